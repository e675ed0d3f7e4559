"""Make a graph that is being traced compute statistics of a module's output, with a kernel.

What a graph reads here it reads while it is traced and keeps. Where blocks of one class share a graph, the row of
statistics must be an exception: it is a tensor that comes with each run, which costs 5 µs per module. A graph of the
whole model is not shared, and refers to its rows directly. Whether a hook is due is a number on the device.

According to their schemas the operators write into that number and nothing else. That keeps them in their order and in
the graph. They write to the rows instead, which nothing else in the graph can notice; each input that a graph declares
to write to costs it 4 µs a run.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch.compiler import assume_constant_result

from hookline.activations.compile.custom_ops import define_operator, flatten, object_of
from hookline.activations.hooked_modules import ForwardTorchHook

STATISTICS = "statistics"  # What a module's hooks want if they need nothing else; followed by a number.
REFUSED, FIRST, LATER = "refused", "first", "later"  # Whether a graph may compute statistics, and if it did before.


class StatsOwner(Protocol):
    """Owns the rows that graphs add to."""

    graph_id: torch.Tensor | None  # Identifies it in graphs.
    due_flag: torch.Tensor | None  # On the device: 1 if a hook is due, else 0.

    def admit(self, device: torch.device) -> str:
        """Return whether a graph may add outputs on this device, and whether it asks for the first time."""

    def is_whole_model(self) -> bool:
        """Return whether the graph that is being traced begins with the model itself."""

    def begin(self, due_flag: torch.Tensor) -> None:
        """Start a run of a graph: write into the tensor whether a hook is due."""


# ---- while a graph is traced: everything is found by texts, which graphs check fastest -------------------------------

_owners: weakref.WeakValueDictionary[str, StatsOwner] = weakref.WeakValueDictionary()  # By what hooks want.
_hooks: weakref.WeakValueDictionary[str, ForwardTorchHook] = weakref.WeakValueDictionary()  # By `stats_key`.
_keys = itertools.count()


def new_owner_key(owner: StatsOwner) -> str:
    """Return a text that leads graphs to an owner: what hooks want that need statistics from it."""
    key = f"{STATISTICS} {next(_keys)}"
    _owners[key] = owner
    return key


def forget_owner_key(key: str) -> None:
    """Make a text lead nowhere."""
    _owners.pop(key, None)


def new_stats_key(hook: ForwardTorchHook) -> str:
    """Return a text that leads graphs to a module's row, and that no other module has or had."""
    key = f"row {next(_keys)}"
    _hooks[key] = hook
    return key


def forget_stats_key(key: str) -> None:
    """Make a text lead nowhere."""
    _hooks.pop(key, None)


# Dynamo calls a function with a constant result while it traces, with constants.


@assume_constant_result  # type: ignore[untyped-decorator]
def _admit(wants: str, device: torch.device) -> str:
    owner = _owners.get(wants)
    return REFUSED if owner is None else owner.admit(device)


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_whole_model(wants: str) -> bool:
    return _owners[wants].is_whole_model()


@assume_constant_result  # type: ignore[untyped-decorator]
def _due_flag(wants: str) -> torch.Tensor | None:
    return _owners[wants].due_flag


@assume_constant_result  # type: ignore[untyped-decorator]
def _owner_id(wants: str) -> torch.Tensor | None:
    return _owners[wants].graph_id


@assume_constant_result  # type: ignore[untyped-decorator]
def _table(stats_key: str) -> torch.Tensor | None:
    place = _hooks[stats_key].stats_place
    return None if place is None else place[0]


@assume_constant_result  # type: ignore[untyped-decorator]
def _row_index(stats_key: str) -> int:
    place = _hooks[stats_key].stats_place
    return 0 if place is None else place[1]


def add_statistics(hook: ForwardTorchHook, wants: str, output: Any) -> bool:
    """Make the graph add the first floating-point tensor of an output to the module's row.

    Args:
        hook: The module's torch hook.
        wants: What the module's hooks want; leads to the owner of the rows.
        output: The module's output. Whatever is read of it here is checked before each run of the graph.

    Returns:
        False if no kernel can read the tensor; then the graph must call the hooks.
    """
    tensors: list[torch.Tensor] = []
    flatten(output, tensors, exact=False)
    for tensor in tensors:
        if tensor.is_floating_point():
            readable = type(tensor) is torch.Tensor and tensor.dtype.itemsize > 1
            return readable and _add(hook, wants, tensor)
    return False


def _add(hook: ForwardTorchHook, wants: str, tensor: torch.Tensor) -> bool:
    answer = _admit(wants, tensor.device)
    if answer == REFUSED:
        return False
    if answer == FIRST:
        begin_run(_owner_id(wants), _due_flag(wants))
    if _is_whole_model(wants):
        add_to_rows([tensor], [_table(hook.stats_key)], [_row_index(hook.stats_key)], _due_flag(wants))
    else:
        add_to_rows([tensor], [hook.stats_row], [0], _due_flag(wants))
    return True


# ---- in the graph ----------------------------------------------------------------------------------------------------


def _begin_run(graph_id: torch.Tensor, due_flag: torch.Tensor) -> None:
    """Ask which hooks are due, each time the graph runs and before its kernels do."""
    owner: StatsOwner | None = object_of(graph_id)
    if owner is not None:
        owner.begin(due_flag)


def _add_to_rows(
    tensors: list[torch.Tensor], tables: list[torch.Tensor], rows: list[int], due_flag: torch.Tensor
) -> None:
    """Launch the kernels, which a CUDA graph can replay. A table that all rows are in need be passed only once."""
    from hookline.stats.cuda_tally import add  # Imports Triton.

    add(tensors, tables, rows, due_flag)


begin_run = define_operator("begin_run(Tensor graph_id, Tensor(a!) due_flag) -> ()", _begin_run)

# The order of elements in memory does not matter, so the compiler must not change it for this operator.
add_to_rows = define_operator(
    "add_to_rows(Tensor[] tensors, Tensor[] tables, int[] rows, Tensor(a!) due_flag) -> ()",
    _add_to_rows,
    tag="flexible_layout",
)
