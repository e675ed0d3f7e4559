"""Capture: a hook that keeps copies of the inputs and outputs of modules, and the cache of a ``with`` block."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import current_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import _parameters
from hookline._console import logger
from hookline._device import HostCopy
from hookline._parameters import NonNegativeInt
from hookline._tensors import is_unsupported, map_tensors
from hookline._words import nearest
from hookline.activations.capture_store import CapturedState, CaptureStore, capture_file, save_states
from hookline.activations.compile.detection import run_uncompiled
from hookline.activations.forward_hooks import BuiltInForwardHook, ForwardStopped, Observe, observer_view
from hookline.core.base import ForwardHook
from hookline.errors import ConfigError, HooklineError

if TYPE_CHECKING:
    from hookline.activations.registry import ModelRegistry  # It makes sessions.
    from hookline.run.control import RunControl

PARTS = ("input", "output")


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_mean": lambda tensor: tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).mean(0),
    "first": lambda tensor: tensor[:1],
    "last_token": lambda tensor: tensor[:, -1],
}


class Capture(BuiltInForwardHook):
    """Keeps inputs and outputs of the selected modules, in their structure.

    A state is a copy-on-write view: it takes no memory until it or the model's tensor is written to, and keeps its
    values when the model writes. With `dtype`, `device` or `reduce` it is converted first; copies from a GPU to the CPU
    are asynchronous. Quantized, sparse and nested tensors and subclasses are copied at once. A tensor that cannot be
    copied or converted is replaced with None and reported once for its module.

    Args:
        modules: The modules to capture from.
        what: ``"input"``, ``"output"``, ``"both"``, or a list of the first two.
        layer_idx: A number that is stored with each state.
        max_captured_states: The number of states that this hook keeps; None for the manager's limit.
        dtype: Convert floating-point tensors to this dtype.
        device: Copy tensors to this device.
        clone: Copy at once instead of at the first write.
        reduce: ``"batch_mean"``, ``"first"``, ``"last_token"``, or a function of a tensor.
        detach: Whether states are detached from autograd. False keeps the module's own tensors with their graph, for
            gradients with respect to an activation; later writes by the model then show in them.
        save: When a run ends, write the kept states to its directory, as ``captures/<name>.safetensors``.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    name = "capture"
    built_in = True

    def __init__(
        self,
        modules: Any = "*",
        what: str | Sequence[str] = "output",
        layer_idx: int | None = None,
        max_captured_states: NonNegativeInt | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        clone: bool = False,
        reduce: str | Callable[[Tensor], Tensor] | None = None,
        save: bool = False,
        detach: bool = True,
    ) -> None:
        super().__init__(modules)
        self.what, self.layer_idx, self.max_captured_states = what, layer_idx, max_captured_states
        self.dtype, self.device, self.clone, self.reduce, self.save = dtype, device, clone, reduce, save
        if not save:
            self.on_train_end = None  # type: ignore[assignment] # do not listen to this event
        self._dtype, self._device, self._reduce = _parse_dtype(dtype), _parse_device(device), _parse_reduction(reduce)
        self._converts = dtype is not None or device is not None or clone or reduce is not None
        self.detach = detach
        if not detach and self._converts:
            problem = "False keeps the tensors themselves"
            raise ConfigError("detach", f"{problem}; leave out dtype, device, clone and reduce, or convert the states")
        self._calls: dict[str, Iterator[int]] = {}  # the numbers of the next calls, by module
        self._store = CaptureStore()
        parts = PARTS if what == "both" else (what,) if isinstance(what, str) else tuple(what)
        for part in parts:
            _parameters.one_of(part, (*PARTS, "both"), "what")
        self._parts = tuple(part for part in PARTS if part in parts)
        # Each method names only the arguments that are needed, so that compiled code passes no others.
        by_parts: dict[tuple[str, ...], Any] = {("input",): self._on_inputs, ("output",): self._on_output}
        self.on_forward: Any = by_parts.get(self._parts, self._on_both)

    def setup(self, registry: Any, name: str) -> None:
        """Use the manager's store and its limits."""
        super().setup(registry, name)
        self._store = getattr(registry, "captures", self._store)

    def on_train_end(self, trainer: RunControl) -> None:
        """Write the states that are kept."""
        if trainer.run_dir is None:
            logger.warning("hook %r cannot save its captures: the run has no directory", self._registered_name)
        elif states := self.states:
            leave_out = partial(self._pass_over, what="cannot save")
            path = capture_file(trainer.run_dir, self._registered_name)
            trainer.record.defer(partial(save_states, states, path, leave_out))

    def close(self) -> None:
        """Remove the hook's states."""
        self.clear_states()

    @property
    def states(self) -> list[CapturedState]:
        """The captured states, oldest first."""
        return self._store.of(self._registered_name)

    def clear_states(self) -> None:
        """Remove the captured states."""
        self.take_states()

    def take_states(self) -> list[CapturedState]:
        """Remove and return the captured states."""
        return self._store.pop_all(self._registered_name)

    def _on_inputs(self, name: str, module: Any, inputs: Any, kwargs: Any, step: int, phase: str) -> None:
        self._capture(name, weakref.ref(module), step, phase, inputs, kwargs, None)

    def _on_output(self, name: str, module: Any, output: Any, step: int, phase: str) -> None:
        self._capture(name, weakref.ref(module), step, phase, None, None, output)

    def _on_both(self, name: str, module: Any, inputs: Any, kwargs: Any, output: Any, step: int, phase: str) -> None:
        self._capture(name, weakref.ref(module), step, phase, inputs, kwargs, output)

    def bind_module(self, name: str, module: torch.nn.Module, run: Any) -> Observe:
        """Return a function that captures a call, given the module's own inputs, keyword inputs and output."""
        module_ref, capture = weakref.ref(module), self._capture
        return lambda inputs, kwargs, output: capture(name, module_ref, run.step, run.phase, inputs, kwargs, output)

    def _capture(
        self, name: str, module: weakref.ref[Any], step: int, phase: str, inputs: Any, kwargs: Any, output: Any
    ) -> None:
        """Keep a state with copies of the parts that are wanted."""
        copies: list[HostCopy] = []
        copy = partial(self._copy, name, copies)
        if "input" in self._parts:
            inputs, kwargs = map_tensors(copy, inputs), map_tensors(copy, kwargs)
        else:
            inputs = kwargs = None
        output = map_tensors(copy, output) if "output" in self._parts else None
        call = next(self._calls.setdefault(name, itertools.count(1)))  # `next` is atomic: no two threads get one number
        values, thread = (inputs, kwargs, output), current_thread().name
        state = CapturedState(
            self._registered_name, name, self.layer_idx, module, call, step, phase, thread, values, copies
        )
        self._store.add(state, self.max_captured_states)

    def _copy(self, name: str, copies: list[HostCopy], tensor: Tensor) -> Tensor | None:
        if not self.detach and tensor.requires_grad:
            return tensor
        view = observer_view(tensor)
        kept = self._convert(view, copies) if self._converts and view is not None else view
        if kept is None:
            self._pass_over(name, tensor)
        return kept

    @torch.no_grad()
    def _convert(self, tensor: Tensor, copies: list[HostCopy]) -> Tensor | None:
        """Return a view as the parameters want it; None if its kind cannot be converted."""
        try:
            converted = tensor if self._reduce is None or not tensor.dim() else self._reduce(tensor)
            if self._dtype is not None and converted.is_floating_point():
                converted = converted.to(self._dtype)
            if self._device is not None and self._device.type == "cpu":
                copy = HostCopy(converted)
                if copy.host is not converted:
                    copies.append(copy)
                    return copy.host
            elif self._device is not None:
                converted = converted.to(self._device)
            return converted.clone() if (self.clone and converted is tensor) or _is_slice(converted) else converted
        except Exception as error:
            if not is_unsupported(tensor, error):
                raise
            return None


