"""Test that values per layer are written packed and without waiting, and that no failing disk or device ends a run."""

import errno
import json
import os
import warnings
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from records import close_record, start_record

from hookline import read_layers
from hookline._device import HostCopy
from hookline.errors import RecordError
from hookline.record import Record


def lines_of(record: Record) -> list[dict[str, Any]]:
    """Read layers.jsonl as strict JSON."""
    text = (record.path / "layers.jsonl").read_text()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


def test_names_are_written_once_and_numbers_packed(record: Record) -> None:
    """A series has one header, then one line per step with four bytes per number in base64."""
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
    record, names, columns = Record.in_memory(), ("a", "b"), ("mean", "std")
    for step in (1, 2):
        record.log_layers("x", step, names, columns, torch.ones(2, 2))
    with pytest.raises(RecordError, match="layers 'x'"):
        record.log_layers("x", 3, names, columns, values)
    record.log_layers("x", 4, names, columns, torch.ones(2, 2, 5))
    record.flush()
    assert [(row.step, row.header.bins) for row in record.layer_rows] == [(1, None), (2, None), (4, 5)]
    assert record.layer_rows[0].header is record.layer_rows[1].header


def test_another_set_of_names_gets_another_header(record: Record) -> None:
    """A series whose names, columns or bins change gets a new header; one that returns to old ones does not."""
    record.log_layers("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    record.log_layers("s", 2, ["a", "b"], ["x"], torch.zeros(2, 1))
    record.log_layers("s", 3, ["a"], ["x"], torch.zeros(1, 1))
    record.log_layers("s", 4, ["a"], ["x"], torch.zeros(1, 1, 5))
    close_record(record)
    assert [line["series"] for line in lines_of(record)] == [0, 0, 1, 1, 0, 2, 2]
    assert lines_of(record)[-2]["bins"] == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_any_real_dtype_is_taken(dtype: torch.dtype) -> None:
    """Values are converted to float32."""
    record = Record.in_memory()
    record.log_layers("s", 1, ["a"], ["x", "y"], torch.tensor([[1.0, 2.0]], dtype=dtype))
    record.flush()
    assert torch.equal(record.layer_rows[0].values, torch.tensor([[1.0, 2.0]]))


def test_values_are_copied() -> None:
    """A caller may reuse its buffer at once; gradients and strides do not matter."""
    record = Record.in_memory()
    values = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    record.log_layers("s", 1, ["a", "b", "c"], ["x", "y"], values)
    with torch.no_grad():
        values.zero_()
    record.flush()
    [row] = record.layer_rows
    assert row.values.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not row.values.requires_grad


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
        Record.in_memory().log_layers("s", 1, ["a", "b"], ["x"], values)


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush leaves copies in progress, and what came after them, to a later one; the order is kept."""
    record = Record.in_memory()
    with monkeypatch.context() as busy:
        busy.setattr(HostCopy, "is_ready", lambda copy: False)
        record.log_layers("s", 1, ["a"], ["x"], torch.zeros(1, 1))
        record.log_layers("s", 2, ["a"], ["x"], torch.ones(1, 1))
        record.flush()
        assert record.layer_rows == []
    record.flush()
    assert [row.step for row in record.layer_rows] == [1, 2]


def test_the_close_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies in progress at the end of a run are written by the close."""
    monkeypatch.setattr(HostCopy, "is_ready", lambda copy: False)
    record = start_record(tmp_path)
    record.log_layers("s", 7, ["a"], ["x"], torch.ones(1, 1))
    record.flush()
    close_record(record)
    assert read_layers(record.path)["s"].steps == (7,)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_failed_device_is_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device failed, only its own steps are lost; the close does not raise."""
    record = start_record(tmp_path) if kind == "disk" else Record.in_memory()
    for step in (1, 2, 3):
        record.log_layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
    wait = HostCopy.wait

    def break_second(copy: HostCopy) -> torch.Tensor:
        if copy.host.item() == 2:
            raise RuntimeError("device-side assert")
        return wait(copy)

    monkeypatch.setattr(HostCopy, "wait", break_second)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close_record(record)
    assert record.lost == 1
    steps = [row.step for row in record.layer_rows] if record.path is None else read_layers(record.path)["s"].steps
    assert list(steps) == [1, 3]


def test_a_full_disk_is_counted_and_a_lost_header_is_written_later(
    monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    """No step raises; once there is space again, the series continues, with its header."""
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    record.log_layers("s", 1, ["a"], ["x"], torch.ones(1, 1))
    with pytest.warns(RuntimeWarning, match="is losing data"):
        record.flush()
    monkeypatch.setattr(os, "write", write)
    record.log_layers("s", 2, ["a"], ["x"], torch.ones(1, 1))
    close_record(record)
    assert record.lost == 1
    assert read_layers(record.path)["s"].steps == (2,)


def test_a_run_without_layers_has_no_such_file(record: Record) -> None:
    """The file is created by its first line; a resume of such a run creates none either."""
    record.resume_at(3, 0)
    close_record(record)
    assert not (record.path / "layers.jsonl").exists()


def test_the_record_in_memory() -> None:
    """Rows are in a list after a flush, and a resume discards those of later steps."""
    record = Record.in_memory(keep=1000)
    for step in range(1, 4):
        record.log_layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
    record.flush()
    assert [(row.step, row.values.item()) for row in record.layer_rows] == [(1, 1), (2, 2), (3, 3)]
    assert record.layer_rows[0].header == ("s", ("a",), ("x",), None)
    record.resume_at(2, 0)
    assert [row.step for row in record.layer_rows] == [1, 2]
    assert record.metrics[-1]["resumed"] is True
    for step in range(100):
        record.log_layers("s", step, ["a"], ["x"], torch.zeros(1, 1))
    record.flush()
    assert len(record.layer_rows) < 20


def test_what_comes_after_the_close_is_counted(record: Record) -> None:
    """It is not written, and the warning says why."""
    record.log_layers("s", 1, ["a"], ["x"], torch.zeros(1, 1))
    close_record(record)
    record.log_layers("s", 2, ["a"], ["x"], torch.zeros(1, 1))
    with pytest.warns(RuntimeWarning, match="is closed"):
        record.flush()
    assert record.lost == 1 and read_layers(record.path)["s"].steps == (1,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_never_waited_for(record: Record) -> None:
    """While the device is busy nothing waits, the values are those of the call, and the close writes them."""
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
    close_record(record)
    assert read_layers(record.path)["s"].values.sum() == 4


# ---- numbers as text -------------------------------------------------------------------------------------------------


COUNTS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2**24), st.sampled_from([127, 128, 16383, 16384]))
HEADER = '{"series":0,"name":"s","names":["a"],"columns":["x"],"bins":%d}'


def write_step(directory: Path, values: np.ndarray[Any, Any], binned: bool = True) -> dict[str, Any]:
    """Write the values as one step of a new record and return its line."""
    record = start_record(directory)
    table = torch.from_numpy(values).reshape(1, 1, -1) if binned else torch.from_numpy(values).reshape(-1, 1)
    record.log_layers("s", 1, [str(index) for index in range(table.shape[0])], ["x"], table)
    close_record(record)
    return {**lines_of(record)[-1], "read": read_layers(record.path)["s"].values.flatten().numpy()}


def read_line(directory: Path, fields: dict[str, Any], bins: int) -> list[float] | None:
    """Read a file with one step of so many bins; None if the reader ignores its line."""
    lines = [HEADER % bins, json.dumps({"series": 0, "step": 1, **fields})]
    (directory / "layers.jsonl").write_text("\n".join(lines) + "\n")
    series = read_layers(directory).get("s")
    return None if series is None else series.values.flatten().tolist()


@settings(deadline=None, max_examples=50)
@given(counts=st.lists(COUNTS, max_size=60))
def test_counts_are_restored(tmp_path_factory: pytest.TempPathFactory, counts: list[int]) -> None:
    """Any counts, in any number."""
    line = write_step(tmp_path_factory.mktemp("runs"), np.array(counts, dtype=np.float32))
    assert "counts" in line and line["read"].tolist() == counts


def test_how_counts_are_packed(tmp_path: Path) -> None:
    """Ten bits for ten bins, then seven bits of a count to the byte, the lowest of all counts first."""
    line = write_step(tmp_path, np.array([0, 5, 0, 0, 127, 128, 0, 0, 0, 300], dtype=np.float32))
    packed = bytes([0b01001100, 0b01000000, 5, 127, 128, 128 + 300 % 128, 1, 300 // 128])
    assert b64decode(line["counts"]) == packed


def test_histograms_take_a_fifth_of_their_floats(tmp_path: Path) -> None:
    """148 of them, with the numbers of elements that GPT-2 small has, take less than 100 kB of text instead of 404."""
    stream = np.random.default_rng(0)
    sizes = [50304 * 768, 1024 * 768, *[768, 768, 768, 768, 2304, 768 * 2304, 3072, 768 * 768] * 18, 768, 768]
    bins = np.exp2(-np.abs(np.arange(512) - 255.5) / 8)[::-1].copy()
    shares = np.roll(bins, 256) / bins.sum()  # half as many values in each octave further down, on both sides
    values = np.stack([stream.poisson(size * shares) for size in sizes]).astype(np.float32)
    as_floats = write_step(tmp_path, values, binned=False)
    assert len(write_step(tmp_path, values)["counts"]) < 100_000 < 404_000 < len(as_floats["data"])


@pytest.mark.parametrize("odd", [0.5, -1.0, float("nan"), float("inf"), -float("inf"), 2.0**31, 1e-40, 1e30])
def test_other_values_stay_floats(odd: float, tmp_path: Path) -> None:
    """One such value is enough for all to be stored as floats."""
    values = np.array([0.0, 3.0, odd], dtype=np.float32)
    line = write_step(tmp_path, values)
    assert "data" in line
    np.testing.assert_array_equal(line["read"], values)


@settings(deadline=None, max_examples=25)
@given(values=arrays.arrays(np.float32, st.integers(1, 20)))
def test_floats_are_restored_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: np.ndarray[Any, Any]
) -> None:
    """Values without bins are never stored as counts."""
    line = write_step(tmp_path_factory.mktemp("runs"), values, binned=False)
    assert "data" in line and line["read"].tobytes() == values.tobytes()


@pytest.mark.filterwarnings("ignore:.*is damaged")
@settings(deadline=None, max_examples=100)
@given(noise=st.binary(max_size=12), size=st.integers(0, 40))
def test_damage_never_raises(tmp_path_factory: pytest.TempPathFactory, noise: bytes, size: int) -> None:
    """Any bytes are read as the expected number of counts, or ignored."""
    values = read_line(tmp_path_factory.mktemp("run"), {"counts": b64encode(noise).decode("ascii")}, size)
    assert values is None or (len(values) == size and min(values, default=0) >= 0)


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_damage_is_detected(tmp_path: Path) -> None:
    """A missing or extra byte, another size, an endless count and invalid text are ignored."""

    def read(packed: bytes, bins: int) -> list[float] | None:
        return read_line(tmp_path, {"counts": b64encode(packed).decode("ascii")}, bins)

    whole = b64decode(write_step(tmp_path, np.array([1, 200, 0, 70000], dtype=np.float32))["counts"])
    assert read(whole, 4) == [1, 200, 0, 70000]
    assert read(whole[:-1], 4) is read(whole + b"\0", 4) is None
    assert read(whole, 40) is read(b"", 4) is read(bytes([128] * 8), 1) is None
    for fields in ({}, {"counts": "?"}, {"counts": 5}, {"data": "AAA="}, {"data": "AACAPw=="}):
        assert read_line(tmp_path, fields, 4) is None
