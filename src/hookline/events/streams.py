"""Training's random streams, all together: seen to move, put back, and exchanged for a hook's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Seen(NamedTuple):
    """Where the streams stood: a word of each, the states to go back to, and whether a normal was held in reserve."""

    words: tuple[Any, ...]
    states: list[Any]
    spare: bool


class Watch(NamedTuple):
    """Check once around an event whether its hooks drew random numbers."""

    streams: Streams
    drew: Callable[[Seen], Any]


class Streams:
    """Every stream that training may draw from: torch, Python, NumPy once it is used, and those of CUDA devices."""

    def __init__(self, cuda_devices: Iterable[int] = ()) -> None:
        self.sources = [_on_host(*found) for found in kinds_in_use()]
        self.sources += [_on_device(index) for index in cuda_devices]
        words = [(word, source.stream.read) for source in self.sources for word in source.stream.words]
        self.names = {f"word{index}": word for index, (word, _) in enumerate(words)}
        self.where = "".join(f"word{index}{read}, " for index, (_, read) in enumerate(words))
        """Source: where the streams stand, as a tuple in terms of these names."""
        self.seen = Seen((), [], True)
        """The last look. It serves again until training has drawn, or may have used a normal from the reserve.

        One comes into the reserve only by a draw: as long as no word moves there is none if there was none.
        """

    def look(self, words: tuple[Any, ...]) -> Seen:
        """Copy the states that go with these words."""
        spare = any(spare[0] for source in self.sources for spare in source.stream.spares)
        self.seen = Seen(words, [source.stream.copy() for source in self.sources], spare)
        return self.seen

    def moved(self, seen: Seen) -> list[str]:
        """The names of the streams that do not stand where they stood, bit for bit."""
        pairs = zip(self.sources, seen.states, strict=True)
        return [source.name for source, state in pairs if not source.stream.is_at(state)]

    def put_back(self, seen: Seen) -> list[str]:
        """Put them back to where they stood; returns the names of those that had moved."""
        moved = self.moved(seen)
        for source, state in zip(self.sources, seen.states, strict=True):
            if source.name in moved:
                source.stream.restore(state)
        return moved

    def guard(self, call: Callable[..., Any], drew: Callable[[Seen], Any]) -> Callable[..., Any]:
        """The same function, but if it draws, `drew` is called after it with where the streams had stood."""
        lines = ["def guarded(*arguments, **named):", *(f"    {line}" for line in look_lines(self))]
        lines += ["    try:", "        return call(*arguments, **named)", "    finally:"]
        lines += [f"        {line}" for line in look_again_lines(self)]
        namespace: dict[str, Any] = {"call": call, **watch_names(self, drew)}
        exec(compile("\n".join(lines), "<hookline streams>", "exec"), namespace)
        guarded: Callable[..., Any] = namespace["guarded"]
        return guarded


def watch_names(streams: Streams, drew: Callable[[Seen], Any]) -> dict[str, Any]:
    """What the lines below refer to."""
    return {**streams.names, "streams": streams, "look": streams.look, "moved": streams.moved, "drew": drew}


def look_lines(streams: Streams) -> list[str]:
    """Source: where the streams stand, before something that may draw. Written out, for it runs at every event."""
    return [
        f"now = ({streams.where})",
        "seen = streams.seen",
        "if now != seen.words or seen.spare:",
        "    seen = look(now)",
    ]


def look_again_lines(streams: Streams) -> list[str]:
    """Source: whether somebody drew. A normal held in reserve moves no word: then the states are compared."""
    return [f"if ({streams.where}) != now or (seen.spare and moved(seen)):", "    drew(seen)"]


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
