"""Tables of numbers go to layers.jsonl without waiting, packed, and a failing disk or device never stops a run."""

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.errors import RecordError
from hookline.record import MemoryRecord, Record, RunRecord, read_layers
from hookline.record.layers import LayerBuffer, LayerLines, Layers, Table
from hookline.record.transfer import HostCopy


def make_record(root: Path, run_id: str | None = None) -> RunRecord:
    """A record on disk that has begun."""
    record = RunRecord.create(root, config={}, seed=None, run_id=run_id)
    record.start([])
    return record


def close(record: Record) -> None:
    """Close with nothing special to say."""
    record.close("completed", None, [], [], {})


def lines_of(record: RunRecord) -> list[dict[str, Any]]:
    """What layers.jsonl holds, as strict JSON."""
    text = (record.path / "layers.jsonl").read_text()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.layers: list[Layers] = []

    def write(self, layers: Layers, /) -> None:
        self.layers.append(layers)


def test_names_are_written_once_and_numbers_packed(tmp_path: Path) -> None:
    """One header for a series, then a line a step that holds four bytes a number in base64."""
    record = make_record(tmp_path)
    for step in (1, 2, 3):
        record.layers("activations", step, ["a", "b"], ["mean", "std"], torch.full((2, 2), float(step)))
    assert not (record.path / "layers.jsonl").exists()
    record.flush()
    header, *steps = lines_of(record)
    assert header == {"series": 0, "name": "activations", "names": ["a", "b"], "columns": ["mean", "std"]}
    assert [(line["series"], line["step"]) for line in steps] == [(0, 1), (0, 2), (0, 3)]
    assert steps[0]["data"] == "AACAPwAAgD8AAIA/AACAPw=="  # 1.0 is 00 00 80 3f in little-endian float32


@pytest.mark.parametrize(
    "values", [torch.ones(2, 3), torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2).to("meta")]
)
def test_what_does_not_fit_is_refused_after_what_did(values: torch.Tensor) -> None:
    """A series whose names and columns are known is no excuse for other values."""
    buffer, names, columns = LayerBuffer(kept := Kept()), ("a", "b"), ("mean", "std")
    for step in (1, 2):
        buffer.add("x", step, names, columns, torch.ones(2, 2))
    with pytest.raises(RecordError, match="layers 'x'"):
        buffer.add("x", 3, names, columns, values)
    buffer.add("x", 4, names, columns, torch.ones(2, 2, 5))
    buffer.drain()
    assert [(one.step, one.table.bins) for one in kept.layers] == [(1, None), (2, None), (4, 5)]
    assert kept.layers[0].table is kept.layers[1].table


def test_another_set_of_names_gets_another_header(tmp_path: Path) -> None:
    """A series whose names, columns or bins change is told anew; one that returns to known ones is not."""
    record = make_record(tmp_path)
    record.layers("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    record.layers("s", 2, ["a", "b"], ["x"], torch.zeros(2, 1))
    record.layers("s", 3, ["a"], ["x"], torch.zeros(1, 1))
    record.layers("s", 4, ["a"], ["x"], torch.zeros(1, 1, 5))
    close(record)
    assert [line["series"] for line in lines_of(record)] == [0, 0, 1, 1, 0, 2, 2]
    assert lines_of(record)[-2]["bins"] == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_any_real_dtype_is_taken(dtype: torch.dtype) -> None:
    """Values arrive in float32, whatever they were."""
    kept = Kept()
    buffer = LayerBuffer(kept)
    buffer.add("s", 1, ["a"], ["x", "y"], torch.tensor([[1.0, 2.0]], dtype=dtype))
    buffer.flush()
    assert torch.equal(kept.layers[0].values, torch.tensor([[1.0, 2.0]]))


def test_values_are_those_of_the_call() -> None:
    """A caller may reuse its buffer at once; gradients and strides don't matter."""
    kept = Kept()
    buffer = LayerBuffer(kept)
    values = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    buffer.add("s", 1, ["a", "b", "c"], ["x", "y"], values)
    with torch.no_grad():
        values.zero_()
    buffer.flush()
    assert kept.layers[0].values.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not kept.layers[0].values.requires_grad


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(2, 3), r"have the shape \[2, 3\]; expected \[2 names, 1 columns\]"),
        (torch.zeros(2), r"shape \[2\]"),
        (torch.zeros(2, 1, 3, 4), r"shape \[2, 1, 3, 4\]"),
        (torch.zeros(2, 1, dtype=torch.complex64), "complex"),
        (torch.zeros(2, 1, device="meta"), "meta device"),
    ],
)
def test_what_is_no_table_is_refused(values: torch.Tensor, said: str) -> None:
    """Values that don't fit their names are the caller's mistake, told where they are given."""
    with pytest.raises(RecordError, match=said):
        LayerBuffer(Kept()).add("s", 1, ["a", "b"], ["x"], values)


