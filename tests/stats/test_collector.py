"""The collector reads what it gathered once, together, and never a value that was meant to be another."""

import gc
import weakref
from time import perf_counter

import pytest
import torch

from hookline.errors import HooklineError
from hookline.stats import collector as module
from hookline.stats.collector import Collector
from hookline.stats.columns import MEAN


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each launch read."""
    read: list[int] = []
    summarize = module.summarize
    monkeypatch.setattr(module, "summarize", lambda *given: read.append(len(given[0])) or summarize(*given))
    return read


def test_everything_is_read_at_the_end(launches: list[int]) -> None:
    """One launch for all, rows in the order of the keys."""
    collector = Collector()
    for value in range(5):
        collector.add(f"layer {value}", torch.full((3,), float(value)))
    assert len(collector) == 5 and not launches
    keys, rows = collector.finish()
    assert keys == [f"layer {value}" for value in range(5)]
    assert rows[:, MEAN].tolist() == [0, 1, 2, 3, 4] and launches == [5]


def test_a_key_may_come_twice() -> None:
    """A module that is called twice in a pass has two rows."""
    collector = Collector()
    collector.add("shared", torch.zeros(2))
    collector.add("shared", torch.ones(2))
    keys, rows = collector.finish()
    assert keys == ["shared", "shared"] and rows[:, MEAN].tolist() == [0, 1]


def test_the_limit_is_kept(launches: list[int]) -> None:
    """More bytes than the limit are not held; the rows are all there in the end."""
    collector = Collector(limit_bytes=1000)
    for value in range(7):
        collector.add(value, torch.full((100,), float(value)))
    keys, rows = collector.finish()
    assert keys == list(range(7)) and rows[:, MEAN].tolist() == keys
    assert launches == [3, 3, 1]


def test_what_the_backward_pass_keeps_does_not_count(launches: list[int]) -> None:
    """In training the outputs that are saved for backward wait for the one launch at the end."""
    collector, values = Collector(limit_bytes=1000), torch.ones(100, requires_grad=True)
    for layer in range(20):
        values = values.exp()  # saves its output
        collector.add(layer, values)
    collector.finish()
    assert launches == [20]


def test_what_nobody_keeps_counts_among_what_is_kept(launches: list[int]) -> None:
    """The limit holds for the outputs that only the collector keeps alive."""
    collector, values = Collector(limit_bytes=1000), torch.ones(100, requires_grad=True)
    for layer in range(6):
        values = values.exp()
        collector.add(f"exp {layer}", values)
        collector.add(f"sum {layer}", values + 1)  # an addition saves nothing
    collector.finish()
    assert len(launches) > 1 and sum(launches) == 12


def test_a_view_that_is_alive_for_a_while_does_not_count_as_kept(launches: list[int]) -> None:
    """Without gradients every byte counts, whoever else uses the memory just now."""
    collector, views = Collector(limit_bytes=1000), []
    for layer in range(6):
        values = torch.ones(100)
        views.append(values.view(10, 10))
        collector.add(layer, values)
    collector.finish()
    assert launches == [3, 3]


def test_references_are_dropped_after_the_launch() -> None:
    """Nothing that was read is kept alive."""
    collector = Collector()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    collector.add("x", tensor)
    collector.finish()
    del tensor
    gc.collect()
    assert alive() is None


def test_each_finish_starts_anew() -> None:
    """What was handed over is not handed over again."""
    collector = Collector()
    collector.add("x", torch.ones(3))
    collector.finish()
    keys, rows = collector.finish()
    assert keys == [] and len(rows) == 0 and len(collector) == 0


def test_an_overwritten_tensor_gets_no_row_and_is_read_at_once_from_then_on() -> None:
    """An in-place write between add and launch is noticed; the next pass is right."""
    collector = Collector()
    for expected in (["after"], ["before", "after"]):
        values = torch.full((4,), -2.0)
        collector.add("before", values)
        values.relu_()
        collector.add("after", values)
        keys, rows = collector.finish()
        assert keys == expected
    assert rows[:, MEAN].tolist() == [-2, 0] and collector.overwritten == {"before"}


def test_a_tensor_flagged_as_about_to_be_overwritten_is_read_now() -> None:
    """With now=True the first pass is right already."""
    collector = Collector()
    values = torch.full((4,), -2.0)
    collector.add("before", values, now=True)
    values.zero_()
    assert collector.finish().rows[0, MEAN] == -2 and not collector.overwritten


def test_inference_tensors_are_gathered_too() -> None:
    """They have no version to compare."""
    with torch.inference_mode():
        collector = Collector()
        collector.add("x", torch.ones(3))
        assert collector.finish().rows[0, MEAN] == 1


def test_a_refusal_names_the_key() -> None:
    """The message calls the tensor by its key, and the next pass is not affected."""
    collector = Collector()
    collector.add("blocks.0", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(HooklineError, match=r"blocks\.0"):
        collector.finish()
    collector.add("blocks.1", torch.ones(2))
    assert collector.finish().keys == ["blocks.1"]


def test_discarding_forgets_everything() -> None:
    """After a pass that failed nothing of it is left."""
    collector = Collector(limit_bytes=10)
    collector.add("a", torch.ones(30))
    collector.add("b", torch.ones(1))
    collector.discard()
    assert len(collector) == 0 and collector.finish().keys == []


def test_adding_is_cheap() -> None:
    """The best of many rounds takes less than 5 µs a tensor, on any machine that runs tests."""
    collector, tensor = Collector(limit_bytes=1 << 60), torch.ones(3)
    best = min(_round(collector, tensor) for _ in range(20))
    assert best < 5e-6


def _round(collector: Collector, tensor: torch.Tensor) -> float:
    began = perf_counter()
    for _ in range(500):
        collector.add("x", tensor)
    spent = (perf_counter() - began) / 500
    collector.discard()
    return spent
