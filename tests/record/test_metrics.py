"""Test that metrics are logged without waiting, copied, and delivered as one row per step in order."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from hookline._host_copy import HostCopy
from hookline.errors import RecordError
from hookline.record import metrics
from hookline.record.metrics import MetricBuffer


class Rows(list[dict[str, Any]]):
    """The delivered rows without their times."""

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        """Receive a batch of rows."""
        assert rows and all(list(row)[:3] == ["step", "epoch", "time"] for row in rows)
        self.extend({key: value for key, value in row.items() if key != "time"} for row in rows)


class SlowCopy(HostCopy):
    """A copy that is complete when the test says so."""

    ready = False
    broken = False

    def is_ready(self) -> bool:
        """Return what the test decided."""
        return SlowCopy.ready

    def wait(self) -> torch.Tensor:
        """Return the numbers, unless the device is broken."""
        if SlowCopy.broken:
            raise RuntimeError("the device is gone")
        return super().wait()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowCopy]:
    """Make every copy a slow one."""
    monkeypatch.setattr(metrics, "HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "ready", False)
    monkeypatch.setattr(SlowCopy, "broken", False)
    return SlowCopy


def test_one_row_per_step_in_order() -> None:
    """Values of one step and epoch share a row, and a later value of a name wins."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    buffer.log(1, 0, "loss", 2.0)
    buffer.log(1, 0, "lr", 0.1)
    buffer.log(2, 0, "loss", 1)
    buffer.log(1, 0, "loss", 3.0)
    buffer.log(2, 1, "ok", True)
    buffer.flush()
    assert rows == [
        {"step": 1, "epoch": 0, "loss": 3.0, "lr": 0.1},
        {"step": 2, "epoch": 0, "loss": 1},
        {"step": 2, "epoch": 1, "ok": True},
    ]
    buffer.flush()
    assert len(rows) == 3


def test_a_row_has_the_time_of_logging() -> None:
    """The time of a row is when its first value was logged, not when it was written."""
    written: list[dict[str, Any]] = []
    buffer = MetricBuffer(written.extend)
    before = time.time()
    buffer.log(1, 0, "loss", 1.0)
    after = time.time()
    time.sleep(0.02)
    buffer.flush()
    assert before - 1e-5 <= written[0]["time"] <= after + 1e-5


def test_tensors_are_copied() -> None:
    """What the caller does to a tensor afterwards does not reach the record; shape and graph do not matter."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    loss = torch.tensor(1.0)
    parameter = torch.tensor([2.0], requires_grad=True)
    buffer.log(1, 0, "loss", loss)
    buffer.log(1, 0, "product", parameter * 2)
    buffer.log(1, 0, "count", torch.tensor([[5]]))
    buffer.log(1, 0, "ok", torch.tensor(True))
    loss.fill_(9.0)
    buffer.flush()
    assert rows == [{"step": 1, "epoch": 0, "loss": 1.0, "product": 4.0, "count": 5, "ok": True}]
    assert type(rows[0]["count"]) is int


def test_numpy_and_non_finite_numbers_pass() -> None:
    """NumPy's scalars and non-finite floats are numbers like any other."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    buffer.log(1, 0, "a", np.float32(0.5))
    buffer.log(1, 0, "b", math.inf)
    buffer.log(1, 0, "c", np.array([3]))
    buffer.flush()
    assert rows == [{"step": 1, "epoch": 0, "a": 0.5, "b": math.inf, "c": 3}]


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
def test_invalid_metrics_raise_where_they_are_logged(name: str, value: Any, message: str) -> None:
    """A value that is not one number raises at the call, with the metric's name, and nothing is written."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    with pytest.raises(RecordError, match=message):
        buffer.log(1, 0, name, value)
    buffer.drain()
    assert rows == []


def test_one_copy_per_flush_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a device and dtype are copied together."""
    copied: list[int] = []

    def counted(tensor: torch.Tensor) -> HostCopy:
        copied.append(tensor.numel())
        return HostCopy(tensor)

    monkeypatch.setattr(metrics, "HostCopy", counted)
    buffer = MetricBuffer(Rows())
    for step in range(50):
        buffer.log(step, 0, "loss", torch.tensor(1.0))
        buffer.log(step, 0, "lr", 0.1)
        buffer.log(step, 0, "norm", torch.tensor(2.0))
        buffer.log(step, 0, "n", torch.tensor(step))
    buffer.flush()
    assert copied == [100, 50]


def test_a_flush_does_not_wait(slow: type[SlowCopy]) -> None:
    """A copy in progress is delivered by a later flush, in order, also before numbers that needed no device."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.flush()
    buffer.log(2, 0, "loss", 2.0)
    buffer.flush()
    assert rows == []
    slow.ready = True
    buffer.flush()
    assert [row["step"] for row in rows] == [1, 2]


def test_draining_waits(slow: type[SlowCopy]) -> None:
    """A drain delivers everything, also copies in progress."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.flush()
    buffer.log(2, 0, "loss", torch.tensor(2.0))
    buffer.drain()
    assert [row["loss"] for row in rows] == [1.0, 2.0]


def test_a_failed_device_loses_only_its_own_values(slow: type[SlowCopy]) -> None:
    """When a device failed, the numbers that were on the host are still delivered, once."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.log(1, 0, "lr", 0.1)
    buffer.flush()
    buffer.log(2, 0, "loss", torch.tensor(1.0))
    buffer.log(2, 0, "lr", 0.2)
    slow.broken = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        buffer.drain()
    assert buffer.salvage() == 2
    assert rows == [{"step": 1, "epoch": 0, "lr": 0.1}, {"step": 2, "epoch": 0, "lr": 0.2}]
    buffer.drain()
    assert len(rows) == 2


def test_logging_from_several_threads_loses_nothing() -> None:
    """Values logged while another thread flushes are all delivered."""
    rows = Rows()
    buffer = MetricBuffer(rows)

    def work(worker: int) -> None:
        for step in range(500):
            buffer.log(step, worker, "x", float(step))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        buffer.flush()
    buffer.drain()
    assert len(rows) == 4 * 500


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
    rows = Rows()
    buffer = MetricBuffer(rows)
    for name, scalar in scalars.items():
        buffer.log(1, 0, name, scalar)
    buffer.log(1, 0, "nan", torch.tensor(math.nan))
    buffer.flush()
    assert math.isnan(rows[0].pop("nan"))
    assert rows == [{"step": 1, "epoch": 0, **{name: scalar.item() for name, scalar in scalars.items()}}]
    assert all(type(rows[0][name]) is type(scalar.item()) for name, scalar in scalars.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_metrics_cause_no_sync() -> None:
    """Neither logging nor flushing waits for the device; snapshots hold on the device, too."""
    rows = Rows()
    buffer = MetricBuffer(rows)
    loss = torch.tensor(0.0, device="cuda")

    def train(steps: range) -> None:
        for step in steps:
            loss.add_(1.0)
            buffer.log(step, 0, "loss", loss)
            buffer.flush()

    torch.cuda._sleep(1_000_000)
    train(range(1, 4))  # the first use loads kernels and pins memory, which waits
    buffer.drain()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        train(range(4, 7))
        assert len(rows) == 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buffer.drain()
    assert [row["loss"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
