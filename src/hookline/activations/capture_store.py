"""Captured states, the store that keeps them within limits, and their file format."""

from __future__ import annotations

import re
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from hookline import _fs
from hookline._console import logger
from hookline._device import HostCopy
from hookline._parameters import NonNegativeFloat, NonNegativeInt, check
from hookline._tensors import is_dense, iter_tensors, kind_of, map_tensors, unwrap
from hookline.activations.forward_hooks import observer_view
from hookline.errors import HooklineError

# `Tensor.data_ptr` gives the same address, but it materializes a copy-on-write view.
_data_address: Any = getattr(torch._C, "_data_address", torch.Tensor.data_ptr)


@dataclass(eq=False)
class CapturedState:
    """The inputs and the output of one call of a module.

    Attributes:
        hook: The name of the hook that captured it.
        name: The module's name.
        layer_idx: The number given for the module.
        call: The number of this call of the module since the hook was registered, from 1.
        step: The optimizer step of the call.
        phase: ``"train"``, ``"validation"`` or ``"inference"``.
        thread: The name of the thread that called the module.
    """

    # A state is created for every call of every captured module, so everything that can wait is computed later.
    hook: str
    name: str
    layer_idx: int | None
    module: weakref.ref[torch.nn.Module]
    call: int
    step: int
    phase: str
    thread: str
    values: tuple[Any, Any, Any]  # inputs, keyword inputs and output, which states may share: readers get views of them
    copies: Sequence[HostCopy] = ()  # copies to the host, which may still be in progress
    storages: Sequence[tuple[int, int]] = ()  # address and bytes of the memory that counts for its limit
    time: float = field(default_factory=monotonic)

    @cached_property
    def inputs(self) -> Any:
        """The positional inputs; None if only outputs are captured."""
        return self._view(0)

    @cached_property
    def kwargs(self) -> Any:
        """The keyword inputs; None if only outputs are captured."""
        return self._view(1)

    @cached_property
    def outputs(self) -> Any:
        """The output in its own structure; None if only inputs are captured."""
        return self._view(2)

    @property
    def main(self) -> Any:
        """The output; the inputs if only these are captured."""
        return self.outputs if self.values[2] is not None else self.inputs

    def _view(self, index: int) -> Any:
        """Return views that a reader may write into without changing another state."""
        for copy in self.copies:
            copy.wait()
        return map_tensors(
            lambda tensor: tensor if tensor.requires_grad else observer_view(unwrap(tensor)), self.values[index]
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the state."""
        return [unwrap(tensor) for tensor in iter_tensors(self.values)]

    def __repr__(self) -> str:
        return f"<CapturedState of {self.name!r} by {self.hook!r}: call {self.call}, step {self.step}, {self.phase}>"


class CaptureStore:
    """Keeps captured states within a number per hook and a number of bytes for all hooks; the oldest go first.

    Bytes are counted by unique storage: a tensor that two states share counts once.

    Args:
        max_states: The number of states per hook, unless a hook has its own limit; None for no limit.
        limit_mb: The size of all states together; None for no limit.
        max_age: The number of seconds after which `sweep` drops a state; None for no limit.

    Raises:
        ConfigError: If a limit is negative or not a number.

    Attributes:
        dropped: How many states were dropped because of a limit or because their module no longer exists.
    """

    def __init__(
        self, max_states: int | None = 100, limit_mb: float | None = None, max_age: float | None = None
    ) -> None:
        self.max_states = check(max_states, NonNegativeInt | None, "max_captured_states")
        limit = check(limit_mb, NonNegativeFloat | None, "memory_limit_mb")
        self.limit_bytes = None if limit is None else int(limit * 2**20)
        self.max_age = check(max_age, NonNegativeFloat | None, "max_age_seconds")
        self.dropped = 0
        self._states: defaultdict[str, deque[CapturedState]] = defaultdict(deque)  # by hook, oldest first
        self._bytes = 0
        self._users: dict[int, int] = {}  # how many captured tensors use a storage, by its address
        self._too_big: set[str] = set()  # modules with a single state that exceeds the limit
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._states.values()))

    @property
    def bytes(self) -> int:
        """The bytes of all states; without a limit they are counted only now."""
        with self._lock:
            if self.limit_bytes is not None:
                return self._bytes
            return _storage_bytes([state for states in self._states.values() for state in states])

    def of(self, hook: str) -> list[CapturedState]:
        """Return a hook's states, oldest first."""
        with self._lock:
            return list(self._states.get(hook, ()))

    def add(self, state: CapturedState, max_states: int | None = None) -> None:
        """Keep a state and drop the oldest ones that exceed a limit; `max_states` is the hook's own limit."""
        with self._lock:
            states = self._states[state.hook]
            states.append(state)
            limit = self.max_states if max_states is None else max_states
            if limit is not None and len(states) > limit:  # one at a time, because every state is added here
                self._drop(states, states[0])
            if self.limit_bytes is not None and states:
                self._enforce_limit(state, self.limit_bytes)

    def _enforce_limit(self, state: CapturedState, limit: int) -> None:
        state.storages = [storage_size(tensor) for tensor in state.tensors()]
        for address, size in state.storages:
            users = self._users[address] = self._users.get(address, 0) + 1
            if users == 1:
                self._bytes += size
        while self._bytes > limit:
            oldest = min(filter(None, self._states.values()), key=lambda states: states[0].time)
            self._drop(oldest, oldest[0])
        if not self._states[state.hook] and state.name not in self._too_big:
            size = _storage_bytes([state])
            if size > limit:  # reported, because an empty list looks like a hook that never fired
                self._too_big.add(state.name)
                why = f"one state takes {size / 2**20:.3g} MB, but memory_limit_mb is {limit / 2**20:.3g} for all"
                logger.warning("hook %r keeps no captures of %r: %s", state.hook, state.name, why)

    def pop_all(self, hook: str) -> list[CapturedState]:
        """Remove and return the states of one hook, oldest first; they do not count as dropped."""
        with self._lock:
            states = list(self._states.pop(hook, ()))
            for state in states:
                self._release(state)
            return states

    def sweep(self) -> None:
        """Drop states that are too old, and states of modules that no longer exist."""
        now = monotonic()
        with self._lock:
            for states in self._states.values():
                for state in list(states):
                    expired = self.max_age is not None and now - state.time > self.max_age
                    if expired or state.module() is None:
                        self._drop(states, state)

    def _drop(self, states: deque[CapturedState], state: CapturedState) -> None:
        states.remove(state)  # nearly always the first
        self.dropped += 1
        self._release(state)

    def _release(self, state: CapturedState) -> None:
        for address, size in state.storages:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self._bytes -= size
        state.storages = ()


def storage_size(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's storage and its size in bytes; (an id, 0) for a tensor without storage."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return id(tensor), 0
    start = _data_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()
    return start, tensor.untyped_storage().nbytes()


def _storage_bytes(states: Sequence[CapturedState]) -> int:
    return sum(dict(storage_size(tensor) for state in states for tensor in state.tensors()).values())


# ---- files -----------------------------------------------------------------------------------------------------------

_NOT_IN_SAFETENSORS = (torch.complex32, torch.complex128)


def capture_file(run_dir: Path, hook: str) -> Path:
    """Return the file in a run's directory for the states of one hook, regardless of the characters in its name."""
    return run_dir / "captures" / f"{re.sub(r'[^A-Za-z0-9_=-]+', '_', hook)}.safetensors"


def save_states(
    states: Sequence[CapturedState], path: str | Path, leave_out: Callable[[str, torch.Tensor], None] | None = None
) -> Path:
    """Write captured tensors to a safetensors file, keyed ``module/call/part/index``; replaces it atomically.

    Args:
        states: The states to write; the file's metadata has the step, phase and layer index of each tensor.
        path: The file; missing directories are created.
        leave_out: Called with the module and a tensor that safetensors cannot store, instead of raising an error.

    Returns:
        The path.

    Raises:
        HooklineError: If the file cannot be written, or safetensors cannot store a tensor.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for state, part in product(states, ("inputs", "kwargs", "outputs")):
        for index, tensor in enumerate(iter_tensors(getattr(state, part))):
            key = f"{state.name}/{state.call}/{part}/{index}"
            if not is_dense(tensor) or tensor.dtype in _NOT_IN_SAFETENSORS:
                if leave_out is not None:
                    leave_out(state.name, tensor)
                    continue
                raise HooklineError(
                    f"safetensors cannot hold {key} ({kind_of(tensor)}); convert it to a plain tensor with reduce=…"
                )
            tensors[key] = tensor.detach().cpu().clone().contiguous()
            metadata[key] = f"step={state.step} phase={state.phase} layer_idx={state.layer_idx}"
    path = Path(path)
    try:
        _fs.make_directory(path.parent)
        _fs.write_atomic(path, save(tensors, metadata=metadata))
    except OSError as error:
        raise HooklineError(_fs.explain(path, error)) from error
    return path


def load_outputs(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the first floating-point output of the last captured call of each module, from a file of `save_states`.

    Raises:
        HooklineError: If the file cannot be read, or has no outputs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise HooklineError(f"cannot read captured states from {str(path)!r}: {error}") from error
    newest: dict[str, tuple[int, int, torch.Tensor]] = {}  # by module, with the number of the call and the index
    for key, tensor in tensors.items():
        name, call, part, index = (*key.rsplit("/", 3), "", "", "")[:4]
        if part == "outputs" and call.isdecimal() and index.isdecimal() and tensor.is_floating_point():
            candidate = int(call), -int(index), tensor
            newest[name] = max(newest.get(name, candidate), candidate, key=lambda version: version[:2])
    if not newest:
        raise HooklineError(
            f"{str(path)!r} has no captured outputs; write it with `Cache.save`, or with a capture hook's `save`"
        )
    return {name: tensor for name, (_, _, tensor) in newest.items()}
