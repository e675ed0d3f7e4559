"""Tensors are collected while a model runs and measured together; one row per key and step arrives on the host."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from hookline import HooklineError
from hookline._host_copy import HostCopy
from hookline.stats import STATISTICS, summarize
from hookline.stats import collector as module
from hookline.stats.borrowed import borrowing, is_borrowed
from hookline.stats.collector import STEPS_TOGETHER, Collector, HostQueue, RowBatch, StepCollector, StepRows

COUNT, MEAN, STD = map(STATISTICS.index, ("count", "mean", "std"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors each launch read."""
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


def test_tensors_that_the_backward_pass_keeps_do_not_count(launches: list[int]) -> None:
    """In training the outputs that are saved for backward wait for the one launch at the end."""
    collector, values = Collector(limit_bytes=1000), torch.ones(100, requires_grad=True)
    for layer in range(20):
        values = values.exp()  # saves its output
        collector.add(layer, values)
    collector.finish()
    assert launches == [20]


def test_tensors_that_only_the_collector_keeps_count(launches: list[int]) -> None:
    """The limit holds for the outputs that only the collector keeps alive."""
    collector, values = Collector(limit_bytes=1000), torch.ones(100, requires_grad=True)
    for layer in range(6):
        values = values.exp()
        collector.add(f"exp {layer}", values)
        collector.add(f"sum {layer}", values + 1)  # an addition saves nothing
    collector.finish()
    assert len(launches) > 1 and sum(launches) == 12


def test_a_view_that_is_alive_for_a_while_does_not_count_as_kept(launches: list[int]) -> None:
    """Without gradients every byte counts, even if a view uses the memory at the moment."""
    collector, views = Collector(limit_bytes=1000), []
    for layer in range(6):
        values = torch.ones(100)
        views.append(values.view(10, 10))
        collector.add(layer, values)
    collector.finish()
    assert launches == [3, 3]


def test_references_are_dropped_after_the_launch() -> None:
    """A tensor that was read is not kept alive."""
    collector = Collector()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    collector.add("x", tensor)
    collector.finish()
    del tensor
    gc.collect()
    assert alive() is None


def test_each_finish_starts_again() -> None:
    """Rows are returned once."""
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
    """After a failed forward pass nothing of it is left."""
    collector = Collector(limit_bytes=10)
    collector.add("a", torch.ones(30))
    collector.add("b", torch.ones(1))
    collector.discard()
    assert len(collector) == 0 and collector.finish().keys == []


# ---- borrowed tensors ------------------------------------------------------------------------------------------------


def test_borrowing_ends_with_its_outermost_block() -> None:
    """Blocks nest, and end also when they fail."""
    assert not is_borrowed()
    with pytest.raises(ValueError), borrowing():
        with borrowing():
            assert is_borrowed()
        assert is_borrowed()
        raise ValueError
    assert not is_borrowed()


