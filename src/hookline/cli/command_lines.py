"""Compose command lines for the user to type, from the one that was typed or from the one in a record."""

from __future__ import annotations

import argparse
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from hookline import cli
from hookline._fs import relative_to_here
from hookline.record.labels import LABEL_OPTIONS
from hookline.report import REPORT
from hookline.runs.find import KILLED, RunFiles


def overrides_among(words: Sequence[str]) -> list[str]:
    """Return the words that change a value of the config; the name of a file may contain an equals sign, too."""
    return [word for word in words if "=" in word and not is_file(word)]


def is_file(word: str) -> bool:
    """Return whether a word is the path of a file."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a file name, as an override may be, or a NUL in it
        return False


def command_like(options: argparse.Namespace, *words: str) -> str:
    """Return a command line with the overrides, the device and the permissions of this one, without secrets."""
    from hookline.record.redaction import redact_text

    repeated = [*overrides_among(options.words), *(["--device", options.device] if options.device is not None else [])]
    for option, given in {"--allow": "allow", "--allow-host": "allow_host", "--import": "imports"}.items():
        repeated += [word for value in getattr(options, given) for word in (option, value)]
    return redact_text(shlex.join(["hookline", *words, *repeated]))


def resume_command(run_dir: Path, options: argparse.Namespace, processes: int | None = None) -> str:
    """Return the command that continues a run from its newest checkpoint.

    Args:
        run_dir: The run's directory.
        options: The arguments of the command that trained it.
        processes: How many processes torchrun starts on each machine; without torchrun, None.
    """
    words = [word for word in options.words if word.partition("=")[0] not in LABEL_OPTIONS]
    repeated = argparse.Namespace(**{**vars(options), "words": words})
    command = command_like(repeated, "resume", str(relative_to_here(run_dir)))
    return command if processes is None else f"torchrun --nproc-per-node={processes} -m {command}"


def recorded_resume_command(run_dir: Path, run: Mapping[str, Any]) -> str:
    """Return the command that continues a run, with the arguments that its record has.

    Arguments of a command on another machine are left out: its record must not suggest what code to import and trust.

    Args:
        run_dir: The run's directory.
        run: The fields of run.json.
    """
    environment, attempts = run.get("environment", {}), run.get("attempts", [])
    argv = environment.get("argv", []) if environment.get("hostname") == platform.node() else []
    ranks = attempts[-1].get("ranks", {}) if attempts else {}  # by machine
    processes = max((len(listed) for listed in ranks.values() if isinstance(listed, list)), default=None)
    return resume_command(run_dir, _parse(argv), processes)


def report_command(files: RunFiles) -> str | None:
    """Return the command that makes the report of a run that was killed before it could; None for other runs."""
    if files.outcome != KILLED or (files.path / REPORT).is_file():
        return None
    return shlex.join(["hookline", "report", str(relative_to_here(files.path))])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the command that trained a run; for other programs, those of the bare command."""
    is_ours = len(argv) > 1 and PurePath(argv[0]).name in ("hookline", "__main__.py") and argv[1] in ("train", "resume")
    command, *words = argv[1:] if is_ours else ["train"]
    parser = cli.Parser(add_help=False)  # an edited record must not make it print the help
    parser.add_arguments_of(command)
    try:
        return parser.read(words)
    except cli.UsageError:  # The record was edited, or written by another version.
        return _parse([])