class OnItsWay(HostCopy):
    """A copy that has not arrived until somebody says so."""

    arrived = False

    def has_arrived(self) -> bool:
        return self.arrived


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush leaves what is on its way, and what came after it, to a later one; order is kept."""
    monkeypatch.setattr("hookline.record.layers.HostCopy", OnItsWay)
    monkeypatch.setattr(OnItsWay, "arrived", False)
    kept = Kept()
    buffer = LayerBuffer(kept)
    buffer.add("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    buffer.add("s", 2, ["a"], ["x"], torch.ones(1, 1))
    buffer.flush()
    assert kept.layers == []
    monkeypatch.setattr(OnItsWay, "arrived", True)
    buffer.flush()
    assert [layers.step for layers in kept.layers] == [1, 2]


def test_the_close_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is still on its way at the end of a run is written by the close."""
    monkeypatch.setattr("hookline.record.layers.HostCopy", OnItsWay)
    record = make_record(tmp_path)
    record.layers("s", 7, ["a"], ["x"], torch.ones(1, 1))
    record.flush()
    close(record)
    assert read_layers(record.path)["s"].steps == (7,)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_failed_device_is_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that no longer answers, only its own steps are lost; the close never raises."""
    monkeypatch.setattr(LayerBuffer, "drain", _broken)
    record: Record = make_record(tmp_path) if kind == "disk" else MemoryRecord()
    record.layers("s", 1, ["a"], ["x"], torch.ones(1, 1))
    record.layers("s", 2, ["a"], ["x"], torch.ones(1, 1))
    record._layers._waiting[0][2].tensor = _broken  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(record)
    assert record.lost == 1
    steps = read_layers(record.path)["s"].steps if isinstance(record, RunRecord) else [record.layer_steps[0].step]  # type: ignore[attr-defined]
    assert list(steps) == [2]


def _broken(*_: Any) -> Any:
    raise RuntimeError("device-side assert")


def test_a_full_disk_is_counted_and_a_lost_header_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step raises; once there is space again, the series is complete from there."""
    record = make_record(tmp_path)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    record.layers("s", 1, ["a"], ["x"], torch.ones(1, 1))
    with pytest.warns(RuntimeWarning, match="is losing data"):
        record.flush()
    monkeypatch.setattr(os, "write", write)
    record.layers("s", 2, ["a"], ["x"], torch.ones(1, 1))
    close(record)
    assert record.lost == 1
    assert read_layers(record.path)["s"].steps == (2,)


def test_a_run_without_layers_has_no_such_file(tmp_path: Path) -> None:
    """The file is made by its first line; a resume of such a run makes none either."""
    record = make_record(tmp_path)
    record.resumed(3, 0)
    close(record)
    assert not (record.path / "layers.jsonl").exists()


def test_the_record_in_memory() -> None:
    """Steps are in a list after a flush, and those taken back by a resume are gone."""
    record = MemoryRecord(keep=1000)
    for step in range(1, 4):
        record.layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
    record.flush()
    assert [(layers.step, layers.values.item()) for layers in record.layer_steps] == [(1, 1), (2, 2), (3, 3)]
    assert record.layer_steps[0].table == Table("s", ("a",), ("x",))
    record.resumed(2, 0)
    assert [layers.step for layers in record.layer_steps] == [1, 2]
    assert record.metrics[-1]["resumed"] is True
    for step in range(100):
        record.layers("s", step, ["a"], ["x"], torch.zeros(1, 1))
    record.flush()
    assert len(record.layer_steps) < 20


def test_closed_lines_refuse(tmp_path: Path) -> None:
    """What comes after the record has ended is an error that says so, which the record counts."""
    lines = LayerLines(tmp_path / "layers.jsonl")
    layers = Layers(1, Table("s", ("a",), ("x",)), torch.zeros(1, 1))
    lines.write(layers)
    lines.close()
    with pytest.raises(RecordError, match="is closed"):
        lines.write(layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_never_waited_for(tmp_path: Path) -> None:
    """While the device is busy nothing waits, the values are those of the call, and the close writes them."""
    record = make_record(tmp_path)
    values = torch.ones(2, 2, device="cuda", dtype=torch.float64)
    record.layers("warm", 0, ["a", "b"], ["x", "y"], values)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        record.layers("s", 1, ["a", "b"], ["x", "y"], values)
        values.zero_()
        record.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "s" not in read_layers(record.path)
    close(record)
    assert read_layers(record.path)["s"].values.sum() == 4
