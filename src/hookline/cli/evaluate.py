"""`hookline evaluate`: measure a trained model on the validation data of its run, or on other data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._fs import relative_to_here
from hookline.cli.arguments import DEVICE, JSON, OVERRIDES, PERMISSIONS, argument, run_argument
from hookline.cli.formatting import bounded, heading, labeled, open_console, print_json
from hookline.errors import ConfigError, HooklineError
from hookline.runs.ranking import metric_order

if TYPE_CHECKING:
    from hookline.checkpoints.store import SavedCheckpoint
    from hookline.trainer.trainer import Trainer

_ABOUT_CHECKPOINT = "best, last, a step, or a checkpoint's name or path (default: best if there is one)"
_ABOUT_DATA = "other data: key=value changes a parameter; a config file replaces the section `data`"
MODEL = (
    run_argument("the run that trained the model, or a checkpoint of it", "RUN|CHECKPOINT")
    | OVERRIDES
    | argument("--checkpoint", "CHECKPOINT", _ABOUT_CHECKPOINT)
    | argument("--data", "KEY=VALUE|FILE", _ABOUT_DATA, nargs="+", action="extend", default=[])
    | DEVICE
    | PERMISSIONS
)
ARGUMENTS = MODEL | JSON


def run(options: argparse.Namespace) -> int:
    """Validate the model of a run, and print the metrics; nothing is written into the run."""
    trainer, checkpoint = load_model(options)
    metrics = trainer.validate()
    if trainer.ranks.rank:  # rank 0 prints for all
        return 0
    meta = checkpoint.manifest["meta"]
    names = sorted(metrics, key=metric_order)
    if options.json:
        about = {"run_id": meta.get("run_id"), "checkpoint": str(checkpoint.path), "step": meta.get("step")}
        print_json({**about, "metrics": {name: metrics[name] for name in names}})
        return 0
    console = open_console()
    heading(console, checkpoint.path.name, f"of {relative_to_here(checkpoint.path.parents[1])}")
    for name in names:
        labeled(console, bounded(name), f"{metrics[name]:.6g}", width=max(map(len, names)) + 2)
    return 0


def load_model(options: argparse.Namespace) -> tuple[Trainer, SavedCheckpoint]:
    """Build the trainer of a run with the weights of the checkpoint, and return both."""
    from hookline.build import load_trainer  # takes seconds

    section, changes = None, []
    for word in options.data:
        if "=" in word and not Path(word).is_file():
            changes.append(f"data.{word}")
        elif section is None:
            section = read_section(word)
        else:
            raise HooklineError(f"--data {word}: one file only; use key=value for single parameters")
    trainer, checkpoint = load_trainer(
        options.run.path, [*changes, *options.words], options.checkpoint, options.allow, options.device, section
    )
    if not trainer.val_loaders:
        raise ConfigError("data", "has no `validation` to iterate over, and nothing else says what to measure")
    return trainer, checkpoint


def read_section(file: str) -> Mapping[str, Any]:
    """Return the section `data` of a config file, which may also hold that section alone."""
    from hookline.config.load import FORMATS, load_config

    if not file.endswith(FORMATS):
        raise HooklineError(f"--data {file}: write key=value, or the name of a file ending in {', '.join(FORMATS)}")
    config, _ = load_config(file)
    section = config.get("data", config)
    section = {"name": section} if isinstance(section, str) else section
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise HooklineError(f"--data {file}: expected a section `data:` with a `name:`, as in a config")
    return section
