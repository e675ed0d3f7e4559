"""Keep hooks from drawing from training's random streams, and give those that draw their own.

Checking before and after every call of every hook would cost more than most hooks, so there is one check around an
event. If its hooks drew, training's streams are restored, and from then on that event is checked hook by hook until
the hook that draws is identified. That hook then draws from its own persistent streams: merely rewinding training's
would make it draw the same numbers at every call.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookline import _device
from hookline.core.base import hook_attribute
from hookline.core.catalog import Event
from hookline.core.failures import Incident

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook, Dispatch

MERSENNE_BYTES = 624 * 4
OBJECT_HEADER = object.__basicsize__  # Bytes before the fields of every Python object.
TRIAL_SEED = 0x1234567890ABCDEF  # It is easy to find again in memory.
TORCH_STATE_BYTES, TORCH_SPARES = 5056, (5040, 5052)  # Flags of a spare double and of a spare float normal.


# ---- the libraries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """The functions of one library whose global generator training may draw from.

    All of them use Mersenne twisters: the position and one word of the state lie side by side, 8 bytes that change with
    every draw. Reading them in place costs 0.05 µs, while asking for the state costs 0.8 µs (torch), 8 (Python) or 32
    (NumPy), too much for every event. Memory is only ever read, and only to detect a draw.
    """

    make: Callable[[int], Any]
    """Make a generator from a seed."""
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    """Get and set a generator's state."""
    holds_spare: Callable[[Any], bool]
    """Return whether a state holds a spare normal, whose use moves no position."""
    draw: Callable[[Any], Any]
    addresses: Callable[[Any], Sequence[int]]
    """Return where the 8 bytes lie that together change with every draw."""
    counters: Callable[[Any], Sequence[Callable[[], Any]]] | None = None
    """Return functions that count draws, instead of addresses."""


def _torch_addresses(generator: torch.Generator) -> list[int]:
    """Return where the position lies: in the C++ object, behind the seed, which is found with a trial generator."""
    trial = torch.Generator().manual_seed(TRIAL_SEED)
    body, trial_body = (ctypes.c_uint64.from_address(id(owner) + OBJECT_HEADER).value for owner in (generator, trial))
    offset = ctypes.string_at(trial_body, 256).index(struct.pack("<Q", TRIAL_SEED))
    return [body + offset + 16]  # Seed (8 bytes), left (4), seeded (4), then position (4) and state.


def _torch_holds_spare(state: torch.Tensor) -> bool:
    """Read the flags of spare normals; a state of unknown size may hold one."""
    if state.numel() != TORCH_STATE_BYTES:
        return True
    # Tensor.numpy() would count as a read of a tensor where those are watched for, and indexing takes 20 µs.
    flags = ctypes.string_at(state.data_ptr() + TORCH_SPARES[0], TORCH_SPARES[1] - TORCH_SPARES[0] + 1)
    return bool(flags[0] or flags[-1])


def as_tuples(state: Sequence[Any]) -> tuple[Any, ...]:
    """Return a state of Python's generator with tuples where it has lists, because it was read from JSON."""
    return tuple(tuple(part) if isinstance(part, list) else part for part in state)


TORCH = Library(
    make=lambda seed: torch.Generator().manual_seed(seed),
    get=torch.Generator.get_state,
    put=torch.Generator.set_state,
    holds_spare=_torch_holds_spare,
    draw=lambda generator: torch.rand(1, generator=generator),
    addresses=_torch_addresses,
)
PYTHON = Library(
    make=random.Random,
    get=random.Random.getstate,
    put=lambda generator, state: generator.setstate(as_tuples(state)),
    holds_spare=lambda state: state[2] is not None,
    draw=random.Random.random,
    # Position (4 bytes), then state. Its first word is the same for every seed: hence the two words after it.
    addresses=lambda generator: [id(generator) + OBJECT_HEADER, id(generator) + OBJECT_HEADER + 8],
)
NUMPY = Library(
    make=lambda seed: sys.modules["numpy.random"].RandomState(seed % 2**32),
    get=lambda generator: generator.get_state(),
    put=lambda generator, state: generator.set_state(state),
    holds_spare=lambda state: bool(state[3]),
    draw=lambda generator: generator.random_sample(),
    # State, then position (4 bytes).
    addresses=lambda generator: [int(generator._bit_generator.ctypes.state_address) + MERSENNE_BYTES - 4],
)


