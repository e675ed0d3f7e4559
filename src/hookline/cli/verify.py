"""`hookline verify`: which hooks of a config change training, at which step, and through what."""

from __future__ import annotations

import argparse
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hookline.cli import FAILED
from hookline.cli.page import entry, open_page
from hookline.cli.settings import read_settings
from hookline.cli.silence import silence
from hookline.config.references import without_values

if TYPE_CHECKING:
    from rich.console import Console

    from hookline.trainer.trainer import Trainer
    from hookline.verification import Verdict


def run(options: argparse.Namespace) -> int:
    """Train a few steps without hooks and with each one alone; 1 if one changes training that does not say so."""
    overrides = ["trainer.console=false", "trainer.deterministic=true"]
    config, from_file = read_settings(options.words, overrides)
    config.setdefault("trainer", {}).setdefault("seed", 0)
    config["trainer"]["record"] = True  # in a directory that is soon gone: hooks that write need a place for it
    from hookline.build import trainer_from_config
    from hookline.verification import verify

    def make_trainer() -> Trainer:
        return trainer_from_config(config, allow=options.allow, from_file=from_file)

    warned: list[str] = []
    with silence(warned, tracebacks=options.debug):
        made = [make_trainer()]  # a config that is wrong says so before anything is printed
    console = open_page()
    entry(console, f"Training {options.steps} steps without hooks, and with each one alone ...", indent=0)
    verdicts: list[Verdict] = []
    try:
        with silence(warned, tracebacks=options.debug), TemporaryDirectory(prefix="hookline-verify-") as directory:

            def next_trainer() -> Trainer:
                trainer = made.pop() if made else make_trainer()
                trainer.options.output_dir = directory
                return trainer

            verdicts = verify(next_trainer, options.steps)
        print_verdicts(console, verdicts)
    finally:
        print_warnings(console, warned, verdicts)
    return 0 if all(verdict.fine for verdict in verdicts) else FAILED


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """A table, then one line that sums it up."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("hook", "step", "verdict"):
        table.add_column(title, justify="right" if title == "step" else "left", no_wrap=title == "hook")
    for verdict in verdicts:
        notes = without_values("".join(f"; {note}" for note in verdict.notes))
        step = "-" if verdict.step is None else str(verdict.step)
        table.add_row(verdict.hook, step, f"{verdict}{notes}", style="" if verdict.fine else "red")
    console.print(table)
    harmful = [verdict.hook for verdict in verdicts if not verdict.fine]
    if harmful:
        entry(console, f"Undeclared changes by {', '.join(harmful)}.", indent=0)
    else:
        entry(console, "No hook changes training that does not say so.", indent=0)


def print_warnings(console: Console, warned: list[str], verdicts: list[Verdict]) -> None:
    """What was warned of meanwhile, without what a verdict says already; a traceback keeps its lines."""
    notes = [without_values(note) for verdict in verdicts for note in verdict.notes]
    for text in map(without_values, warned):
        if "\n" in text:
            console.print(f"\n{text}", soft_wrap=True)
        elif not any(text.endswith(note) for note in notes):
            entry(console, f"warning: {text}", indent=0, hanging=4)
