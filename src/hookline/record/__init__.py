"""Record what a run did, and with which code and config, as JSON that any program can read.

Imports `core` and the shared modules. `runs`, which reads records, and what is above it may import it. The names below
are loaded on first use, because commands that only read a record do not need torch; those that read are in `runs`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.record.format import Image, MediaRow, Table
    from hookline.record.json_lines import read_json, read_jsonl
    from hookline.record.record import Record
    from hookline.record.redaction import redact
    from hookline.record.sinks import Sink
    from hookline.runs.layers import LayerSeries, read_layers
    from hookline.runs.media import read_media
    from hookline.runs.reader import read_events, read_metrics

_NAMES = {  # By module.
    "record.format": "Image MediaRow Table",
    "record.json_lines": "read_json read_jsonl",
    "record.record": "Record",
    "record.redaction": "redact",
    "record.sinks": "Sink",
    "runs.media": "read_media",
    "runs.layers": "LayerSeries read_layers",
    "runs.reader": "read_events read_metrics",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Image", "LayerSeries", "MediaRow", "Record", "Sink", "Table", "read_events", "read_json", "read_jsonl",
    "read_layers", "read_media", "read_metrics", "redact",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hookline.record' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
