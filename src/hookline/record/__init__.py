"""Record what a run did, from which code and config, readable by anything that reads JSON.

Imports `core` and the shared modules. `hooks`, `trainer` and what is above them may import it. The names below are
loaded on first use, because commands that only read a record do not need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.record.json_lines import read_json, read_jsonl
    from hookline.record.media_reader import Image, MediaRow, Table, read_media
    from hookline.record.reader import LayerSeries, read_events, read_layers, read_metrics
    from hookline.record.record import Record
    from hookline.record.redaction import redact
    from hookline.record.sinks import Sink

_NAMES = {  # By module.
    "json_lines": "read_json read_jsonl",
    "media_reader": "Image MediaRow Table read_media",
    "reader": "LayerSeries read_events read_layers read_metrics",
    "record": "Record",
    "redaction": "redact",
    "sinks": "Sink",
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
    value = getattr(import_module(f"hookline.record.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
