"""Metrics are noted without waiting, snapshotted, and written one line per step in order."""

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hookline.errors import RecordError
from hookline.record import metrics
from hookline.record.metrics import MetricBuffer
from hookline.record.transfer import Transfer


class Lines(list[dict[str, Any]]):
    """A sink that keeps the records without their times."""

    def write(self, record: Mapping[str, Any], /) -> None:
        """Keep one record."""
        assert list(record)[:3] == ["step", "epoch", "time"]
        self.append({key: value for key, value in record.items() if key != "time"})


class Slow(Transfer):
    """A transfer that arrives when the test says so."""

    arrived = False
    broken = False

    def has_arrived(self) -> bool:
        """As the test decided."""
        return Slow.arrived

    def numbers(self) -> list[Any]:
        """The numbers, unless the device is broken."""
        if Slow.broken:
            raise RuntimeError("the device is gone")
        return super().numbers()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    """Make every transfer a slow one."""
    monkeypatch.setattr(metrics, "Transfer", Slow)
    monkeypatch.setattr(Slow, "arrived", False)
    monkeypatch.setattr(Slow, "broken", False)
    return Slow


def test_one_line_per_step_in_order() -> None:
    """Values of one step and epoch share a line, and a later value of a name wins."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    buffer.log(1, 0, "loss", 2.0)
    buffer.log(1, 0, "lr", 0.1)
    buffer.log(2, 0, "loss", 1)
    buffer.log(1, 0, "loss", 3.0)
    buffer.log(2, 1, "ok", True)
    buffer.flush()
    assert lines == [
        {"step": 1, "epoch": 0, "loss": 3.0, "lr": 0.1},
        {"step": 2, "epoch": 0, "loss": 1},
        {"step": 2, "epoch": 1, "ok": True},
    ]
    buffer.flush()
    assert len(lines) == 3


def test_the_line_has_the_time_it_was_logged() -> None:
    """The time in the record is when the value was noted, not when it was written."""
    written: list[Mapping[str, Any]] = []

    class Sink:
        def write(self, record: Mapping[str, Any], /) -> None:
            written.append(record)

    buffer = MetricBuffer(Sink())
    before = time.time()
    buffer.log(1, 0, "loss", 1.0)
    after = time.time()
    time.sleep(0.02)
    buffer.flush()
    assert before - 1e-5 <= written[0]["time"] <= after + 1e-5


def test_tensors_are_snapshotted() -> None:
    """What the caller does to a tensor afterwards does not reach the record; shape and graph do not matter."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    loss = torch.tensor(1.0)
    parameter = torch.tensor([2.0], requires_grad=True)
    buffer.log(1, 0, "loss", loss)
    buffer.log(1, 0, "product", parameter * 2)
    buffer.log(1, 0, "count", torch.tensor([[5]]))
    buffer.log(1, 0, "ok", torch.tensor(True))
    loss.fill_(9.0)
    buffer.flush()
    assert lines == [{"step": 1, "epoch": 0, "loss": 1.0, "product": 4.0, "count": 5, "ok": True}]
    assert type(lines[0]["count"]) is int


def test_numpy_and_non_finite_numbers_pass() -> None:
    """NumPy's scalars and non-finite floats are numbers like any other."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    buffer.log(1, 0, "a", np.float32(0.5))
    buffer.log(1, 0, "b", math.inf)
    buffer.log(1, 0, "c", np.array([3]))
    buffer.flush()
    assert lines == [{"step": 1, "epoch": 0, "a": 0.5, "b": math.inf, "c": 3}]


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
def test_what_is_no_metric_is_refused_where_it_is_logged(name: str, value: Any, message: str) -> None:
    """A value that is not one number fails at the call that logged it, by name, and nothing is written."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    with pytest.raises(RecordError, match=message):
        buffer.log(1, 0, name, value)
    buffer.drain()
    assert lines == []


def test_one_copy_per_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a device come over together."""
    transfers: list[int] = []

    class Counted(Transfer):
        def __init__(self, scalars: list[torch.Tensor]) -> None:
            transfers.append(len(scalars))
            super().__init__(scalars)

    monkeypatch.setattr(metrics, "Transfer", Counted)
    buffer = MetricBuffer(Lines())
    for step in range(50):
        buffer.log(step, 0, "loss", torch.tensor(1.0))
        buffer.log(step, 0, "lr", 0.1)
        buffer.log(step, 0, "n", torch.tensor(step))
    buffer.flush()
    assert transfers == [100]


def test_a_flush_does_not_wait(slow: type[Slow]) -> None:
    """What has not arrived is written by a later flush, in order, also before numbers that needed no device."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.flush()
    buffer.log(2, 0, "loss", 2.0)
    buffer.flush()
    assert lines == []
    slow.arrived = True
    buffer.flush()
    assert [line["step"] for line in lines] == [1, 2]


def test_draining_waits(slow: type[Slow]) -> None:
    """A drain writes everything, arrived or not."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.flush()
    buffer.log(2, 0, "loss", torch.tensor(2.0))
    buffer.drain()
    assert [line["loss"] for line in lines] == [1.0, 2.0]


def test_a_dead_device_takes_only_its_own_values(slow: type[Slow]) -> None:
    """When a device has failed, the numbers that were on the host are still written, once."""
    lines = Lines()
    buffer = MetricBuffer(lines)
    buffer.log(1, 0, "loss", torch.tensor(1.0))
    buffer.log(1, 0, "lr", 0.1)
    buffer.flush()
    buffer.log(2, 0, "loss", torch.tensor(1.0))
    buffer.log(2, 0, "lr", 0.2)
    slow.broken = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        buffer.drain()
    assert buffer.salvage() == 2
    assert lines == [{"step": 1, "epoch": 0, "lr": 0.1}, {"step": 2, "epoch": 0, "lr": 0.2}]
    buffer.drain()
    assert len(lines) == 2


def test_logging_from_several_threads_loses_nothing() -> None:
    """Values logged while another thread flushes are all written."""
    lines = Lines()
    buffer = MetricBuffer(lines)

    def work(worker: int) -> None:
        for step in range(500):
            buffer.log(step, worker, "x", float(step))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        buffer.flush()
    buffer.drain()
    assert len(lines) == 4 * 500


def test_logging_a_number_is_cheap() -> None:
    """Noting a float costs about a microsecond at most, also on a busy machine."""
    buffer = MetricBuffer(Lines())
    log = buffer.log
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        for step in range(1000):
            log(step, 0, "loss", 0.5)
        best = min(best, (time.perf_counter() - started) / 1000)
    assert best < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_metrics_cause_no_sync() -> None:
    """Neither logging nor flushing waits for the device; snapshots hold on the device, too."""
    lines = Lines()
    buffer = MetricBuffer(lines)
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
        assert len(lines) == 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buffer.drain()
    assert [line["loss"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
