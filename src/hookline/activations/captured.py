"""Captured states, and the budgets they live under."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hookline.activations.copies import copy_on_write, mapped
from hookline.activations.moment import tensors_in


class Origin(NamedTuple):
    """Where states come from: which hook took them at which module."""

    hook: str
    name: str
    layer_idx: int | None
    module: weakref.ref[torch.nn.Module] | None = None


class _Thread(threading.local):
    """The name of the current thread, asked for once in each."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


_thread = _Thread()


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
        ready: torch.cuda.Event | None = None,
    ) -> None:
        self.origin = origin
        self.call = call  # which call of the module this hook heard, from 1
        self.step, self.phase = step, phase
        self.thread = _thread.name
        self.taken_at = time.monotonic()
        self.taken = taken  # inputs, keyword inputs, output; states may share tensors, so these are never handed out
        self.shown: dict[int, Any] | None = None  # what was handed out instead, by place
        self.ready = ready  # on its way from the device until then
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
        if self.ready is not None:
            self.ready.synchronize()
        if self.shown is None:
            self.shown = {}
        if place not in self.shown:
            self.shown[place] = mapped(copy_on_write, self.taken[place])
        return self.shown[place]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor it holds."""
        return tensors_in(self.taken)

    def is_gone(self) -> bool:
        """Whether its module no longer exists."""
        return self.origin.module is not None and self.origin.module() is None

    def __repr__(self) -> str:
        return f"<CapturedState of {self.name!r} by {self.hook!r}: call {self.call}, step {self.step}, {self.phase}>"


class CaptureStore:
    """Keeps captured states within a number per hook and a number of bytes for all; the oldest go first.

    Bytes are counted by unique storage: a tensor that two states share counts once.
    """

    def __init__(self, max_states: int | None = 100, limit_bytes: int | None = None) -> None:
        self.max_states = max_states
        self.limit_bytes = limit_bytes
        self._bytes = 0
        self.dropped = 0  # states that had to go to keep the limits
        self._states: dict[str, deque[CapturedState]] = {}
        self._users: dict[int, int] = {}  # how many captured tensors use a storage
        self._lock = threading.RLock()

    @property
    def bytes(self) -> int:
        """What is held now."""
        with self._lock:
            if self.limit_bytes is None:  # nothing to keep to: counted only when somebody asks
                return sum(dict(_storage(tensor) for state in self._all() for tensor in state.tensors()).values())
            return self._bytes

    def add(self, state: CapturedState, max_states: int | None = None) -> None:
        """Keep a state; older ones make way for it."""
        with self._lock:
            states = self._states.get(state.origin.hook)
            if states is None:
                states = self._states[state.origin.hook] = deque()
            states.append(state)
            if self.limit_bytes is not None:
                self._count(state)
            most = max_states if max_states is not None else self.max_states
            while most is not None and len(states) > most:
                self.dropped += 1
                self._uncount(states.popleft())
            while self.limit_bytes is not None and self._bytes > self.limit_bytes:
                self._drop(self._oldest())

    def of(self, hook: str) -> list[CapturedState]:
        """A hook's states, oldest first."""
        with self._lock:
            return list(self._states.get(hook, ()))

    def clear(self, hook: str | None = None) -> None:
        """Forget the states of one hook, or all."""
        with self._lock:
            for name in [hook] if hook is not None else list(self._states):
                for state in self._states.pop(name, ()):
                    self._uncount(state)

    def sweep(self, max_age: float | None) -> None:
        """Drop states that are too old, and those of modules that no longer exist."""
        now = time.monotonic()
        with self._lock:
            for state in list(self._all()):
                if state.is_gone() or (max_age is not None and now - state.taken_at > max_age):
                    self._drop(state)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(states) for states in self._states.values())

    def _all(self) -> Iterable[CapturedState]:
        return (state for states in self._states.values() for state in states)

    def _oldest(self) -> CapturedState:
        return min((states[0] for states in self._states.values() if states), key=lambda state: state.taken_at)

    def _drop(self, state: CapturedState) -> None:
        self.dropped += 1
        states = self._states[state.hook]
        states.remove(state)  # nearly always the first
        if not states:
            del self._states[state.hook]
        self._uncount(state)

    def _count(self, state: CapturedState) -> None:
        state.counted = [_storage(tensor) for tensor in state.tensors()]
        for where, size in state.counted:
            users = self._users[where] = self._users.get(where, 0) + 1
            if users == 1:
                self._bytes += size

    def _uncount(self, state: CapturedState) -> None:
        for where, size in state.counted:
            self._users[where] -= 1
            if not self._users[where]:
                del self._users[where]
                self._bytes -= size
        state.counted = ()


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins, without touching it (asking for `data_ptr` would copy a copy-on-write view)."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    start = address - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
