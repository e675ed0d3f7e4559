"""`hookline explain`: which hooks of a config run when, in which order and why. Nothing is trained."""

from __future__ import annotations

import argparse

from hookline.cli.arguments import CONFIG, EVENT, HOOK, JSON, OVERRIDES, PERMISSIONS
from hookline.cli.formatting import heading, open_console, paragraph, print_json

ARGUMENTS = CONFIG | OVERRIDES | HOOK | EVENT | JSON | PERMISSIONS


def run(options: argparse.Namespace) -> int:
    """Create only the hooks that a run of this config would have, and print what each event calls."""
    from hookline.build import add_clipping, make_manager
    from hookline.cli.config_args import read_config
    from hookline.config.references import resolve_references
    from hookline.config.schema import as_run_config
    from hookline.core.catalog import CATALOG, find_event

    config, from_file = read_config(options.words, hooks=options.hook)
    settings = as_run_config(resolve_references(config))
    manager = make_manager(settings, options.allow, from_file, settings.trainer.enable_intervention)
    console, explained = open_console(), []
    try:
        # A trainer would add this hook, but creating one would also create the model and read the data.
        add_clipping(manager, settings.trainer)
        for event in [find_event(options.event)] if options.event else CATALOG.values():
            if options.event or any(event.name in entry.listeners for entry in manager.entries()):
                first, *lines = manager.explain(event.name).splitlines()
                name, _, about = first.partition(": ")
                if options.json:
                    explained.append({"event": event.name, "about": about, "hooks": [line.strip() for line in lines]})
                    continue
                heading(console, name)
                paragraph(console, about)
                for line in lines:
                    paragraph(console, line.strip(), hanging=3)
                console.print()
    finally:
        manager.close()
    if options.json:
        print_json(explained)
    return 0
