"""`hookline verify`: which hooks of a config change training, from which step on, and through what."""

from __future__ import annotations

import argparse
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hookline.cli import FAILED
from hookline.cli.config_args import read_config
from hookline.cli.formatting import open_console, paragraph, table
from hookline.cli.quiet import quiet
from hookline.config.references import without_values

if TYPE_CHECKING:
    from rich.console import Console

    from hookline.trainer.trainer import Trainer
    from hookline.verify import Verdict


def run(options: argparse.Namespace) -> int:
    """Train a few steps without hooks and with each one alone; return 1 if one makes undeclared changes."""
    config, from_file = read_config(options.words, ["trainer.console=false", "trainer.deterministic=true"])
    config.setdefault("trainer", {}).setdefault("seed", 0)
    config["trainer"]["record"] = True  # hooks that write need a directory; it is temporary
    from hookline.build import trainer_from_config
    from hookline.verify import verify

    def make_trainer() -> Trainer:
        return trainer_from_config(config, allow=options.allow, from_file=from_file)

    warnings: list[str] = []
    with quiet(warnings, tracebacks=options.debug):
        made = [make_trainer()]  # errors of the config come before anything is printed
    console = open_console()
    paragraph(console, f"Training {options.steps} steps without hooks, and with each one alone ...", indent=0)
    verdicts: list[Verdict] = []
    try:
        with quiet(warnings, tracebacks=options.debug), TemporaryDirectory(prefix="hookline-verify-") as directory:

            def next_trainer() -> Trainer:
                trainer = made.pop() if made else make_trainer()
                trainer.options.output_dir = directory
                return trainer

            verdicts = verify(next_trainer, options.steps)
        print_verdicts(console, verdicts)
    finally:
        print_warnings(console, warnings, verdicts)
    return 0 if all(verdict.fine for verdict in verdicts) else FAILED


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Print a table of the verdicts, and a summary in one line."""
    rows = []
    for verdict in verdicts:
        notes = without_values("".join(f"; {note}" for note in verdict.notes))
        step = "-" if verdict.step is None else str(verdict.step)
        rows.append(((verdict.hook, step, f"{verdict}{notes}"), "" if verdict.fine else "red"))
    table(console, {"hook": {"no_wrap": True}, "step": {"justify": "right"}, "verdict": {}}, rows)
    harmful = [verdict.hook for verdict in verdicts if not verdict.fine]
    undeclared = f"Undeclared changes by {', '.join(harmful)}."
    paragraph(console, undeclared if harmful else "OK: no hook changed training without declaring it.", indent=0)


def print_warnings(console: Console, warnings: list[str], verdicts: list[Verdict]) -> None:
    """Print the collected warnings, without those that a verdict's notes repeat; tracebacks keep their lines."""
    notes = [without_values(note) for verdict in verdicts for note in verdict.notes]
    for text in map(without_values, warnings):
        if "\n" in text:
            console.print(f"\n{text}", soft_wrap=True)
        elif not any(text.endswith(note) for note in notes):
            paragraph(console, f"warning: {text}", indent=0, hanging=4)
