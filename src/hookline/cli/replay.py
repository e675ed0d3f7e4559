"""`hookline replay`: run the batch of a crash again, to reproduce its NaN."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.cli import FAILED
from hookline.cli.arguments import DEVICE, JSON, PERMISSIONS, argument
from hookline.cli.formatting import heading, labeled, open_console, print_json
from hookline.errors import ConfigError, HooklineError
from hookline.runs.named import find_run

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

ARGUMENTS = (
    argument("crash", "CRASH", "crash folder, for example runs/…/crashes/step-00000042")
    | argument("--weights", "CHECKPOINT", "checkpoint or run to load weights from, if the crash folder has none")
    | JSON
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Rebuild the run that crashed, without its hooks, and run the batch; return 0 if it fails in the same way."""
    if options.weights is not None:
        options.weights = str(find_run(options.weights))  # it may also be a checkpoint
    from hookline.hooks.nan_forensics.dump import read_crash, replay

    crash = read_crash(options.crash)
    trainer = rebuild(crash[0], options)
    if options.weights:
        from hookline.trainer.sections import load_weights

        load_weights(trainer.model, options.weights)
    replayed = replay(options.crash, crash, trainer, weights_loaded=bool(options.weights))
    if options.json:
        then = {name: replayed.then[name] for name in ("step", "reason")}
        then["summary"] = replayed.then["autopsy"]["summary"]
        print_json({"then": then, "now": str(replayed.now), "same": replayed.same})
        return 0 if replayed.same else FAILED
    console = open_console()
    heading(console, f"step {replayed.then['step']}", replayed.then["reason"])
    labeled(console, "then", replayed.then["autopsy"]["summary"])
    labeled(console, "now", str(replayed.now))
    labeled(console, "verdict", "the same" if replayed.same else "not the same")
    return 0 if replayed.same else FAILED


def rebuild(report: dict[str, Any], options: argparse.Namespace) -> Trainer:
    """Make a trainer like the one that crashed. The folder counts as a file: it may name only registered components."""
    from hookline.build import trainer_from_config
    from hookline.config.recorded import check_whole

    recorded = report.get("config")
    config = dict(recorded) if isinstance(recorded, dict) else {}
    check_whole(config, options.crash, "hookline.replay_crash(folder, trainer)")
    settings = config.get("trainer") or {}
    if isinstance(settings, dict):  # otherwise the config's own check says what is wrong
        settings = {**settings, "record": False, "console": False, "init_from": None}
    config["trainer"] = settings
    try:
        return trainer_from_config({**config, "hooks": {}}, allow=options.allow, from_file=True, device=options.device)
    except ConfigError as error:
        raise HooklineError(f"the run of {Path(options.crash).name} cannot be rebuilt: {error}") from error
