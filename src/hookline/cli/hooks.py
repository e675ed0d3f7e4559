"""`hookline hooks`: print the hooks that a config may list, with their parameters."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Collection
from typing import Any

from rich.console import Console

from hookline._parameters import parameters_of
from hookline.cli.arguments import IMPORT, JSON, argument
from hookline.cli.formatting import heading, labeled, open_console, paragraph, print_json
from hookline.core.base import ForwardHook, UpdateHook
from hookline.core.catalog import SPELLINGS, Events
from hookline.core.plugins import HOOKS, TABLES, PluginTable, package_of, unread_entry_points
from hookline.errors import HooklineError, error_text

FUNCTION = "made by a function"
SCHEDULE = ("every", "at", "start", "stop")
NOT_FOR_CONFIGS = ("stream", "name")  # a config cannot hold an open file, and `name:` is the hook's type there

ARGUMENTS = argument("hooks", "NAME", "one hook in full", nargs="?") | JSON | IMPORT


def run(options: argparse.Namespace) -> int:
    """Print the kind, purpose and parameters of every registered hook, or why it cannot be imported; or one in full."""
    if options.json:
        print_json([describe(options.hooks)] if options.hooks else list(map(describe_any, HOOKS.names())))
        return 0
    console = open_console()
    if options.hooks:
        print_hook(console, options.hooks)
        return 0
    for name in HOOKS.names():
        print_entry(console, HOOKS, name)
    others = [(table, name) for table in TABLES if table is not HOOKS for name in sorted(table.plugins)]
    for table, name in others:
        print_entry(console, table, name)
    print_unread(console)
    from hookline.config.hooks import RESERVED  # imports torch

    labeled(console, "every entry", f"also takes {', '.join(RESERVED)}", indent=0, width=13)
    labeled(console, "in a config", "a parameter without = is required; the others have the defaults shown", 0, 13)
    console.print("\nhookline hooks NAME prints one hook in full.")
    return 0


def print_entry(console: Console, table: PluginTable, name: str) -> None:
    """Print what a name stands for and where it comes from, or why it cannot be used."""
    origin = table.origin(name)
    try:
        factory = table.find(name)
    except Exception as error:  # Any error of a plugin's own code; the others are still printed.
        heading(console, name, f"broken, {origin}")
        paragraph(console, reason(error))
    else:
        is_hook = table is HOOKS
        heading(console, name, f"{kind_of(factory) if is_hook else table.noun}, {origin}")
        paragraph(console, first_sentence(factory))
        if is_hook and (parameters := parameter_list(factory)):
            labeled(console, "parameters", ", ".join(parameters), width=12)
        if refused := table.refused(name):
            paragraph(console, refused)
    console.print()


def reason(error: Exception) -> str:
    """Return why a name cannot be used."""
    return str(error) if isinstance(error, HooklineError) else f"cannot be imported: {error_text(error)}"


def print_unread(console: Console) -> None:
    """Print the entry points of groups that Hookline does not read, so their authors notice."""
    groups = ", ".join(f"hookline.{table.plural}" for table in TABLES)
    for point in unread_entry_points():
        heading(console, point.name, f"not read, {package_of(point)}")
        remedy = f"sinks, trackers and transforms are hooks; the groups are {groups}"
        paragraph(console, f"there is no group {point.group!r}; {remedy}")
        console.print()


def describe(name: str) -> dict[str, Any]:
    """Return a hook for programs."""
    factory = HOOKS.find(name)
    text, meanings = split_docstring(docstring(factory).replace("`", ""))
    parameters = [parameter.partition("=") for parameter in parameter_list(factory)]
    return {
        "name": name,
        "origin": HOOKS.origin(name),
        "refused": HOOKS.refused(name) or None,
        "kind": kind_of(factory),
        "about": "\n\n".join(text),
        "parameters": [
            {"name": key, "required": not equals and not key.startswith("*"), "default": default or None,
             "meaning": meanings.get(key)}
            for key, equals, default in parameters
        ],
    }  # fmt: skip


def describe_any(name: str) -> dict[str, Any]:
    """Return a hook for programs; one that cannot be imported has an `error` instead."""
    try:
        return describe(name)
    except Exception as error:  # Any error of a plugin's own code; the other hooks are still printed.
        return {"name": name, "origin": HOOKS.origin(name), "error": error_text(error)}


def print_hook(console: Console, name: str) -> None:
    """Print a hook's whole docstring, every parameter with its default, and how to use the hook."""
    hook = describe(name)
    parameters = hook["parameters"]
    required = [parameter["name"] for parameter in parameters if parameter["required"]]
    heading(console, name, f"{hook['kind']}, {hook['origin']}")
    if hook["refused"]:
        paragraph(console, f"{hook['refused']}\n")
    for part in hook["about"].split("\n\n"):
        paragraph(console, part)
        console.print()
    if parameters:
        console.print("parameters [and their defaults]")
        width = min(max(len(parameter["name"]) for parameter in parameters) + 2, 30)
        for parameter in parameters:
            default = f"[{parameter['default'] or 'required'}]"
            labeled(console, parameter["name"], f"{parameter['meaning'] or ''} {default}".lstrip(), width=width)
        console.print()
    kind = hook["kind"].split(" and ")[0]
    entry = f"{{{', '.join([f'name: {name}', *(f'{key}: ...' for key in required)])}}}"
    names = [parameter["name"] for parameter in parameters]
    console.print("in a config")
    paragraph(console, entry if kind == FUNCTION else f"hooks: {{{kind}: [{entry}]}}")
    paragraph(console, f"the entry also takes {', '.join(entry_keys(HOOKS.find(name), names))}")
    if kind != FUNCTION:
        console.print("\non the command line")
        values = "".join(f" hooks.{name}.{key}=..." for key in required)
        paragraph(console, f"hookline train --hook {name}{values}")


