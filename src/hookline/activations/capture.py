"""The capture hook: keeps what modules get and give, as it was at that moment."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.activations.captured import (
    CallNumbers,
    CapturedState,
    CaptureStore,
    Origin,
    Record,
    check_limit,
    state_of,
    thread_name,
)
from hookline.activations.copies import copy_on_write, mapped, shares_memory
from hookline.activations.direct import Keep, Recorder
from hookline.activations.moment import tensors_in
from hookline.activations.saved_states import file_of_hook, save_states
from hookline.activations.site import Site
from hookline.activations.sites import weakly
from hookline.errors import ConfigError, nearest
from hookline.registry.base import ForwardHook

PARTS = ("input", "output")

logger = logging.getLogger("hookline")

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_mean": lambda tensor: tensor.float().mean(0),
    "first": lambda tensor: tensor[:1],
    "last_token": lambda tensor: tensor[:, -1],
}


class Capture(ForwardHook):
    """Keeps inputs and outputs of the selected modules, in their structure.

    A state is a copy-on-write view: it costs nothing until somebody writes, and stays true when the model does. With
    `dtype`, `device` or `reduce` it is made smaller or moved first; from a GPU to the CPU asynchronously. With `save`
    what is kept when a run ends is written to its directory, as ``captures/<name>.safetensors``.
    """

    built_in = True
    name = "capture"

    def __init__(
        self,
        modules: Any = "*",
        what: str | Sequence[str] = "output",
        layer_idx: int | None = None,
        max_captured_states: int | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        clone: bool = False,
        reduce: str | Callable[[torch.Tensor], torch.Tensor] | None = None,
        save: bool = False,
    ) -> None:
        self.modules = weakly(modules)
        self.what = what
        self.layer_idx = layer_idx
        self.max_captured_states = max_captured_states
        self.dtype, self.device, self.clone, self.reduce, self.save = dtype, device, clone, reduce, save
        if not save:
            self.on_train_end = None  # type: ignore[assignment] # it need not hear it
        parts = _parts(what)
        check_limit("max_captured_states", max_captured_states)
        self._change = _changes(_dtype(dtype), _device(device), clone, _reduction(reduce))
        self._calls: dict[str, CallNumbers] = {}  # of each module
        self._own_name, self._store = self.name, CaptureStore()
        self._shelf = self._store.new_shelf(self._calls, max_captured_states)
        self._parts = parts
        self._copies = SharedCopies(parts == PARTS)
        # The method names only what is asked for, so nothing else is made.
        methods = {("input",): self._inputs, ("output",): self._outputs, ("input", "output"): self._both}
        self.on_forward: Any = methods[parts]

    def setup(self, registry: Any, name: str) -> None:
        """Share the manager's budgets."""
        store = getattr(registry, "captures", self._store)
        if store is not self._store:
            self._store, self._shelf = store, store.new_shelf(self._calls, self.max_captured_states)
        self._own_name = name
        store.put_up(name, self._shelf)

    def on_train_end(self, trainer: Any) -> None:
        """Write what is kept, if that was asked for."""
        if trainer.run_dir is None:
            logger.warning("hook %r has nowhere to save what it captured: the run has no record", self._own_name)
        elif states := self.states:
            save_states(states, file_of_hook(trainer.run_dir, self._own_name))

    def close(self) -> None:
        """Nothing survives the hook."""
        self._store.take_down(self._own_name)

    @property
    def states(self) -> list[CapturedState]:
        """What was captured, oldest first."""
        return self._store.of(self._own_name)

    def hand_over(self) -> list[CapturedState | Record]:
        """Give away what was captured, and begin anew: calls are counted from 1 again."""
        kept = self._shelf.take_all()
        self._shelf.start_over()
        return kept

    def _inputs(self, name: str, module: Any, inputs: Any, kwargs: Any, step: int, phase: str) -> None:
        self._keep(name, module, step, phase, (inputs, kwargs, None))

    def _outputs(self, name: str, module: Any, output: Any, step: int, phase: str) -> None:
        self._keep(name, module, step, phase, (None, None, output))

    def _both(self, name: str, module: Any, inputs: Any, kwargs: Any, output: Any, step: int, phase: str) -> None:
        self._keep(name, module, step, phase, (inputs, kwargs, output))

    def _keep(self, name: str, module: torch.nn.Module, step: int, phase: str, taken: tuple[Any, Any, Any]) -> None:
        ready: Sequence[torch.cuda.Event] = ()  # behind the copies to the host
        if self._change is not None:
            devices = {tensor.device for tensor in tensors_in(taken) if tensor.is_cuda} if self.device == "cpu" else ()
            taken = (mapped(self._change, taken[0]), mapped(self._change, taken[1]), mapped(self._change, taken[2]))
            ready = [torch.cuda.current_stream(device).record_event() for device in devices]
        origin, call = self._origin(name, weakref.ref(module)), self._numbers(name).next()
        self._store.add(CapturedState(origin, call, step, phase, taken, ready), self.max_captured_states)

    def shortcut(self, site: Site, tap: Any) -> Keep | None:
        """The same as `on_forward` with everything looked up beforehand; None when states are changed first.

        The tap calls it with the live inputs, keyword inputs and output.
        """
        if self._change is not None:
            return None
        name = site.name_for(self._own_name)
        origin, numbers = self._origin(name, site.module_ref), self._numbers(name)
        site.fired.follow(self._own_name, numbers)
        put = self._shelf.append if self._store.takes_records else self._put
        with_output, copies = "output" in self._parts, self._copies

        def keep_output(inputs: Any, kwargs: Any, output: Any) -> None:
            kept = copy_on_write(output) if type(output) is Tensor else mapped(copy_on_write, output)
            run = tap.run
            put((origin, numbers.next(), run.step, run.phase, thread_name(), kept))

        def keep_inputs(inputs: Any, kwargs: Any, output: Any) -> None:
            got, by_name = copies.known(inputs), copies.known(kwargs) if kwargs else {}
            kept = copies.new(output) if with_output else None
            run = tap.run
            put((origin, numbers.next(), run.step, run.phase, thread_name(), kept, got, by_name))

        if "input" in self._parts:
            return keep_inputs
        return Recorder.of(keep_output, origin, numbers, put) if self._store.takes_records else keep_output

    def _put(self, record: Record) -> None:
        self._store.add(state_of(record), self.max_captured_states)

    def _origin(self, name: str, module: weakref.ref[torch.nn.Module]) -> Origin:
        return Origin(self._own_name, name, self.layer_idx, module)

    def _numbers(self, name: str) -> CallNumbers:
        """The numbers of a module's calls; two threads get the same."""
        return self._calls.get(name) or self._calls.setdefault(name, CallNumbers())


