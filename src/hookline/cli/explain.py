"""`hookline explain`: which hooks of a config run when, in which order and why. Nothing is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from hookline.cli.config_args import read_config
from hookline.cli.formatting import heading, open_console, paragraph

if TYPE_CHECKING:
    from hookline.activations.manager import HookManager


def run(options: argparse.Namespace) -> int:
    """Make the config's hooks, and nothing else, and print what each event calls."""
    from hookline.core.catalog import CATALOG, find_event

    manager = make_hooks(options)
    console = open_console()
    try:
        for event in [find_event(options.event)] if options.event else CATALOG.values():
            if options.event or any(event.name in entry.listeners for entry in manager.entries()):
                print_explanation(console, manager.explain(event.name))
    finally:
        manager.close()
    return 0


def make_hooks(options: argparse.Namespace) -> HookManager:
    """Make the hooks that a run of this config would have."""
    from hookline.build import add_clipping, make_manager
    from hookline.config.references import resolve_references
    from hookline.config.schema import as_run_config

    config, from_file = read_config(options.words)
    settings = as_run_config(resolve_references(config))
    manager = make_manager(settings.hooks, options.allow, from_file, settings.trainer.enable_intervention)
    add_clipping(manager, settings.trainer)
    return manager


def print_explanation(console: Console, text: str) -> None:
    """Print the registry's explanation of an event: the event, then its hooks in order."""
    first, *lines = text.splitlines()
    name, _, about = first.partition(": ")
    heading(console, name)
    paragraph(console, about)
    for line in lines:
        paragraph(console, line.strip(), hanging=3)
    console.print()
