"""Captured states, and the budgets they live under."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from hookline.activations.copies import copy_on_write, mapped, unwrapped
from hookline.activations.moment import tensors_in
from hookline.errors import ConfigError

logger = logging.getLogger("hookline")


class Origin(NamedTuple):
    """Where states come from: which hook took them at which module."""

    hook: str
    name: str
    layer_idx: int | None
    module: weakref.ref[torch.nn.Module] | None = None


this_thread = threading.local()  # has its name once that was asked for; a subclass of `local` is slower to read


def thread_name() -> str:
    """The name of the current thread."""
    try:
        return this_thread.name  # type: ignore[no-any-return]
    except AttributeError:
        this_thread.name = name = threading.current_thread().name
        return name


class CallNumbers:
    """The numbers of the calls that a hook keeps of one module; the last one given says how many.

    A module's calls are counted where its torch hook is called. On the direct way their numbers alone count them.
    """

    __slots__ = ("given", "torch_hook")

    def __init__(self) -> None:
        self.given = 0
        self.torch_hook = 0  # of these, how many came through the torch hook

    @property
    def direct(self) -> int:
        """Calls that came on the direct way."""
        return self.given - self.torch_hook

    def next(self) -> int:
        """One more call through the torch hook."""
        self.torch_hook += 1  # no other thread gets in between: nothing is called here
        self.given = call = self.given + 1
        return call

    def start_over(self) -> None:
        """Begin at 1 again."""
        self.given = self.torch_hook = 0


Record = tuple[Any, ...]
"""A state that nobody has read, cheaper than an object: origin, call, step, phase, thread, output; inputs and keyword
inputs where they are kept."""


class CapturedState:
    """What went into a module and came out of it in one call."""

    __slots__ = ("call", "counted", "origin", "phase", "ready", "shown", "step", "taken", "taken_at", "thread")

    def __init__(
        self,
        origin: Origin,
        call: int,
        step: int,
        phase: str,
        taken: tuple[Any, Any, Any],
        ready: Sequence[torch.cuda.Event] = (),
        thread: str | None = None,
    ) -> None:
        self.origin = origin
        self.call = call  # which call of the module this hook heard, from 1
        self.step, self.phase = step, phase
        self.thread = thread or thread_name()
        self.taken_at = time.monotonic()  # of one that lay there as a record: when it was first looked at
        self.taken = taken  # inputs, keyword inputs, output; states may share tensors, so these are never handed out
        self.shown: dict[int, Any] | None = None  # what was handed out instead, by place
        self.ready = ready  # on its way from devices until then
        self.counted: Sequence[tuple[int, int]] = ()  # the storages a budget counts it for: where, how many bytes

    @property
    def hook(self) -> str:
        """The id of the hook that took it."""
        return self.origin.hook

    @property
    def name(self) -> str:
        """The module's name."""
        return self.origin.name

    @property
    def layer_idx(self) -> int | None:
        """The number that was given for the module."""
        return self.origin.layer_idx

    @property
    def inputs(self) -> Any:
        """The positional inputs; None when they were not asked for."""
        return self._show(0)

    @property
    def kwargs(self) -> Any:
        """The keyword inputs; None when they were not asked for."""
        return self._show(1)

    @property
    def outputs(self) -> Any:
        """The output in its own structure; None when it was not asked for."""
        return self._show(2)

    @property
    def main(self) -> Any:
        """The output; the inputs where only those were asked for."""
        return self.outputs if self.taken[2] is not None else self.inputs

    def _show(self, place: int) -> Any:
        """A view of its own for whoever reads: what the reader writes into it reaches no other state."""
        for event in self.ready:
            event.synchronize()
        if self.shown is None:
            self.shown = {}
        if place not in self.shown:
            self.shown[place] = mapped(_readable, self.taken[place])
        return self.shown[place]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor it holds."""
        return [unwrapped(tensor) for tensor in tensors_in(self.taken)]

    def __repr__(self) -> str:
        return f"<CapturedState of {self.name!r} by {self.hook!r}: call {self.call}, step {self.step}, {self.phase}>"


class Shelf(deque[CapturedState | Record]):
    """The states of one hook, oldest first; beyond `most` the oldest fall off by themselves.

    Putting something there is one step for Python, so it takes no lock. How many fell off is known all the same: as
    many as the hook has numbered and are neither here nor were cleared away.
    """

    def __init__(self, numbers: dict[str, CallNumbers], most: int | None) -> None:
        super().__init__(maxlen=most)
        self.numbers = numbers  # of the calls of each module
        self._cleared = self._given()

    @property
    def dropped(self) -> int:
        """How many states had to go."""
        return self._given() - self._cleared - len(self)

    def states(self) -> list[CapturedState]:
        """What is there; a record makes way for the state that it stands for, so that it is the same at every look."""
        return [self._state(kept, place) for place, kept in enumerate(list(self))]

    def _state(self, kept: CapturedState | Record, place: int) -> CapturedState:
        made = state_of(kept)
        with suppress(IndexError):  # cleared away by another thread
            while self[place] is not kept:  # others have fallen off before it
                place -= 1
            self[place] = made  # no other thread gets in between: nothing is called here
        return made

    def take_all(self) -> list[CapturedState | Record]:
        """Clear everything away."""
        taken = [self.popleft() for _ in range(len(self))]  # another thread may put something there
        self._cleared += len(taken)
        return taken

    def start_over(self) -> None:
        """Number calls from 1 again."""
        for numbers in list(self.numbers.values()):
            numbers.start_over()
        self._cleared = -len(self)

    def settle(self) -> int:
        """How many states had to go, which are not told of again."""
        dropped = self.dropped
        self._cleared += dropped
        return dropped

    def _given(self) -> int:
        return sum(numbers.given for numbers in list(self.numbers.values()))


def check_limit(option: str, given: Any, kind: type = Integral) -> None:
    """Refuse a limit that is no number, or that nothing could keep to; None is no limit."""
    number = isinstance(given, kind) and not isinstance(given, bool)
    if given is not None and not (number and given >= 0):
        what = "a whole number" if kind is Integral else "a number"
        raise ConfigError(option, f"{given!r} is no limit; give {what} from 0 up, or None for none")


class CaptureStore:
    """Keeps captured states within a number per hook and a number of bytes for all; the oldest go first.

    Bytes are counted by unique storage: a tensor that two states share counts once. Where neither bytes nor age are
    limited, a hook may put records on its shelf itself.
    """

    def __init__(
        self, max_states: int | None = 100, limit_bytes: int | None = None, max_age: float | None = None
    ) -> None:
        check_limit("max_captured_states", max_states)
        check_limit("max_age_seconds", max_age, Real)
        self.max_states = max_states
        self.limit_bytes = limit_bytes
        self.max_age = max_age  # seconds
        self._bytes = 0
        self._dropped = 0  # from shelves that are gone
        self._shelves: dict[str, Shelf] = {}
        self._users: dict[int, int] = {}  # how many captured tensors use a storage
        self._too_big: set[str] = set()  # modules of which one state is more than the limit
        self._lock = threading.RLock()

    @property
    def takes_records(self) -> bool:
        """Whether hooks may put records on their shelves; otherwise states are to be added one by one."""
        return self.limit_bytes is None and self.max_age is None

    @property
    def bytes(self) -> int:
        """What is held now."""
        with self._lock:
            if self.limit_bytes is None:  # nothing to keep to: counted only when somebody asks
                return sum(dict(_storage(tensor) for state in self._all() for tensor in state.tensors()).values())
            return self._bytes

    @property
    def dropped(self) -> int:
        """How many states had to go to keep the limits."""
        with self._lock:
            return self._dropped + sum(shelf.dropped for shelf in self._shelves.values())

    def new_shelf(self, numbers: dict[str, CallNumbers], most: int | None) -> Shelf:
        """A shelf for a hook that numbers its calls there and may have `most` states, or as many as anybody."""
        return Shelf(numbers, self._most(most) if self.takes_records else None)

    def put_up(self, hook: str, shelf: Shelf) -> None:
        """Have a hook's shelf here."""
        with self._lock:
            self._shelves[hook] = shelf

    def take_down(self, hook: str) -> None:
        """A hook is gone, and its states with it; should it come back, it may bring its shelf."""
        with self._lock:
            self.clear(hook)
            shelf = self._shelves.pop(hook, None)
            self._dropped += shelf.settle() if shelf is not None else 0

    def add(self, state: CapturedState, most: int | None = None) -> None:
        """Keep a state; older ones make way for it, at the latest when the hook has `most`."""
        with self._lock:
            if state.hook not in self._shelves:
                self.put_up(state.hook, self.new_shelf({}, most))
            shelf = self._shelves[state.hook]
            numbers = shelf.numbers.setdefault(state.name, CallNumbers())
            numbers.given = max(numbers.given, state.call)
            shelf.append(state)
            if self.limit_bytes is not None:
                self._count(state)
            limit = self._most(most)
            while limit is not None and len(shelf) > limit:
                self._drop(shelf, shelf[0])
            while self.limit_bytes is not None and self._bytes > self.limit_bytes:
                self._drop(*self._oldest())
            if self.limit_bytes is not None and not shelf:
                self._tell_if_too_big(state, self.limit_bytes)

    def _tell_if_too_big(self, state: CapturedState, limit: int) -> None:
        """Say once that nothing of a module can be kept: an empty list looks like a hook that never fired."""
        size = sum(dict(_storage(tensor) for tensor in state.tensors()).values())
        if size > limit and state.name not in self._too_big:
            self._too_big.add(state.name)
            why = f"one state takes {size / 2**20:.3g} MB, and memory_limit_mb is {limit / 2**20:.3g} for all"
            logger.warning("hook %r keeps nothing of %r: %s", state.hook, state.name, why)

    def _most(self, own: int | None) -> int | None:
        return self.max_states if own is None else own

    def of(self, hook: str) -> list[CapturedState]:
        """A hook's states, oldest first."""
        with self._lock:
            return self._shelves[hook].states() if hook in self._shelves else []

    def clear(self, hook: str | None = None) -> None:
        """Forget the states of one hook, or all."""
        with self._lock:
            for name in [hook] if hook is not None else list(self._shelves):
                for kept in self._shelves[name].take_all() if name in self._shelves else ():
                    self._uncount(kept)

    def sweep(self) -> None:
        """Drop states that are too old, and those of modules that no longer exist."""
        now = time.monotonic()
        with self._lock:
            for shelf in self._shelves.values():
                for kept in list(shelf):
                    if _is_gone(kept) or (self.max_age is not None and now - state_of(kept).taken_at > self.max_age):
                        self._drop(shelf, kept)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._shelves.values()))

    def _all(self) -> Iterator[CapturedState]:
        return (state for shelf in self._shelves.values() for state in shelf.states())

    def _oldest(self) -> tuple[Shelf, CapturedState | Record]:
        shelf = min(filter(None, self._shelves.values()), key=lambda shelf: state_of(shelf[0]).taken_at)
        return shelf, shelf[0]

    def _drop(self, shelf: Shelf, kept: CapturedState | Record) -> None:
        try:
            shelf.remove(kept)  # nearly always the first
        except ValueError:
            return  # it has fallen off meanwhile
        self._uncount(kept)

    def _count(self, state: CapturedState) -> None:
        state.counted = [_storage(tensor) for tensor in state.tensors()]
        for where, size in state.counted:
            users = self._users[where] = self._users.get(where, 0) + 1
            if users == 1:
                self._bytes += size

    def _uncount(self, kept: CapturedState | Record) -> None:
        if isinstance(kept, tuple):  # never counted
            return
        for where, size in kept.counted:
            self._users[where] -= 1
            if not self._users[where]:
                del self._users[where]
                self._bytes -= size
        kept.counted = ()


def state_of(kept: CapturedState | Record) -> CapturedState:
    """A record as the state that it stands for."""
    if isinstance(kept, CapturedState):
        return kept
    origin, call, step, phase, thread, output, *inputs = kept
    return CapturedState(origin, call, step, phase, (*(inputs or (None, None)), output), thread=thread)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    return copy_on_write(unwrapped(tensor))


def _is_gone(kept: CapturedState | Record) -> bool:
    """Whether the module no longer exists."""
    origin = kept.origin if isinstance(kept, CapturedState) else kept[0]
    return origin.module is not None and origin.module() is None


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins, without touching it (asking for `data_ptr` would copy a copy-on-write view)."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    start = address - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
