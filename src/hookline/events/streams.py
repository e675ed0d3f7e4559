"""Training's random streams, all together: seen to move, put back, and exchanged for a hook's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hookline.events.twisters import CudaStream, Kind, Stream, kinds_in_use


@dataclass(frozen=True)
class Source:
    """One stream under its name, and how a hook gets one like it."""

    name: str
    stream: Stream
    own: Callable[[int], Any]
    portable: Callable[[Any], Any]
    from_portable: Callable[[Any], Any]


class Streams:
    """Every stream that training may draw from: torch, Python, NumPy once it is used, and the CUDA devices."""

    def __init__(self) -> None:
        self.sources = [_on_host(*found) for found in kinds_in_use()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.sources += [_on_device(index) for index in range(torch.cuda.device_count())]
        self._states: list[Any] = []  # where they stood at the last look
        self.guard, self.guard_event = _make_guards(self)
        """``guard(call, drew)``: the same function, but if it draws, `drew` is called after it.

        `guard_event` does so for a function of one argument, and is a little faster.
        """

    def look(self) -> bool:
        """Remember where the streams stand; whether a normal is held in reserve, whose use moves no word."""
        self._states = [source.stream.copy() for source in self.sources]
        return any(spare[0] for source in self.sources for spare in source.stream.spares)

    def stand_still(self) -> bool:
        """Whether they stand where they stood at the last look, bit for bit."""
        return all(source.stream.is_at(state) for source, state in zip(self.sources, self._states, strict=True))

    def put_back(self) -> list[str]:
        """Put them back to where they stood at the last look; returns the names of those that had moved."""
        moved = []
        for source, state in zip(self.sources, self._states, strict=True):
            if not source.stream.is_at(state):
                moved.append(source.name)
                source.stream.restore(state)
        return moved


_GUARD = """
def make(streams, {words}):
    look, stand_still = streams.look, streams.stand_still
    {known} = {nothing}
    spare, inside = True, False

{guard}
{guard_event}
    return guard, guard_event
"""

_ONE_GUARD = """
    def {name}(call, drew):
        def guarded({arguments}):
            nonlocal {known}, spare, inside
            if inside:  # an event within an event: the outer one sees everything
                return call({arguments})
            if {moved} or spare:
                {known} = {now}
                spare = look()
            inside = True
            try:
                return call({arguments})
            finally:
                inside = False
                if {moved} or (spare and not stand_still()):
                    drew()
        return guarded
"""


Guarding = Callable[[Callable[..., Any], Callable[[], Any]], Callable[..., Any]]


def _make_guards(streams: Streams) -> tuple[Guarding, Guarding]:
    """What runs around every event that a user's hook hears, written out for the words there are: 1 µs, not 4.

    States are copied only when training has drawn since the last look, or may have used a normal from the reserve.
    One comes into the reserve only by a draw: as long as no word moves there is none if there was none.
    """
    words = {f"word{n}": word for n, word in enumerate(word for one in streams.sources for word in one.stream.words)}
    parts = {
        "known": ", ".join(f"known_{word}" for word in words),
        "now": ", ".join(f"{word}[0]" for word in words),
        "moved": " or ".join(f"{word}[0] != known_{word}" for word in words),
    }
    source = _GUARD.format(
        words=", ".join(words),
        known=parts["known"],
        nothing=", ".join("None" for _ in words),
        guard=_ONE_GUARD.format(name="guard", arguments="*arguments, **named", **parts),
        guard_event=_ONE_GUARD.format(name="guard_event", arguments="moment", **parts),
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, "<hookline streams>", "exec"), namespace)
    guards: tuple[Guarding, Guarding] = namespace["make"](streams, **words)
    return guards


class OwnStreams:
    """The streams of one hook that draws: as many as training has, seeded from the run's seed and the hook's name."""

    def __init__(self, streams: Streams, seed: int, hook: str) -> None:
        self._sources = streams.sources
        self._states = {source.name: source.own(_seed(seed, hook, source.name)) for source in self._sources}

    def lend_to(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, drawing from these streams."""

        def on_own_streams(*arguments: Any, **named: Any) -> Any:
            training = [source.stream.copy() for source in self._sources]
            for source in self._sources:
                source.stream.restore(self._states[source.name])
            try:
                return call(*arguments, **named)
            finally:
                for source, state in zip(self._sources, training, strict=True):
                    self._states[source.name] = source.stream.copy()
                    source.stream.restore(state)

        return on_own_streams

    def state_dict(self) -> dict[str, Any]:
        """Where they stand, in the libraries' own terms."""
        return {source.name: source.portable(self._states[source.name]) for source in self._sources}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there; a stream that was not in use then starts from its seed."""
        for source in self._sources:
            if source.name in saved:
                self._states[source.name] = source.from_portable(saved[source.name])


def _seed(run_seed: int, hook: str, stream: str) -> int:
    digest = hashlib.sha256(f"{run_seed}/{hook}/{stream}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _on_host(name: str, kind: Kind, generator: Any) -> Source:
    return Source(name, kind.stream(generator), kind.own, kind.portable, kind.from_portable)


def _on_device(index: int) -> Source:
    def own(seed: int) -> torch.Tensor:
        return torch.Generator(f"cuda:{index}").manual_seed(seed).get_state()

    stream = CudaStream(torch.cuda.default_generators[index])
    return Source(f"cuda:{index}", stream, own, lambda state: state, lambda state: state)


def isolates(hook: Any) -> bool:
    """Whether a hook leaves training's random streams alone; one that seeds them on purpose says so."""
    return bool(getattr(hook, "isolate_rng", True))
