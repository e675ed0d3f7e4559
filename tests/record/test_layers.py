"""Test that values per layer are written packed and without waiting, and that no failing disk or device ends a run."""

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hookline import read_layers
from hookline._host_copy import HostCopy
from hookline.errors import RecordError
from hookline.record import Record
from hookline.record.layers import (
    LayerBuffer,
    LayerLines,
    LayerRow,
    SeriesHeader,
    pack,
    pack_counts,
    unpack,
    unpack_counts,
)


def make_record(root: Path, run_id: str | None = None) -> Record:
    """Make a record on disk and start it."""
    record = Record.on_disk(root, config={}, seed=None, run_id=run_id)
    record.start([])
    return record


def close(record: Record) -> None:
    """Close the record."""
    record.close("completed", None, [], [], {})


def lines_of(record: Record) -> list[dict[str, Any]]:
    """Read layers.jsonl as strict JSON."""
    assert record.path is not None
    text = (record.path / "layers.jsonl").read_text()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


def test_names_are_written_once_and_numbers_packed(tmp_path: Path) -> None:
    """A series has one header, then one line per step with four bytes per number in base64."""
    record = make_record(tmp_path)
    for step in (1, 2, 3):
        record.log_layers("activations", step, ["a", "b"], ["mean", "std"], torch.full((2, 2), float(step)))
    assert not (record.path / "layers.jsonl").exists()
    record.flush()
    header, *steps = lines_of(record)
    assert header == {"series": 0, "name": "activations", "names": ["a", "b"], "columns": ["mean", "std"]}
    assert [(line["series"], line["step"]) for line in steps] == [(0, 1), (0, 2), (0, 3)]
    assert steps[0]["data"] == "AACAPwAAgD8AAIA/AACAPw=="  # 1.0 is 00 00 80 3f in little-endian float32


@pytest.mark.parametrize(
    "values", [torch.ones(2, 3), torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2).to("meta")]
)
def test_values_that_do_not_fit_a_known_series_raise(values: torch.Tensor) -> None:
    """Values are checked also when the names and columns of the series are known."""
    buffer, names, columns = LayerBuffer((rows := list[LayerRow]()).extend), ("a", "b"), ("mean", "std")
    for step in (1, 2):
        buffer.add("x", step, names, columns, torch.ones(2, 2))
    with pytest.raises(RecordError, match="layers 'x'"):
        buffer.add("x", 3, names, columns, values)
    buffer.add("x", 4, names, columns, torch.ones(2, 2, 5))
    buffer.drain()
    assert [(row.step, row.header.bins) for row in rows] == [(1, None), (2, None), (4, 5)]
    assert rows[0].header is rows[1].header


