"""Keep hooks from drawing from training's random streams, and give hooks that draw their own streams.

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
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookline import _device
from hookline.core.base import hook_attribute
from hookline.core.catalog import Event
from hookline.core.failures import FailureHandler, Incident

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook, Dispatch

MERSENNE_BYTES, POSITION_BYTES = 624 * 4, 16
OBJECT_HEADER = object.__basicsize__  # Bytes before the fields of every Python object.
TRIAL_SEED = 0x1234567890ABCDEF  # A value that is easy to find in memory.
TORCH_STATE_BYTES, TORCH_SPARES = 5056, (5040, 5052)  # The flags of a spare double and a spare float normal.


# ---- the libraries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """The functions of one library with a global generator, from which training may draw.

    All of them use Mersenne twisters: the position and some words of the state are adjacent, 16 bytes that change with
    every draw. Reading them in place costs 0.05 µs, while asking for the state costs 0.8 µs (torch), 8 (Python) or 32
    (NumPy), too much for every event. Memory is only ever read, and only to detect a draw.
    """

    make: Callable[[int], Any]
    """Make a generator from a seed."""
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    """Get and set a generator's state."""
    holds_spare: Callable[[Any], bool]
    """Return whether a state holds a spare normal, whose use does not move the position."""
    draw: Callable[[Any], Any]
    address: Callable[[Any], int]
    """Return where the 16 bytes lie that change with every draw."""


def _torch_address(generator: torch.Generator) -> int:
    """Return where the position lies: in the C++ object, after the seed, which is found with a trial generator."""
    trial = torch.Generator().manual_seed(TRIAL_SEED)
    body, trial_body = (ctypes.c_uint64.from_address(id(owner) + OBJECT_HEADER).value for owner in (generator, trial))
    offset = ctypes.string_at(trial_body, 256).index(struct.pack("<Q", TRIAL_SEED))
    return int(body + offset + 16)  # Seed (8 bytes), left (4), seeded (4), then position (4) and state.


def _torch_holds_spare(state: torch.Tensor) -> bool:
    """Read the flags of spare normals; a state of unknown size may hold one."""
    if state.numel() != TORCH_STATE_BYTES:
        return True
    # Tensor.numpy() would count as a tensor read where those are watched, and indexing takes 20 µs.
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
    address=_torch_address,
)
PYTHON = Library(
    make=random.Random,
    get=random.Random.getstate,
    put=lambda generator, state: generator.setstate(as_tuples(state)),
    holds_spare=lambda state: state[2] is not None,
    draw=random.Random.random,
    # Position (4 bytes), then state, whose first word is the same for every seed.
    address=lambda generator: id(generator) + OBJECT_HEADER,
)
NUMPY = Library(
    make=lambda seed: sys.modules["numpy.random"].RandomState(seed % 2**32),
    get=lambda generator: generator.get_state(),
    put=lambda generator, state: generator.set_state(state),
    holds_spare=lambda state: bool(state[3]),
    draw=lambda generator: generator.random_sample(),
    # State, then position (4 bytes).
    address=lambda generator: generator._bit_generator.ctypes.state_address + MERSENNE_BYTES + 4 - POSITION_BYTES,
)


def _reader(address: int) -> Callable[[], bytes]:
    return memoryview((ctypes.c_char * POSITION_BYTES).from_address(address)).tobytes


@cache
def readable_in_place(library: Library) -> bool:
    """Check on a private generator that its position is where it is expected to be.

    No library documents this position. If it is elsewhere, the guard asks for the whole state instead, which only costs
    time.
    """
    try:
        generator = library.make(TRIAL_SEED)
        read, state = _reader(library.address(generator)), library.get(generator)
        positions = [read()]
        for _ in range(3):
            library.draw(generator)
            positions.append(read())
        library.put(generator, state)
        return len(set(positions)) == len(positions) and read() == positions[0]
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

    @cached_property
    def position(self) -> Callable[[], Any]:
        """A function that returns the value to compare to detect a draw."""
        if readable_in_place(self.library):
            return _reader(self.library.address(self._generator))
        return lambda: _comparable(self.get())

    def get(self) -> Any:
        """Return the generator's state, as its library gives it."""
        return self.library.get(self._generator)

    def put(self, state: Any) -> None:
        """Restore a state."""
        self.library.put(self._generator, state)

    def seeded(self, string: str) -> Any:
        """Return the state of a generator that is seeded with the hash of a string."""
        return self.library.get(self.library.make(hashed_seed(string)))


class DeviceStream(Stream):
    """The generator of an accelerator, which counts its draws and holds no spare normals."""

    def __init__(self, index: int) -> None:
        generator = _device.generator(index)
        library = replace(
            TORCH,
            make=lambda seed: torch.Generator(generator.device).manual_seed(seed),
            holds_spare=lambda state: False,
        )
        super().__init__(str(generator.device), library, generator)
        self.position = lambda: (generator.initial_seed(), generator.get_offset())


def host_streams() -> list[Stream]:
    """Return the streams of torch, Python, and NumPy if it is imported."""
    streams = [Stream("torch", TORCH, torch.default_generator), Stream("python", PYTHON, random._inst)]
    if "numpy" in sys.modules:
        streams.append(Stream("numpy", NUMPY, sys.modules["numpy"].random.mtrand._rand))
    return streams


def hashed_seed(string: str) -> int:
    """Return a seed that is derived from a string."""
    return int.from_bytes(hashlib.sha256(string.encode()).digest()[:6], "little")


