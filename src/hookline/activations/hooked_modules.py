"""The torch hooks that Hookline puts on modules, what it stores about such a module, and how hooks select modules."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from hookline import _device
from hookline._names import plain_modules, unwrap_module
from hookline.core.base import hook_attribute
from hookline.core.dispatch import EventSlots
from hookline.core.entry import Entry
from hookline.core.patterns import select
from hookline.errors import HooklineError

OUTSIDE = "outside"  # The hooks of a module must be called outside of compiled graphs.
MAX_NESTED_CALLS = 100
_REMOVED = object()
# Returns the number of the backward pass that this thread runs. A forward pass inside it repeats one that hooks have
# seen (checkpointing); if torch does not report it, hooks see the pass again.
NO_BACKWARD = -1
backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_BACKWARD)


# ---- torch hooks -----------------------------------------------------------------------------------------------------


class TorchHook:
    """A callable for torch that allows its module to be pickled and copied, and that the copy leaves out.

    A copy of the module has in its place a method that takes anything and does nothing: the copy is not hooked, and
    what it computes is not attributed to the original. The method is Python's, so that a model saved while hooks were
    attached needs no Hookline where it is loaded. A function inside a function could not be pickled at all.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Measured(NamedTuple):
    """The cost of a call: seconds on the host, and the bytes it left allocated on the device, -1 if unknown."""

    seconds: float
    memory: int


class ModuleTimer(TorchHook):
    """The forward pre-hook of a module whose calls are measured: a stack of starts in each thread.

    It is a stack because a module may run inside itself.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Start to measure a call."""
        # A hook that measures breaks the graph at its module, and both torch hooks are called outside.
        if is_dynamo_compiling():
            return
        starts = self._local.__dict__.setdefault("starts", [])
        if len(starts) > MAX_NESTED_CALLS:  # These were left behind by calls that ended in an exception.
            starts.clear()
        starts.append((perf_counter_ns(), _allocated(module)))

    def end(self, module: torch.nn.Module) -> Measured | None:
        """Return the cost of the call, or None if its start was not seen."""
        starts = self._local.__dict__.get("starts")
        if not starts:
            return None
        started, allocated = starts.pop()
        seconds = (perf_counter_ns() - started) / 1e9
        return Measured(seconds, -1 if allocated < 0 else _allocated(module) - allocated)


def _allocated(module: torch.nn.Module) -> int:
    parameter = next(module.parameters(), None)
    allocated = None if parameter is None else _device.memory_allocated(parameter.device)
    return -1 if allocated is None else allocated


# ---- one module ------------------------------------------------------------------------------------------------------


Register: TypeAlias = "Callable[[torch.nn.Module, HookedModule], Any]"
"""Has torch call a hook after the forward of its module; returns an object whose `remove` takes the hook off."""


def register_on_module(module: torch.nn.Module, hook: HookedModule) -> RemovableHandle:
    """Put a forward hook on its module."""
    return module.register_forward_hook(hook, with_kwargs=True)


class HookedModule(TorchHook):
    """One module that forward hooks select, and the forward hook that torch calls: it passes the call on to them.

    It does not keep the module alive.

    Args:
        module: The module.
        slots: Where the forward hooks that are due are found.
        register: Has torch call this hook after the module's forward.
    """

    __name__ = "hookline_forward_hook"  # Users find our torch hooks by this name.

    def __init__(self, module: torch.nn.Module, slots: EventSlots, register: Register) -> None:
        self.calls = 0
        self.fired: Counter[str] = Counter()  # How often each hook was called here and returned without an error.
        self.module_ref = weakref.ref(module)
        self.timer: ModuleTimer | None = None
        self.handle: Any = None  # The torch hook's handle, while it is on the module.
        self._timer_handle: RemovableHandle | None = None
        self._register = register
        # Torch keeps this object alive as long as the module, so it must keep no other object alive. When the
        # manager is gone, so are the slots, and the dispatcher's finalizer detaches.
        self._slots = weakref.ref(slots)
        # Before each run, compiled code checks the attributes that it read here while it was traced.
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
        if output is _REMOVED:  # Another thread has just removed the hook; torch has forgotten that it takes keywords.
            return None
        self.calls += 1  # Even if no hook is due, for the fire report: it says which modules never ran.
        slots, timer = self._slots(), self.timer
        dispatch = None if slots is None else slots.on_forward
        measured = timer.end(module) if timer is not None else None
        return None if dispatch is None else dispatch(self, module, inputs, kwargs, output, measured)

    def update(self, attached: bool, measured: bool = False, returns: bool = False) -> None:
        """Put torch hooks on the module, or remove them, where the state differs.

        Args:
            attached: Whether a hook selects the module.
            measured: Whether its calls are measured.
            returns: Whether hooks that are detached are attached again later; graphs of the module then stay valid.
        """
        module = self.module_ref()
        if self._timer_handle is not None and not measured:
            self._timer_handle.remove()
            self.timer = self._timer_handle = None
        if self.handle is not None and not attached:
            self.handle.remove()
            self.handle = None
        if module is not None and self._timer_handle is None and measured:
            self.timer = ModuleTimer()
            self._timer_handle = module.register_forward_pre_hook(self.timer)
        if module is not None and self.handle is None and attached:
            self.handle = self._register(module, self)
        if self.graph_id is not None and not attached and not returns:
            from hookline.activations.compile.dynamo import leave_graphs

            leave_graphs(self)


# ---- selecting modules -----------------------------------------------------------------------------------------------


def patterns_of(entry: Entry) -> list[Any]:
    """Return the patterns and modules that a hook selects by, modules as weak references."""
    pattern = hook_attribute(entry.hook, "modules")
    return list(pattern) if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]


def select_modules(entry: Entry, model: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
    """Return the modules that `modules` selects, by name; a pattern selects nothing without a model."""
    patterns = patterns_of(entry)
    if not patterns or None in patterns:
        raise HooklineError(f"hook {entry.name!r}: modules={entry.hook.modules!r} selects nothing; '*' selects all")
    alive = [pattern() if isinstance(pattern, weakref.ref) else pattern for pattern in patterns]
    objects = [pattern for pattern in alive if isinstance(pattern, torch.nn.Module)]
    others = [pattern for pattern in alive if pattern is not None and not isinstance(pattern, torch.nn.Module)]
    named = plain_modules(model) if model is not None else {}
    chosen = select(others, named, f"hook {entry.name!r}: module") if others and model is not None else {}
    if objects:
        names = {id(module): name for name, module in named.items()}
        for index, module in enumerate(objects):
            fallback = entry.name if len(objects) == 1 else f"{entry.name}.{index}"
            inner = unwrap_module(module)  # As in patterns, a wrapper stands for the module inside it.
            chosen[names.get(id(inner)) or fallback] = inner
    return chosen


def weak_selection(modules: Any) -> Any:
    """Return the same `modules` selection with weak references to modules that are passed as objects."""
    if isinstance(modules, (list, tuple)):
        return [weak_selection(pattern) for pattern in modules]
    return weakref.ref(modules) if isinstance(modules, torch.nn.Module) else modules
