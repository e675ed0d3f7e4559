"""`hookline resume`: continue a run that stopped, was stopped or was killed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline._console import print_line
from hookline.cli.arguments import DEVICE, OVERRIDES, PERMISSIONS, flag, run_argument
from hookline.cli.command_lines import LABELS, command_like, report_command
from hookline.cli.train import train_and_report
from hookline.errors import ConfigError, HooklineError, RecordError
from hookline.record.redaction import REDACTED
from hookline.runs.find import RunFiles
from hookline.runs.reader import CONFIG

ARGUMENTS = (
    run_argument("the directory of a run, or of the checkpoint to continue from", "RUN|CHECKPOINT")
    | OVERRIDES
    | flag("--fork", "begin a new run from there, with its own directory")
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Rebuild the run from its recorded config, and continue from its newest good checkpoint."""
    from hookline.checkpoints.find import run_directory
    from hookline.cli.config_args import check_whole
    from hookline.config.load import load_config
    from hookline.record.record import refuse_links

    path = Path(options.run)
    run_dir = run_directory(path)
    if run_dir is None:
        raise HooklineError(f"{path} is not a run: it has no run.json; give a run's directory, runs/<run_id>")
    refuse_links(run_dir)
    config, _ = load_config(run_dir / CONFIG, options.words)
    _check_labels(options, config)
    check_whole(config, str(run_dir), f"trainer.fit(resume={str(run_dir)!r})")
    for secret in _redacted(config, ""):
        remedy = f"give it again: {secret}=value, or as ${{env:NAME}}"
        raise ConfigError(secret, f"was a secret and is not recorded; {remedy}")
    from hookline.build import trainer_from_config  # takes seconds: errors of the path come first

    # The run may have been built in code, or come from another machine: what its config names must be allowed again.
    trainer = trainer_from_config(config, allow=options.allow, from_file=True, device=options.device)
    trainer.find_nan_by = command_like(options, "train", str(run_dir / CONFIG), "--hook", "nan_forensics")
    with suppress(RecordError):  # a run whose run.json is damaged can be resumed
        command = report_command(RunFiles.read(run_dir))
        if command is not None and not trainer.ranks.rank:
            print_line(f"hookline: the run was killed; a report of what it has recorded: {command}", sys.stderr)
    return train_and_report(trainer, options, resume=path, fork=options.fork)


def _check_labels(options: argparse.Namespace, config: dict[str, Any]) -> None:
    """Give a new run the labels of the command line only, and refuse them for a run that has labels already."""
    paths = {word.partition("=")[0] for word in options.words}
    for name in LABELS:
        if options.fork and f"trainer.{name}" not in paths:
            config.get("trainer", {}).pop(name, None)
        elif not options.fork and f"trainer.{name}" in paths:
            why = f"the run keeps its labels; change them with `hookline label {options.run}`"
            raise ConfigError(f"trainer.{name}", why)


def _redacted(tree: Any, path: str) -> Iterator[str]:
    """Yield the dotted paths of redacted values; an entry in a list of hooks goes by its name."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _redacted(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            named = value.get("as", value.get("name")) if isinstance(value, dict) else None
            yield from _redacted(value, f"hooks.{named}" if named and path.startswith("hooks.") else f"{path}.{index}")
    elif isinstance(tree, str) and REDACTED in tree:
        yield path
