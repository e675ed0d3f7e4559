"""`hookline hooks`: print the hooks that a config may list, with their parameters."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any

from hookline.cli.formatting import heading, labelled, open_console, paragraph
from hookline.config.factory import parameters_of
from hookline.config.hooks import RESERVED
from hookline.core.base import ForwardHook, UpdateHook
from hookline.core.plugins import HOOKS

NOT_FOR_CONFIGS = ("stream", "name")  # a config cannot hold an open file, and `name:` is the hook's type there


def run(options: argparse.Namespace) -> int:
    """Print the kind, purpose and parameters of every registered hook, or why it cannot be imported."""
    console = open_console()
    for name in HOOKS.names():
        origin = HOOKS.origin(name)
        try:
            factory = HOOKS.find(name)
        except Exception as error:  # of a plugin's own code; the other hooks are still printed
            heading(console, name, origin)
            paragraph(console, f"cannot be imported: {type(error).__name__}: {error}")
        else:
            heading(console, name, kind_of(factory) + ("" if origin == "built-in" else f", {origin}"))
            paragraph(console, first_sentence(factory))
            if parameters := parameter_list(factory):
                labelled(console, "parameters", ", ".join(parameters), width=12)
        console.print()
    labelled(console, "every entry", f"also takes {', '.join(RESERVED)}", indent=0, width=13)
    labelled(console, "in a config", "a parameter without = is required; the others have the defaults shown", 0, 13)
    return 0


def kind_of(factory: Any) -> str:
    """Return the list of a config in which a hook belongs, as far as its class shows."""
    if not isinstance(factory, type):
        return "made by a function"
    kinds = [kind for base, kind in ((ForwardHook, "forward"), (UpdateHook, "update")) if issubclass(factory, base)]
    return " and ".join(kinds) or "lifecycle"


def parameter_list(factory: Any) -> list[str]:
    """Return the constructor's parameters as 'name=default', or the bare name of a required one."""
    parameters = [one for one in (parameters_of(factory) or {}).values() if one.name not in NOT_FOR_CONFIGS]
    return [
        str(one).partition(":")[0] if one.default is one.empty else f"{one.name}={_in_yaml(one.default)}"
        for one in parameters
    ]


def _in_yaml(value: Any) -> str:
    """Write a default as a config has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_in_yaml, value))}]"
    return repr(value)


def first_sentence(factory: Any) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(factory) or "").replace("`", "").split())
    found = re.match(r".*?[.!?](?=\s|$)", text)
    return found[0] if found else text or "(it has no docstring)"
