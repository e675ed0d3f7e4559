"""Test that metrics are logged without waiting, copied, and written as one row per step in order."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from hookline._device import HostCopy
from hookline.errors import RecordError
from hookline.record import Record


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Return the written rows without their times."""
    assert all(list(row)[:3] == ["step", "epoch", "time"] for row in record.metrics)
    return [{key: value for key, value in row.items() if key != "time"} for row in record.metrics]


@pytest.fixture
def record() -> Record:
    """Return a record in memory."""
    return Record.in_memory()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make every copy to the host an incomplete one, as on a busy device."""
    monkeypatch.setattr(HostCopy, "is_ready", lambda copy: False)
    return monkeypatch


def break_device(*_: Any) -> Any:
    """Fail as a device does."""
    raise RuntimeError("the device is gone")


def test_one_row_per_step_in_order(record: Record) -> None:
    """Values of one step and epoch share a row, and a later value of a name wins."""
    record.log(1, 0, "loss", 2.0)
    record.log(1, 0, "lr", 0.1)
    record.log(2, 0, "loss", 1)
    record.log(1, 0, "loss", 3.0)
    record.log(2, 1, "ok", True)
    record.flush()
    assert rows_of(record) == [
        {"step": 1, "epoch": 0, "loss": 3.0, "lr": 0.1},
        {"step": 2, "epoch": 0, "loss": 1},
        {"step": 2, "epoch": 1, "ok": True},
    ]
    record.flush()
    assert len(record.metrics) == 3


def test_a_row_has_the_time_of_logging(record: Record) -> None:
    """The time of a row is when its first value was logged, not when it was written."""
    before = time.time()
    record.log(1, 0, "loss", 1.0)
    after = time.time()
    time.sleep(0.02)
    record.flush()
    assert before - 1e-5 <= record.metrics[0]["time"] <= after + 1e-5


def test_tensors_are_copied(record: Record) -> None:
    """What the caller does to a tensor afterwards does not reach the record; shape and graph do not matter."""
    loss = torch.tensor(1.0)
    parameter = torch.tensor([2.0], requires_grad=True)
    record.log(1, 0, "loss", loss)
    record.log(1, 0, "product", parameter * 2)
    record.log(1, 0, "count", torch.tensor([[5]]))
    record.log(1, 0, "ok", torch.tensor(True))
    loss.fill_(9.0)
    record.flush()
    assert rows_of(record) == [{"step": 1, "epoch": 0, "loss": 1.0, "product": 4.0, "count": 5, "ok": True}]
    assert type(record.metrics[0]["count"]) is int


def test_numpy_and_non_finite_numbers_pass(record: Record) -> None:
    """NumPy's scalars and non-finite floats are numbers like any other."""
    record.log(1, 0, "a", np.float32(0.5))
    record.log(1, 0, "b", math.inf)
    record.log(1, 0, "c", np.array([3]))
    record.flush()
    assert rows_of(record) == [{"step": 1, "epoch": 0, "a": 0.5, "b": math.inf, "c": 3}]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", torch.zeros(3), r"'loss' has shape \[3\]; log one number"),
        ("loss", torch.zeros(0), r"'loss' has shape \[0\]"),
        ("loss", torch.tensor(1j), "'loss' is complex"),
        ("loss", torch.zeros((), device="meta"), "'loss' is on the meta device"),
        ("loss", "high", "'loss' is a str; log a number"),
        ("loss", None, "'loss' is a NoneType"),
        ("step", 1.0, "no metric can be named 'step'"),
    ],
)
def test_invalid_metrics_raise_where_they_are_logged(name: str, value: Any, message: str, record: Record) -> None:
    """A value that is not one number raises at the call, with the metric's name, and nothing is written."""
    with pytest.raises(RecordError, match=message):
        record.log(1, 0, name, value)
    record.flush(wait=True)
    assert record.metrics == []


