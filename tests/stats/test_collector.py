"""Tensors are collected while a model runs and measured together; one row per key and step arrives on the host."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import HooklineError
from hookline._device import HostCopy
from hookline.stats import STATISTICS, summarize
from hookline.stats import collector as module
from hookline.stats.borrowed import borrowing
from hookline.stats.collector import StepCollector

COUNT, MEAN, STD = map(STATISTICS.index, ("count", "mean", "std"))


class Counting:
    """Measures tensors, and counts how many each launch reads."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def __call__(self, tensors: Sequence[Tensor], names: Sequence[object]) -> Tensor:
        """Return the rows of the tensors."""
        self.launches.append(len(tensors))
        return summarize(tensors, names)


@pytest.fixture
def collector() -> StepCollector:
    """Return a collector that has measured nothing."""
    return StepCollector()


@pytest.fixture
def measure() -> Counting:
    """Return a measurement that counts its launches."""
    return Counting()


def means(collector: StepCollector) -> dict[Any, float]:
    """End step 1 and return the mean of each key."""
    collector.end_step(1)
    found: dict[Any, float] = {}
    for rows in collector.ready():
        found |= dict(zip(rows.keys, rows.rows[:, MEAN].tolist(), strict=True))
    return found


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_everything_is_read_at_the_end(measure: Counting) -> None:
    """One launch for all, rows in the order of the keys."""
    collector = StepCollector(measure)
    for value in range(5):
        collector.add(f"layer {value}", torch.full((3,), float(value)), 1)
    assert not measure.launches
    assert list(means(collector).items()) == [(f"layer {value}", value) for value in range(5)]
    assert measure.launches == [5]


