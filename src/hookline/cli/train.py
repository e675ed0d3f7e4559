"""`hookline train`: build a run from a config, run it, and print the path of its record."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookline import cli
from hookline._console import print_line
from hookline._fs import relative_to_here
from hookline.cli.arguments import CONFIG, DEVICE, HOOK, OVERRIDES, PERMISSIONS, argument
from hookline.cli.command_lines import resume_command
from hookline.cli.output import drop_unwritten_output
from hookline.errors import CheckpointError, error_text
from hookline.record.outcome import TERMINATED, Outcome

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

ARGUMENTS = (
    CONFIG
    | OVERRIDES
    | HOOK
    | argument("--fast-dev-run", "N", "try N batches of everything and write nothing", type=int)
    | argument("--output", "DIR", "where the run's directory is created (trainer.output_dir)")
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Train; the last line on the console is the path of the run's record."""
    given = {"trainer.fast_dev_run": options.fast_dev_run, "trainer.output_dir": options.output}
    overrides = [f"{path}={json.dumps(value)}" for path, value in given.items() if value is not None]
    from hookline.cli.config_args import read_config  # imports torch

    config, from_file = read_config(options.words, overrides, options.hook)
    from hookline.build import trainer_from_config  # takes seconds: errors of the config come first

    trainer = trainer_from_config(config, allow=options.allow, from_file=from_file, device=options.device)
    trainer.find_nan_by = shlex.join(["hookline", *options.arguments, "--hook", "nan_forensics"])
    return train_and_report(trainer, options)


def train_and_report(
    trainer: Trainer, options: argparse.Namespace, resume: Path | None = None, fork: bool = False
) -> int:
    """Run a trainer, print the path of its record, and return the exit status.

    Args:
        trainer: The trainer.
        options: The arguments of the command; after an interruption the command that resumes repeats them.
        resume: As for `Trainer.fit`.
        fork: As for `Trainer.fit`.
    """
    status: int = Outcome.COMPLETED.exit_code
    try:
        trainer.fit(resume=resume, fork=fork)
        outcome = Outcome(trainer.record.run["outcome"])
        status = outcome.exit_code
        if outcome is Outcome.NON_FINITE:
            reason = str(trainer.record.run["reason"])
            problem = "was" if reason.startswith("stopped") else "ended with non-finite weights:"
            reason = cli.one_line(f"the run {problem} {reason}")
            print_line(f"hookline: error: {reason}", sys.stderr)
    except KeyboardInterrupt:
        status = cli.INTERRUPTED
    except SystemExit as stop:
        if stop.code != TERMINATED:
            raise
        status = TERMINATED
    except Exception as error:
        if not trainer.run_ended:  # the run never began: the output is not writable, or there is nothing to train on
            raise
        from hookline.record.redaction import redact_values

        status = cli.print_error(error, options.debug, cli.FAILED, hide=redact_values)
    if trainer.ranks.rank:  # rank 0 prints for all
        return status
    if status in (cli.INTERRUPTED, TERMINATED):
        try:
            print_how_to_continue(trainer, options)
        except (OSError, CheckpointError) as error:  # the current directory is gone, for instance
            print_line(f"hookline: the run cannot be continued: {error_text(error)}", sys.stderr)
    # Scripts read the last line: lines on stderr are flushed when they are printed, so none comes after it in a file.
    print_line(str(trainer.run_dir) if trainer.run_dir is not None else "no record was written")
    if (failure := drop_unwritten_output()) is not None:  # It changes nothing about the run.
        cli.print_output_failure(failure)
    return status


def print_how_to_continue(trainer: Trainer, options: argparse.Namespace) -> None:
    """Print the newest checkpoint of an interrupted run, and the command that continues the run from any directory."""
    if not (trainer.prints and trainer.run_ended):  # otherwise the run's closing line has already said so
        print_line("hookline: interrupted", sys.stderr)
    if trainer.run_dir is None or trainer.checkpoint_dir is None:
        return
    if trainer.run_status.non_finite_losses:  # the newest checkpoint may have ruined weights
        show = shlex.join(["hookline", "show", str(relative_to_here(trainer.run_dir))])
        print_line(f"hookline: the loss became non-finite; `{show}` says where to continue from", sys.stderr)
        return
    from hookline.checkpoints.store import checkpoints_in

    saved = checkpoints_in(trainer.checkpoint_dir)
    start = f"from {saved[0].path.name}" if saved else "from the first step, because there is no checkpoint"
    # Modules that were imported and paths in the config may be relative to the current directory.
    here = Path.cwd()
    count = trainer.ranks.world_size
    processes = None if count == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", count))
    command = resume_command(trainer.run_dir, options, processes)
    print_line(f"hookline: to continue {start}:\n  cd {shlex.quote(str(here))} && {command}", sys.stderr)
