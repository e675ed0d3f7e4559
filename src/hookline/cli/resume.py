"""`hookline resume`: go on with a run where it stopped, was stopped or was killed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline.cli.train import train_and_tell
from hookline.config.loading import load_config
from hookline.config.schemas import RunConfig
from hookline.errors import ConfigError, HooklineError
from hookline.record.redaction import REDACTED

CONFIG = "config.yaml"


def run(options: argparse.Namespace) -> int:
    """Build the run again from the config it recorded, and go on from its newest whole checkpoint."""
    path = Path(options.run)
    config = read_recorded_config(path, options.words)
    from hookline.build import trainer_from_config  # takes seconds, which a wrong path need not wait for

    trainer = trainer_from_config(config, allow=options.allow, from_file=True)
    return train_and_tell(trainer, options.debug, resume=path, fork=options.fork)


def read_recorded_config(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The config of the run that a path leads to, a run's directory or a checkpoint's, with changes applied."""
    from hookline.trainer.checkpointing import run_directory

    run_dir = run_directory(path)
    if run_dir is None:
        raise HooklineError(f"{path} is no run: there is no run.json; give a run's directory, runs/<run_id>")
    config, _ = load_config(run_dir / CONFIG, overrides)
    if not {"model", "data", "optimizer"} <= config.keys() or not config.keys() <= set(RunConfig.model_fields):
        raise HooklineError(
            f"{run_dir}: that run was put together in code; build the same trainer there and call "
            f"trainer.fit(resume={str(run_dir)!r})"
        )
    for hidden in _redacted(config, ""):
        raise ConfigError(hidden, f"was a secret and is not kept; give it again: {hidden}=value, or as ${{env:NAME}}")
    return config


def _redacted(tree: Any, path: str) -> Iterator[str]:
    """The dotted paths of values that the record did not keep; in a list of hooks an entry goes by its name."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _redacted(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            named = value.get("as", value.get("name")) if isinstance(value, dict) else None
            yield from _redacted(value, f"hooks.{named}" if named and path.startswith("hooks.") else f"{path}.{index}")
    elif isinstance(tree, str) and REDACTED in tree:
        yield path
