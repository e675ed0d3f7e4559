"""`hookline run`: run a script that knows nothing about Hookline, and record its training."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from hookline import cli
from hookline.cli.arguments import IMPORT, REPEATED, argument, flag
from hookline.hosts.options import Options

SITE = "hookline.hosts.site.sitecustomize"

ARGUMENTS = (
    argument("--hooks", "FILE", "a hooks config (default: statistics of gradients and activations)")
    | argument("--output", "DIR", "where the run's directory is created (default: runs)", default="runs")
    | flag("--allow-changes", "let hooks change training (without it, such hooks are rejected)")
    | IMPORT
    | argument("--allow", "PREFIX", "let the config import from this package of yours (may be repeated)", **REPEATED)
    | argument(
        "script", "COMMAND", "a script (train.py) or a command, with its own arguments", nargs=argparse.REMAINDER
    )
)


def run(options: argparse.Namespace) -> NoReturn:
    """Replace this process with the script, which keeps its own arguments, output, signals and exit status."""
    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not words:
        raise cli.UsageError("name the script, as in: hookline run train.py --lr 3e-4")
    program, arguments = program_of(words)
    if options.hooks is not None:
        check_hooks(options.hooks, options.allow)
    environment = {**os.environ, **environment_of(options)}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(program, arguments, environment)


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the file to execute and its arguments, with its own name first.

    Raises:
        UsageError: If the script or command does not exist, or is a Python that ignores PYTHONPATH.
    """
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise cli.UsageError(f"there is no script {words[0]!r}; put options of the script after its name")
        return sys.executable, [sys.executable, *words]
    program = shutil.which(words[0])
    if program is None:
        raise cli.UsageError(f"there is no command {words[0]!r}; name a script (train.py) or a program on PATH")
    if Path(program).name.startswith("python"):
        options = itertools.takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), words[1:])
        if deaf := next((option for option in options if re.fullmatch("-[A-Za-z]*[EIS][A-Za-z]*", option)), None):
            problem = f"Python with {deaf} does not load Hookline, so nothing would be recorded"
            raise cli.UsageError(f"{problem}; leave {deaf} out, or call hookline.attach in the script")
    return program, words


def check_hooks(path: str, allow: list[str]) -> None:
    """Check a hooks config before the script starts, because its first step may be hours away.

    Raises:
        HooklineError: If it cannot be read, or names things that do not exist.
    """
    from hookline.config.hooks import read_hook_specs  # imports torch
    from hookline.config.load import load_config

    config, from_file = load_config(path)
    read_hook_specs(config, allow=allow, from_file=from_file)


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that let Hookline watch the script and the processes that it starts."""
    spec = find_spec(SITE)
    assert spec is not None and spec.origin is not None
    paths = [str(Path(spec.origin).parent), os.environ.get("PYTHONPATH", "")]
    told = Options(
        hooks=None if options.hooks is None else str(Path(options.hooks).absolute()),
        output=str(Path(options.output).absolute()),
        allow_changes=options.allow_changes,
        imports=options.imports,
        allow=options.allow,
        directory=str(Path.cwd()),
    )
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **told.variables()}
