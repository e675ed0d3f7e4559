"""The record of a run: what happened, from which code and config, readable by anything that reads JSON."""

from __future__ import annotations

from hookline.record.layer_series import LayerSeries, read_layers
from hookline.record.memory_record import MemoryRecord
from hookline.record.provenance import config_hash, environment, git_state, new_run_id
from hookline.record.reader import read_json, read_jsonl, read_metrics
from hookline.record.redaction import redact
from hookline.record.run_record import Record, RunRecord

__all__ = [
    "LayerSeries",
    "MemoryRecord",
    "Record",
    "RunRecord",
    "config_hash",
    "environment",
    "git_state",
    "new_run_id",
    "read_json",
    "read_jsonl",
    "read_layers",
    "read_metrics",
    "redact",
]
