"""Arguments that several commands share: runs, a config with overrides, permissions, where to run, `--json`.

The other arguments are in the `ARGUMENTS` of each command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hookline._words import meant
from hookline.runs.find import RunFiles
from hookline.runs.named import find_files

Arguments = dict[str, dict[str, Any]]
"""By name of an argument: the parameters of `ArgumentParser.add_argument`."""

_RUN_NAMES = (
    "its name, or any unique prefix or suffix of its id; "
    "`latest` is the newest run in runs/, DIR/latest the newest in DIR"
)
REPEATED: dict[str, Any] = {"action": "append", "default": []}


def argument(name: str, metavar: str, about: str, **settings: Any) -> Arguments:
    """Return an argument with a value."""
    return {name: {"metavar": metavar, "help": about, **settings}}


def flag(name: str, about: str) -> Arguments:
    """Return an option without a value."""
    return {name: {"action": "store_true", "help": about}}


_CHECKPOINT_NAMES = "RUN/best, RUN/last and RUN/step-00000120 are its checkpoints"


def run_argument(about: str = "the run's directory", metavar: str = "RUN") -> Arguments:
    """Return the argument of one run, or of its checkpoint, which `resolve_runs` finds."""
    checkpoints = f"; {_CHECKPOINT_NAMES}" if "CHECKPOINT" in metavar else ""
    return argument("run", metavar, f"{about}; {_RUN_NAMES}{checkpoints}")


RUN = run_argument()
RUNS = argument("runs", "RUN", f"runs' directories; {_RUN_NAMES}", nargs="+")
# The first of `options.words`, which also has the overrides and every other word after an option.
CONFIG = argument("config", "CONFIG", "a YAML, TOML or JSON file; without one, the default job", nargs="?")
_ABOUT_OVERRIDES = "change a value: trainer.seed=1, hooks.ema.decay=0.99"
OVERRIDES = argument("words", "a.b=value", _ABOUT_OVERRIDES, nargs="*", default=[])
_ABOUT_HOOK = "add this hook; hooks.NAME.key=value sets its parameters (may be repeated)"
HOOK = argument("--hook", "NAME", _ABOUT_HOOK, **REPEATED)
DEVICE = argument("--device", "DEVICE", "device, for example cpu or cuda:1 (default: cuda if available, else cpu)")
EVENT = argument("--event", "NAME", "one event")
HOST = argument("--host", "HOST", "print what the events mean in attach, lightning, transformers or ignite")
_ABOUT_IMPORT = "import your module first, so that it registers its components (may be repeated)"
IMPORT = argument("--import", "MODULE", _ABOUT_IMPORT, dest="imports", **REPEATED)
_ABOUT_HOST = "let webhooks connect to this local or private host (may be repeated)"
# For the command line only: a config must not give them.
PERMISSIONS = (
    IMPORT
    | argument("--allow", "PREFIX", "let the config import from this package of yours (may be repeated)", **REPEATED)
    | argument("--allow-host", "HOST", _ABOUT_HOST, **REPEATED)
)
JSON = flag("--json", "print JSON for programs")


def positive(word: str) -> int:
    """Parse a word as an integer of at least 1; the type of an argument."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {word!r}")
    return int(word)


def resolve_runs(options: argparse.Namespace) -> None:
    """Replace the names of runs with their files; several names of one run are one."""
    if hasattr(options, "run"):
        options.run = find_files(options.run)
    if hasattr(options, "runs"):
        known: dict[Path, RunFiles] = {}
        files = [find_files(given, known=known) for given in options.runs]
        options.runs = [*{run.path.resolve(): run for run in files}.values()]


def suggest_override(option: str, arguments: Sequence[str]) -> str:
    """Return what to write in place of an unknown option: `--max-steps 3` → 'trainer.max_steps=3'."""
    from hookline.trainer.options import TrainerOptions

    name, equals, value = option.lstrip("-").partition("=")
    if not equals and option in arguments:
        value = next(iter(arguments[arguments.index(option) + 1 :]), "")
    known = [field.name for field in fields(TrainerOptions)]
    close = [meant(name, known), *get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)]
    ours = next((word for word in close if word in known), None)
    if ours is None:
        return "a.b=value, for instance trainer.max_steps=100 or optimizer.lr=1e-3"
    return f"trainer.{ours}={value if value and not value.startswith('-') else 'value'}"
