"""`hookline explain`: which hooks of a config run when, in which order and why. Nothing is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from hookline.cli.page import entry, heading, open_page
from hookline.cli.settings import read_settings

if TYPE_CHECKING:
    from hookline.activations.manager import HookManager


def run(options: argparse.Namespace) -> int:
    """Make the config's hooks, and no more, and print what each event calls."""
    from hookline.events.catalog import CATALOG, find_event

    manager = make_hooks(options)
    console = open_page()
    try:
        for event in [find_event(options.event)] if options.event else CATALOG.values():
            if options.event or any(event.name in known.listeners for known in manager.entries()):
                print_explanation(console, manager.explain(event.name))
    finally:
        manager.close()
    return 0


def make_hooks(options: argparse.Namespace) -> HookManager:
    """The hooks that a run of this config would have."""
    from hookline.build import add_clipping, make_manager_of_config
    from hookline.config.references import resolve_references
    from hookline.config.schemas import as_run_config
    from hookline.registry.loading import Gate

    config, from_file = read_settings(options.words)
    settings = as_run_config(resolve_references(config))
    manager = make_manager_of_config(settings, Gate(tuple(options.allow), from_file))
    add_clipping(manager, settings.trainer)
    return manager


def print_explanation(console: Console, text: str) -> None:
    """The registry's own words, laid out: the event, then its hooks in order."""
    first, *lines = text.splitlines()
    name, _, about = first.partition(": ")
    heading(console, name)
    entry(console, about)
    for line in lines:
        entry(console, line.strip(), hanging=3)
    console.print()