def _is_slice(tensor: Tensor) -> bool:
    """Return whether a tensor uses only part of its storage, so that keeping it would keep the whole storage alive."""
    try:
        return tensor.untyped_storage().nbytes() > tensor.nbytes
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and numbers have no single storage
        return False


def _parse_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    dtype = getattr(torch, given, None)
    if not isinstance(dtype, torch.dtype):
        choices = nearest(given, ["float32", "float16", "bfloat16", "float64"])
        raise ConfigError("dtype", f"unknown dtype {given!r}; {choices}")
    return dtype


def _parse_device(given: str | None) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except RuntimeError as error:
        raise ConfigError("device", f"unknown device {given!r}; pass one such as 'cpu' or 'cuda:0'") from error


def _parse_reduction(given: Any) -> Callable[[Tensor], Tensor] | None:
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    return REDUCTIONS[_parameters.one_of(given, tuple(REDUCTIONS), "reduce")]


# ---- for a block of code --------------------------------------------------------------------------------------------


class Cache:
    """The states captured in a block, by module name or glob. It can be read after the block, too.

    If several threads capture from one model at once, each cache has only the states of its thread. States of threads
    that do not capture themselves, such as the workers of a pool, are in every open cache.
    """

    def __init__(self, hook: Capture, model: torch.nn.Module) -> None:
        self.hook, self.model = hook, weakref.ref(model)  # weak, because the cache may outlive the model
        self.early_stop: EarlyStop | None = None
        self.thread = current_thread().name
        self.other_threads: set[str] = set()  # Threads that have their own cache for the model.
        self._states: list[CapturedState] | None = None  # once the block has ended

    @property
    def states(self) -> list[CapturedState]:
        """Every state, oldest first."""
        states = self.hook.states if self._states is None else self._states
        return [state for state in states if state.thread not in self.other_threads]

    def close(self) -> None:
        """Take the states over from the hook, at the end of the block."""
        self._states = self.hook.take_states()
        self._states = self.states

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; return None if `early_stop` ended the pass after the last selected module."""
        model = self.model()
        if model is None:
            raise HooklineError("the model of this cache no longer exists")
        return model(*args, **kwargs) if self.early_stop is None else self.early_stop.run(model, args, kwargs)

    def __getitem__(self, name: str) -> Any:
        """Return the last output of one module, or for a glob a dict of them (inputs if only these are captured)."""
        last = {state.name: state for state in self.states}
        if name in last:
            return last[name].main
        matching = {key: state.main for key, state in last.items() if fnmatchcase(key, name)}
        if not matching:
            raise HooklineError(f"nothing was captured from {name!r}; {nearest(name, last)}")
        return matching

    def __contains__(self, name: str) -> bool:
        return any(state.name == name for state in self.states)

    def __len__(self) -> int:
        return len(self.states)

    def save(self, path: str | Path) -> Path:
        """Write every captured tensor to a safetensors file, keyed ``module/call/part/index``."""
        return save_states(self.states, path)


class EarlyStop(ForwardHook):
    """Ends the forward pass of `Cache.run` when every selected module has run and was captured.

    Other threads that run the model at the same time are not stopped.
    """

    def __init__(self, modules: Any, num_modules: int) -> None:
        self.modules, self._num_modules = modules, num_modules
        self._local = threading.local()  # has the names of the modules that have run, in a thread that should stop

    def run(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's result, or None if the pass was stopped."""
        self._local.names = set()
        try:
            return model(*args, **kwargs)
        except ForwardStopped:
            return None
        finally:
            del self._local.names

    def on_forward(self, name: str) -> None:
        """Note that a module ran; stop after the last."""
        names = self._local.__dict__.get("names")
        if names is not None:
            names.add(name)
            if len(names) >= self._num_modules:
                raise ForwardStopped


