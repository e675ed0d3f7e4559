"""`hookline hooks`: what a config may list under `hooks:`."""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any

from rich.console import Console

from hookline.cli.page import entry, heading, labelled, open_page
from hookline.registry.base import ForwardHook, UpdateHook
from hookline.registry.loading import RESERVED
from hookline.registry.names import HOOKS

NOT_FOR_CONFIGS = ("stream", "name")  # an open file cannot be written down; `name:` is the hook's type there


def run(options: argparse.Namespace) -> int:
    """Print every registered hook."""
    console = open_page()
    for name in HOOKS.names():
        print_hook(console, name)
        console.print()
    labelled(console, "every entry", f"also takes {', '.join(RESERVED)}", indent=0, width=13)
    labelled(console, "in a config", "a parameter without = must be given; the others have the values shown", 0, 13)
    return 0


def print_hook(console: Console, name: str) -> None:
    """A hook's kind, parameters and purpose. One that cannot be imported says why and hides nobody else."""
    origin = HOOKS.origin(name)
    try:
        factory = HOOKS.find(name)
    except Exception as error:
        heading(console, name, origin)
        entry(console, f"cannot be imported: {type(error).__name__}: {error}")
        return
    heading(console, name, kind_of(factory) + ("" if origin == "built-in" else f", {origin}"))
    entry(console, first_sentence(factory))
    if parameters := parameter_list(factory):
        labelled(console, "parameters", ", ".join(parameters), width=12)


def kind_of(factory: Any) -> str:
    """In which list of a config a hook belongs, as far as its class tells."""
    if not isinstance(factory, type):
        return "made by a function"
    kinds = [kind for base, kind in ((ForwardHook, "forward"), (UpdateHook, "update")) if issubclass(factory, base)]
    return " and ".join(kinds) or "lifecycle"


def parameter_list(factory: Any) -> list[str]:
    """The constructor's parameters as 'name=default', or the bare name of one that must be given."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [_parameter(parameter) for parameter in parameters if parameter.name not in NOT_FOR_CONFIGS]


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return str(parameter).partition(":")[0]
    return f"{parameter.name}={_in_yaml(parameter.default)}"


def _in_yaml(value: Any) -> str:
    """A default as one would write it in a config."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_in_yaml, value))}]"
    return repr(value)


def first_sentence(factory: Any) -> str:
    """What the docstring begins with."""
    text = " ".join((inspect.getdoc(factory) or "").replace("`", "").split())
    found = re.match(r".*?[.!?](?=\s|$)", text)
    return found[0] if found else text or "(it has no docstring)"
