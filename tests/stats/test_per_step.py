"""Tensors go in while a model runs; one row per key and step comes out, once the step is complete."""

from collections.abc import Iterator

import pytest
import torch

from hookline.stats import flush, per_step
from hookline.stats.bundle import TOGETHER
from hookline.stats.columns import COUNT, MEAN, STD
from hookline.stats.per_step import PerStep, one_row_each
from hookline.stats.statistics import summarize


def steps_of(rows: Iterator[per_step.StepRows]) -> list[int]:
    """The steps that came out."""
    return [row.step for row in rows]


def test_a_step_comes_out_when_it_has_ended() -> None:
    """Sent rows are held back until the step is ended, or the next one's arrive."""
    gathered = PerStep()
    gathered.add("a", torch.ones(2), 1)
    gathered.send()
    assert steps_of(gathered.ready()) == []
    gathered.end_step(1)
    assert steps_of(gathered.ready()) == [1]
    gathered.add("a", torch.ones(2), 2)
    gathered.add("a", torch.ones(2), 3)
    gathered.send()
    assert steps_of(gathered.ready()) == [2]
    assert steps_of(gathered.ready()) == []


def test_calls_of_one_step_are_merged() -> None:
    """A key that was added several times, before and after a send, has the row of all its values together."""
    gathered = PerStep()
    first, second, third = torch.randn(10), torch.randn(30) + 5, torch.randn(20) * 9
    gathered.add("a", first, 1)
    gathered.add("b", first, 1)
    gathered.add("a", second, 1)
    gathered.send()
    gathered.add("a", third, 1)
    gathered.end_step(1)
    (found,) = gathered.ready()
    assert found.keys == ["a", "b"]
    whole = torch.cat([first, second, third]).double()
    true = torch.stack([torch.tensor(60.0, dtype=torch.float64), whole.mean(), whole.std()])
    torch.testing.assert_close(found.rows[0, [COUNT, MEAN, STD]], true, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.rows[1], summarize([first])[0])


def test_without_steps_every_call_has_its_row() -> None:
    """Step 0 is no step: nothing is merged, and everything comes out at once."""
    gathered = PerStep()
    for value in range(3):
        gathered.add("a", torch.full((2,), float(value)), 0)
    gathered.send()
    (found,) = gathered.ready()
    assert (found.keys, found.rows[:, MEAN].tolist()) == (["a", "a", "a"], [0, 1, 2])


def test_what_is_under_way_can_be_seen_and_stays() -> None:
    """Reading a step before its end takes nothing from it."""
    gathered = PerStep()
    gathered.add("a", torch.zeros(2), 1)
    assert steps_of(gathered.drain()) == []
    under_way = gathered.incomplete()
    assert under_way is not None and under_way.rows[0, COUNT] == 2
    gathered.add("a", torch.ones(2), 1)
    gathered.end_step(1)
    (found,) = gathered.drain()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]
    assert gathered.incomplete() is None


def test_a_run_that_goes_back_merges_again() -> None:
    """After a rewind the repeated step is held back until its own end."""
    gathered = PerStep()
    for step in (1, 2, 3):
        gathered.add("a", torch.ones(1), step)
        gathered.end_step(step)
    assert steps_of(gathered.ready()) == [1, 2, 3]
    gathered.add("a", torch.ones(1), 2)
    gathered.send()
    assert steps_of(gathered.ready()) == []
    gathered.add("a", torch.ones(1), 2)
    gathered.end_step(2)
    (found,) = gathered.ready()
    assert (found.step, found.rows[0, COUNT]) == (2, 2)


