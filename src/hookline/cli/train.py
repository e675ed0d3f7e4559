"""`hookline train`: build a run from a config, run it, and print the path of its record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookline.cli import FAILED, TERMINATED, print_error, print_interrupted
from hookline.cli.config_args import overrides_among, read_config

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


def run(options: argparse.Namespace) -> int:
    """Train; the last line on the console is the path of the run's record."""
    given = {"trainer.fast_dev_run": options.fast_dev_run, "trainer.output_dir": options.output}
    overrides = [f"{path}={json.dumps(value)}" for path, value in given.items() if value is not None]
    config, from_file = read_config(options.words, overrides)
    from hookline.build import trainer_from_config  # takes seconds: errors of the config come first

    trainer = trainer_from_config(config, allow=options.allow, from_file=from_file)
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
    # Scripts read the last line: what was written to stderr must not come after it in a common file.
    sys.stderr.flush()
    print(trainer.run_dir if trainer.run_dir is not None else "no record was written", flush=True)
    return status


def print_resume_command(trainer: Trainer, options: argparse.Namespace) -> None:
    """Print the command that continues an interrupted run, with the overrides and permissions of this one."""
    if trainer.run_dir is None:
        return
    from hookline.record.redaction import redact_text

    words = ["hookline", "resume", str(trainer.run_dir), *overrides_among(options.words)]
    for option, given in (("--allow", "allow"), ("--allow-host", "allow_hosts"), ("--import", "imports")):
        words += [word for value in getattr(options, given) for word in (option, value)]
    print(f"hookline: to continue: {redact_text(shlex.join(words))}", file=sys.stderr, flush=True)
