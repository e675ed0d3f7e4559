"""Captured states, and the budgets they live under."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hookline.activations.moment import tensors_in


@dataclass(eq=False, slots=True)
class CapturedState:
    """What went into a module and came out of it in one call."""

    hook: str
    name: str
    layer_idx: int | None
    step: int
    call: int  # which call of the module since it is watched, from 1
    phase: str
    thread: str
    taken_inputs: Any = None
    taken_kwargs: Any = None
    taken_outputs: Any = None
    ready: torch.cuda.Event | None = None  # on its way from the device until then
    taken_at: float = field(default_factory=time.monotonic)
    module: weakref.ref[torch.nn.Module] | None = field(default=None, repr=False)

    @property
    def inputs(self) -> Any:
        """The positional inputs; None when they were not asked for."""
        return self._arrived(self.taken_inputs)

    @property
    def kwargs(self) -> Any:
        """The keyword inputs; None when they were not asked for."""
        return self._arrived(self.taken_kwargs)

    @property
    def outputs(self) -> Any:
        """The output in its own structure; None when it was not asked for."""
        return self._arrived(self.taken_outputs)

    def _arrived(self, value: Any) -> Any:
        if self.ready is not None:
            self.ready.synchronize()
        return value

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor it holds."""
        return tensors_in((self.taken_inputs, self.taken_kwargs, self.taken_outputs))


class CaptureStore:
    """Keeps captured states within a number per hook and a number of bytes for all; the oldest go first.

    Bytes are counted by unique storage: a tensor that two states share counts once.
    """

    def __init__(self, max_states: int | None = 100, limit_bytes: int | None = None) -> None:
        self.max_states = max_states
        self.limit_bytes = limit_bytes
        self._bytes = 0
        self.dropped = 0  # states that had to go to keep the limits
        self._states: dict[str, list[CapturedState]] = {}
        self._shared: dict[int, tuple[int, int]] = {}  # storage -> how many tensors use it, its bytes
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
            states = self._states.setdefault(state.hook, [])
            states.append(state)
            if self.limit_bytes is not None:
                self._count(state, 1)
            most = max_states if max_states is not None else self.max_states
            while most is not None and len(states) > most:
                self._drop(states[0])
            while self.limit_bytes is not None and self._bytes > self.limit_bytes:
                self._drop(self._oldest())

    def of(self, hook: str) -> list[CapturedState]:
        """A hook's states, oldest first."""
        with self._lock:
            return list(self._states.get(hook, ()))

    def clear(self, hook: str | None = None) -> None:
        """Forget the states of one hook, or all."""
        with self._lock:
            for state in self.of(hook) if hook is not None else list(self._all()):
                self._forget(state)

    def sweep(self, max_age: float | None) -> None:
        """Drop states that are too old, and those of modules that no longer exist."""
        now = time.monotonic()
        with self._lock:
            for state in list(self._all()):
                gone = state.module is not None and state.module() is None
                if gone or (max_age is not None and now - state.taken_at > max_age):
                    self._drop(state)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(states) for states in self._states.values())

    def _all(self) -> Iterable[CapturedState]:
        return (state for states in self._states.values() for state in states)

    def _oldest(self) -> CapturedState:
        return min((states[0] for states in self._states.values() if states), key=lambda state: state.taken_at)

    def _drop(self, state: CapturedState) -> None:
        self._forget(state)
        self.dropped += 1

    def _forget(self, state: CapturedState) -> None:
        states = self._states[state.hook]
        states.remove(state)
        if not states:
            del self._states[state.hook]
        if self.limit_bytes is not None:
            self._count(state, -1)

    def _count(self, state: CapturedState, by: int) -> None:
        for tensor in state.tensors():
            where, size = _storage(tensor)
            users, _ = self._shared.get(where, (0, size))
            if users == 0:
                self._bytes += size
            if users + by == 0:
                self._bytes -= size
                del self._shared[where]
            else:
                self._shared[where] = (users + by, size)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins, without touching it (asking for `data_ptr` would copy a copy-on-write view)."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    start = address - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()
