"""Decide what compiled code passes to forward hooks (calls, statistics or nothing), with Dynamo's private names.

`torch.compile` traces a module's torch hooks together with the module. Ours puts one operator into the graph, which
passes the tensors to the hooks whenever the graph runs. This causes no graph break, and the graph stays valid whether
or not hooks are due. If hooks need only statistics of what a GPU computes, a kernel takes the operator's place, and no
hook is called. Hooks that change the output or measure time need the graph broken at their modules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline.activations.compile import detection
from hookline.activations.compile.compiled_stats import STATISTICS, CompiledStats, add_statistics
from hookline.activations.compile.custom_ops import (
    define_operator,
    flatten,
    give_back_id,
    object_of,
    rebuild,
    take_id,
    warn_once,
)
from hookline.activations.forward_hooks import measures_calls
from hookline.activations.hooked_modules import OUTSIDE, HookedModule, ModuleTimer
from hookline.activations.monitor import Monitor
from hookline.core.base import hook_attribute
from hookline.core.entry import Entry
from hookline.stats.borrowed import borrowing

if TYPE_CHECKING:
    from hookline.activations.forward_hooks import ForwardDispatcher

NOTHING = ""  # A module's hooks may need nothing from graphs, a call outside of them, statistics, or several of these:
CALLED, INPUTS, KWARGS, OUTPUT, LIVE = "called", "inputs", "kwargs", "output", "live"
PARTS = {"inputs": INPUTS, "kwargs": KWARGS, "output": OUTPUT, "live_output": LIVE}  # By argument of `on_forward`.


# ---- while a graph is traced -----------------------------------------------------------------------------------------


def call_while_tracing(hooked: HookedModule, module: Any, inputs: Any, kwargs: Any, output: Any) -> Any:
    """Make the graph that is being traced call a module's hooks, or break it where they must be called outside."""
    _prepare_if_needed()
    wants = hooked.wants
    if wants == NOTHING:
        return None
    if wants.startswith(STATISTICS):
        if add_statistics(hooked, wants, output):
            return None
        wants = LIVE
    if wants != OUTSIDE and _pass_to_hooks(hooked, wants, inputs, kwargs, output):
        return None
    return _call_outside(hooked, module, inputs, kwargs, output)


def _pass_to_hooks(hooked: HookedModule, wants: str, inputs: Any, kwargs: Any, output: Any) -> bool:
    """Put the operator into the graph; return False if the values cannot go through a graph."""
    tensors: list[torch.Tensor] = []
    parts = [
        flatten(inputs if INPUTS in wants else None, tensors, exact=True),
        flatten(kwargs if KWARGS in wants else None, tensors, exact=True),
        flatten(output if OUTPUT in wants or LIVE in wants else None, tensors, exact=OUTPUT in wants),
    ]
    if None in parts:
        return False
    call_hooks(tensors, f"({parts[0]}, {parts[1]}, {parts[2]})", hooked.graph_id)
    return True


def _call_hooks(tensors: list[torch.Tensor], structure: str, graph_id: torch.Tensor) -> None:
    """Pass the tensors of one module call to its hooks, each time the graph runs."""
    hooked: HookedModule | None = object_of(graph_id)
    if hooked is not None:
        with borrowing():
            hooked(hooked.module_ref(), *rebuild(structure, tensors))


call_hooks = define_operator("call_hooks(Tensor[] tensors, str structure, Tensor(a!) graph_id) -> ()", _call_hooks)


@torch.compiler.disable(reason="a forward hook must be called outside of the graph")  # type: ignore[no-untyped-call,untyped-decorator]
def _call_outside(hooked: HookedModule, module: Any, inputs: Any, kwargs: Any, output: Any) -> Any:
    return hooked(module, inputs, kwargs, output)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare_if_needed() -> None:
    """Prepare dispatchers that the compiler could not notify, because it was imported after they attached hooks."""
    detection.prepare_all()


# ---- before ----------------------------------------------------------------------------------------------------------


def enter_graphs(dispatcher: ForwardDispatcher, entries: Sequence[Entry]) -> None:
    """Make graphs pass a dispatcher's hooks the arguments that they name."""
    stats = dispatcher.compiled_stats
    if stats is None:
        stats = dispatcher.compiled_stats = CompiledStats(dispatcher)
    listening = filter(dispatcher.is_listening, entries)
    wanted = [(dispatcher.selected_by(entry), wanted_parts(entry)) for entry in listening]
    for hooked in dispatcher.modules:
        if hooked.graph_id is None and hooked.handle is not None:
            hooked.graph_id = take_id(hooked)
            hooked.stats_key = str(int(hooked.graph_id))
        if hooked.graph_id is not None:
            wants = combine({part for modules, parts in wanted for part in parts if hooked in modules})
            hooked.wants = stats.key if wants == STATISTICS else wants
    served = tuple(hooked for hooked in dispatcher.modules if hooked.wants == stats.key)
    monitors = [(entry, dispatcher.selected_by(entry)) for entry in entries if _needs_statistics_only(entry)]
    stats.serve(served, monitors)


def leave_graphs(hooked: HookedModule) -> None:
    """Disconnect graphs from a module's torch hook."""
    if hooked.graph_id is not None:
        give_back_id(hooked.stats_key)  # The collector may call this during a trace, when no tensor can be read.
    hooked.wants, hooked.stats_key = OUTSIDE, ""
    hooked.graph_id = hooked.stats_row = hooked.stats_place = None


def combine(parts: Collection[str]) -> str:
    """Return what the hooks of a module need together, as text that graphs compare before each run."""
    if OUTSIDE in parts:
        return OUTSIDE
    combined = set(parts)
    if STATISTICS in combined and len(combined) > 1:  # If one hook is called anyway, the others are called with it.
        combined = combined - {STATISTICS} | {CALLED, LIVE}
    return " ".join(sorted(combined))


def _needs_statistics_only(entry: Entry) -> bool:
    return isinstance(entry.hook, Monitor) and entry.hook.statistics_only


def wanted_parts(entry: Entry) -> set[str]:
    """Return the values that graphs must pass to a hook."""
    needs_live_output = hook_attribute(entry.hook, "intervene") or hook_attribute(entry.hook, "watches_backward")
    if measures_calls(entry) or needs_live_output:
        return {OUTSIDE}
    if _needs_statistics_only(entry):
        return {STATISTICS}
    return {CALLED, *(PARTS[name] for name in entry.listeners["on_forward"].wanted if name in PARTS)}


_guards_missing = False


def guard_on_hooks(reset: bool = True) -> None:
    """Make compiled code check whether torch hooks were added, and discard code that was compiled without the check.

    Dynamo omits these checks by default; its settings call that unsafe.

    Args:
        reset: Whether code may be discarded now, which the compiler does not allow while it compiles.
    """
    global _guards_missing
    try:
        from torch._dynamo import config, reset_code_caches

        if config.skip_nnmodule_hook_guards:
            config.skip_nnmodule_hook_guards = False
            _guards_missing = True
    except (ImportError, AttributeError) as error:
        warn_once(error)
        return
    if _guards_missing and reset:
        _guards_missing = False
        reset_code_caches()


try:
    detection.never_compile(HookedModule.__call__)
    detection.never_compile(ModuleTimer.__call__)
except ImportError as error:
    warn_once(error)
