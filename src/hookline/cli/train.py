"""`hookline train`: build a run from a config, run it, and print the path of its record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookline._console import drop_unwritten_output, print_line
from hookline.cli import FAILED, NON_FINITE, TERMINATED, one_line, print_error, print_interrupted, print_output_failure
from hookline.cli.config_args import overrides_among, read_config

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


def run(options: argparse.Namespace) -> int:
    """Train; the last line on the console is the path of the run's record."""
    given = {"trainer.fast_dev_run": options.fast_dev_run, "trainer.output_dir": options.output}
    overrides = [f"{path}={json.dumps(value)}" for path, value in given.items() if value is not None]
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
    status = 0
    try:
        trainer.fit(resume=resume, fork=fork)
        if trainer.record.run["outcome"] == "non_finite":
            reason = one_line(f"the run ended with bad weights: {trainer.record.run['reason']}")
            print_line(f"hookline: error: {reason}", sys.stderr)
            status = NON_FINITE
    except KeyboardInterrupt:
        where = f"the record is in {trainer.run_dir}" if trainer.run_dir is not None else "no record was written"
        status = print_interrupted(f"; {where}")
        print_resume_command(trainer, options)
    except SystemExit as stop:
        if stop.code != TERMINATED:
            raise
        status = TERMINATED
        print_resume_command(trainer, options)
    except Exception as error:
        if not trainer.run_ended:  # the run never began: the output is not writable, or there is nothing to train on
            raise
        from hookline.record.redaction import redact_values

        status = print_error(error, options.debug, FAILED, hide=redact_values)
    # Scripts read the last line: lines on stderr are flushed when they are printed, so none comes after it in a file.
    print_line(str(trainer.run_dir) if trainer.run_dir is not None else "no record was written")
    if (failure := drop_unwritten_output()) is not None:  # which changes nothing about the run
        print_output_failure(failure)
    return status


def print_resume_command(trainer: Trainer, options: argparse.Namespace) -> None:
    """Print the command that continues an interrupted run, with the overrides and permissions of this one."""
    if trainer.run_dir is None:
        return
    from hookline.record.redaction import redact_text

    words = ["hookline", "resume", str(trainer.run_dir), *overrides_among(options.words)]
    if options.device is not None:
        words += ["--device", options.device]
    for option, given in (("--allow", "allow"), ("--allow-host", "allow_hosts"), ("--import", "imports")):
        words += [word for value in getattr(options, given) for word in (option, value)]
    print_line(f"hookline: to continue: {redact_text(shlex.join(words))}", sys.stderr)