def _words(addresses: Iterable[int]) -> list[memoryview]:
    return [memoryview((ctypes.c_char * 8).from_address(address)).cast("B").cast("Q") for address in addresses]


@cache
def readable_in_place(library: Library) -> bool:
    """Check on a private generator that its position is where it is expected to be.

    No library documents where it lies. Where it lies elsewhere, the state is asked for instead, which costs only time.
    """
    try:
        generator = library.make(TRIAL_SEED)
        words, state = _words(library.addresses(generator)), library.get(generator)
        positions = [[word[0] for word in words]]
        for _ in range(3):
            library.draw(generator)
            positions.append([word[0] for word in words])
        library.put(generator, state)
        differ = all(position not in positions[:index] for index, position in enumerate(positions))
        return differ and [word[0] for word in words] == positions[0]
    except Exception:
        return False


def _comparable(state: Any) -> Any:
    """Return a state in a form that compares with ==."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, (tuple, list)):
        return [_comparable(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


# ---- streams ---------------------------------------------------------------------------------------------------------


class Stream:
    """One generator that training draws from."""

    def __init__(self, name: str, library: Library, generator: Any) -> None:
        self.name, self.library, self._generator = name, library, generator
        self.words: Sequence[Callable[[], Any]]
        """Functions that return what is compared to detect a draw."""
        if library.counters is not None:
            self.words = library.counters(generator)
        elif readable_in_place(library):
            self.words = [partial(word.__getitem__, 0) for word in _words(library.addresses(generator))]
        else:
            self.words = [lambda: _comparable(self.get())]

    @classmethod
    def of_device(cls, index: int) -> Stream:
        """Return the stream of an accelerator, whose generator counts its draws and holds no spare normals."""
        generator = _device.generator(index)
        library = replace(
            TORCH,
            make=lambda seed: torch.Generator(generator.device).manual_seed(seed),
            holds_spare=lambda state: False,
            counters=lambda generator: [generator.initial_seed, generator.get_offset],
        )
        return cls(str(generator.device), library, generator)

    def get(self) -> Any:
        """Return the generator's state, as its library gives it."""
        return self.library.get(self._generator)

    def put(self, state: Any) -> None:
        """Restore a state."""
        self.library.put(self._generator, state)


class Snapshot(NamedTuple):
    """The states of all streams at one time."""

    positions: list[Any]
    states: tuple[Any, ...]
    spares: tuple[bool, ...]
    holds_spare: bool