def test_other_threads_borrow_nothing() -> None:
    """Borrowing holds for one thread."""
    seen: list[bool] = []
    with borrowing():
        thread = threading.Thread(target=lambda: seen.append(is_borrowed()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_borrowed_tensor_is_copied() -> None:
    """Its owner may overwrite it afterwards without raising its version."""
    collector, tensor = Collector(), torch.ones(4)
    with borrowing():
        collector.add("borrowed", tensor)
    tensor.data.fill_(7.0)
    keys, rows = collector.finish()
    assert keys == ["borrowed"] and rows[0, MEAN] == 1.0


# ---- rows on their way to the host -----------------------------------------------------------------------------------


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each copy has arrived, oldest first, as a device would decide; copies made later have not."""
    copies: list[HostCopy] = []
    done: list[bool] = []

    def is_ready(copy: HostCopy) -> bool:
        if copy not in copies:
            copies.append(copy)
        place = copies.index(copy)
        return place < len(done) and done[place]

    monkeypatch.setattr(HostCopy, "is_ready", is_ready)
    return done


def test_rows_on_the_host_have_arrived() -> None:
    """On the CPU nothing is in progress."""
    queue = HostQueue()
    queue.send(7, ["a"], torch.tensor([[1.0, 2.0]]))
    (found,) = queue.ready()
    assert (found.step, found.keys, found.rows.tolist()) == (7, ["a"], [[1, 2]])
    assert len(queue) == 0


def test_copies_in_progress_are_not_waited_for(arrived: list[bool]) -> None:
    """`ready` yields what has arrived, in order, and leaves the rest; `drain` yields everything."""
    queue = HostQueue()
    for step in (1, 2, 3):
        queue.send(step, (), torch.zeros(1))
    assert list(queue.ready()) == []
    arrived[:] = [True]
    assert [rows.step for rows in queue.ready()] == [1] and len(queue) == 2
    assert [rows.step for rows in queue.drain()] == [2, 3] and len(queue) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_cuda_arrives() -> None:
    """The rows come through pinned memory, with their values."""
    queue = HostQueue()
    queue.send(1, ["x"], torch.arange(6.0, device="cuda").view(2, 3))
    (found,) = queue.drain()
    assert found.rows.is_pinned() and found.rows.tolist() == [[0, 1, 2], [3, 4, 5]]


def batched_at(steps: range) -> list[int]:
    """Return at which of these steps a batch of rows should be copied."""
    batch, times = RowBatch(), []
    for step in steps:
        if batch.add(step, ["a", "b"], torch.full((2, 3), float(step))):
            times.append(step)
            batch.take()
    return times


@pytest.mark.parametrize(
    ("steps", "times"),
    [
        (range(1, 2 * STEPS_TOGETHER + 1), [STEPS_TOGETHER, 2 * STEPS_TOGETHER]),
        (
            range(3 * STEPS_TOGETHER, 9 * STEPS_TOGETHER, STEPS_TOGETHER),
            list(range(3 * STEPS_TOGETHER, 9 * STEPS_TOGETHER, STEPS_TOGETHER)),
        ),
        (range(3, 25, 3), [9, 18]),
        (range(1), []),
    ],
    ids=["every step", "rarely", "every third step", "no step"],
)
def test_no_row_waits_for_more_than_a_few_steps(steps: range, times: list[int]) -> None:
    """Rows of every step are copied eight at a time; those of a schedule as rare as that at once."""
    assert batched_at(steps) == times


def test_without_steps_a_number_of_batches_is_copied_together() -> None:
    """A model that runs without a trainer has step 0 all the time."""
    batch = RowBatch()
    full = [batch.add(0, ["a"], torch.ones(1, 3)) for _ in range(STEPS_TOGETHER)]
    assert full == [False] * (STEPS_TOGETHER - 1) + [True]


def test_a_rewound_run_does_not_fill_a_batch_without_end() -> None:
    """Later steps are never far from a first one that is ahead of them."""
    batch = RowBatch()
    batch.add(1000, ["a"], torch.ones(1, 3))
    assert any(batch.add(step, ["a"], torch.ones(1, 3)) for step in range(1, STEPS_TOGETHER))


# ---- rows of steps ---------------------------------------------------------------------------------------------------


def steps_of(rows: Iterator[StepRows]) -> list[int]:
    """Return the steps of some rows."""
    return [row.step for row in rows]


def test_a_step_is_returned_when_it_has_ended() -> None:
    """Sent rows are held back until the step ends, or rows of the next one arrive."""
    collector = StepCollector()
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


def test_calls_of_one_step_are_merged() -> None:
    """A key that was added several times, before and after a send, has the row of all its values together."""
    collector = StepCollector()
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
    assert torch.equal(found.rows[1], summarize([first])[0])


def test_without_steps_every_call_has_its_row() -> None:
    """Step 0 means no steps: nothing is merged, and everything is returned at once."""
    collector = StepCollector()
    for value in range(3):
        collector.add("a", torch.full((2,), float(value)), 0)
    collector.send()
    (found,) = collector.ready()
    assert (found.keys, found.rows[:, MEAN].tolist()) == (["a", "a", "a"], [0, 1, 2])


def test_an_incomplete_step_can_be_read() -> None:
    """Reading a step before its end removes nothing from it."""
    collector = StepCollector()
    collector.add("a", torch.zeros(2), 1)
    assert steps_of(collector.drain()) == []
    under_way = collector.incomplete()
    assert under_way is not None and under_way.rows[0, COUNT] == 2
    collector.add("a", torch.ones(2), 1)
    collector.end_step(1)
    (found,) = collector.drain()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]
    assert collector.incomplete() is None


def test_a_rewound_run_merges_again() -> None:
    """After a rewind the repeated step is held back until its own end."""
    collector = StepCollector()
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
    monkeypatch.setattr(HostCopy, "is_ready", lambda copy: False)
    collector = StepCollector()
    for step in (1, 2):
        collector.add("a", torch.ones(1), step)
        collector.end_step(step)
    assert steps_of(collector.ready()) == []
    assert steps_of(collector.drain()) == [1, 2]


def test_thousands_of_small_tensors_are_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of collected tensors stays bounded, although the tensors themselves take little memory."""
    monkeypatch.setattr(module, "MOST_COLLECTED", 10)
    collector = StepCollector()
    for _ in range(25):
        collector.add("a", torch.ones(1), 0)
    (found,) = collector.ready()
    assert len(found.keys) == 20


def test_discarding_keeps_what_was_sent() -> None:
    """Tensors that were collected and not read are dropped; what had been sent is not."""
    collector = StepCollector()
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


def test_added_rows_arrive_for_several_steps_at_once() -> None:
    """They have their own steps and values; `drain` returns the rest."""
    collector = StepCollector()
    seen = []
    for step in range(1, 2 * STEPS_TOGETHER):
        add_rows(collector, step, step)
        seen.append([(rows.step, rows.rows[0, MEAN].item()) for rows in collector.ready()])
    assert [len(found) for found in seen] == [0] * (STEPS_TOGETHER - 1) + [STEPS_TOGETHER] + [0] * (STEPS_TOGETHER - 1)
    assert seen[STEPS_TOGETHER - 1] == [(step, step) for step in range(1, STEPS_TOGETHER + 1)]
    assert steps_of(collector.drain()) == list(range(STEPS_TOGETHER + 1, 2 * STEPS_TOGETHER))


def test_a_step_is_not_returned_while_rows_of_it_wait() -> None:
    """The first half of it was drained already; both become one row all the same."""
    collector = StepCollector()
    collector.add_rows(["a"], summarize([torch.zeros(2)]), 1)
    assert steps_of(collector.drain()) == []
    collector.add_rows(["a"], summarize([torch.ones(2)]), 1)
    collector.end_step(1)
    assert steps_of(collector.ready()) == []
    (found,) = collector.drain()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]


def test_added_rows_stay_in_step_with_those_of_tensors() -> None:
    """With both, each step is still returned once and in order."""
    collector = StepCollector()
    for step in (1, 2, 3):
        collector.add("c", torch.ones(2), step)
        add_rows(collector, step, step)
    found = [(rows.step, sorted(map(str, rows.keys))) for rows in collector.drain()]
    assert found == [(step, ["a", "b", "c"]) for step in (1, 2, 3)]
