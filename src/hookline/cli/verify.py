"""`hookline verify`: which hooks of a config change training, from which step on, and through what."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline.cli import FAILED, USAGE, print_error
from hookline.cli.arguments import CONFIG, DEVICE, HOOK, JSON, OVERRIDES, PERMISSIONS, argument, positive
from hookline.cli.formatting import open_console, paragraph, print_json, table
from hookline.config.references import without_values
from hookline.errors import HooklineError
from hookline.record.redaction import redact_text, redact_values

if TYPE_CHECKING:
    from rich.console import Console

    from hookline.trainer.trainer import Trainer
    from hookline.verify import Verdict

ARGUMENTS = (
    CONFIG
    | OVERRIDES
    | HOOK
    | argument("--steps", "N", "how many steps to compare (default: 20)", type=positive, default=20)
    | JSON
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Train a few steps without hooks and with each one alone; return 1 if one makes undeclared changes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HooklineError(
            "`hookline verify` compares runs in one process: start it without torchrun or accelerate launch"
        )
    from hookline.cli.config_args import read_config  # imports torch

    config, from_file = read_config(
        options.words, ["trainer.console=false", "trainer.deterministic=true"], options.hook
    )
    from hookline.build import trainer_from_config
    from hookline.verify import verify

    console = open_console()
    collected: list[str] = []
    made: list[Trainer] = []
    verdicts: list[Verdict] = []
    failure: Exception | None = None

    # Every comparison needs a new trainer; the first trainer is created early and used for the first comparison.
    def make_trainer() -> Trainer:
        if made:
            return made.pop()
        return trainer_from_config(config, allow=options.allow, from_file=from_file, device=options.device)

    config["trainer"] = {"seed": 0, **config["trainer"], "record": True}  # hooks that write need a directory
    with quiet(collected, tracebacks=options.debug):
        made.append(make_trainer())  # errors of the config come before anything is printed or created
    with TemporaryDirectory(prefix="hookline-verify-") as directory:
        made[0].options.output_dir = config["trainer"]["output_dir"] = directory
        if not options.json:
            paragraph(console, f"Training {options.steps} steps without hooks, and with each one alone ...", indent=0)
        try:
            with quiet(collected, tracebacks=options.debug):
                verdicts = verify(make_trainer, options.steps)
        except Exception as error:
            failure = error
        else:
            if options.json:
                print_json({"steps": options.steps, "hooks": list(map(describe, verdicts)), "warnings": collected})
            else:
                print_verdicts(console, verdicts)
        finally:
            # Warnings that a verdict's notes repeat are left out; tracebacks keep their lines.
            notes = [without_secrets(note) for verdict in verdicts for note in verdict.notes]
            for text in collected if not options.json else ():
                if "\n" in text:
                    console.print(f"\n{text}", soft_wrap=True)
                elif not any(text.endswith(note) for note in notes):
                    paragraph(console, f"warning: {text}", indent=0, hanging=4)
        if failure is not None:  # printed here, while the failed run still exists: it knows its secrets
            return print_error(failure, options.debug, USAGE, hide=lambda text: redact_values(without_values(text)))
    return 0 if all(verdict.fine for verdict in verdicts) else FAILED


def without_secrets(text: str) -> str:
    """Return a string as a record would have it: references for their values, and no secrets."""
    return redact_text(without_values(text))


def describe(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict for programs."""
    notes = [without_secrets(note) for note in verdict.notes]
    return {
        "hook": verdict.hook, "fine": verdict.fine, "step": verdict.step, "verdict": str(verdict), "notes": notes,
    }  # fmt: skip


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Print a table of the verdicts, and a summary in one line."""
    rows = []
    for verdict in verdicts:
        notes = without_secrets("".join(f"; {note}" for note in verdict.notes))
        step = "-" if verdict.step is None else str(verdict.step)
        rows.append(((verdict.hook, step, f"{verdict}{notes}"), "" if verdict.fine else "red"))
    console.print()
    table(console, {"hook": {"no_wrap": True}, "step": {"justify": "right"}, "verdict": {}}, rows)
    console.print()
    harmful = [verdict.hook for verdict in verdicts if not verdict.fine]
    undeclared = f"Undeclared changes by {', '.join(harmful)}."
    paragraph(console, undeclared if harmful else "OK: no hook changed training without declaring it.", indent=0)


@contextmanager
def quiet(collected: list[str], tracebacks: bool = False) -> Iterator[None]:
    """Print nothing inside the block, and append the warnings of Hookline and of Python to a list, each once.

    With `tracebacks`, those of logged exceptions are collected, too.
    """

    def collect(text: str) -> None:
        text = without_secrets(text)  # now, while the run that knows the secrets still exists
        if text not in collected:
            collected.append(text)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: collect(  # type: ignore[method-assign]  # a class would only hold this function
        handler.format(record) if tracebacks else record.getMessage()
    )
    # Handlers of the root logger, such as those of an application or of pytest, would print while the table is being
    # built.
    log = logger.logger
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_: collect(f"{category.__name__}: {message}")
            yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
