"""The modules that have our torch hooks, with their names, calls and timers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from hookline import _device
from hookline.core.dispatch import EventSlots
from hookline.core.entry import Entry
from hookline.core.patterns import select
from hookline.errors import HooklineError

OUTSIDE = "outside"  # The hooks of a module must be called outside of compiled graphs.
MAX_NESTED_CALLS = 100
_REMOVED = object()
# Returns the number of the backward pass that this thread runs. A forward pass inside it repeats one that hooks have
# seen (checkpointing); with a torch that does not tell, hooks see it again.
NO_BACKWARD = -1
backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_BACKWARD)


# ---- torch hooks -----------------------------------------------------------------------------------------------------


class TorchHook:
    """A callable for torch that lets its module be pickled and copied, and does not go with the copy.

    A copy of the module has in its place a method that takes anything and does nothing: the copy is not hooked, and
    what it computes is not attributed to the original. The method is Python's, so that a model saved while hooks were
    attached needs no Hookline where it is loaded. A function inside a function could not be pickled at all.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ForwardTorchHook(TorchHook):
    """The forward hook that torch calls: passes the call on to the hooks that are due.

    Compiled code checks before each run what it read here while it was traced. That is why the few values it needs are
    attributes of this object: to check them takes a third of the time that checking the `HookedModule` would take.
    """

    __name__ = "hookline_tap"  # Users find our torch hooks by this name.

    def __init__(self, hooked: HookedModule, slots: EventSlots) -> None:
        self.hooked, self._slots = hooked, slots
        self.wants = OUTSIDE  # What graphs pass to the module's hooks; see `compile.dynamo`.
        self.graph_id: torch.Tensor | None = None  # Identifies the module in graphs.
        self.stats_key = ""  # Identifies its row of compiled statistics while a graph is traced.
        self.stats_row: torch.Tensor | None = None
        self.stats_place: tuple[torch.Tensor, int] | None = None  # The table that the row is in, and its index.

    def __call__(self, module: Any, inputs: Any, kwargs: Any, output: Any = _REMOVED) -> Any:
        """Return the output that replaces the module's, None to keep it."""
        if is_dynamo_compiling():
            from hookline.activations.compile.dynamo import call_while_tracing

            return call_while_tracing(self, module, inputs, kwargs, output)
        if output is _REMOVED:  # Another thread has just removed the hook, and torch forgot that it takes keywords.
            return None
        hooked = self.hooked
        hooked.calls += 1
        dispatch, timer = self._slots.on_forward, hooked.timer
        measured = timer.end(module) if timer is not None else None
        return None if dispatch is None else dispatch(hooked, module, inputs, kwargs, output, measured)


