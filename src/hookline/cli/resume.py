"""`hookline resume`: continue a run that stopped, was stopped or was killed."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import Any

from hookline._console import print_line
from hookline.cli.arguments import DEVICE, OVERRIDES, PERMISSIONS, flag, run_argument
from hookline.cli.command_lines import command_like, report_command
from hookline.cli.train import train_and_report
from hookline.config.recorded import check_secrets, read_recorded
from hookline.errors import ConfigError, HooklineError, RecordError
from hookline.record.format import CONFIG_FILE
from hookline.record.labels import LABEL_OPTIONS
from hookline.runs.find import RunFiles

ARGUMENTS = (
    run_argument("the run, or the checkpoint to continue from", "RUN|CHECKPOINT")
    | OVERRIDES
    | flag("--fork", "start a new run from there, with its own directory")
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Rebuild the run from its recorded config, and continue from its newest good checkpoint."""
    from hookline.checkpoints.find import run_directory
    from hookline.config.load import load_config

    path = options.run.path
    run_dir = run_directory(path)
    if run_dir is None:
        raise HooklineError(f"{path} is not a run: it has no run.json; pass a run's directory, runs/<run_id>")
    from_code = f"trainer.fit(resume={str(run_dir)!r}), or hl.load({str(run_dir)!r}) in a loop with attach"
    config, _ = load_config(read_recorded(run_dir, from_code), options.words)
    check_secrets(config)
    _check_labels(options, config)
    from hookline.build import trainer_from_config  # takes seconds: errors of the path come first

    # The run may have been built in code, or come from another machine: what its config names must be allowed again.
    trainer = trainer_from_config(config, allow=options.allow, from_file=True, device=options.device)
    trainer.find_nan_by = command_like(options, "train", str(run_dir / CONFIG_FILE), "--hook", "nan_forensics")
    with suppress(RecordError):  # a run whose run.json is damaged can be resumed
        command = report_command(options.run if path.resolve() == run_dir else RunFiles(run_dir))
        if command is not None and not trainer.ranks.rank:
            print_line(f"hookline: the run was killed; to write a report of what it recorded: {command}", sys.stderr)
    return train_and_report(trainer, options, resume=path, fork=options.fork)


def _check_labels(options: argparse.Namespace, config: dict[str, Any]) -> None:
    """Give a new run the labels of the command line only, and refuse them for a run that has labels already."""
    paths = {word.partition("=")[0] for word in options.words}
    for option in LABEL_OPTIONS:
        if options.fork and option not in paths:
            config.get("trainer", {}).pop(option.removeprefix("trainer."), None)
        elif not options.fork and option in paths:
            why = f"the run keeps its labels; change them with `hookline label {options.run.path}`"
            raise ConfigError(option, why)
