"""Statistics of modules that compiled code computes itself, and that hooks get when it has run.

Where hooks need nothing of a module but statistics of its output, and the output is on a GPU, the graph gets a kernel
instead of a call into Python. Once a run, before its first such kernel, the graph asks which hooks are due; the answer
is a number on the device that every kernel reads, so that one graph serves all schedules. The rows of all modules are
taken together when the step is over, when a hook reads them, or when another step begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookline._device import cached_table
from hookline.activations.compile.custom_ops import give_back_id, take_id, warn_once
from hookline.activations.compile.stats_ops import FIRST, LATER, REFUSED, forget_key, new_key
from hookline.activations.hooked_modules import HookedModule
from hookline.core.dispatch import BoundHook
from hookline.stats.rows import has_kernels

if TYPE_CHECKING:
    from hookline.activations.forward_hooks import ForwardDispatcher
    from hookline.activations.monitor import Monitor


class DueHook(NamedTuple):
    """A hook that is due, with its modules."""

    hook: str
    monitor: Monitor  # Needs statistics and nothing else.
    modules: frozenset[tuple[HookedModule, str]]  # With the names under which the hook sees them.


class Pending(NamedTuple):
    """The step that the rows belong to, and the hooks that get them."""

    step: int
    hooks: tuple[DueHook, ...]


class CompiledStats:
    """Has a row for every module whose statistics compiled code computes, all on the device that comes first.

    One thread runs the model at a time: two threads with different due hooks would share their rows.
    """

    def __init__(self, dispatcher: ForwardDispatcher) -> None:
        self.key = new_key(self)  # What the torch hooks of its modules want.
        self.graph_id: Tensor | None = None
        self.due_flag: Tensor | None = None
        self._dispatcher = weakref.ref(dispatcher)
        self._modules: tuple[HookedModule, ...] = ()
        self._pending: Pending | None = None
        self._flag_value = 0  # What `due_flag` holds.
        self._addresses: Tensor | None = None  # Of the rows, on the device.
        # The calls of the modules, on the device: by the hooks that were due, and all that no report has counted yet.
        self._counts: dict[tuple[DueHook, ...], Tensor] = {}
        self._uncounted: list[tuple[tuple[HookedModule, ...], tuple[DueHook, ...], Tensor]] = []
        self._rows_of: dict[DueHook, tuple[list[str], tuple[int, ...]]] = {}  # Names and indices of a hook's rows.
        self._due: tuple[Sequence[BoundHook], list[DueHook]] = (), []
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._last_graph: weakref.ref[Any] | None = None
        self._lock = threading.RLock()

    def serve(self, modules: Sequence[HookedModule], model: torch.nn.Module | None = None) -> None:
        """Have rows for these modules and no others; `model` is what they are part of."""
        with self._lock:
            self._model = None if model is None else weakref.ref(model)
            if tuple(modules) != self._modules:
                self._take()
                self._set_modules(tuple(modules))
                self._make_rows()

    def close(self) -> None:
        """Free the device's memory and drop what was not delivered."""
        with self._lock:
            if self.graph_id is not None:
                give_back_id(self.graph_id)
            self.graph_id = self.due_flag = self._pending = None
            self._flag_value = 0
            self._set_modules(())
            forget_key(self.key)
            self.key = new_key(self)

    def _set_modules(self, modules: tuple[HookedModule, ...]) -> None:
        self._modules, self._addresses, self._counts, self._rows_of = modules, None, {}, {}

    # ---- while a graph is traced ---------------------------------------------------------------------------------

    def admit(self, device: torch.device) -> str:
        """Return whether a graph may add outputs on this device, and whether it asks for the first time."""
        if self.due_flag is None and has_kernels(device):
            self._open_on(device)
        if self.due_flag is None or self.due_flag.device != device:
            return REFUSED
        graph = _traced_graph()
        if graph is None or (self._last_graph is not None and self._last_graph() is graph):
            return LATER
        self._last_graph = weakref.ref(graph)
        return FIRST

    def is_whole_model(self) -> bool:
        """Return whether the graph that is being traced begins with the model's own code, not with that of a block."""
        model, graph = self._model() if self._model is not None else None, _traced_graph()
        code = getattr(model.forward, "__code__", None) if model is not None else None
        return code is not None and getattr(graph, "traced_code", [])[:1] == [code]

    def _open_on(self, device: torch.device) -> None:
        from hookline.stats.cuda_accumulators import make_flag

        flag = make_flag(device)
        try:
            from hookline.activations.compile.fuse_stats_pass import install  # Imports inductor.

            install()
            _traced_graph()
            _keep_address(flag)
        except (ImportError, AttributeError) as error:
            warn_once(error)
            return
        with self._lock:
            self.graph_id, self.due_flag = take_id(self), flag
            self._make_rows()

    def _make_rows(self) -> None:
        """Make the rows of all modules at once: blocks that share a graph must look the same to it."""
        hooks = [hooked.torch_hook for hooked in self._modules if hooked.torch_hook.stats_row is None]
        if self.due_flag is None or not hooks:
            return
        from hookline.stats.cuda_accumulators import make_accumulators

        table, rows = make_accumulators(len(hooks), self.due_flag.device)
        _keep_address(table, *rows)
        for index, (hook, row) in enumerate(zip(hooks, rows, strict=True)):
            hook.stats_row, hook.stats_place = row, (table, index)

    # ---- when a graph runs ---------------------------------------------------------------------------------------

    def begin(self, due_flag: Tensor) -> None:
        """Start a run of a graph: set whether a hook is due, and deliver what belongs to another step."""
        pending = self._due_now()
        with self._lock:
            if self._pending is not None and pending is not None and (pending != self._pending or not pending.step):
                self.deliver()
            self._pending = pending or self._pending
            if self._flag_value != bool(pending):
                self._flag_value = int(bool(pending))
                due_flag.fill_(self._flag_value)

    def _due_now(self) -> Pending | None:
        dispatcher = self._dispatcher()
        if dispatcher is None:
            return None
        hooks = dispatcher.due_hooks()
        if hooks is not self._due[0]:  # The same list for the same set of due hooks.
            due = []
            for hook in hooks:
                if getattr(hook.owner, "statistics_only", False):
                    modules = dispatcher.selected_by(dispatcher.registry.entry(hook.hook))
                    due.append(DueHook(hook.hook, hook.owner, frozenset(modules.items())))
            self._due = hooks, due
        listening = tuple([hook for hook in self._due[1] if not hook.monitor.validating])
        return Pending(dispatcher.run.step, listening) if listening else None

    def deliver(self) -> None:
        """Give the rows to the hooks they were computed for; nothing waits for the device."""
        if self._pending is not None:
            self._take()

    def count_calls(self) -> None:
        """Add the calls of compiled code to the counts of its modules; waits for the device."""
        with self._lock:
            self._take()
            for modules, due, counts in self._uncounted:
                counted = dict(zip(modules, counts.tolist(), strict=True))
                for hooked, (calls, _) in counted.items():
                    hooked.calls += int(calls)
                for hook in due:
                    for hooked, _ in hook.modules:
                        if hooked in counted:
                            hooked.fired[hook.hook] = hooked.fired.get(hook.hook, 0) + int(counted[hooked][1])
            self._uncounted, self._counts = [], {}

    def _take(self) -> None:
        with self._lock:
            pending, self._pending = self._pending or Pending(0, ()), None
            if self.due_flag is None or not self._modules:
                return
            from hookline.stats.cuda_accumulators import addresses_of, make_counts, take

            if self._addresses is None:
                rows_of_modules = [hooked.torch_hook.stats_row for hooked in self._modules]
                self._addresses = addresses_of([row for row in rows_of_modules if row is not None])
            counts = self._counts.get(pending.hooks)
            if counts is None:  # They stay on the device until a report.
                counts = self._counts[pending.hooks] = make_counts(len(self._modules), self.due_flag.device)
                self._uncounted.append((self._modules, pending.hooks, counts))
            rows = take(self._addresses, counts)
            for hook in pending.hooks:
                if hook not in self._rows_of:
                    names = dict(hook.modules)
                    indices = tuple(index for index, hooked in enumerate(self._modules) if hooked in names)
                    self._rows_of[hook] = [names[self._modules[index]] for index in indices], indices
                own_names, indices = self._rows_of[hook]
                own = rows if len(indices) == len(rows) else rows[cached_table(rows.device, indices)]
                hook.monitor.add_rows(own_names, own, pending.step)


def _traced_graph() -> Any:
    """Return the context of the graph that is being traced, None if none is."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def _keep_address(*tensors: Tensor) -> None:
    """Let CUDA graphs write to these tensors themselves, not to copies of them."""
    from torch._dynamo import mark_static_address

    for tensor in tensors:
        mark_static_address(tensor, guard=False)
