"""Captured states and the budgets they live under."""

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hookline.activations.captured import CallNumbers, CapturedState, CaptureStore, Origin, Record, Shelf


def state(output: Any = None, hook: str = "a", inputs: Any = None, call: int = 1) -> CapturedState:
    """A state of some module."""
    return CapturedState(Origin(hook, "module", 3), call, 7, "train", (inputs, None, output))


def test_it_tells_where_it_comes_from() -> None:
    """What its origin says, and its own step, call, phase and thread."""
    made = state(torch.ones(2))
    assert (made.hook, made.name, made.layer_idx, made.call, made.step) == ("a", "module", 3, 1, 7)
    assert made.phase == "train" and made.thread == threading.current_thread().name
    assert repr(made) == "<CapturedState of 'module' by 'a': call 1, step 7, train>"


def test_two_states_that_share_a_tensor_do_not_share_writes() -> None:
    """What is read is a view of its own, the same at every look; the other state and the budget know nothing of it."""
    shared = torch.zeros(3)
    first, second = state(shared), state(None, inputs=(shared,))
    first.outputs.add_(1)
    assert first.outputs.sum() == 3 and second.inputs[0].sum() == 0 and shared.sum() == 0
    assert first.outputs is first.outputs
    assert first.main is first.outputs and second.main is second.inputs


@pytest.mark.req("003-35")
def test_bytes_are_counted_by_unique_storage_and_stay_exact() -> None:
    """Views and shared tensors count once, a write by the reader changes nothing, and nothing is left at the end."""
    store, big, other = CaptureStore(None, 10_000), torch.zeros(100), torch.zeros(50)
    store.add(state(big, inputs=(big[:10], other)))
    store.add(state(big, "b"))
    assert store.bytes == 600
    store.of("a")[0].outputs.add_(1)
    store.clear("a")
    assert store.bytes == 400 and len(store) == 1
    store.clear()
    assert store.bytes == 0 and len(store) == 0


def test_without_a_limit_bytes_are_counted_when_asked_for() -> None:
    """The same number."""
    store, tensor = CaptureStore(None), torch.zeros(100)
    store.add(state(tensor, inputs=(tensor,)))
    assert store.bytes == 400


@pytest.mark.req("003-30", "003-32")
def test_the_oldest_go_first() -> None:
    """Per hook by number, over all hooks by bytes; a state too large for the limit does not stay either."""
    store = CaptureStore(2, 1000)
    for call in range(1, 4):
        store.add(state(torch.zeros(50), call=call))
    assert [one.call for one in store.of("a")] == [2, 3] and store.dropped == 1
    store.add(state(torch.zeros(200), "b"))
    assert [one.call for one in store.of("a")] == [3] and len(store.of("b")) == 1
    store.add(state(torch.zeros(1000), "c"))
    assert len(store) == 0 and store.bytes == 0 and store.dropped == 5


def test_a_limit_of_no_states_keeps_none() -> None:
    """And counts nothing for them."""
    store = CaptureStore(0, 1000)
    store.add(state(torch.zeros(10)))
    assert len(store) == 0 and store.bytes == 0


@pytest.mark.req("003-06")
def test_sweeping_drops_what_is_old_or_has_lost_its_module() -> None:
    """What has no module to lose stays until it is old."""
    store, module = CaptureStore(), nn.Linear(1, 1)
    store.add(state(torch.ones(1)))
    store.add(CapturedState(Origin("a", "m", None, weakref.ref(module)), 1, 0, "train", (None, None, torch.ones(1))))
    del module
    store.sweep()
    assert [one.name for one in store.of("a")] == ["module"]
    store.max_age = -1.0
    store.sweep()
    assert len(store) == 0 and store.dropped == 2


def record(call: int, origin: Origin) -> Record:
    """What a hook puts on its shelf."""
    return origin, call, 7, "train", "worker", torch.full((2,), call)


def put(shelf: Shelf, calls: int, module: weakref.ref[nn.Module] | None = None) -> None:
    """Put records of so many calls there, as a hook does."""
    numbers = shelf.numbers.setdefault("m", CallNumbers())
    for _ in range(calls):
        shelf.append(record(numbers.next(), Origin("a", "m", None, module)))


@pytest.mark.req("003-30")
def test_records_become_states_when_they_are_read() -> None:
    """Each the same state at every look; the oldest fall off, and how many is known."""
    store = CaptureStore(2)
    store.put_up("a", shelf := store.new_shelf({}, None))
    put(shelf, 5)
    first, second = store.of("a")
    assert (first.call, second.call, first.thread, first.step) == (4, 5, "worker", 7)
    assert store.of("a")[0] is first and torch.equal(first.outputs, torch.full((2,), 4)) and first.inputs is None
    assert store.dropped == 3 and len(store) == 2 and store.bytes == 32
    store.clear("a")
    assert store.of("a") == [] and store.dropped == 3
    put(shelf, 1)
    assert [state.call for state in store.of("a")] == [6]


def test_a_shelf_that_comes_back_tells_of_nothing_twice() -> None:
    """A hook is closed at the end of a run and set up again for the next."""
    store = CaptureStore(2)
    store.put_up("a", shelf := store.new_shelf({}, None))
    put(shelf, 3)
    store.take_down("a")
    assert len(store) == 0 and store.of("a") == [] and store.dropped == 1
    store.take_down("a")
    store.put_up("a", shelf)
    put(shelf, 3)
    assert store.dropped == 2 and [state.call for state in store.of("a")] == [5, 6]


def test_starting_over_numbers_from_one() -> None:
    """And nothing counts as dropped."""
    shelf = CaptureStore(1).new_shelf({}, 5)
    put(shelf, 7)
    assert shelf.dropped == 2 and len(shelf.take_all()) == 5
    shelf.start_over()
    put(shelf, 2)
    assert shelf.dropped == 0 and [kept[1] for kept in shelf] == [1, 2]  # type: ignore[index]


def test_records_are_only_for_stores_that_need_not_count() -> None:
    """With a budget of bytes or an age every state is looked at when it comes."""
    assert CaptureStore().takes_records
    assert not CaptureStore(limit_bytes=1).takes_records and not CaptureStore(max_age=1.0).takes_records


@pytest.mark.req("003-06")
def test_sweeping_drops_records_of_modules_that_are_gone() -> None:
    """Others stay."""
    store, module, other = CaptureStore(), nn.Linear(1, 1), nn.Linear(1, 1)
    store.put_up("a", shelf := store.new_shelf({}, None))
    put(shelf, 2, weakref.ref(module))
    put(shelf, 1, weakref.ref(other))
    del module
    store.sweep()
    assert [state.call for state in store.of("a")] == [3] and store.dropped == 2


def test_a_state_finds_its_place_when_others_have_fallen_off() -> None:
    """Another thread goes on capturing while somebody reads; what was cleared away meanwhile is only handed out."""
    store = CaptureStore(3)
    store.put_up("a", shelf := store.new_shelf({}, None))
    put(shelf, 3)
    second, third = list(shelf)[1:]
    put(shelf, 1)
    made = shelf._state(third, 2)
    assert shelf[1] is made and shelf.states()[1] is made and shelf.states()[0].call == 2
    shelf.clear()
    assert shelf._state(second, 1).call == 2 and not shelf
