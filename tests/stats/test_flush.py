"""Rows arrive on the host in order, with the step and the keys they were sent with."""

import pytest
import torch

from hookline.stats import flush as module
from hookline.stats.flush import Flush


class Event:
    """Stands for a device's event: over when told so."""

    def __init__(self) -> None:
        self.over = False
        self.waited = False

    def query(self) -> bool:
        """Whether the copy is done."""
        return self.over

    def synchronize(self) -> None:
        """Wait for it."""
        self.waited = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of the copies that are sent, as a device would make them."""
    made: list[Event] = []

    def start(rows: torch.Tensor) -> tuple[torch.Tensor, Event]:
        made.append(Event())
        return rows, made[-1]

    monkeypatch.setattr(module, "_start_copy", start)
    return made


def test_rows_on_the_host_have_arrived() -> None:
    """On the CPU nothing needs waiting for."""
    flush = Flush()
    flush.send(7, ["a"], torch.tensor([[1.0, 2.0]]))
    (arrival,) = flush.ready()
    assert (arrival.step, arrival.keys, arrival.rows.tolist()) == (7, ["a"], [[1, 2]])
    assert len(flush) == 0


def test_what_is_on_its_way_is_not_waited_for(events: list[Event]) -> None:
    """Ready gives what has arrived and leaves the rest."""
    flush = Flush()
    for step in (1, 2, 3):
        flush.send(step, (), torch.zeros(1))
    assert list(flush.ready()) == []
    events[0].over = events[2].over = True
    assert [arrival.step for arrival in flush.ready()] == [1]  # the third waits behind the second
    assert not any(event.waited for event in events) and len(flush) == 2


def test_drain_waits_for_everything(events: list[Event]) -> None:
    """At the end nothing is lost."""
    flush = Flush()
    for step in (1, 2):
        flush.send(step, (), torch.zeros(1))
    assert [arrival.step for arrival in flush.drain()] == [1, 2]
    assert all(event.waited for event in events) and len(flush) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_cuda_arrives() -> None:
    """The rows come over pinned memory, with their values."""
    flush = Flush()
    flush.send(1, ["x"], torch.arange(6.0, device="cuda").view(2, 3))
    (arrival,) = flush.drain()
    assert arrival.rows.is_pinned() and arrival.rows.tolist() == [[0, 1, 2], [3, 4, 5]]
