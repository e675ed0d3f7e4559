"""Record what a run did, from which code and config, readable by anything that reads JSON.

Imports `core` and the shared modules. `hooks`, `trainer` and what is above them may import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.record.reader import LayerSeries, read_events, read_json, read_jsonl, read_layers, read_metrics
    from hookline.record.record import Record
    from hookline.record.redaction import redact
    from hookline.record.sinks import Sink

__all__ = [
    "LayerSeries", "Record", "Sink", "read_events", "read_json", "read_jsonl", "read_layers", "read_metrics", "redact",
]  # fmt: skip

_MODULES = {"Record": "record", "Sink": "sinks", "redact": "redaction"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: commands that list or label runs need none of them, and must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'reader')}"), name)
    globals()[name] = value
    return value
