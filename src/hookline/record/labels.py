"""The labels of a run, for people: its name, tags and notes, in labels.json. They may change at any time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hookline import _parameters
from hookline._fs import refuse_link
from hookline.errors import ConfigError, RecordError
from hookline.record.json_lines import parse_json, read_bytes, write_json_atomic, writing
from hookline.record.redaction import redact_text

LABELS = "labels.json"
VERSION = 1
MAX_NAME_LENGTH, MAX_TAG_LENGTH, MAX_NOTES_LENGTH, MAX_TAGS = 200, 100, 10_000, 100  # lists of runs show them
LATEST = "latest"  # on a command line, the newest run


@dataclass(frozen=True)
class Labels:
    """The name, tags and notes of a run; training does not depend on them."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of labels.json."""
        return {"version": VERSION, "name": self.name, "tags": list(self.tags), "notes": self.notes}


LABEL_OPTIONS = tuple(f"trainer.{field.name}" for field in fields(Labels))
"""The options of a config that label a new run; a run that continues keeps its labels."""


def read_labels(directory: Path | str) -> Labels:
    """Read the labels of a run; empty ones if it has no labels.json.

    Raises:
        RecordError: If the file is damaged, cannot be read or has a newer format.
    """
    path = Path(directory) / LABELS
    if not os.path.lexists(path):
        return Labels()
    content = read_bytes(path)
    try:
        fields = parse_json(content)
    except ValueError:
        fields = None
    if isinstance(fields, dict) and isinstance(fields.get("version"), int) and fields["version"] > VERSION:
        raise RecordError(f"{path} has the format {fields['version']}, which a newer Hookline wrote; upgrade Hookline")
    match fields:
        case {"name": str() | None as name, "tags": list() as tags, "notes": str() | None as notes}:
            if all(isinstance(tag, str) for tag in tags):
                return Labels(name, tuple(tags), notes)
    raise RecordError(f"{path} is damaged or was not written by Hookline; remove it, and label the run again")


def write_labels(directory: Path | str, labels: Labels) -> None:
    """Replace the labels of a run atomically, without secrets; needs no lock, so the run may be training.

    Raises:
        RecordError: If the disk refuses.
    """
    path = Path(directory) / LABELS
    with writing(path):
        refuse_link(path)
    write_json_atomic(path, redact_labels(labels).to_json())


def redact_labels(labels: Labels) -> Labels:
    """Return labels without the secrets in them."""
    name, notes = (None if text is None else redact_text(text) for text in (labels.name, labels.notes))
    return Labels(name, tuple(map(redact_text, labels.tags)), notes)


def check_name(value: Any, where: str) -> str | None:
    """Check the name of a run; an empty one is none."""
    name = _one_line(value, where, MAX_NAME_LENGTH)
    if name == LATEST:
        raise ConfigError(where, f"{LATEST!r} is the newest run on a command line; choose another name")
    return name or None


def check_tags(values: Any, where: str) -> tuple[str, ...]:
    """Check tags, each of them once; one may be given without a list around it."""
    tags = tuple(dict.fromkeys(_one_line(tag, where, MAX_TAG_LENGTH) for tag in _parameters.names(values, where)))
    if "" in tags:
        raise ConfigError(where, "a tag cannot be empty")
    if len(tags) > MAX_TAGS:
        raise ConfigError(where, f"{len(tags)} tags are too many; a run has at most {MAX_TAGS}")
    return tags


def check_notes(value: Any, where: str) -> str | None:
    """Check the notes about a run, of any number of lines; empty ones are none."""
    notes = value.replace("\r\n", "\n") if isinstance(value, str) else value
    return _text(notes, where, MAX_NOTES_LENGTH, "\n\t") or None


def _one_line(value: Any, where: str, longest: int) -> str:
    return _text(value, where, longest).strip(" ")


def _text(value: Any, where: str, longest: int, allowed: Iterable[str] = "") -> str:
    """Check that a string has a bounded length and no characters that control a terminal or reverse the text."""
    if not isinstance(value, str):
        raise ConfigError(where, f"expected a string, got {type(value).__name__}")
    if len(value) > longest:
        raise ConfigError(where, f"has {len(value):,} characters; at most {longest:,} are allowed")
    for letter in value:
        if not letter.isprintable() and letter not in allowed:
            what = "a line break" if letter in "\r\n" else f"the character {letter!a}"
            raise ConfigError(where, f"contains {what}, which cannot be printed as text; leave it out")
    return value
