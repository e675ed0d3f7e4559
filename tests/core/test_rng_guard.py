"""Draws from the random streams of training are detected and undone, spare normals included."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hookline.core import rng_guard
from hookline.core.rng_guard import (
    NUMPY,
    PYTHON,
    TORCH,
    HookStreams,
    Library,
    Snapshot,
    Stream,
    TrainingStreams,
    readable_in_place,
)

DRAWS: dict[str, Callable[[], object]] = {
    "torch uniform": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(1),
    "torch double normal": lambda: torch.randn(1, dtype=torch.double),
    "torch many": lambda: torch.rand(1000),
    "torch seed": lambda: torch.manual_seed(9),
    "python uniform": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python shuffle": lambda: random.shuffle(list(range(1000))),
    "python seed": lambda: random.seed(9),
    "numpy uniform": np.random.rand,
    "numpy normal": np.random.standard_normal,
    "numpy many": lambda: np.random.rand(1000),
    "numpy seed": lambda: np.random.seed(9),
}


def state() -> tuple[object, ...]:
    """Return the state of the three streams, through their libraries' own functions."""
    name, words, position, has_gauss, gauss = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (name, words.tobytes(), position, has_gauss, gauss),  # type: ignore[union-attr]
    )


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("what", list(DRAWS))
def test_a_draw_is_detected_and_undone(what: str) -> None:
    """Whatever was drawn, and from whichever library."""
    seed(1)
    streams, before, moved = TrainingStreams(), state(), []
    streams.guard(DRAWS[what], lambda snapshot: moved.extend(streams.restore(snapshot)))()
    assert moved == [what.split()[0]]
    assert state() == before


def test_a_function_that_does_not_draw_is_left_alone() -> None:
    """Its arguments and its result pass through."""
    seed(1)
    assert TrainingStreams().guard(lambda x, y: x - y, pytest.fail)(5, y=3) == 2


def mismatches(streams_class: type[TrainingStreams]) -> int:
    """Count how often training's streams were not restored, over 15 seeds of random draws by training and a hook."""
    wrong = 0
    for number in range(15):
        seed(number)
        plan, streams = random.Random(number), streams_class()
        hook = streams.guard(lambda what: DRAWS[what]() if what else None, streams.restore)
        for _ in range(40):
            if plan.random() < 0.7:
                DRAWS[plan.choice(list(DRAWS))]()  # Training draws.
            expected = state()
            hook(plan.choice(list(DRAWS)) if plan.random() < 0.7 else None)
            wrong += state() != expected
    return wrong


def test_no_draw_is_missed_in_place_or_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare normals included, whose use moves no position; also where positions cannot be read in place."""
    assert mismatches(TrainingStreams) == 0
    monkeypatch.setattr(rng_guard, "readable_in_place", lambda library: False)
    assert mismatches(TrainingStreams) == 0


def test_positions_alone_would_miss_spare_normals() -> None:
    """The negative control: without the rule for spare normals, draws are missed."""

    class PositionsAlone(TrainingStreams):
        def snapshot(self, positions: tuple[Any, ...]) -> Snapshot:
            self.last = super().snapshot(positions)._replace(spares=(False,) * len(self.streams), holds_spare=False)
            return self.last

    assert mismatches(PositionsAlone) > 15


@pytest.mark.parametrize("library", [TORCH, PYTHON, NUMPY], ids=["torch", "python", "numpy"])
def test_every_draw_moves_the_position(library: Library) -> None:
    """Also over the end of a block of 624, where the index starts again; on tested versions it is read in place."""
    assert readable_in_place(library)
    generator = library.make(3)
    stream = Stream("own", library, generator)
    positions = set()
    for _ in range(650):
        positions.add(tuple(word[0] for word in stream.words))
        library.draw(generator)
    assert stream.read == "[0]" and len(positions) == 650


@pytest.mark.parametrize("address", [lambda generator: [id(generator)], lambda generator: 1 // 0])
def test_where_the_position_lies_elsewhere_the_library_is_asked(address: Any) -> None:
    """A layout that does not pass its trial is not used."""
    stream = Stream("own", replace(PYTHON, addresses=address), random.Random(1))
    assert stream.read == "()"


def test_only_streams_that_training_drew_from_are_asked_for_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's state costs 8 µs and NumPy's 32, so that they are not read because torch drew."""
    seed(2)
    asked: list[str] = []
    get = Stream.get
    monkeypatch.setattr(Stream, "get", lambda self: asked.append(self.name) or get(self))
    call = TrainingStreams().guard(lambda: None, pytest.fail)
    call()
    call()
    assert asked == ["torch", "python", "numpy"]
    torch.rand(1)
    call()
    assert asked[3:] == ["torch"]


