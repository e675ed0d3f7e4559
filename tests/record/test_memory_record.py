"""The record in memory says what the one on disk would, and touches no disk."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.record import MemoryRecord
from hookline.record.metrics import MetricBuffer


def test_everything_is_in_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, events and the run are kept as dicts; no file is made and no git is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    record = MemoryRecord({"token": "abc"}, seed=4, run_id="r")
    record.start([{"name": "x", "api_key": "k"}], lineage={"parent": "p"})
    record.log(1, 0, "loss", torch.tensor(float("inf")))
    record.log(1, 0, "n", 2)
    record.flush()
    record.event("saved", 1, by="x", token="abc")
    record.close("completed", None, [], [], {"steps": 1})
    record.close("failed", None, [], [], {})
    assert [{k: v for k, v in line.items() if k != "time"} for line in record.metrics] == [
        {"step": 1, "epoch": 0, "loss": float("inf"), "n": 2}
    ]
    assert (record.events[0]["kind"], record.events[0]["token"]) == ("saved", "<redacted>")
    assert (record.run["run_id"], record.run["seed"], record.run["outcome"]) == ("r", 4, "completed")
    assert (record.run["lineage"], record.run["git"]["commit"]) == ({"parent": "p"}, "unknown")
    assert list(tmp_path.iterdir()) == []


def test_long_runs_do_not_fill_the_memory() -> None:
    """Only the last records are kept once there are too many."""
    record = MemoryRecord(keep=10)
    for step in range(1000):
        record.log(step, 0, "loss", 1.0)
        record.flush()
    assert 10 <= len(record.metrics) < 20
    assert record.metrics[-1]["step"] == 999


def test_a_failed_device_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that a device no longer gives are counted as lost."""
    record = MemoryRecord()
    record.start([])
    record.log(1, 0, "loss", torch.tensor(1.0))

    def broken(_: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(MetricBuffer, "drain", broken)
    record.close("failed", None, [], [], {})
    assert (record.lost, record.run["lost"], record.metrics) == (1, 1, [])
