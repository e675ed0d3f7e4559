"""Statistics of modules that compiled code computes itself and passes to hooks after it has run.

Where hooks need only statistics of a module's output, and the output is on a GPU, the graph gets a kernel
instead of a call into Python. Once a run, before its first such kernel, the graph asks which hooks are due; the answer
is a number on the device that every kernel reads, so that one graph serves all schedules. The rows of all modules are
taken together when the step is over, when a hook reads them, or when another step begins.

A graph keeps the values that it read while it was traced. If blocks of one class share a graph, the row of statistics
must be an exception: it is passed as a tensor with each run, which costs 5 µs per module. A graph of the whole model is
not shared, and refers to its rows directly.

Their schemas declare that the operators write only into the number on the device. That keeps them in their
order and in the graph. They write to the rows instead, which nothing else in the graph can notice; each input that a
graph declares to write to costs it 4 µs a run.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from hookline._device import cached_table
from hookline.activations.compile.custom_ops import (
    define_operator,
    flatten,
    give_back_id,
    object_of,
    take_id,
    warn_once,
)
from hookline.activations.hooked_modules import NO_BACKWARD, HookedModule, backward_id
from hookline.core.catalog import CATALOG
from hookline.core.entry import Entry
from hookline.stats.rows import has_kernels

if TYPE_CHECKING:
    from hookline.activations.forward_hooks import ForwardDispatcher

STATISTICS = "statistics"  # The request of a module's hooks that need only statistics; followed by the owner's number.
REFUSED, FIRST, LATER = "refused", "first", "later"  # May a graph compute statistics, and has it before?
ON_FORWARD = CATALOG["on_forward"]


@dataclass(frozen=True, eq=False)
class ServedHook:
    """A monitor that needs only statistics, with its rows."""

    entry: Entry
    names: list[str]  # The modules' names, as the monitor sees them.
    indices: tuple[int, ...]  # The indices of the modules' rows.

    def is_due(self, dispatcher: ForwardDispatcher) -> bool:
        """Return whether the monitor would be called if one of its modules ran now."""
        registry, entry = dispatcher.registry, self.entry
        if not dispatcher.is_listening(entry) or not entry.is_called_here(registry.ranks):
            return False
        return entry.is_called(ON_FORWARD, registry.scheduler.decision.due_for(ON_FORWARD))


class Pending(NamedTuple):
    """The step that the rows belong to, and the hooks that get them."""

    step: int
    hooks: tuple[ServedHook, ...]


class CompiledStats:
    """Has a row for every module whose statistics compiled code computes, all on the first module's device.

    One thread runs the model at a time: two threads with different due hooks would share their rows.
    """

    def __init__(self, dispatcher: ForwardDispatcher) -> None:
        self.due_flag: Tensor | None = None
        self._dispatcher = weakref.ref(dispatcher)
        self._selected: list[tuple[Entry, dict[HookedModule, str]]] = []
        self._modules: tuple[HookedModule, ...] = ()
        self._hooks: list[ServedHook] = []
        self._addresses: Tensor | None = None  # The rows' addresses, on the device.
        self._pending: Pending | None = None
        self._flag_value = 0  # What `due_flag` holds.
        # The calls of modules that no report has counted yet, on the device, by the hooks that were due.
        self._counts: dict[tuple[tuple[HookedModule, ...], tuple[ServedHook, ...]], Tensor] = {}
        self._last_graph: weakref.ref[Any] | None = None
        self._lock = threading.RLock()
        self._take_id()

    def _take_id(self) -> None:
        self.graph_id = take_id(self)
        self.key = f"{STATISTICS} {int(self.graph_id)}"  # The requests of its modules' torch hooks.

    def serve(self, modules: tuple[HookedModule, ...], selected: list[tuple[Entry, dict[HookedModule, str]]]) -> None:
        """Keep rows for these modules and no others.

        Args:
            modules: The modules.
            selected: The monitors that need only statistics, with the modules that they select.
        """
        with self._lock:
            if (modules, selected) == (self._modules, self._selected):
                return
            self._take()
            hooks = []
            for entry, names in selected:
                indices = tuple(index for index, hooked in enumerate(modules) if hooked in names)
                hooks.append(ServedHook(entry, [names[modules[index]] for index in indices], indices))
            self._modules, self._selected, self._hooks, self._addresses = modules, selected, hooks, None
            self._make_rows()

    def close(self) -> None:
        """Free the device's memory and drop undelivered rows."""
        with self._lock:
            give_back_id(self.graph_id)
            self._take_id()
            self.due_flag, self._flag_value = None, 0
            self.serve((), [])

    # ---- while a graph is traced ---------------------------------------------------------------------------------

    def admit(self, device: torch.device) -> str:
        """Return whether a graph may add outputs on this device, and whether this is the first request."""
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
        """Return whether the graph that is being traced begins with the model's own code, rather than a block's."""
        dispatcher = self._dispatcher()
        model = None if dispatcher is None else dispatcher.model
        code = None if model is None else getattr(model.forward, "__code__", None)
        return code is not None and getattr(_traced_graph(), "traced_code", [])[:1] == [code]

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
            self.due_flag = flag
            self._make_rows()

    def _make_rows(self) -> None:
        """Make the rows of all modules at once: blocks that share a graph must look the same to it."""
        modules = [hooked for hooked in self._modules if hooked.stats_row is None]
        if self.due_flag is None or not modules:
            return
        from hookline.stats.cuda_accumulators import make_accumulators

        table, rows = make_accumulators(len(modules), self.due_flag.device)
        _keep_address(table, *rows)
        for index, (hooked, row) in enumerate(zip(modules, rows, strict=True)):
            hooked.stats_row, hooked.stats_place = row, (table, index)

    # ---- when a graph runs ---------------------------------------------------------------------------------------

    def begin(self, due_flag: Tensor) -> None:
        """Start a run of a graph: set whether a hook is due, and deliver the rows of another step."""
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
        # In the last case, backward repeats a forward pass that hooks have seen.
        if dispatcher is None or dispatcher.is_silenced() or backward_id() != NO_BACKWARD:
            return None
        if dispatcher.begin_batch is not None:
            dispatcher.begin_batch()
        if dispatcher.run.phase == "validation":  # Monitors leave it out.
            return None
        hooks = tuple([hook for hook in self._hooks if hook.is_due(dispatcher)])
        return Pending(dispatcher.run.step, hooks) if hooks else None

    def deliver(self) -> None:
        """Pass the rows to the hooks for which they were computed, without waiting for the device."""
        if self._pending is not None:
            self._take()

    def count_calls(self) -> None:
        """Add the calls of compiled code to the counts of its modules; waits for the device."""
        with self._lock:
            self._take()
            for (modules, hooks), tensor in self._counts.items():
                counts = tensor.tolist()
                for hooked, (calls, _) in zip(modules, counts, strict=True):
                    hooked.calls += int(calls)
                for hook in hooks:
                    for index in hook.indices:
                        modules[index].fired[hook.entry.name] += int(counts[index][1])
            self._counts = {}

    def _take(self) -> None:
        with self._lock:
            pending, self._pending = self._pending or Pending(0, ()), None
            if self.due_flag is None or not self._modules:
                return
            from hookline.stats.cuda_accumulators import addresses_of, make_counts, take

            if self._addresses is None:
                rows_of_modules = [hooked.stats_row for hooked in self._modules]
                self._addresses = addresses_of([row for row in rows_of_modules if row is not None])
            key = self._modules, pending.hooks
            if key not in self._counts:  # They stay on the device until a report.
                self._counts[key] = make_counts(len(self._modules), self.due_flag.device)
            rows = take(self._addresses, self._counts[key])
            for hook in pending.hooks:
                hook_rows = rows if len(hook.indices) == len(rows) else rows[cached_table(rows.device, hook.indices)]
                hook.entry.hook.add_rows(hook.names, hook_rows, pending.step)