def test_only_the_stream_that_moved_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the library's own function."""
    seed(2)
    restored: list[str] = []
    put = Stream.put
    monkeypatch.setattr(Stream, "put", lambda self, state: restored.append(self.name) or put(self, state))
    streams = TrainingStreams()
    streams.guard(random.random, streams.restore)()
    assert restored == ["python"]


def test_draws_before_a_nested_event_belong_to_the_outer_one() -> None:
    """A hook that draws and then fires another event is restored to where it began."""
    seed(3)
    streams, before, drew = TrainingStreams(), state(), []
    inner = streams.guard(lambda: None, lambda snapshot: drew.append("inner"))

    def draws_then_fires() -> None:
        torch.rand(1)
        inner()

    def on_draw(snapshot: Snapshot) -> None:
        drew.append("outer")
        streams.restore(snapshot)

    streams.guard(draws_then_fires, on_draw)()
    assert drew == ["outer"] and state() == before


def test_draws_are_undone_when_the_hook_raises() -> None:
    """A hook that draws and fails has still drawn."""
    seed(4)
    streams, before = TrainingStreams(), state()

    def draws_and_fails() -> None:
        torch.rand(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        streams.guard(draws_and_fails, streams.restore)()
    assert state() == before
    with pytest.raises(ValueError, match="no"):
        HookStreams(TrainingStreams(), 1, "a").used_by(draws_and_fails)()
    assert state() == before


def test_a_hooks_streams_continue_from_call_to_call_and_leave_training_alone() -> None:
    """A sampling hook gets new numbers at every call; training's streams stay where they are."""
    seed(3)
    own = HookStreams(TrainingStreams(), seed=7, hook="sampler")
    draw = own.used_by(lambda: (torch.rand(1).item(), random.random(), float(np.random.rand())))
    before = state()
    drawn = [draw() for _ in range(20)]
    assert state() == before
    assert all(len(set(column)) == 20 for column in zip(*drawn, strict=True))


def test_a_hooks_streams_depend_on_the_runs_seed_and_the_hooks_name_alone() -> None:
    """So that a run can be repeated, and two hooks do not draw alike."""

    def first(run_seed: int, hook: str) -> float:
        return float(HookStreams(TrainingStreams(), run_seed, hook).used_by(random.random)())

    assert first(1, "a") == first(1, "a")
    assert len({first(1, "a"), first(2, "a"), first(1, "b")}) == 3


def test_a_hooks_streams_are_saved_as_the_libraries_give_them_and_restored() -> None:
    """A resumed run draws what the uninterrupted one would have drawn, also from lists instead of tuples."""
    own = HookStreams(TrainingStreams(), 1, "a")
    own.used_by(lambda: random.gauss(0, 1))()
    saved = own.state_dict()
    generator = random.Random()
    generator.setstate(saved["python"])
    saved["python"] = [saved["python"][0], list(saved["python"][1]), saved["python"][2]]
    expected = [own.used_by(lambda: (random.gauss(0, 1), torch.randn(1).item()))() for _ in range(3)]
    assert generator.gauss(0, 1) == expected[0][0]
    resumed = HookStreams(TrainingStreams(), 1, "a")
    resumed.load_state_dict(saved)
    assert [resumed.used_by(lambda: (random.gauss(0, 1), torch.randn(1).item()))() for _ in range(3)] == expected
    assert type(resumed.state_dict()["python"]) is tuple