class SharedCopies:
    """Copies of what modules get and give; where both are wanted, an output that is the next input is copied once."""

    def __init__(self, share: bool) -> None:
        self._share = share
        self._last: tuple[weakref.ref[torch.Tensor], int, weakref.ref[torch.Tensor]] | None = None

    def new(self, value: Any) -> Any:
        """Copy an output."""
        if not isinstance(value, torch.Tensor):
            return mapped(copy_on_write, value)
        made = copy_on_write(value)
        if self._share and type(value) is Tensor and not value.is_inference():  # others' writes may go unseen
            self._last = weakref.ref(value), value._version, weakref.ref(made)
        return made

    def known(self, value: Any) -> Any:
        """Copy inputs, unless they are the last output as it was."""
        return mapped(self._known, value)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        last = self._last  # another thread may replace it
        if last is not None and last[0]() is tensor and last[1] == tensor._version:
            made = last[2]()
            if made is not None and shares_memory(tensor, made):
                return made
        return copy_on_write(tensor)


def _changes(
    dtype: torch.dtype | None, device: str | None, clone: bool, reduce: Callable[[torch.Tensor], torch.Tensor] | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if dtype is None and device is None and not clone and reduce is None:
        return None

    def change(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor if reduce is None or not tensor.dim() else reduce(tensor)
        if dtype is not None and made.is_floating_point():
            made = made.to(dtype)
        if device is not None:
            made = _moved(made, device)
        return made.clone() if (clone and made is tensor) or _is_part(made) else made

    return change


def _is_part(made: torch.Tensor) -> bool:
    """Whether a tensor keeps more memory than it shows: a slice would hold the whole, and count for it."""
    try:
        return made.untyped_storage().nbytes() > made.nbytes
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse ones have no one storage; a number has none
        return False


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.device.type == "cuda" and device == "cpu":
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.to(device)


def _parts(what: str | Sequence[str]) -> tuple[str, ...]:
    given = PARTS if what == "both" else (what,) if isinstance(what, str) else tuple(what)
    for part in given:
        if part not in PARTS:
            raise ConfigError("what", f"{part!r} cannot be captured; {nearest(str(part), [*PARTS, 'both'])}")
    return tuple(part for part in PARTS if part in given)


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            "dtype", f"{given!r} is no dtype; {nearest(given, ['float32', 'float16', 'bfloat16', 'float64'])}"
        )
    return found


def _device(given: str | None) -> str | None:
    if given is not None:
        try:
            torch.device(given)
        except RuntimeError as error:
            raise ConfigError("device", f"{given!r} is no device; give one such as 'cpu' or 'cuda:0'") from error
    return given


def _reduction(given: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    if given not in REDUCTIONS:
        raise ConfigError("reduce", f"{given!r} is no reduction; {nearest(str(given), REDUCTIONS)}")
    return REDUCTIONS[given]
