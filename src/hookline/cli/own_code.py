"""The user's own code: modules that the command line asks for, found in the current directory.

A config file can ask for none of this. Who types `--import` or `--allow` consents to running what is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from hookline.errors import HooklineError
from hookline.registry.loading import where_to_look


@contextmanager
def own_code(options: argparse.Namespace) -> Iterator[None]:
    """Import what `--import` names; until the command is over, modules of the current directory are found first."""
    modules, allowed = getattr(options, "imports", []), getattr(options, "allow", [])
    if not modules and not allowed:
        yield
        return
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        for name in modules:
            import_own(name)
        yield
    finally:
        if here in sys.path:  # unless that code has removed it
            sys.path.remove(here)


def import_own(name: str) -> None:
    """Import one module, so that its decorators register what they decorate."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise HooklineError(f"--import {name}: is no module's name; write {_as_module(name)}")
    try:
        import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}{where_to_look(error, name)}"
        raise HooklineError(f"--import {name}: cannot import {name!r}: {why}") from error


def _as_module(written: str) -> str:
    """'./parts/mine.py' → '--import parts.mine', or an example when nothing can be made of it."""
    guess = ".".join(part for part in Path(written).with_suffix("").parts if part != ".")
    valid = bool(guess) and all(part.isidentifier() for part in guess.split("."))
    return f"--import {guess if valid else 'mypackage.mymodule'}"
