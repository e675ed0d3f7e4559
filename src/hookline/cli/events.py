"""`hookline events`: the catalogue, for people."""

from __future__ import annotations

import argparse

from rich.console import Console

from hookline.cli.page import entry, heading, labelled, open_page
from hookline.events.catalog import ARGUMENT_ALIASES, ARGUMENTS, CATALOG, Event, find_event

_PREFACE = (
    "The events of a run, in order. A hook's method has the name of an event and names the arguments it wants; "
    "what nobody names is never computed."
)


def run(options: argparse.Namespace) -> int:
    """Print every event in the order of a run, or one in full."""
    console = open_page()
    if options.event:
        print_event(console, find_event(options.event))
    else:
        print_catalogue(console)
    return 0


def print_catalogue(console: Console) -> None:
    """All events; what nearly all of them offer is said once, at the top."""
    everywhere = _everywhere()
    entry(console, _PREFACE, indent=0)
    console.print()
    labelled(console, "everywhere", _names(everywhere), indent=0)
    labelled(console, "*", "costs something, which is paid only where a due hook names it", indent=0)
    for event in CATALOG.values():
        console.print()
        heading(console, event.name, _aliases(event))
        _print_summary(console, event)
        own = [name for name in event.attributes if name not in everywhere]
        if missing := [name for name in everywhere if name not in event.attributes]:
            labelled(console, "not here", _names(missing))
        if own:
            labelled(console, "arguments", _names(own, event))
    console.print("\nhookline events --event NAME shows one event in full.")


def print_event(console: Console, event: Event) -> None:
    """One event with everything that is known about it."""
    heading(console, event.name, _aliases(event))
    entry(console, event.doc)
    _print_summary(console, event)
    labelled(console, "kind", event.kind)
    gated = (
        "a hook's schedule (every, at, start, stop) gates it"
        if event.inner
        else "always arrives, whatever the schedule"
    )
    labelled(console, "schedule", gated)
    labelled(console, "by hand", f"{event.name}({', '.join(event.order)})")
    console.print("\narguments [and what they cost, where they do]")
    _print_arguments(console, event)


def _print_summary(console: Console, event: Event) -> None:
    labelled(console, "fires", event.fires)
    labelled(console, "gradients", event.gradients)


def _print_arguments(console: Console, event: Event) -> None:
    aliases = {name: alias for alias, name in ARGUMENT_ALIASES.items()}
    for name in event.attributes:
        cost = "" if event.free(name) else f" [{ARGUMENTS[name].cost}]"
        also = f" (also {aliases[name]})" if name in aliases else ""
        labelled(console, name, f"{ARGUMENTS[name].meaning}{also}{cost}", width=17)


def _everywhere() -> list[str]:
    """The arguments of all lifecycle events."""
    lifecycle = [event for event in CATALOG.values() if event.kind == "lifecycle"]
    return [name for name in ARGUMENTS if all(name in event.attributes for event in lifecycle)]


def _names(names: list[str], event: Event | None = None) -> str:
    return ", ".join(f"{name}*" if _costs(name, event) else name for name in names)


def _costs(name: str, event: Event | None) -> bool:
    return not (event.free(name) if event else ARGUMENTS[name].free)


def _aliases(event: Event) -> str:
    return f"({', '.join(event.aliases)})" if event.aliases else ""
