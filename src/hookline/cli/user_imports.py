"""What the command line allows and a config file cannot: `--import`, `--allow` and `--allow-host`.

Typing `--import` or `--allow` is consent to running the code that is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from hookline.config.factory import search_path_hint
from hookline.errors import HooklineError


@contextmanager
def user_imports(options: argparse.Namespace) -> Iterator[None]:
    """Import the modules of `--import`; until the command ends, modules of the current directory are found first."""
    modules, allowed = getattr(options, "imports", []), getattr(options, "allow", [])
    if not modules and not allowed:
        yield
        return
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        for name in modules:
            import_user_module(name)
        yield
    finally:
        if here in sys.path:  # unless that code has removed it
            sys.path.remove(here)


def import_user_module(name: str) -> None:
    """Import a module, so that its decorators register what they decorate."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        # './parts/mine.py' was probably meant as 'parts.mine'.
        guess = ".".join(part for part in Path(name).with_suffix("").parts if part != ".")
        valid = bool(guess) and all(part.isidentifier() for part in guess.split("."))
        remedy = f"write --import {guess if valid else 'mypackage.mymodule'}"
        raise HooklineError(f"--import {name}: is not the name of a module; {remedy}")
    try:
        import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}{search_path_hint(error, name)}"
        raise HooklineError(f"--import {name}: cannot import {name!r}: {why}") from error


@contextmanager
def allowed_hosts(options: argparse.Namespace) -> Iterator[None]:
    """Let webhooks connect to the local or private hosts of `--allow-host` until the command ends."""
    hosts = getattr(options, "allow_hosts", [])
    if not hosts:  # a command that sends nothing need not load the webhook client
        yield
        return
    from hookline.hooks.webhook import hosts_allowed

    with hosts_allowed(hosts):
        yield
