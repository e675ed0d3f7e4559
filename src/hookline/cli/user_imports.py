"""What the command line allows and a config file cannot: `--import`, `--allow` and `--allow-host`.

Typing `--import` or `--allow` is consent to running the code that is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from hookline.config.factory import search_path_hint
from hookline.errors import HooklineError


@contextmanager
def user_imports(options: argparse.Namespace) -> Iterator[None]:
    """Import the modules of `--import`, and let webhooks connect to the hosts of `--allow-host`.

    Until the command ends, modules of the current directory are found first, and those hosts are allowed.
    """
    modules, allowed, hosts = (getattr(options, name, []) for name in ("imports", "allow", "allow_hosts"))
    here = str(Path.cwd())
    with ExitStack() as stack:
        if modules or allowed:
            sys.path.insert(0, here)
            stack.callback(lambda: sys.path.remove(here) if here in sys.path else None)  # that code may have removed it
        for name in modules:
            import_user_module(name)
        if hosts:  # a command that sends nothing need not load the webhook client
            from hookline.hooks.webhook import hosts_allowed

            stack.enter_context(hosts_allowed(hosts))
        yield


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