class TrainingStreams:
    """Every stream that training may draw from: torch, Python, NumPy once it is imported, and the devices'."""

    def __init__(self, device_indices: Iterable[int] = ()) -> None:
        self.streams = [Stream("torch", TORCH, torch.default_generator), Stream("python", PYTHON, random._inst)]
        if "numpy.random" in sys.modules:
            self.streams.append(Stream("numpy", NUMPY, sys.modules["numpy.random"].mtrand._rand))
        self.streams += [Stream.of_device(index) for index in device_indices]
        self._words = [word for stream in self.streams for word in stream.words]
        ends = list(accumulate(len(stream.words) for stream in self.streams))
        self._spans = [slice(start, end) for start, end in pairwise([0, *ends])]
        self.last = Snapshot([], (), (), True)

    def positions(self) -> list[Any]:
        """Read where all streams are; it is called twice at every event."""
        return [word() for word in self._words]

    def _is_at(self, index: int, positions: list[Any], snapshot: Snapshot) -> bool:
        span = self._spans[index]
        return positions[span] == snapshot.positions[span]

    def snapshot(self, positions: list[Any]) -> Snapshot:
        """Return all states; only those that may have changed since the last snapshot are asked for.

        A stream whose position has not moved is unchanged unless it held a spare normal, which may be used up by now. A
        stream gets one only by a draw, which moves its position.
        """
        last = self.last
        states = []
        for index, stream in enumerate(self.streams):
            unchanged = last.states and self._is_at(index, positions, last) and not last.spares[index]
            states.append(last.states[index] if unchanged else stream.get())
        spares = tuple(stream.library.holds_spare(state) for stream, state in zip(self.streams, states, strict=True))
        self.last = Snapshot(positions, tuple(states), spares, any(spares))
        return self.last

    def moved(self, since: Snapshot) -> list[int]:
        """Return the indices of the streams that are not where they were; spare normals count."""
        positions = self.positions()
        return [
            index
            for index, stream in enumerate(self.streams)
            if not self._is_at(index, positions, since)
            or (since.spares[index] and _comparable(stream.get()) != _comparable(since.states[index]))
        ]

    def restore(self, snapshot: Snapshot) -> list[str]:
        """Restore the streams that moved and return their names."""
        moved = self.moved(snapshot)
        for index in moved:
            self.streams[index].put(snapshot.states[index])
        return [self.streams[index].name for index in moved]

    def guard(self, call: Callable[..., Any], on_draw: Callable[[Snapshot], Any]) -> Callable[..., Any]:
        """Return the same function, but if it draws, `on_draw` is called afterwards with the snapshot before it."""
        positions = self.positions

        def guarded(*args: Any, **kwargs: Any) -> Any:
            before = positions()
            snapshot = self.last  # Local, because another event may happen inside this one and take its own.
            if before != snapshot.positions or snapshot.holds_spare:
                snapshot = self.snapshot(before)
            try:
                return call(*args, **kwargs)
            finally:
                if positions() != before or (snapshot.holds_spare and self.moved(snapshot)):
                    on_draw(snapshot)

        return guarded


