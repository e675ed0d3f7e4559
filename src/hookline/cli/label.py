"""`hookline label`: print or change the name, tags and notes of a run, even while it is training."""

from __future__ import annotations

import argparse

from hookline._words import nearest
from hookline.cli.arguments import JSON, REPEATED, RUN, argument
from hookline.cli.formatting import bounded, heading, labeled, open_console, paragraph, print_json
from hookline.errors import HooklineError
from hookline.record.labels import (
    MAX_NAME_LENGTH,
    MAX_NOTES_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAGS,
    Labels,
    check_name,
    check_notes,
    check_tags,
    read_labels,
    write_labels,
)

ARGUMENTS = (
    RUN
    | argument("--name", "TEXT", "the run's name; an empty string removes it")
    | argument("--tag", "TAG", "add this tag (may be repeated)", **REPEATED)
    | argument("--untag", "TAG", "remove this tag (may be repeated)", **REPEATED)
    | argument("--notes", "TEXT", "notes about the run; an empty string removes them")
    | JSON
)


def run(options: argparse.Namespace) -> int:
    """Change the labels that options name, and print all of them."""
    record, run_id = options.run, options.run.run_id  # first: without run.json the directory is not a run
    labels = read_labels(record.path)
    if options.name is not None or options.tag or options.untag or options.notes is not None:
        write_labels(record.path, change(labels, options))
        labels = read_labels(record.path)
    if options.json:
        print_json({"run_id": run_id, **labels.to_json()})
        return 0
    console = open_console()
    heading(console, bounded(run_id))
    labeled(console, "name", bounded(labels.name or "-", MAX_NAME_LENGTH), width=7)
    labeled(console, "tags", bounded(", ".join(labels.tags) or "-", MAX_TAGS * (MAX_TAG_LENGTH + 2)), width=7)
    first, *others = bounded(labels.notes or "-", MAX_NOTES_LENGTH).splitlines() or ["-"]
    labeled(console, "notes", first, width=7)
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
