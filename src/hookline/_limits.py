"""How large the files of a run may be, and how deeply values may be nested: readers and writers look here first.

A file that is larger is damaged, or was made to exhaust the reader's memory: JSON takes 30 times its size.
"""

from __future__ import annotations

from typing import Any

MB = 1_000_000

MAX_YAML = 250_000  # bytes of a config, because PyYAML takes seven seconds per MB. Longer ones are recorded as JSON.

_FILES = {  # bytes of files that are read whole, by name
    "run.json": 16 * MB,
    "labels.json": MB,
    "config.yaml": 16 * MB,
    "manifest.json": 16 * MB,
    "state.json": 64 * MB,  # what hooks and loaders save as plain values; tensors are in other files
}
_OTHER_FILES = 128 * MB  # the largest are images of 4096 by 4096 pixels
_LINES = {"layers.jsonl": 96 * MB}  # bytes of a line, by the name of the file
_OTHER_LINES = 16 * MB
MAX_LAYER_VALUES = 16 * MB  # numbers that a line of layers stands for; histograms take a bit for an empty bin

MAX_GAPS = 1000  # places of a table per value in the file: names or hooks that change leave empty places

MAX_DEPTH = 50  # levels; real values have fewer than ten, and Python's recursion limit is much higher
TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


def size_limit(name: str) -> int:
    """Return how many bytes a file with this name may have, if such files are read whole."""
    is_of_rank = name.startswith("state.rank-")
    return _FILES.get("state.json" if is_of_rank else name, _OTHER_FILES)


def line_limit(name: str) -> int:
    """Return how many bytes a line of a file with this name may have."""
    return _LINES.get(name, _OTHER_LINES)


def has_too_many_gaps(places: int, values: int) -> bool:
    """Return whether a table is so sparse that a small file would fill the memory."""
    return places > MAX_GAPS * max(values, MAX_GAPS)


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Return whether dicts and lists, as a parser returns them, are nested deeper than the limit."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(
        is_too_deep(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )
