"""Streams that somebody drew from are noticed and put back, a spare normal included."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hookline.events.streams import OwnStreams, Seen, Streams, isolates

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
    """Everything about the three streams, through their libraries' own functions."""
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
def test_a_draw_is_noticed_and_undone(what: str) -> None:
    """Whatever was drawn, and from whichever library."""
    seed(1)
    streams, before, moved = Streams(), state(), []
    streams.guard(DRAWS[what], lambda seen: moved.extend(streams.put_back(seen)))()
    assert moved == [what.split()[0]]
    assert state() == before


def test_what_draws_nothing_is_not_suspected() -> None:
    """Nor is its result touched."""
    seed(1)
    streams = Streams()
    assert streams.guard(lambda x, y: x - y, pytest.fail)(5, y=3) == 2


def mismatches(streams_class: type[Streams]) -> int:
    """How often training's streams were not put back, over 15 seeds of random drawing by training and by a hook."""
    wrong = 0
    for number in range(15):
        seed(number)
        plan, streams = random.Random(number), streams_class()
        hook = streams.guard(lambda what: DRAWS[what]() if what else None, streams.put_back)
        for _ in range(40):
            if plan.random() < 0.7:
                DRAWS[plan.choice(list(DRAWS))]()  # training
            expected = state()
            hook(plan.choice(list(DRAWS)) if plan.random() < 0.7 else None)
            wrong += state() != expected
    return wrong


def test_nothing_is_missed_whoever_draws_what() -> None:
    """Normals held in reserve included: they move no word."""
    assert mismatches(Streams) == 0


def test_without_the_rule_for_spare_normals_something_would_be() -> None:
    """The control: looking at the words alone misses the use of a normal that was held in reserve."""

    class WordsAlone(Streams):
        def look(self, words: tuple[Any, ...]) -> Seen:
            self.seen = super().look(words)._replace(spare=False)
            return self.seen

    assert mismatches(WordsAlone) > 15


def test_states_are_copied_only_after_training_has_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events of a step that draws nothing, the last look serves again."""
    seed(2)
    looks = []
    look = Streams.look
    monkeypatch.setattr(Streams, "look", lambda self, words: looks.append(1) or look(self, words))
    call = Streams().guard(lambda: None, pytest.fail)
    call()
    call()
    assert len(looks) == 1
    torch.rand(1)
    call()
    assert len(looks) == 2


def test_an_event_within_an_event_is_the_outer_ones() -> None:
    """A hook that drew and then fires another event does not get its draws hidden."""
    seed(3)
    streams, before, told = Streams(), state(), []
    inner = streams.guard(lambda: None, lambda seen: told.append("inner"))

    def draws_then_fires() -> None:
        torch.rand(1)
        inner()

    def drew(seen: Seen) -> None:
        told.append("outer")
        streams.put_back(seen)

    streams.guard(draws_then_fires, drew)()
    assert told == ["outer"] and state() == before


def test_the_guard_passes_exceptions_on_and_looks_all_the_same() -> None:
    """A hook that draws and fails has still drawn."""
    seed(4)
    streams, before = Streams(), state()

    def draws_and_fails() -> None:
        torch.rand(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        streams.guard(draws_and_fails, streams.put_back)()
    assert state() == before


def test_own_streams_go_on_from_call_to_call_and_leave_training_alone() -> None:
    """A sampling hook sees new numbers at every call; training sees none of it."""
    seed(3)
    own = OwnStreams(Streams(), seed=7, hook="sampler")
    draw = own.lend_to(lambda: (torch.rand(1).item(), random.random(), float(np.random.rand())))
    before = state()
    drawn = [draw() for _ in range(20)]
    assert state() == before
    assert all(len(set(column)) == 20 for column in zip(*drawn, strict=True))


def test_own_streams_depend_on_the_runs_seed_and_the_hooks_name_alone() -> None:
    """So that a run can be repeated, and two hooks do not draw alike."""

    def first(run_seed: int, hook: str) -> float:
        return float(OwnStreams(Streams(), run_seed, hook).lend_to(random.random)())

    assert first(1, "a") == first(1, "a")
    assert len({first(1, "a"), first(2, "a"), first(1, "b")}) == 3


def test_own_streams_are_saved_and_go_on() -> None:
    """What a resumed run draws is what the unbroken one would have drawn."""
    own = OwnStreams(Streams(), 1, "a")
    own.lend_to(lambda: random.gauss(0, 1))()
    saved = own.state_dict()
    expected = [own.lend_to(lambda: (random.gauss(0, 1), torch.randn(1).item()))() for _ in range(3)]
    resumed = OwnStreams(Streams(), 1, "a")
    resumed.load_state_dict(saved)
    assert [resumed.lend_to(lambda: (random.gauss(0, 1), torch.randn(1).item()))() for _ in range(3)] == expected


def test_training_gets_its_streams_back_when_a_hook_raises() -> None:
    """The exception passes, the streams stay."""
    before = state()

    def draws_and_fails() -> None:
        torch.rand(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        OwnStreams(Streams(), 1, "a").lend_to(draws_and_fails)()
    assert state() == before


def test_a_hook_that_seeds_on_purpose_says_so() -> None:
    """The attribute `isolate_rng`, true unless it is set."""

    class Seeder:
        isolate_rng = False

    assert isolates(object()) and not isolates(Seeder())