class Snapshot(NamedTuple):
    """The states of all streams at one time."""

    positions: list[Any]
    states: list[Any]
    spares: list[bool]


class TrainingStreams:
    """Every stream that training may draw from: torch, Python, NumPy once it is imported, and the devices'."""

    def __init__(self, device_indices: Iterable[int] = ()) -> None:
        self.streams = [*host_streams(), *map(DeviceStream, device_indices)]
        self._reads = [stream.position for stream in self.streams]
        self.last = Snapshot([], [], [])

    def positions(self) -> list[Any]:
        """Read where all streams are; it is called twice at every event."""
        return [read() for read in self._reads]

    def snapshot(self, positions: list[Any]) -> Snapshot:
        """Return all states; only those that may have changed since the last snapshot are read.

        A stream whose position has not moved is unchanged unless it held a spare normal, which may be used up by now. A
        stream gets one only by a draw, which moves its position.
        """
        last, states = self.last, []
        for index, stream in enumerate(self.streams):
            unchanged = last.states and positions[index] == last.positions[index] and not last.spares[index]
            states.append(last.states[index] if unchanged else stream.get())
        spares = [stream.library.holds_spare(state) for stream, state in zip(self.streams, states, strict=True)]
        self.last = Snapshot(positions, states, spares)
        return self.last

    def moved(self, since: Snapshot) -> list[int]:
        """Return the indices of the streams that are not where they were; spare normals count."""
        return [
            index
            for index, (stream, position) in enumerate(zip(self.streams, self.positions(), strict=True))
            if position != since.positions[index]
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
            snapshot = self.last  # Local, because another event may happen inside this one and take its own snapshot.
            if before != snapshot.positions or True in snapshot.spares:
                snapshot = self.snapshot(before)
            try:
                return call(*args, **kwargs)
            finally:
                if positions() != before or (True in snapshot.spares and self.moved(snapshot)):
                    on_draw(snapshot)

        return guarded

    def exchanged(self, call: Callable[..., Any], states: dict[str, Any]) -> Callable[..., Any]:
        """Return the same function, drawing from streams of these states, which costs about 60 µs a call."""

        def on_own_streams(*args: Any, **kwargs: Any) -> Any:
            training = self.snapshot(self.positions())
            for stream in self.streams:
                stream.put(states[stream.name])
            try:
                return call(*args, **kwargs)
            finally:
                for stream, state in zip(self.streams, training.states, strict=True):
                    states[stream.name] = stream.get()
                    stream.put(state)

        return on_own_streams


# ---- the guard -------------------------------------------------------------------------------------------------------


class RngGuard:
    """Protect training's random streams from a registry's user hooks during a run; built-in hooks do not draw."""

    def __init__(self, failures: FailureHandler, changed: Callable[[], None]) -> None:
        self._failures, self._changed = failures, changed
        self._training: TrainingStreams | None = None
        self._seed = 0
        self._suspects: set[str] = set()  # Events at which a hook drew that is not identified yet.
        self._states: dict[str, dict[str, Any]] = {}  # By hook that draws: its states, by stream.

    def begin(self, seed: int, device_indices: Iterable[int] = ()) -> None:
        """Protect the streams of a run that begins.

        Args:
            seed: The run's seed, from which hooks that draw get theirs.
            device_indices: The accelerators whose streams are protected, too.
        """
        self._training, self._seed = TrainingStreams(device_indices), seed
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
            if hook.hook in self._states:
                hook = hook.with_call(training.exchanged(hook.call, self._states_of(hook, training)))
            elif one_by_one and self._protects_from(hook):
                hook = hook.with_call(training.guard(hook.call, partial(self._drew, event, [hook])))
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
        return is_guarded and hook.hook not in self._states

    def _states_of(self, hook: BoundHook, training: TrainingStreams) -> dict[str, Any]:
        """Return the states of a hook's own streams; new ones depend on the run's seed, the hook and the rank."""
        rank = 0 if hook_attribute(hook.owner, "same_on_all_ranks") else self._failures.ranks.rank
        states = self._states[hook.hook]
        for stream in training.streams:
            if stream.name not in states:
                of_rank = f"/rank {rank}" if rank else ""
                states[stream.name] = stream.seeded(f"{self._seed}/{hook.hook}/{stream.name}{of_rank}")
        return states

    def _drew(self, event: Event, among: Sequence[BoundHook], snapshot: Snapshot) -> None:
        """Restore training's streams; the hook that drew gets its own if it is identified."""
        assert self._training is not None
        moved = ", ".join(self._training.restore(snapshot))
        if len(among) > 1:
            self._suspects.add(event.name)  # The hook that drew is found when the event fires again.
        else:
            hook = among[0].hook
            self._states[hook] = {}
            self._states_of(among[0], self._training)  # created now, so that a checkpoint before its next call has them
            message = (
                f"drew from training's random streams or seeded them ({moved}); they were restored, and from now on "
                "the hook draws from its own streams. To seed training on purpose, set isolate_rng = False"
            )
            self._failures.report(Incident("drew", hook, event.name, self._failures.current_step(), message), True)
        self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the streams of the hooks that draw, and the events at which one is still to be identified."""
        return {
            "suspects": sorted(self._suspects),
            "hooks": {name: dict(states) for name, states in self._states.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a stream that was not in use then starts from its seed."""
        self._suspects = set(saved["suspects"])
        self._states = {name: dict(states) for name, states in saved["hooks"].items()}
        self._changed()