def test_the_limit_is_kept(measure: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than the limit are not held; the rows are all there in the end."""
    monkeypatch.setattr(StepCollector, "limit_bytes", 1000)
    collector = StepCollector(measure)
    for value in range(7):
        collector.add(value, torch.full((100,), float(value)), 1)
    assert means(collector) == {value: value for value in range(7)}
    assert measure.launches == [3, 3, 1]


def test_tensors_that_the_backward_pass_keeps_do_not_count(measure: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training the outputs that are saved for backward wait for the one launch at the end."""
    monkeypatch.setattr(StepCollector, "limit_bytes", 1000)
    collector, values = StepCollector(measure), torch.ones(100, requires_grad=True)
    for layer in range(20):
        values = values.exp()  # saves its output
        collector.add(layer, values, 1)
    collector.send()
    assert measure.launches == [20]


def test_tensors_that_only_the_collector_keeps_count(measure: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for the outputs that only the collector keeps alive."""
    monkeypatch.setattr(StepCollector, "limit_bytes", 1000)
    collector, values = StepCollector(measure), torch.ones(100, requires_grad=True)
    for layer in range(6):
        values = values.exp()
        collector.add(f"exp {layer}", values, 1)
        collector.add(f"sum {layer}", values + 1, 1)  # an addition saves nothing
    collector.send()
    assert len(measure.launches) > 1 and sum(measure.launches) == 12


def test_a_view_that_is_alive_for_a_while_does_not_count_as_kept(
    measure: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients every byte counts, even if a view uses the memory at the moment."""
    monkeypatch.setattr(StepCollector, "limit_bytes", 1000)
    collector, views = StepCollector(measure), []
    for layer in range(6):
        values = torch.ones(100)
        views.append(values.view(10, 10))
        collector.add(layer, values, 1)
    collector.send()
    assert measure.launches == [3, 3]


def test_references_are_dropped_after_the_launch(collector: StepCollector) -> None:
    """A tensor that was read is not kept alive."""
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    collector.add("x", tensor, 1)
    collector.send()
    del tensor
    gc.collect()
    assert alive() is None


def test_an_overwritten_tensor_gets_no_row_and_is_read_at_once_from_then_on(collector: StepCollector) -> None:
    """An in-place write between add and launch is noticed; the next pass is right."""
    for expected in ({"after": 0}, {"before": -2, "after": 0}):
        values = torch.full((4,), -2.0)
        collector.add("before", values, 1)
        values.relu_()
        collector.add("after", values, 1)
        assert means(collector) == expected


def test_a_step_whose_tensors_were_all_overwritten_has_no_rows() -> None:
    """Nothing is returned for it, and the next step is not affected."""
    collector, values = StepCollector(), torch.ones(4)
    collector.add("a", values, 1)
    values.zero_()
    assert means(collector) == {}
    collector.add("b", values, 2)
    collector.end_step(2)
    assert steps_of(collector.ready()) == [2]


def test_inference_tensors_are_gathered_too() -> None:
    """They have no version to compare."""
    with torch.inference_mode():
        collector = StepCollector()
        collector.add("x", torch.ones(3), 1)
        assert means(collector) == {"x": 1}


def test_a_refusal_names_the_key(collector: StepCollector) -> None:
    """The message calls the tensor by its key, and the next pass is not affected."""
    collector.add("blocks.0", torch.ones(2, dtype=torch.complex64), 1)
    with pytest.raises(HooklineError, match=r"blocks\.0"):
        collector.send()
    collector.add("blocks.1", torch.ones(2), 1)
    assert means(collector) == {"blocks.1": 1}


def test_discarding_forgets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed forward pass nothing of it is left, not even what was read early."""
    monkeypatch.setattr(StepCollector, "limit_bytes", 10)
    collector = StepCollector()
    collector.add("a", torch.ones(30), 1)
    collector.add("b", torch.ones(1), 1)
    collector.discard()
    assert means(collector) == {} and collector.incomplete() is None


def test_tensors_on_several_devices() -> None:
    """Each launch reads the tensors of one device, and all rows of a step are returned together."""
    devices: list[set[str]] = []

    def measure(tensors: Sequence[Tensor], names: Sequence[object]) -> Tensor:
        devices.append({tensor.device.type for tensor in tensors})
        return summarize([torch.full((2,), float(str(name))) for name in names])

    collector = StepCollector(measure)
    for step in (1, 2):
        for key, device in enumerate(["cpu", "meta", "cpu", "meta", "meta"]):
            collector.add(key, torch.ones(2, device=device), step)
        collector.end_step(step)
    found = list(collector.ready())
    assert devices == [{"cpu"}, {"meta"}] * 2
    for step, keys, rows in found:
        assert dict(zip(keys, rows[:, MEAN].tolist(), strict=True)) == {key: key for key in range(5)}, step
    assert [rows.step for rows in found] == [1, 2]


# ---- borrowed tensors ------------------------------------------------------------------------------------------------


def is_copied() -> bool:
    """Return whether a collector copies a tensor, so that later writes that raise no version do not change its row."""
    collector, tensor = StepCollector(), torch.ones(4)
    collector.add("x", tensor, 1)
    tensor.data.fill_(7.0)
    return means(collector) == {"x": 1.0}


def test_borrowed_tensors_are_copied() -> None:
    """Their owner may overwrite them without raising a version; blocks nest, and end also when they fail."""
    assert not is_copied()
    with pytest.raises(ValueError), borrowing():
        with borrowing():
            assert is_copied()
        assert is_copied()
        raise ValueError
    assert not is_copied()


def test_other_threads_borrow_nothing() -> None:
    """Borrowing holds for one thread."""
    seen: list[bool] = []
    with borrowing():
        thread = threading.Thread(target=lambda: seen.append(is_copied()))
        thread.start()
        thread.join()
    assert seen == [False]


# ---- rows of steps ---------------------------------------------------------------------------------------------------


def steps_of(rows: Iterator[Any]) -> list[int]:
    """Return the steps of some rows."""
    return [row.step for row in rows]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_cuda_arrive_through_pinned_memory(collector: StepCollector) -> None:
    """They have the values of their tensors."""
    collector.add("x", torch.arange(6.0, device="cuda"), 1)
    collector.end_step(1)
    (found,) = collector.drain()
    assert found.rows.is_pinned() and found.rows[0, MEAN] == 2.5


def test_a_step_is_returned_when_it_has_ended(collector: StepCollector) -> None:
    """Sent rows are held back until the step ends, or rows of the next one arrive."""
    collector.add("a", torch.ones(2), 1)
    collector.send()
    assert steps_of(collector.ready()) == []
    collector.end_step(1)
    assert steps_of(collector.ready()) == [1]
    collector.add("a", torch.ones(2), 2)
    collector.add("a", torch.ones(2), 3)
    collector.send()
    assert steps_of(collector.ready()) == [2]
    assert steps_of(collector.ready()) == []


def test_calls_of_one_step_are_merged(collector: StepCollector) -> None:
    """A key that was added several times, before and after a send, has the row of all its values together."""
    first, second, third = torch.randn(10), torch.randn(30) + 5, torch.randn(20) * 9
    collector.add("a", first, 1)
    collector.add("b", first, 1)
    collector.add("a", second, 1)
    collector.send()
    collector.add("a", third, 1)
    collector.end_step(1)
    (found,) = collector.ready()
    assert found.keys == ["a", "b"]
    whole = torch.cat([first, second, third]).double()
    true = torch.stack([torch.tensor(60.0, dtype=torch.float64), whole.mean(), whole.std()])
    torch.testing.assert_close(found.rows[0, [COUNT, MEAN, STD]], true, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.rows[1], summarize([first])[0], rtol=1e-12, atol=0)  # merging rounds


def test_without_steps_every_call_has_its_row(collector: StepCollector) -> None:
    """Step 0 means no steps: nothing is merged, and everything is returned at once."""
    for value in range(3):
        collector.add("a", torch.full((2,), float(value)), 0)
    collector.send()
    (found,) = collector.ready()
    assert (found.keys, found.rows[:, MEAN].tolist()) == (["a", "a", "a"], [0, 1, 2])


def test_an_incomplete_step_can_be_read(collector: StepCollector) -> None:
    """Reading a step before its end removes nothing from it."""
    collector.add("a", torch.zeros(2), 1)
    assert steps_of(collector.drain()) == []
    under_way = collector.incomplete()
    assert under_way is not None and under_way.rows[0, COUNT] == 2
    collector.add("a", torch.ones(2), 1)
    collector.end_step(1)
    (found,) = collector.drain()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]
    assert collector.incomplete() is None


def test_a_rewound_run_merges_again(collector: StepCollector) -> None:
    """After a rewind the repeated step is held back until its own end."""
    for step in (1, 2, 3):
        collector.add("a", torch.ones(1), step)
        collector.end_step(step)
    assert steps_of(collector.ready()) == [1, 2, 3]
    collector.add("a", torch.ones(1), 2)
    collector.send()
    assert steps_of(collector.ready()) == []
    collector.add("a", torch.ones(1), 2)
    collector.end_step(2)
    (found,) = collector.ready()
    assert (found.step, found.rows[0, COUNT]) == (2, 2)


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose copy is in progress comes later, in order; a drain waits."""
    arrived: set[int] = set()
    monkeypatch.setattr(HostCopy, "is_ready", lambda copy: int(copy.host[0, COUNT]) in arrived)
    collector = StepCollector()
    for step in (1, 2, 3):
        collector.add("a", torch.ones(step), step)
        collector.end_step(step)
    assert steps_of(collector.ready()) == []
    arrived.update((1, 3))
    assert steps_of(collector.ready()) == []  # The rows of step 2 might add to step 1.
    arrived.add(2)
    assert steps_of(collector.ready()) == [1, 2, 3]
    arrived.clear()
    collector.add("a", torch.ones(1), 4)
    collector.end_step(4)
    assert steps_of(collector.ready()) == [] and steps_of(collector.drain()) == [4]


def test_thousands_of_small_tensors_are_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of collected tensors stays bounded, although the tensors themselves take little memory."""
    monkeypatch.setattr(module, "MOST_COLLECTED", 10)
    collector = StepCollector()
    for _ in range(25):
        collector.add("a", torch.ones(1), 0)
    (found,) = collector.ready()
    assert len(found.keys) == 20


def test_discarding_keeps_what_was_sent(collector: StepCollector) -> None:
    """Tensors that were collected and not read are dropped; what had been sent is not."""
    collector.add("a", torch.ones(1), 1)
    collector.send()
    collector.add("b", torch.ones(1), 1)
    collector.discard()
    collector.end_step(1)
    (found,) = collector.ready()
    assert found.keys == ["a"]


def test_keys_keep_the_order_of_their_first_appearance() -> None:
    """Merging moves no row to another key."""
    steps = StepCollector()
    for value, key in enumerate("babca"):
        steps.add(key, torch.full((1,), float(value)), 1)
    steps.end_step(1)
    (found,) = steps.ready()
    assert found.keys == ["b", "a", "c"]
    assert found.rows[:, MEAN].tolist() == [1.0, 2.5, 3.0]
    assert found.rows[:, COUNT].tolist() == [2, 2, 1]


def test_added_rows_are_merged_with_those_of_tensors() -> None:
    """A row with NaN as its count stands for nothing; a step that has only such rows is not returned."""
    collector, nan = StepCollector(), float("nan")
    rows = torch.cat([summarize([torch.tensor([3.0, 5.0])]), torch.full((1, 10), nan)]).double()
    collector.add("a", torch.ones(2), 1)
    collector.add_rows(["a", "b"], rows, 1)
    collector.add_rows(["b"], rows[1:], 2)
    collector.end_step(2)
    (step,) = collector.drain()
    assert (step.step, step.keys) == (1, ["a"]) and step.rows[0, [COUNT, MEAN]].tolist() == [4, 2.5]


def add_rows(collector: StepCollector, step: int, value: float) -> None:
    """Add rows for a step, which then ends."""
    collector.add_rows(["a", "b"], summarize([torch.full((2,), value)] * 2), step)
    collector.end_step(step)


def test_added_rows_arrive_with_their_step(collector: StepCollector) -> None:
    """Each step has its own values, and is returned once."""
    found: list[tuple[int, float]] = []
    for step in (1, 2, 5, 40):
        add_rows(collector, step, step)
        found += [(rows.step, rows.rows[0, MEAN].item()) for rows in collector.ready()]
    assert found == [(step, step) for step in (1, 2, 5, 40)]
    assert steps_of(collector.drain()) == []


def test_without_steps_added_rows_arrive_at_once() -> None:
    """A model that runs without a trainer has step 0 all the time."""
    collector, found = StepCollector(), []
    for _ in range(3):
        collector.add_rows(["a"], summarize([torch.ones(1)]), 0)
        found.append(sum(len(rows.keys) for rows in collector.ready()))
    assert found == [1, 1, 1]


def test_added_rows_of_a_rewound_run_arrive(collector: StepCollector) -> None:
    """Steps that are repeated come after the later ones that were there first."""
    found: list[int] = []
    for step in (1000, 1, 2):
        add_rows(collector, step, step)
        found += steps_of(collector.ready())
    assert found == [1000, 1, 2]


def test_a_step_that_was_drained_under_way_is_one_row(collector: StepCollector) -> None:
    """The first half of it was drained already; both become one row all the same."""
    collector.add_rows(["a"], summarize([torch.zeros(2)]), 1)
    assert steps_of(collector.drain()) == []
    collector.add_rows(["a"], summarize([torch.ones(2)]), 1)
    collector.end_step(1)
    (found,) = collector.ready()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]


def test_added_rows_stay_in_step_with_those_of_tensors(collector: StepCollector) -> None:
    """With both, each step is still returned once and in order."""
    for step in (1, 2, 3):
        collector.add("c", torch.ones(2), step)
        add_rows(collector, step, step)
    found = [(rows.step, sorted(map(str, rows.keys))) for rows in collector.drain()]
    assert found == [(step, ["a", "b", "c"]) for step in (1, 2, 3)]


def test_added_rows_come_before_those_of_later_tensors(collector: StepCollector) -> None:
    """Steps arrive in order."""
    for step in (1, 2):
        add_rows(collector, step, step)
    collector.add("c", torch.ones(2), 3)
    collector.end_step(3)
    assert steps_of(collector.ready()) == [1, 2, 3]
