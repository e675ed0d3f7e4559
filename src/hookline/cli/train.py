"""`hookline train`: build a run from a config, run it, and say where its record is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hookline.cli import FAILED, TERMINATED, tell_error, tell_interrupted
from hookline.cli.settings import read_settings

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


def run(options: argparse.Namespace) -> int:
    """Train; the last line on the console is the path of the run's record."""
    config, from_file = read_settings(options.words, _overrides(options))
    from hookline.build import trainer_from_config  # takes seconds, which an unreadable config need not wait for

    trainer = trainer_from_config(config, allow=options.allow, from_file=from_file)
    return train_and_tell(trainer, options.debug)


def train_and_tell(trainer: Trainer, debug: bool, resume: Path | None = None, fork: bool = False) -> int:
    """Run it, and say where its record is; the exit status."""
    status = _train(trainer, debug, resume, fork)
    sys.stderr.flush()
    print(trainer.run_dir if trainer.run_dir is not None else "no record was written", flush=True)
    return status


def _overrides(options: argparse.Namespace) -> list[str]:
    """The command line's own options, as overrides."""
    asked = {"trainer.fast_dev_run": options.fast_dev_run, "trainer.output_dir": options.output}
    return [f"{path}={json.dumps(value)}" for path, value in asked.items() if value is not None]


def _train(trainer: Trainer, debug: bool, resume: Path | None, fork: bool) -> int:
    try:
        trainer.fit(resume=resume, fork=fork)
    except KeyboardInterrupt:
        where = f"the record is in {trainer.run_dir}" if trainer.run_dir is not None else "no record was written"
        return tell_interrupted(f"; {where}")
    except SystemExit as left:
        if left.code != TERMINATED:
            raise
        return TERMINATED
    except Exception as error:
        if not trainer.run_ended:  # it never began: an output that cannot be written to, nothing to train on
            raise
        from hookline.record.known_secrets import without_known  # brings torch along, which is here by now

        return tell_error(error, debug, FAILED, hide=without_known)
    return 0