def entry_keys(factory: Any, parameters: Collection[str]) -> list[str]:
    """List the keys that an entry takes beside the hook's parameters; schedules are for hooks called inside steps."""
    from hookline.config.hooks import RESERVED  # imports torch

    bases = factory.__mro__ if kind_of(factory) == "lifecycle" else ()
    called = {name for base in bases if base is not Events for name in vars(base)} & set(SPELLINGS)
    scheduled = not bases or any(SPELLINGS[name].inner for name in called)
    return [key for key in RESERVED[1:] if key not in parameters and (scheduled or key not in SCHEDULE)]


def docstring(factory: Any) -> str:
    """Return the docstring of a hook's class or function, not that of its base class."""
    text = factory.__doc__  # a class may have a property of that name
    return inspect.cleandoc(text if isinstance(text, str) and text else "(it has no docstring)")


def split_docstring(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a docstring, and the description of each parameter in its Args section."""
    parts = re.split(r"^(Args|Raises|Returns|Attributes):\s*$", text, flags=re.MULTILINE)
    meanings: dict[str, str] = {}
    for title, section in zip(parts[1::2], parts[2::2], strict=True):
        if title == "Args":
            entries = re.findall(r"^    (\w+)(?: \(.*?\))?: (.*(?:\n      .*)*)", section, flags=re.MULTILINE)
            meanings = {name: " ".join(meaning.split()) for name, meaning in entries}
    return [" ".join(block.split()) for block in parts[0].strip().split("\n\n")], meanings


def kind_of(factory: Any) -> str:
    """Return the config list that a hook belongs to, as far as its class reveals it."""
    if not isinstance(factory, type):
        return FUNCTION
    kinds = [kind for base, kind in ((ForwardHook, "forward"), (UpdateHook, "update")) if issubclass(factory, base)]
    return " and ".join(kinds) or "lifecycle"


def parameter_list(factory: Any) -> list[str]:
    """Return the constructor's parameters as 'name=default', or the bare name of a required one."""
    texts = []
    for name, parameter in (parameters_of(factory) or {}).items():
        if name not in NOT_FOR_CONFIGS:
            # A default as a config has it; a required parameter without its type.
            required = parameter.default is parameter.empty
            texts.append(str(parameter).split(":")[0] if required else f"{name}={default_text(parameter.default)}")
    return texts


def default_text(value: Any) -> str:
    """Return a default as a config has it; as Python writes it if a config cannot have it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)


def first_sentence(factory: Any) -> str:
    """Return the first sentence of a docstring, as plain text."""
    return sentence_of(docstring(factory).replace("`", ""))


def sentence_of(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    line = " ".join(text.split())
    sentence = re.match(r".*?[.!?](?=\s|$)", line)
    return sentence[0] if sentence else line
