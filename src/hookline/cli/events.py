"""`hookline events`: print the event catalog."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from hookline.cli.arguments import EVENT, HOST, JSON
from hookline.cli.formatting import heading, labeled, open_console, paragraph, print_json
from hookline.core.catalog import ARGUMENT_ALIASES, CATALOG, Event, find_event
from hookline.core.catalog import ARGUMENTS as EVENT_ARGUMENTS
from hookline.hosts.truth import Host, find_host

_PREFACE = (
    "The events of a run, in order. A hook's method has the name of an event and names the arguments it wants; "
    "arguments that no hook names are never computed."
)

ARGUMENTS = EVENT | HOST | JSON


def run(options: argparse.Namespace) -> int:
    """Print every event in the order of a run, or one in full; with a host, their meaning there."""
    host = find_host(options.host) if options.host else None
    events = [find_event(options.event)] if options.event else list(CATALOG.values())
    if options.json:
        print_json([describe(event, host) for event in events])
        return 0
    console = open_console()
    if host is not None:
        print_host(console, host, events)
    elif options.event:
        print_event(console, events[0])
    else:
        print_catalog(console)
    return 0


def print_host(console: Console, host: Host, events: list[Event]) -> None:
    """Print what events mean in a host, and how it stops."""
    for event in events:
        heading(console, event.name, _aliases(event))
        paragraph(console, host.meaning(event))
        console.print()
    labeled(console, "stop", host.stop, indent=0)


def describe(event: Event, host: Host | None = None) -> dict[str, Any]:
    """Return an event for programs."""
    return {
        **({} if host is None else {"host": host.name, "means": host.meaning(event)}),
        "name": event.name,
        "aliases": list(event.aliases),
        "kind": event.kind,
        "about": event.doc,
        "fires": event.fires,
        "gradients": event.gradients,
        "scheduled": event.inner,
        "order": list(event.order),
        "arguments": {
            name: {
                "meaning": EVENT_ARGUMENTS[name].meaning,
                "cost": None if event.free(name) else EVENT_ARGUMENTS[name].cost,
            }
            for name in event.attributes
        },
    }


def print_catalog(console: Console) -> None:
    """Print all events; the arguments that all lifecycle events have are printed once, at the top."""
    lifecycle = [event for event in CATALOG.values() if event.kind == "lifecycle"]
    # Events of forward and update hooks have few arguments in common with the others, and would leave nothing here.
    everywhere = [name for name in EVENT_ARGUMENTS if all(name in event.attributes for event in lifecycle)]
    paragraph(console, _PREFACE, indent=0)
    console.print()
    labeled(console, "everywhere", _names(everywhere), indent=0)
    labeled(console, "*", "has a cost, but only where a due hook names it", indent=0)
    for event in CATALOG.values():
        console.print()
        heading(console, event.name, _aliases(event))
        _print_summary(console, event)
        if missing := [name for name in everywhere if name not in event.attributes]:
            labeled(console, "not here", _names(missing))
        if extra_names := [name for name in event.attributes if name not in everywhere]:
            labeled(console, "arguments", _names(extra_names, event))
    console.print("\nhookline events --event NAME prints one event in full.")


def print_event(console: Console, event: Event) -> None:
    """Print everything the catalog says about one event."""
    heading(console, event.name, _aliases(event))
    paragraph(console, event.doc)
    _print_summary(console, event)
    labeled(console, "kind", event.kind)
    always = "always fires, whatever the schedule"
    labeled(console, "schedule", "a hook's schedule (every, at, start, stop) applies" if event.inner else always)
    labeled(console, "by hand", f"{event.name}({', '.join(event.order)})")
    console.print("\narguments [and their cost, if any]")
    aliases = {name: alias for alias, name in ARGUMENT_ALIASES.items()}
    for name in event.attributes:
        cost = "" if event.free(name) else f" [{EVENT_ARGUMENTS[name].cost}]"
        also = f" (also {aliases[name]})" if name in aliases else ""
        labeled(console, name, f"{EVENT_ARGUMENTS[name].meaning}{also}{cost}", width=17)


def _print_summary(console: Console, event: Event) -> None:
    labeled(console, "fires", event.fires)
    labeled(console, "gradients", event.gradients)


def _names(names: list[str], event: Event | None = None) -> str:
    """Join the names of arguments; those with a cost get a star."""
    free = {name: event.free(name) if event else EVENT_ARGUMENTS[name].free for name in names}
    return ", ".join(name if free[name] else f"{name}*" for name in names)


def _aliases(event: Event) -> str:
    return f"({', '.join(event.aliases)})" if event.aliases else ""