def test_one_copy_per_flush_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a device and dtype are copied together."""
    copied: list[int] = []

    def counted(tensor: torch.Tensor) -> HostCopy:
        copied.append(tensor.numel())
        return HostCopy(tensor)

    monkeypatch.setattr("hookline.record.metrics.HostCopy", counted)
    record = Record.in_memory()
    for step in range(50):
        record.log(step, 0, "loss", torch.tensor(1.0))
        record.log(step, 0, "lr", 0.1)
        record.log(step, 0, "norm", torch.tensor(2.0))
        record.log(step, 0, "n", torch.tensor(step))
    record.flush()
    assert copied == [100, 50]


def test_a_flush_does_not_wait(slow: pytest.MonkeyPatch, record: Record) -> None:
    """A copy in progress is written by a later flush, in order, also before numbers that needed no device."""
    record.log(1, 0, "loss", torch.tensor(1.0))
    record.flush()
    record.log(2, 0, "loss", 2.0)
    record.flush()
    assert record.metrics == []
    slow.undo()
    record.flush()
    assert [row["step"] for row in record.metrics] == [1, 2]


@pytest.mark.usefixtures("slow")
def test_a_sync_waits(record: Record) -> None:
    """Everything is written, also copies in progress."""
    record.log(1, 0, "loss", torch.tensor(1.0))
    record.flush()
    record.log(2, 0, "loss", torch.tensor(2.0))
    record.sync()
    assert [row["loss"] for row in record.metrics] == [1.0, 2.0]


@pytest.mark.parametrize("call", ["stack", "wait"])
def test_a_failed_device_loses_only_its_own_values(call: str, slow: pytest.MonkeyPatch, record: Record) -> None:
    """When a device failed, before or after a copy began, the numbers that were on the host are written, once."""
    record.log(1, 0, "loss", torch.tensor(1.0))
    record.log(1, 0, "lr", 0.1)
    if call == "wait":
        record.flush()
    record.log(2, 0, "loss", torch.tensor(1.0))
    record.log(2, 0, "lr", 0.2)
    slow.setattr(torch if call == "stack" else HostCopy, call, break_device)
    record.sync()
    assert record.lost == 2
    assert rows_of(record) == [{"step": 1, "epoch": 0, "lr": 0.1}, {"step": 2, "epoch": 0, "lr": 0.2}]
    record.sync()
    assert (record.lost, len(record.metrics)) == (2, 2)


def test_logging_from_several_threads_loses_nothing(record: Record) -> None:
    """Values logged while other threads flush are all written."""

    def work(worker: int) -> None:
        for step in range(500):
            record.log(step, worker, "x", float(step))
            if step % 100 == 0:
                record.flush()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        record.flush()
    record.flush(wait=True)
    assert len(record.metrics) == 4 * 500


@pytest.mark.usefixtures("slow")
def test_a_record_is_closed_while_another_thread_waits_for_a_device(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing without a wait leaves out what a device that never answers has not computed."""
    waits, answers, wait = threading.Event(), threading.Event(), HostCopy.wait

    def hang(copy: HostCopy) -> torch.Tensor:
        waits.set()
        answers.wait()
        return wait(copy)

    monkeypatch.setattr(HostCopy, "wait", hang)
    record.log(1, 0, "loss", torch.tensor(1.0))
    waiting = threading.Thread(target=record.flush, kwargs={"wait": True}, daemon=True)
    waiting.start()
    waits.wait()
    record.finish("failed", None, [], [], {}, wait=False)
    record.close_files()
    assert (record.run["outcome"], record.metrics) == ("failed", [])
    answers.set()
    waiting.join()


def test_numbers_of_every_dtype() -> None:
    """Numbers of all dtypes keep their type and value: ints are ints, booleans are bools, floats are exact."""
    scalars = {
        "bool": torch.tensor(True),
        "float64": torch.tensor(0.1, dtype=torch.float64),
        "int64": torch.tensor(2**62 + 1),
        "int8": torch.tensor(-3, dtype=torch.int8),
        "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
        "float32": torch.tensor(0.1),
        "false": torch.tensor(False),
        "int16": torch.tensor(7, dtype=torch.int16),
        "float16": torch.tensor(65504.0, dtype=torch.float16),
        "uint8": torch.tensor(200, dtype=torch.uint8),
        "float8": torch.tensor(0.5).to(torch.float8_e4m3fn),
        "infinity": torch.tensor(-math.inf),
    }
    record = Record.in_memory()
    for name, scalar in scalars.items():
        record.log(1, 0, name, scalar)
    record.log(1, 0, "nan", torch.tensor(math.nan))
    record.flush()
    rows = rows_of(record)
    assert math.isnan(rows[0].pop("nan"))
    assert rows == [{"step": 1, "epoch": 0, **{name: scalar.item() for name, scalar in scalars.items()}}]
    assert all(type(rows[0][name]) is type(scalar.item()) for name, scalar in scalars.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_metrics_cause_no_sync(record: Record) -> None:
    """Neither logging nor flushing waits for the device; snapshots hold on the device, too."""
    loss = torch.tensor(0.0, device="cuda")

    def train(steps: range) -> None:
        for step in steps:
            loss.add_(1.0)
            record.log(step, 0, "loss", loss)
            record.flush()

    torch.cuda._sleep(1_000_000)
    train(range(1, 4))  # the first use loads kernels and pins memory, which waits
    record.flush(wait=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        train(range(4, 7))
        assert len(record.metrics) == 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record.flush(wait=True)
    assert [row["loss"] for row in record.metrics] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
