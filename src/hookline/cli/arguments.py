"""Arguments that several commands share: runs, a config with overrides, permissions, where to run, `--json`.

Everything else is in the `add_arguments` of the command itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hookline.cli.find_run import resolve_run

RUN_NAMES = (
    "`latest` is the newest run in runs/, DIR/latest the newest in DIR; "
    "its name or the beginning or end of its id is enough"
)
REPEATED: dict[str, Any] = {"action": "append", "default": []}
PERMISSIONS = {"--allow": "allow", "--allow-host": "allow_host", "--import": "imports"}  # not for a config to give


def positive(word: str) -> int:
    """Return the integer of at least 1 that a word is; the type of an argument."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {word!r}")
    return int(word)


# ---- runs ------------------------------------------------------------------------------------------------------------


def add_run(parser: argparse.ArgumentParser, metavar: str = "RUN", about: str = "a run's directory") -> None:
    """Add one run, which `resolve_runs` finds."""
    parser.add_argument("run", metavar=metavar, help=f"{about}; {RUN_NAMES}")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add one or more runs, which `resolve_runs` finds."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"runs' directories; {RUN_NAMES}")


def resolve_runs(options: argparse.Namespace) -> None:
    """Replace what `add_run` and `add_runs` take by the directories of the runs."""
    if hasattr(options, "run"):
        options.run = resolve_run(options.run)
    if hasattr(options, "runs"):
        options.runs = [resolve_run(given) for given in options.runs]


# ---- a config --------------------------------------------------------------------------------------------------------


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the file of a config; it becomes the first of `options.words`."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a YAML, TOML or JSON file; without one, the default job"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `options.words`: overrides, and every other word behind an option."""
    about = "change a value: trainer.seed=1, hooks.ema.decay=0.99"
    parser.add_argument("words", metavar="a.b=value", nargs="*", default=[], help=about)


def add_hook(parser: argparse.ArgumentParser) -> None:
    """Add the names of hooks that a config is to have, too."""
    about = "add this hook; hooks.NAME.key=value sets its parameters (may be repeated)"
    parser.add_argument("--hook", metavar="NAME", **REPEATED, help=about)


def suggest_override(option: str, arguments: Sequence[str]) -> str:
    """Return what to write in place of an unknown option: `--max-steps 3` → 'trainer.max_steps=3'."""
    from hookline.trainer.options import TrainerOptions

    name, equals, value = option.lstrip("-").partition("=")
    if not equals and option in arguments:
        value = next(iter(arguments[arguments.index(option) + 1 :]), "")
    known = [field.name for field in fields(TrainerOptions)]
    close = get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)
    if not close:
        return "a.b=value, for instance trainer.max_steps=100 or optimizer.lr=1e-3"
    return f"trainer.{close[0]}={value if value and not value.startswith('-') else 'value'}"


# ---- options ---------------------------------------------------------------------------------------------------------


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device of a command that runs a model."""
    about = "where to run, such as cpu or cuda:1; by default the best there is"
    parser.add_argument("--device", metavar="DEVICE", help=about)


def add_event(parser: argparse.ArgumentParser) -> None:
    """Add the choice of one event."""
    parser.add_argument("--event", metavar="NAME", help="one event")


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the modules of the user that are imported before the command begins."""
    about = "import your module first, for what it registers (may be repeated)"
    parser.add_argument("--import", metavar="MODULE", dest="imports", **REPEATED, help=about)


def add_permissions(parser: argparse.ArgumentParser) -> None:
    """Add what only a command line may allow: imports of the user's modules, and private hosts."""
    add_import(parser)
    about = "let the config import from this package of yours (may be repeated)"
    parser.add_argument("--allow", metavar="PREFIX", **REPEATED, help=about)
    about = "let webhooks connect to this local or private host (may be repeated)"
    parser.add_argument("--allow-host", metavar="HOST", **REPEATED, help=about)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the choice of output for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
