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
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import assume_constant_result

from hookline.activations.compile.custom_ops import define_operator, flatten, object_of
from hookline.activations.hooked_modules import ForwardTorchHook

if TYPE_CHECKING:  # It imports this module.
    from hookline.activations.compile.compiled_stats import CompiledStats

STATISTICS = "statistics"  # What a module's hooks want if they need nothing else; followed by a number.
REFUSED, FIRST, LATER = "refused", "first", "later"  # Whether a graph may compute statistics, and if it did before.


# ---- while a graph is traced: everything is found by texts, which graphs check fastest -------------------------------

# The owners of rows by what hooks want that need statistics from them, and torch hooks by their `stats_key`.
_targets: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_keys = itertools.count()


def new_key(target: CompiledStats | ForwardTorchHook) -> str:
    """Return a text that leads graphs to an owner of rows or to a module's row, and that nothing else has or had."""
    key = f"{STATISTICS} {next(_keys)}"
    _targets[key] = target
    return key


def forget_key(key: str) -> None:
    """Make a text lead nowhere."""
    _targets.pop(key, None)


# Dynamo calls a function with a constant result while it traces, with constants. It identifies a tensor that such a
# function returns by the function's name, so that each tensor needs a separate function.


@assume_constant_result  # type: ignore[untyped-decorator]
def _admit(wants: str, device: torch.device) -> str:
    owner: CompiledStats | None = _targets.get(wants)
    return REFUSED if owner is None else owner.admit(device)


@assume_constant_result  # type: ignore[untyped-decorator]
def _is_whole_model(wants: str) -> bool:
    return bool(_targets[wants].is_whole_model())


@assume_constant_result  # type: ignore[untyped-decorator]
def _due_flag(wants: str) -> torch.Tensor | None:
    return _targets[wants].due_flag  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _owner_id(wants: str) -> torch.Tensor | None:
    return _targets[wants].graph_id  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _table(stats_key: str) -> torch.Tensor:
    return _targets[stats_key].stats_place[0]  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _row_index(stats_key: str) -> int:
    return _targets[stats_key].stats_place[1]  # type: ignore[no-any-return]


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
        add_to_rows([tensor], [_table(hook.stats_key)], [_row_index(hook.stats_key)], _due_flag(wants))
    else:
        add_to_rows([tensor], [hook.stats_row], [0], _due_flag(wants))
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

# The order of elements in memory does not matter, so the compiler must not change it for this operator.
add_to_rows = define_operator(
    "add_to_rows(Tensor[] tensors, Tensor[] tables, int[] rows, Tensor(a!) due_flag) -> ()",
    _add_to_rows,
    tag="flexible_layout",
)
