"""Record what a run did, from which code and config, readable by anything that reads JSON.

Imports `core` and the shared modules. `hooks`, `trainer` and what is above them may import it.
"""

from __future__ import annotations

from hookline.record.media import Image, MediaRow, Table, read_media
from hookline.record.reader import LayerSeries, read_events, read_json, read_jsonl, read_layers, read_metrics
from hookline.record.record import Record
from hookline.record.redaction import redact
from hookline.record.sinks import Sink

__all__ = [
    "Image", "LayerSeries", "MediaRow", "Record", "Sink", "Table", "read_events", "read_json", "read_jsonl",
    "read_layers", "read_media", "read_metrics", "redact",
]  # fmt: skip