class TimerTorchHook(TorchHook):
    """The forward pre-hook of a module whose calls are measured."""

    def __init__(self, timer: ModuleTimer) -> None:
        self._timer = timer

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        # A hook that measures breaks the graph at its module, and both torch hooks are called outside.
        if not is_dynamo_compiling():
            self._timer.begin(module)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What a call cost: seconds on the host, and the bytes it left allocated on the device, -1 if unknown."""

    seconds: float
    memory: int


class ModuleTimer(threading.local):
    """Measures the calls of one module: a stack per thread, because a module may run inside itself."""

    def __init__(self) -> None:
        self._started: list[tuple[int, int]] = []

    def begin(self, module: torch.nn.Module) -> None:
        """Start to measure a call."""
        if len(self._started) > MAX_NESTED_CALLS:  # Left behind by calls that ended in an exception.
            self._started.clear()
        self._started.append((perf_counter_ns(), _allocated(module)))

    def end(self, module: torch.nn.Module) -> Measured | None:
        """Return what the call cost, None if its start was not seen."""
        if not self._started:
            return None
        started, allocated = self._started.pop()
        seconds = (perf_counter_ns() - started) / 1e9
        now = _allocated(module) if allocated >= 0 else -1
        return Measured(seconds, now - allocated if now >= 0 else -1)


def _allocated(module: torch.nn.Module) -> int:
    parameter = next(module.parameters(), None)
    allocated = None if parameter is None else _device.memory_allocated(parameter.device)
    return -1 if allocated is None else allocated


# ---- one module ------------------------------------------------------------------------------------------------------


class HookedModule:
    """One module that forward hooks select; it does not keep the module alive."""

    def __init__(self, name: str, module: torch.nn.Module, slots: EventSlots) -> None:
        self.name = name
        self.names: dict[str, str] = {}  # By hook, where it differs: a module passed as an object has the hook's name.
        self.calls = 0
        self.fired: dict[str, int] = {}  # How often each hook was called here and returned without an error.
        self.module_ref = weakref.ref(module)
        self.timer: ModuleTimer | None = None
        self.torch_hook = ForwardTorchHook(self, slots)
        self._handle: RemovableHandle | None = None
        self._timer_handle: RemovableHandle | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        return self.module_ref()

    @property
    def attached(self) -> bool:
        return self._handle is not None

    def name_for(self, hook: str) -> str:
        """Return the module's name as a hook sees it."""
        return self.names.get(hook, self.name)

    def attach(self, measure: bool = False) -> None:
        """Put the torch hook on the module if it is not there, and the one that measures calls if `measure`."""
        module = self.module_ref()
        if module is None:
            return
        if measure != (self._timer_handle is not None):
            self._stop_measuring()
            if measure:
                self.timer = ModuleTimer()
                self._timer_handle = module.register_forward_pre_hook(TimerTorchHook(self.timer))
        if self._handle is None:
            self._handle = module.register_forward_hook(self.torch_hook, with_kwargs=True)

    def take_off(self) -> None:
        """Remove the torch hook; `attach` puts it back."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def detach(self) -> None:
        """Remove every torch hook and withdraw the module from compiled graphs."""
        self.take_off()
        self._stop_measuring()
        if self.torch_hook.graph_id is not None:
            from hookline.activations.compile.dynamo import leave_graphs

            leave_graphs(self.torch_hook)

    def _stop_measuring(self) -> None:
        if self._timer_handle is not None:
            self._timer_handle.remove()
        self.timer = self._timer_handle = None


# ---- all modules -----------------------------------------------------------------------------------------------------


class HookedModules:
    """The modules that a registry's forward hooks select: those of one model by name, and modules passed as objects."""

    def __init__(self, slots: EventSlots) -> None:
        self._slots = slots
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._hooked: weakref.WeakKeyDictionary[torch.nn.Module, HookedModule] = weakref.WeakKeyDictionary()
        self._selected: dict[str, tuple[Entry, list[HookedModule]]] = {}

    @property
    def model(self) -> torch.nn.Module | None:
        return None if self._model is None else self._model()

    def __iter__(self) -> Iterator[HookedModule]:
        return iter(list(self._hooked.values()))

    def watch(self, model: torch.nn.Module) -> None:
        """Resolve patterns against this model; the torch hooks on another one are removed."""
        if self.model is not model:
            for hooked in self:
                hooked.detach()
            self._hooked.clear()
        self._model = weakref.ref(model)
        self._selected.clear()

    def check(self, entry: Entry, model: torch.nn.Module | None) -> None:
        """Raise if a hook's patterns match nothing in a model."""
        chosen = _select(entry, model)
        if model is not self.model:
            return
        # `selected_by` will be called next.
        selected = []
        for name, module in chosen.items():
            hooked = self._hooked.get(module)
            if hooked is None:
                hooked = self._hooked[module] = HookedModule(name, module, self._slots)
            if name != hooked.name:
                hooked.names[entry.name] = name
            selected.append(hooked)
        self._selected[entry.name] = (entry, selected)

    def selected_by(self, entry: Entry) -> list[HookedModule]:
        """Return the modules that a hook selects."""
        selected = self._selected.get(entry.name)
        if selected is None or selected[0] is not entry:
            self.check(entry, self.model)
            selected = self._selected[entry.name]
        return selected[1]

    def forget_others(self, entries: Iterable[Entry]) -> None:
        """Forget what removed hooks selected."""
        staying = {id(entry) for entry in entries}
        for name in [name for name, (entry, _) in self._selected.items() if id(entry) not in staying]:
            for hooked in self._selected.pop(name)[1]:
                hooked.names.pop(name, None)


def _select(entry: Entry, model: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
    """Return what `modules` selects, by name; a pattern selects nothing as long as there is no model."""
    pattern = getattr(entry.hook, "modules", "*")
    patterns = list(pattern) if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
    if not patterns or None in patterns:
        raise HooklineError(f"hook {entry.name!r}: modules={pattern!r} selects nothing; '*' selects all")
    alive = [one() if isinstance(one, weakref.ref) else one for one in patterns]
    objects = [one for one in alive if isinstance(one, torch.nn.Module)]
    others = [one for one in alive if one is not None and not isinstance(one, torch.nn.Module)]
    named = dict(model.named_modules()) if model is not None else {}
    chosen = select(others, named, f"hook {entry.name!r}: module") if others and model is not None else {}
    if objects:
        names = {id(module): name for name, module in named.items()}
        for index, module in enumerate(objects):
            own = entry.name if len(objects) == 1 else f"{entry.name}.{index}"
            chosen[names.get(id(module)) or own] = module
    return chosen


def weak_selection(modules: Any) -> Any:
    """Return the same `modules` selection with weak references to modules that are passed as objects."""
    if isinstance(modules, (list, tuple)):
        return [weak_selection(one) for one in modules]
    return weakref.ref(modules) if isinstance(modules, torch.nn.Module) else modules


# ---- the module that runs --------------------------------------------------------------------------------------------


class RunningModules:
    """The modules of a model that are running now, outermost first, separately for each thread."""

    def __init__(self) -> None:
        self.entered = 0  # Modules that started to run, in all threads.
        self._local = threading.local()

    @property
    def innermost(self) -> torch.nn.Module | None:
        """The module that this thread is in; None outside of the model and in passes that backward repeats."""
        stack = self._stack
        return stack[-1] if stack and backward_id() == NO_BACKWARD else None

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Follow the model's modules inside the block, with two torch hooks on each of them."""
        with ExitStack() as attached:
            for module in model.modules():
                attached.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                attached.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    @property
    def _stack(self) -> list[torch.nn.Module]:
        stack: list[torch.nn.Module] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self.entered += 1
        self._stack.append(module)

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # Modules inside that were left by a BaseException (an early stop, Ctrl-C) did not call this: pop them, too.
        stack = self._stack
        while stack and stack.pop() is not module:
            pass
