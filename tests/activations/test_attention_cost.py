"""The cost of attention maps: work is added up where it is done."""

import time

import pytest
import torch

from hookline.activations.attention_cost import Stopwatch

CPU = torch.device("cpu")


def test_pieces_add_up() -> None:
    """Only what is done inside the blocks counts."""
    watch = Stopwatch()
    assert watch.seconds == 0
    for _ in range(2):
        with watch.timing(CPU):
            time.sleep(0.02)
        time.sleep(0.1)
    assert 0.04 <= watch.seconds < 0.2


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events before and after, read only when somebody asks, each pair once."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, last: "Event") -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch()
    with watch.timing(torch.device("cuda")):
        told.append("work")
    assert told == ["record", "work", "record"]
    assert watch.seconds == watch.seconds == 0.25
    assert told == ["record", "work", "record", "wait"]
