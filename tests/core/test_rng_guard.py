"""Draws from the random streams of training are detected and undone, spare normals included."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hookline import HookRegistry
from hookline.core.rng_guard import NUMPY, PYTHON, TORCH, Stream, TrainingStreams, as_tuples, readable_in_place

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
        (name, words.tobytes(), position, has_gauss, gauss),
    )


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def guarded(hook: Callable[[], Any], name: str = "h", run_seed: int = 0) -> HookRegistry:
    """Make the registry of a run with one hook, whose event is fired by ``registry.on_epoch_end()``."""
    registry = HookRegistry()
    registry.register(hook, name, event="epoch_end")
    registry.rng_guard.begin(run_seed)
    return registry


@pytest.mark.parametrize("what", list(DRAWS))
def test_a_draw_is_detected_and_undone(what: str) -> None:
    """Whatever was drawn, and from whichever library; the report names the library."""
    seed(1)
    registry, before, incidents = guarded(lambda: DRAWS[what]()), state(), []
    registry.failures.subscribe(incidents.append)
    registry.on_epoch_end()
    assert [(one.kind, f"({what.split()[0]})" in one.message) for one in incidents] == [("drew", True)]
    assert state() == before


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
    monkeypatch.setattr("hookline.core.rng_guard.readable_in_place", lambda library: False)
    assert mismatches(TrainingStreams) == 0


def test_positions_alone_would_miss_spare_normals() -> None:
    """The negative control: without the rule for spare normals, draws are missed."""

    class PositionsAlone(TrainingStreams):
        def snapshot(self, positions: list[Any]) -> Any:
            self.last = super().snapshot(positions)._replace(spares=[False] * len(self.streams))
            return self.last

    assert mismatches(PositionsAlone) > 15


@pytest.mark.parametrize("library", [TORCH, PYTHON, NUMPY], ids=["torch", "python", "numpy"])
def test_every_draw_moves_the_position(library: Any) -> None:
    """Also over the end of a block of 624, where the index starts again; on tested versions it is read in place."""
    generator = library.make(3)
    stream = Stream("own", library, generator)
    positions = set()
    for _ in range(650):
        positions.add(stream.position())
        library.draw(generator)
    assert readable_in_place(library) and len(positions) == 650


@pytest.mark.parametrize("address", [id, lambda generator: 1 // 0])
def test_where_the_position_lies_elsewhere_the_library_is_asked(address: Any) -> None:
    """A layout that does not pass its trial is not used."""
    generator = random.Random(1)
    read = Stream("own", replace(PYTHON, address=address), generator).position
    before = read()
    generator.random()
    assert read() != before and len(before[1]) == 625  # the whole state is compared


def test_a_state_from_json_is_what_the_generator_takes() -> None:
    """JSON has lists where the state has tuples."""
    generator = random.Random(1)
    state = generator.getstate()
    read = as_tuples(json.loads(json.dumps(state)))
    assert read == state and as_tuples(state) == state
    generator.setstate(read)


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

    def on_draw(snapshot: Any) -> None:
        drew.append("outer")
        streams.restore(snapshot)

    streams.guard(draws_then_fires, on_draw)()
    assert drew == ["outer"] and state() == before


def test_draws_are_undone_when_the_hook_raises() -> None:
    """A hook that draws and fails has still drawn, from training's streams and then from its own."""
    seed(4)
    drawn: list[float] = []

    def draws_and_fails() -> None:
        drawn.append(torch.rand(1).item())
        raise ValueError("no")

    registry, before = guarded(draws_and_fails), state()
    registry.failures.debug = True
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            registry.on_epoch_end()
        assert state() == before
    assert len(set(drawn)) == 3


def draws_of(name: str, run_seed: int, events: int = 20, saved: Any = None) -> tuple[list[Any], Any]:
    """Return what a hook draws from its own streams at some events, from a saved state if given, and its state then."""
    drawn: list[Any] = []
    registry = guarded(
        lambda: drawn.append((torch.randn(1).item(), random.gauss(0, 1), float(np.random.rand()))), name, run_seed
    )
    if saved is None:
        registry.on_epoch_end()  # The first draw is from training's streams, and undone.
        drawn.clear()
    else:
        registry.rng_guard.load_state_dict(saved)
    for _ in range(events):
        registry.on_epoch_end()
    return drawn, registry.rng_guard.state_dict()


def test_a_hooks_streams_continue_from_call_to_call_and_leave_training_alone() -> None:
    """A sampling hook gets new numbers at every call; training's streams stay where they are."""
    seed(3)
    before = state()
    drawn, _ = draws_of("sampler", 7)
    assert state() == before
    assert all(len(set(column)) == 20 for column in zip(*drawn, strict=True))


def test_a_hooks_streams_depend_on_the_runs_seed_and_the_hooks_name_alone() -> None:
    """So that a run can be repeated, and two hooks do not draw alike."""
    first = draws_of("a", 1)[0]
    seed(5)
    assert draws_of("a", 1)[0] == first
    assert len({str(draws_of(name, run_seed)[0]) for name, run_seed in [("a", 1), ("a", 2), ("b", 1)]}) == 3


def test_a_hooks_streams_are_saved_as_the_libraries_give_them_and_restored() -> None:
    """A resumed run draws what the uninterrupted one would have drawn, also from lists instead of tuples."""
    _, saved = draws_of("a", 1, events=15)
    own = saved["hooks"]["a"]
    random.Random().setstate(own["python"])
    own["python"], own["numpy"] = [own["python"][0], list(own["python"][1]), own["python"][2]], list(own["numpy"])
    resumed, state_then = draws_of("a", 1, events=5, saved=saved)
    assert resumed == draws_of("a", 1, events=20)[0][15:]
    assert type(state_then["hooks"]["a"]["python"]) is tuple