class HookStreams:
    """The streams of one hook that draws, seeded from the run's seed, the hook's name and, but for 0, the rank."""

    def __init__(self, training: TrainingStreams, seed: int, hook: str, rank: int = 0) -> None:
        self._training = training
        self._states = {}
        for stream in training.streams:
            of_rank = f"/rank {rank}" if rank else ""
            digest = hashlib.sha256(f"{seed}/{hook}/{stream.name}{of_rank}".encode()).digest()
            generator = stream.library.make(int.from_bytes(digest[:6], "little"))
            self._states[stream.name] = stream.library.get(generator)

    def used_by(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, drawing from these streams; exchanging the states costs about 60 µs a call."""

        def on_own_streams(*args: Any, **kwargs: Any) -> Any:
            training = self._training.snapshot(self._training.positions())
            for stream in self._training.streams:
                stream.put(self._states[stream.name])
            try:
                return call(*args, **kwargs)
            finally:
                for stream, state in zip(self._training.streams, training.states, strict=True):
                    self._states[stream.name] = stream.get()
                    stream.put(state)

        return on_own_streams

    def state_dict(self) -> dict[str, Any]:
        """Return the states by stream, as the libraries give them."""
        return dict(self._states)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore saved states; a stream that was not in use when they were saved starts from its seed."""
        for stream in self._training.streams:
            if stream.name in saved:
                # Through a generator, because a checkpoint may hold lists where the library has tuples.
                generator = stream.library.make(0)
                stream.library.put(generator, saved[stream.name])
                self._states[stream.name] = stream.library.get(generator)


# ---- the guard -------------------------------------------------------------------------------------------------------


class RngGuard:
    """Protect training's random streams from a registry's user hooks during a run; built-in hooks do not draw."""

    def __init__(self, report: Callable[[Incident, bool], None], changed: Callable[[], None]) -> None:
        self._report, self._changed = report, changed
        self._training: TrainingStreams | None = None
        self._seed = self._rank = 0
        self._step: Callable[[], int] = lambda: 0
        self._suspects: set[str] = set()  # Events at which a hook drew that is not identified yet.
        self._hook_streams: dict[str, HookStreams] = {}

    def begin(self, seed: int, step: Callable[[], int], device_indices: Iterable[int] = (), rank: int = 0) -> None:
        """Protect the streams of a run that begins.

        Args:
            seed: The run's seed, from which hooks that draw get theirs.
            step: Returns the current step, for reports.
            device_indices: The accelerators whose streams are protected, too.
            rank: This process's rank; hooks draw other numbers on each, unless they say `same_on_all_ranks`.
        """
        self._training, self._seed, self._step, self._rank = TrainingStreams(device_indices), seed, step, rank
        self._changed()

    def end(self) -> None:
        """Stop protecting, because the run is over."""
        self._training = None
        self._changed()

    def wrap(self, event: Event, hooks: Sequence[BoundHook]) -> list[BoundHook]:
        """Return the listeners as they are called: drawing from their own streams, or checked one by one."""
        training = self._training
        if training is None:
            return list(hooks)
        one_by_one = self._must_check_each(event, hooks)
        wrapped = []
        for hook in hooks:
            if hook.hook in self._hook_streams:
                hook = hook.with_call(self._hook_streams[hook.hook].used_by(hook.listener.call))
            elif one_by_one and self._protects_from(hook):
                hook = hook.with_call(training.guard(hook.listener.call, partial(self._drew, event, [hook])))
            wrapped.append(hook)
        return wrapped

    def around(self, event: Event, hooks: Sequence[BoundHook], dispatch: Dispatch | None) -> Dispatch | None:
        """Return an event's callable with one check around it, if that is enough to protect from these hooks."""
        checked = [hook for hook in hooks if self._protects_from(hook)]
        if self._training is None or not checked or dispatch is None or self._must_check_each(event, hooks):
            return dispatch
        return self._training.guard(dispatch, partial(self._drew, event, checked))

    def _must_check_each(self, event: Event, hooks: Sequence[BoundHook]) -> bool:
        """Return whether one check would not identify the hook, or would undo what one of them does on purpose."""
        return event.name in self._suspects or not all(hook_attribute(hook.owner, "isolate_rng") for hook in hooks)

    def _protects_from(self, hook: BoundHook) -> bool:
        is_guarded = not hook.built_in and bool(hook_attribute(hook.owner, "isolate_rng"))
        return is_guarded and hook.hook not in self._hook_streams

    def _drew(self, event: Event, among: Sequence[BoundHook], snapshot: Snapshot) -> None:
        """Restore training's streams; the hook that drew gets its own if it is identified."""
        assert self._training is not None
        moved = ", ".join(self._training.restore(snapshot))
        if len(among) > 1:
            self._suspects.add(event.name)  # The hook that drew is found when the event fires again.
        else:
            hook = among[0].hook
            rank = 0 if hook_attribute(among[0].owner, "same_on_all_ranks") else self._rank
            self._hook_streams[hook] = HookStreams(self._training, self._seed, hook, rank)
            message = (
                f"drew from training's random streams or seeded them ({moved}); they were restored, and from now on "
                "the hook draws from its own streams. To seed training on purpose, set isolate_rng = False"
            )
            self._report(Incident("drew", hook, event.name, self._step(), message), True)
        self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the streams of the hooks that draw, and the events at which one is still to be identified."""
        return {
            "suspects": sorted(self._suspects),
            "hooks": {name: streams.state_dict() for name, streams in self._hook_streams.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        training = self._training or TrainingStreams()
        self._suspects = set(saved["suspects"])
        self._hook_streams = {}
        for name, state in saved["hooks"].items():
            self._hook_streams[name] = HookStreams(training, self._seed, name, self._rank)
            self._hook_streams[name].load_state_dict(state)
        self._changed()