def test_a_busy_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose copy is on its way comes later, in order; a drain waits."""
    arrived = False
    monkeypatch.setattr(flush, "_has_arrived", lambda event: arrived)
    gathered = PerStep()
    for step in (1, 2):
        gathered.add("a", torch.ones(1), step)
        gathered.end_step(step)
    assert steps_of(gathered.ready()) == []
    assert steps_of(gathered.drain()) == [1, 2]


def test_thousands_of_small_tensors_are_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered stays bounded although the tensors themselves cost next to nothing."""
    monkeypatch.setattr(per_step, "MOST_GATHERED", 10)
    gathered = PerStep()
    for _ in range(25):
        gathered.add("a", torch.ones(1), 0)
    (found,) = gathered.ready()
    assert len(found.keys) == 20


def test_forgetting() -> None:
    """What was gathered and not read is gone; what had been sent is not."""
    gathered = PerStep()
    gathered.add("a", torch.ones(1), 1)
    gathered.send()
    gathered.add("b", torch.ones(1), 1)
    gathered.discard()
    gathered.end_step(1)
    (found,) = gathered.ready()
    assert found.keys == ["a"]


def test_keys_keep_the_order_of_their_first_appearance() -> None:
    """Merging moves no row to another key."""
    tensors = [torch.full((1,), float(value)) for value in range(5)]
    keys, rows = one_row_each(["b", "a", "b", "c", "a"], summarize(tensors))
    assert keys == ["b", "a", "c"]
    assert rows[:, MEAN].tolist() == [1.0, 2.5, 3.0]
    assert rows[:, COUNT].tolist() == [2, 2, 1]


def test_rows_of_others_are_merged_with_those_of_tensors() -> None:
    """One that has NaN for a count is none; a step of which nothing else came does not come out."""
    gathered, nan = PerStep(), float("nan")
    rows = torch.cat([summarize([torch.tensor([3.0, 5.0])]), torch.full((1, 10), nan)]).double()
    gathered.add("a", torch.ones(2), 1)
    gathered.add_rows(["a", "b"], rows, 1)
    gathered.add_rows(["b"], rows[1:], 2)
    gathered.end_step(2)
    (step,) = gathered.drain()
    assert (step.step, step.keys) == (1, ["a"]) and step.rows[0, [COUNT, MEAN]].tolist() == [4, 2.5]


def given(gathered: PerStep, step: int, value: float) -> None:
    """Rows of others for a step, which then ends."""
    gathered.add_rows(["a", "b"], summarize([torch.full((2,), value)] * 2), step)
    gathered.end_step(step)


def test_rows_of_others_arrive_for_several_steps_at_once() -> None:
    """With their true steps and values; whoever drains waits for none."""
    gathered = PerStep()
    seen = []
    for step in range(1, 2 * TOGETHER):
        given(gathered, step, step)
        seen.append([(rows.step, rows.rows[0, MEAN].item()) for rows in gathered.ready()])
    assert [len(found) for found in seen] == [0] * (TOGETHER - 1) + [TOGETHER] + [0] * (TOGETHER - 1)
    assert seen[TOGETHER - 1] == [(step, step) for step in range(1, TOGETHER + 1)]
    assert steps_of(gathered.drain()) == list(range(TOGETHER + 1, 2 * TOGETHER))


def test_a_step_does_not_end_while_rows_of_it_wait() -> None:
    """Somebody has read the first half of it; both are one row all the same."""
    gathered = PerStep()
    gathered.add_rows(["a"], summarize([torch.zeros(2)]), 1)
    assert steps_of(gathered.drain()) == []
    gathered.add_rows(["a"], summarize([torch.ones(2)]), 1)
    gathered.end_step(1)
    assert steps_of(gathered.ready()) == []
    (found,) = gathered.drain()
    assert found.rows[0, [COUNT, MEAN]].tolist() == [4, 0.5]


def test_rows_of_others_do_not_fall_behind_those_of_tensors() -> None:
    """Where both are gathered, steps still come out once each and in their order."""
    gathered = PerStep()
    for step in (1, 2, 3):
        gathered.add("c", torch.ones(2), step)
        given(gathered, step, step)
    found = [(rows.step, sorted(map(str, rows.keys))) for rows in gathered.drain()]
    assert found == [(step, ["a", "b", "c"]) for step in (1, 2, 3)]
