"""The capture hook: keep copies of the inputs and outputs of modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import _checks
from hookline._console import logger
from hookline._host_copy import HostCopy
from hookline._tensors import is_unsupported, map_tensors
from hookline._words import nearest
from hookline.activations.capture_store import CapturedState, CaptureSource, CaptureStore, capture_file, save_states
from hookline.activations.cow_views import observer_view
from hookline.activations.forward_hooks import BuiltInForwardHook, Observe
from hookline.errors import ConfigError

if TYPE_CHECKING:
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
    are asynchronous. Quantized, sparse and nested tensors and subclasses are copied at once. None takes the place of
    one that cannot be copied or converted, which is reported once for its module.

    Args:
        modules: The modules to capture from.
        what: ``"input"``, ``"output"``, ``"both"``, or a list of the first two.
        layer_idx: A number that is stored with each state.
        max_captured_states: How many states this hook keeps; None for the manager's limit.
        dtype: Convert floating-point tensors to this dtype.
        device: Copy tensors to this device.
        clone: Copy at once instead of at the first write.
        reduce: ``"batch_mean"``, ``"first"``, ``"last_token"``, or a function of a tensor.
        save: Write the states that are kept when a run ends to its directory, as ``captures/<name>.safetensors``.

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
        max_captured_states: int | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        clone: bool = False,
        reduce: str | Callable[[Tensor], Tensor] | None = None,
        save: bool = False,
    ) -> None:
        super().__init__(modules)
        self.what, self.layer_idx = what, layer_idx
        self.max_captured_states = _checks.optional(
            _checks.integer, max_captured_states, "max_captured_states", at_least=0
        )
        self.dtype, self.device, self.clone, self.reduce, self.save = dtype, device, clone, reduce, save
        if not save:
            self.on_train_end = None  # type: ignore[assignment] # do not listen to this event
        self._dtype, self._device, self._reduce = _parse_dtype(dtype), _parse_device(device), _parse_reduction(reduce)
        self._converts = dtype is not None or device is not None or clone or reduce is not None
        self._calls: dict[str, Iterator[int]] = {}  # the numbers of the next calls, by module
        self._store = CaptureStore()
        parts = PARTS if what == "both" else (what,) if isinstance(what, str) else tuple(what)
        for part in parts:
            _checks.one_of(part, (*PARTS, "both"), "what")
        self._parts = tuple(part for part in PARTS if part in parts)
        # Each method names only the arguments that are needed, so that no other views are made.
        listeners = {("input",): self._on_inputs, ("output",): self._on_output, PARTS: self._on_both}
        self.on_forward: Any = listeners[self._parts]

    def setup(self, registry: Any, name: str) -> None:
        """Use the manager's store and its limits."""
        super().setup(registry, name)
        self._store = getattr(registry, "captures", self._store)

    def on_train_end(self, trainer: RunControl) -> None:
        """Write the states that are kept."""
        if trainer.run_dir is None:
            logger.warning("hook %r cannot save what it captured: the run has no directory", self._registered_name)
        elif states := self.states:
            leave_out = partial(self._pass_over, what="cannot save")
            save_states(states, capture_file(trainer.run_dir, self._registered_name), leave_out)

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
        self._convert_and_add(name, module, step, phase, (inputs, kwargs, None))

    def _on_output(self, name: str, module: Any, output: Any, step: int, phase: str) -> None:
        self._convert_and_add(name, module, step, phase, (None, None, output))

    def _on_both(self, name: str, module: Any, inputs: Any, kwargs: Any, output: Any, step: int, phase: str) -> None:
        self._convert_and_add(name, module, step, phase, (inputs, kwargs, output))

    def bind_module(self, name: str, module: torch.nn.Module, run: Any) -> Observe | None:
        """Return `on_forward` for one module with everything looked up; None if tensors are converted.

        The function is called with the module's own inputs, keyword inputs and output.
        """
        if self._converts:
            return None
        source = CaptureSource(self._registered_name, name, self.layer_idx, weakref.ref(module))
        with_inputs, with_output = "input" in self._parts, "output" in self._parts
        calls, add, limit = self._calls, self._store.add, self.max_captured_states
        calls.setdefault(name, itertools.count(1))  # `next` is atomic: no two threads get one number
        copy = partial(self._copy, name)

        def capture(inputs: Any, kwargs: Any, output: Any) -> None:
            if with_inputs:
                inputs, kwargs = map_tensors(copy, inputs), map_tensors(copy, kwargs)
            else:
                inputs = kwargs = None
            if not with_output:
                output = None
            elif type(output) is Tensor:  # nearly always
                output = copy(output)
            else:
                output = map_tensors(copy, output)
            add(CapturedState(source, next(calls[name]), run.step, run.phase, (inputs, kwargs, output)), limit)

        return capture

    def _copy(self, name: str, tensor: Tensor) -> Tensor | None:
        view = observer_view(tensor)
        if view is None:
            self._pass_over(name, tensor)
        return view

    def _convert_and_add(
        self, name: str, module: torch.nn.Module, step: int, phase: str, values: tuple[Any, Any, Any]
    ) -> None:
        copies: list[HostCopy] = []
        if self._converts:
            values = map_tensors(lambda tensor: self._convert_or_pass_over(name, tensor, copies), values)
        source = CaptureSource(self._registered_name, name, self.layer_idx, weakref.ref(module))
        call = next(self._calls.setdefault(name, itertools.count(1)))
        self._store.add(CapturedState(source, call, step, phase, values, copies), self.max_captured_states)

    def _convert_or_pass_over(self, name: str, tensor: Tensor, copies: list[HostCopy]) -> Tensor | None:
        try:
            return self._convert(tensor, copies)
        except Exception as error:
            if not is_unsupported(tensor, error):
                raise
            self._pass_over(name, tensor)
            return None

    def _convert(self, tensor: Tensor, copies: list[HostCopy]) -> Tensor:
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


def _is_slice(tensor: Tensor) -> bool:
    """Return whether a tensor uses a part of its storage, so that keeping it would keep the whole storage alive."""
    try:
        return tensor.untyped_storage().nbytes() > tensor.nbytes
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and numbers have no single storage
        return False


def _parse_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given, None)
    if not isinstance(found, torch.dtype):
        choices = nearest(given, ["float32", "float16", "bfloat16", "float64"])
        raise ConfigError("dtype", f"unknown dtype {given!r}; {choices}")
    return found


def _parse_device(given: str | None) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except RuntimeError as error:
        raise ConfigError("device", f"unknown device {given!r}; give one such as 'cpu' or 'cuda:0'") from error


def _parse_reduction(given: Any) -> Callable[[Tensor], Tensor] | None:
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    return REDUCTIONS[_checks.one_of(given, tuple(REDUCTIONS), "reduce")]
