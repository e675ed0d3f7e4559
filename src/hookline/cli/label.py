"""`hookline label`: print or change the name, tags and notes of a run, also while it is training."""

from __future__ import annotations

import argparse

from hookline._words import nearest
from hookline.cli.formatting import cut, heading, labelled, open_console, paragraph, print_json
from hookline.errors import HooklineError
from hookline.record.labels import (
    LONGEST_NAME,
    LONGEST_NOTES,
    LONGEST_TAG,
    MOST_TAGS,
    Labels,
    check_name,
    check_notes,
    check_tags,
    read_labels,
    write_labels,
)
from hookline.record.runs import RunFiles


def run(options: argparse.Namespace) -> int:
    """Change the labels that options name, and print all of them."""
    found = RunFiles.read(options.run)
    labels = read_labels(found.path)
    if options.name is not None or options.tag or options.untag or options.notes is not None:
        write_labels(found.path, change(labels, options))
        labels = read_labels(found.path)
    if options.json:
        print_json({"run_id": found.run_id, **labels.to_json()})
        return 0
    console = open_console()
    heading(console, cut(found.run_id))
    labelled(console, "name", cut(labels.name or "-", LONGEST_NAME), width=7)
    labelled(console, "tags", cut(", ".join(labels.tags) or "-", MOST_TAGS * (LONGEST_TAG + 2)), width=7)
    first, *others = cut(labels.notes or "-", LONGEST_NOTES).splitlines() or ["-"]
    labelled(console, "notes", first, width=7)
    for line in others:
        paragraph(console, line, indent=11)
    return 0


def change(labels: Labels, options: argparse.Namespace) -> Labels:
    """Return the labels with the changes of a command line; an empty name or empty notes are none."""
    for tag in options.untag:
        if tag not in labels.tags:
            raise HooklineError(f"--untag {tag}: the run has no such tag; {nearest(tag, labels.tags)}")
    kept = [tag for tag in labels.tags if tag not in options.untag]
    return Labels(
        labels.name if options.name is None else check_name(options.name, "--name"),
        check_tags([*kept, *options.tag], "--tag"),
        labels.notes if options.notes is None else check_notes(options.notes, "--notes"),
    )