def _traced_graph() -> Any:
    """Return the context of the graph that is being traced; None if none is."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def _keep_address(*tensors: Tensor) -> None:
    """Let CUDA graphs write to these tensors themselves, not to copies of them."""
    from torch._dynamo import mark_static_address

    for tensor in tensors:
        mark_static_address(tensor, guard=False)


# ---- while a graph is traced: everything is found by texts, which graphs check fastest -------------------------------


def _owner(wants: str) -> Any:
    return object_of(wants.removeprefix(STATISTICS))


# Dynamo calls a function with a constant result while it traces, with constants. It identifies a tensor that such a
# function returns by the function's name, so that each tensor needs a separate function.


@assume_constant_result  # type: ignore[untyped-decorator]
def _admit(wants: str, device: torch.device) -> str:
    owner = _owner(wants)
    return REFUSED if owner is None else owner.admit(device)


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_whole_model(wants: str) -> bool:
    return bool(_owner(wants).is_whole_model())


@assume_constant_result  # type: ignore[untyped-decorator]
def _due_flag(wants: str) -> torch.Tensor | None:
    return _owner(wants).due_flag  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _owner_id(wants: str) -> torch.Tensor | None:
    return _owner(wants).graph_id  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _table(stats_key: str) -> torch.Tensor:
    return object_of(stats_key).stats_place[0]  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _row_index(stats_key: str) -> int:
    return object_of(stats_key).stats_place[1]  # type: ignore[no-any-return]


def add_statistics(hooked: HookedModule, wants: str, output: Any) -> bool:
    """Make the graph add the first floating-point tensor of an output to the module's row.

    Args:
        hooked: The module.
        wants: The values that the module's hooks need; refers to the owner of the rows.
        output: The module's output. Before each run of the graph, torch checks every property read here.

    Returns:
        False if no kernel can read the tensor; then the graph must call the hooks.
    """
    tensors: list[torch.Tensor] = []
    flatten(output, tensors, exact=False)
    for tensor in tensors:
        if tensor.is_floating_point():
            break
    else:
        return False
    readable = type(tensor) is torch.Tensor and tensor.dtype.itemsize > 1
    answer = _admit(wants, tensor.device) if readable else REFUSED
    if answer == REFUSED:
        return False
    if answer == FIRST:
        begin_run(_owner_id(wants), _due_flag(wants))
    if _is_whole_model(wants):
        add_to_rows([tensor], [_table(hooked.stats_key)], [_row_index(hooked.stats_key)], _due_flag(wants))
    else:
        add_to_rows([tensor], [hooked.stats_row], [0], _due_flag(wants))
    return True


# ---- in the graph ----------------------------------------------------------------------------------------------------


def _begin_run(graph_id: torch.Tensor, due_flag: torch.Tensor) -> None:
    """Ask which hooks are due, each time the graph runs and before its kernels do."""
    owner: CompiledStats | None = object_of(graph_id)
    if owner is not None:
        owner.begin(due_flag)


def _add_to_rows(
    tensors: list[torch.Tensor], tables: list[torch.Tensor], rows: list[int], due_flag: torch.Tensor
) -> None:
    """Launch the kernels, which a CUDA graph can replay. A table that all rows are in need be passed only once."""
    from hookline.stats.cuda_accumulators import add

    add(tensors, tables, rows, due_flag)


begin_run = define_operator("begin_run(Tensor graph_id, Tensor(a!) due_flag) -> ()", _begin_run)

# The order of elements in memory does not matter here, so the compiler must not copy to change it.
add_to_rows = define_operator(
    "add_to_rows(Tensor[] tensors, Tensor[] tables, int[] rows, Tensor(a!) due_flag) -> ()",
    _add_to_rows,
    tag="flexible_layout",
)