def test_another_set_of_names_gets_another_header(tmp_path: Path) -> None:
    """A series whose names, columns or bins change gets a new header; one that returns to old ones does not."""
    record = make_record(tmp_path)
    record.log_layers("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    record.log_layers("s", 2, ["a", "b"], ["x"], torch.zeros(2, 1))
    record.log_layers("s", 3, ["a"], ["x"], torch.zeros(1, 1))
    record.log_layers("s", 4, ["a"], ["x"], torch.zeros(1, 1, 5))
    close(record)
    assert [line["series"] for line in lines_of(record)] == [0, 0, 1, 1, 0, 2, 2]
    assert lines_of(record)[-2]["bins"] == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_any_real_dtype_is_taken(dtype: torch.dtype) -> None:
    """Values are converted to float32."""
    rows: list[LayerRow] = []
    buffer = LayerBuffer(rows.extend)
    buffer.add("s", 1, ["a"], ["x", "y"], torch.tensor([[1.0, 2.0]], dtype=dtype))
    buffer.flush()
    assert torch.equal(rows[0].values, torch.tensor([[1.0, 2.0]]))


def test_values_are_copied() -> None:
    """A caller may reuse its buffer at once; gradients and strides do not matter."""
    rows: list[LayerRow] = []
    buffer = LayerBuffer(rows.extend)
    values = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    buffer.add("s", 1, ["a", "b", "c"], ["x", "y"], values)
    with torch.no_grad():
        values.zero_()
    buffer.flush()
    assert rows[0].values.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not rows[0].values.requires_grad


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
def test_invalid_values_raise(values: torch.Tensor, said: str) -> None:
    """Values that do not fit their names raise at the call."""
    with pytest.raises(RecordError, match=said):
        LayerBuffer(list).add("s", 1, ["a", "b"], ["x"], values)


class SlowCopy(HostCopy):
    """A copy that is complete when the test says so."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush leaves copies in progress, and what came after them, to a later one; the order is kept."""
    monkeypatch.setattr("hookline.record.layers.HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "ready", False)
    rows: list[LayerRow] = []
    buffer = LayerBuffer(rows.extend)
    buffer.add("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    buffer.add("s", 2, ["a"], ["x"], torch.ones(1, 1))
    buffer.flush()
    assert rows == []
    monkeypatch.setattr(SlowCopy, "ready", True)
    buffer.flush()
    assert [row.step for row in rows] == [1, 2]


def test_the_close_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies in progress at the end of a run are written by the close."""
    monkeypatch.setattr("hookline.record.layers.HostCopy", SlowCopy)
    record = make_record(tmp_path)
    record.log_layers("s", 7, ["a"], ["x"], torch.ones(1, 1))
    record.flush()
    close(record)
    assert read_layers(record.path)["s"].steps == (7,)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_failed_device_is_counted(kind: str, tmp_path: Path) -> None:
    """If a device failed, only its own steps are lost; the close does not raise."""
    record = make_record(tmp_path) if kind == "disk" else Record.in_memory()
    for step in (1, 2, 3):
        record.log_layers("s", step, ["a"], ["x"], torch.ones(1, 1))
    record._layers._waiting[1][2].wait = _broken  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(record)
    assert record.lost == 1
    steps = [row.step for row in record.layer_rows] if record.path is None else read_layers(record.path)["s"].steps
    assert list(steps) == [1, 3]


def _broken(*_: Any) -> Any:
    raise RuntimeError("device-side assert")


def test_a_full_disk_is_counted_and_a_lost_header_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step raises; once there is space again, the series continues, with its header."""
    record = make_record(tmp_path)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    record.log_layers("s", 1, ["a"], ["x"], torch.ones(1, 1))
    with pytest.warns(RuntimeWarning, match="is losing data"):
        record.flush()
    monkeypatch.setattr(os, "write", write)
    record.log_layers("s", 2, ["a"], ["x"], torch.ones(1, 1))
    close(record)
    assert record.lost == 1
    assert read_layers(record.path)["s"].steps == (2,)


def test_a_run_without_layers_has_no_such_file(tmp_path: Path) -> None:
    """The file is created by its first line; a resume of such a run creates none either."""
    record = make_record(tmp_path)
    record.resume_at(3, 0)
    close(record)
    assert not (record.path / "layers.jsonl").exists()


def test_the_record_in_memory() -> None:
    """Rows are in a list after a flush, and a resume discards those of later steps."""
    record = Record.in_memory(keep=1000)
    for step in range(1, 4):
        record.log_layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
    record.flush()
    assert [(row.step, row.values.item()) for row in record.layer_rows] == [(1, 1), (2, 2), (3, 3)]
    assert record.layer_rows[0].header == SeriesHeader("s", ("a",), ("x",))
    record.resume_at(2, 0)
    assert [row.step for row in record.layer_rows] == [1, 2]
    assert record.metrics[-1]["resumed"] is True
    for step in range(100):
        record.log_layers("s", step, ["a"], ["x"], torch.zeros(1, 1))
    record.flush()
    assert len(record.layer_rows) < 20


def test_writing_to_a_closed_file_raises(tmp_path: Path) -> None:
    """What comes after the end of the record raises an error, which the record counts."""
    lines = LayerLines(tmp_path / "layers.jsonl")
    row = LayerRow(1, SeriesHeader("s", ("a",), ("x",)), torch.zeros(1, 1))
    lines.write(row)
    lines.close()
    with pytest.raises(RecordError, match="is closed"):
        lines.write(row)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_never_waited_for(tmp_path: Path) -> None:
    """While the device is busy nothing waits, the values are those of the call, and the close writes them."""
    record = make_record(tmp_path)
    values = torch.ones(2, 2, device="cuda", dtype=torch.float64)
    record.log_layers("warm", 0, ["a", "b"], ["x", "y"], values)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        record.log_layers("s", 1, ["a", "b"], ["x", "y"], values)
        values.zero_()
        record.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "s" not in read_layers(record.path)
    close(record)
    assert read_layers(record.path)["s"].values.sum() == 4


# ---- numbers as text -------------------------------------------------------------------------------------------------


COUNTS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2**24), st.sampled_from([127, 128, 16383, 16384]))


def packed(values: np.ndarray[Any, Any], binned: bool = True) -> dict[str, Any]:
    """Return the fields of a line."""
    field, text = pack(values, binned)
    return {field: text.decode("ascii")}


@given(st.lists(COUNTS, max_size=60))
def test_counts_are_restored(counts: list[int]) -> None:
    """Any counts, in any number."""
    values = np.array(counts, dtype=np.float32)
    line = packed(values)
    assert list(line) == ["counts"]
    found = unpack(line, len(counts))
    assert found is not None and found.dtype == np.float32 and found.tolist() == counts


def test_how_counts_are_packed() -> None:
    """Ten bits for ten bins, then seven bits of a count to the byte, the lowest of all counts first."""
    values = np.array([0, 5, 0, 0, 127, 128, 0, 0, 0, 300], dtype=np.float32)
    assert pack_counts(values) == bytes([0b01001100, 0b01000000, 5, 127, 128, 128 + 300 % 128, 1, 300 // 128])


def test_histograms_take_a_fifth_of_their_floats() -> None:
    """148 of them, with the numbers of elements that GPT-2 small has, take less than 100 kB of text instead of 404."""
    stream = np.random.default_rng(0)
    sizes = [50304 * 768, 1024 * 768, *[768, 768, 768, 768, 2304, 768 * 2304, 3072, 768 * 768] * 18, 768, 768]
    bins = np.exp2(-np.abs(np.arange(512) - 255.5) / 8)[::-1].copy()
    shares = np.roll(bins, 256) / bins.sum()  # half as many values in each octave further down, on both sides
    values = np.stack([stream.poisson(size * shares) for size in sizes]).astype(np.float32)
    assert len(packed(values)["counts"]) < 100_000 < 404_000 < len(packed(values, binned=False)["data"])


@pytest.mark.parametrize("odd", [0.5, -1.0, float("nan"), float("inf"), -float("inf"), 2.0**31, 1e-40, 1e30])
def test_other_values_stay_floats(odd: float) -> None:
    """One such value is enough for all to be stored as floats."""
    values = np.array([0.0, 3.0, odd], dtype=np.float32)
    assert pack_counts(values) is None
    line = packed(values)
    assert list(line) == ["data"]
    np.testing.assert_array_equal(unpack(line, 3), values)


@settings(max_examples=50)
@given(arrays.arrays(np.float32, st.integers(0, 20)))
def test_floats_are_restored_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    """Values without bins are never stored as counts."""
    found = unpack(packed(values, binned=False), values.size)
    assert found is not None and found.tobytes() == values.tobytes()


@settings(max_examples=200)
@given(st.binary(max_size=12), st.integers(0, 40))
def test_damage_never_raises(noise: bytes, size: int) -> None:
    """Any bytes unpack to the requested number of counts, or to None."""
    found = unpack_counts(noise, size)
    assert found is None or (found.size == size and (found >= 0).all())


def test_damage_is_detected() -> None:
    """A missing or extra byte, another size, an endless count and invalid text give None."""
    whole = pack_counts(np.array([1, 200, 0, 70000], dtype=np.float32))
    assert whole is not None and unpack_counts(whole, 4) is not None
    assert unpack_counts(whole[:-1], 4) is None and unpack_counts(whole + b"\0", 4) is None
    assert unpack_counts(whole, 40) is None and unpack_counts(b"", 4) is None
    assert unpack_counts(bytes([128] * 8), 1) is None
    for record in ({}, {"counts": "?"}, {"counts": 5}, {"data": "AAA="}, {"data": "AACAPw=="}):
        assert unpack(record, 4) is None