_open_caches: list[Cache] = []  # The open caches of all models.
_open_caches_lock = threading.Lock()


@contextmanager
def capture_session(
    manager: ModelRegistry, model: torch.nn.Module, cache: Cache, early_stop: bool = False
) -> Iterator[None]:
    """Capture from a model until the block ends; then no hook is left on it.

    Args:
        manager: A manager that has no hooks yet.
        model: The model to capture from.
        cache: Gets the states.
        early_stop: Whether `Cache.run` ends the forward pass after the last selected module.
    """
    manager.dispatcher.compilable = False  # the block runs uncompiled, so nothing is prepared for graphs
    with _open_caches_lock:
        for other in _open_caches:
            if other.model() is cache.model() and other.thread != cache.thread:
                other.other_threads.add(cache.thread)
                cache.other_threads.add(other.thread)
        _open_caches.append(cache)
    try:
        with run_uncompiled():
            manager.watch(model)
            manager.register(cache.hook, "cache", on_error="raise" if early_stop else None)
            if early_stop:
                selected = manager.dispatcher.selected_by(manager.entry("cache"))
                cache.early_stop = EarlyStop(cache.hook.modules, len(selected))
                manager.register(cache.early_stop, "early_stop", after="cache", on_error="raise")
            yield
    finally:
        cache.close()  # takes the states, which removing the hook drops
        for name in manager:
            manager.remove(name)
        with _open_caches_lock:
            _open_caches.remove(cache)
