"""A graph pass that lets one call add many modules' outputs to their rows of statistics, and places these calls.

A call per module would cost the host more than reading all outputs costs the device. So neighboring calls are fused.
The tensors stay alive until the last of them is computed, even if nothing else needs them; the bytes that may wait are
limited.

A call is placed after the other uses of the tensors it reads. Before `torch.compile` makes a forward and a backward
graph from one, it decides what the forward graph saves for the backward graph, and it assumes that a custom operator
ends what can be computed in one go: what follows it is not recomputed in the backward pass. Directly after a module's
output, a call would make it save other, larger tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from hookline.activations.compile.compiled_stats import add_to_rows

MAX_BYTES = 256 * 1024 * 1024  # Bytes of tensors that only the pass keeps alive.
MAX_KEPT_BYTES = 4 * MAX_BYTES  # In total, because the backward pass may also recompute what it needs.
MAX_TENSORS = 32  # The maximum for one launch.


def install() -> None:
    """Apply the pass to graphs that are compiled from now on.

    A process has one place for such a pass. If it is already taken, statistics cost time and perhaps memory.
    """
    if config.joint_custom_pre_pass is None:
        config.joint_custom_pre_pass = FuseStatsPass()


class FuseStatsPass(CustomGraphPass):
    """Replaces the calls for single rows, in a graph without in-place writes, by a few for many rows."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        order = {node: index for index, node in enumerate(graph.nodes)}
        backward = _backward_nodes(graph)
        for calls in _chains(graph):
            last_use = {call: _last_use(call, backward, order) for call in calls}
            in_order = sorted(calls, key=lambda call: order[last_use[call]])
            groups = list(_groups(in_order, backward))
            if len(groups) < len(calls) or last_use != {call: call for call in calls}:
                _replace(calls, [(group, last_use[group[-1]]) for group in groups])

    def uuid(self) -> str:
        """Return a key that distinguishes graphs of this pass in caches on disk."""
        return f"hookline: fused statistics, one table, {MAX_TENSORS} of {MAX_BYTES} or {MAX_KEPT_BYTES} bytes"


# ---- reading a graph -------------------------------------------------------------------------------------------------


def _chains(graph: Graph) -> list[list[Node]]:
    """Return the calls that follow each other: each passes its flag, perhaps written to, only to the next."""
    chains: list[list[Node]] = []
    for node in graph.nodes:
        if node.target is not auto_functionalized_v2 or node.args[0] is not add_to_rows:
            continue
        if chains and _flag(node) is _flag_after(chains[-1][-1]) and len(_flag(node).users) == 1:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _argument(call: Node, name: str) -> list[Any]:
    return call.kwargs[name]  # type: ignore[return-value]


def _flag(call: Node) -> Node:
    flag: Node = _argument(call, "_all_bases")[0]
    return flag


def _flag_after(call: Node) -> Node | None:
    """Return the flag after a call; None if nothing reads it."""
    return next(iter(call.users), None)


def _last_use(call: Node, backward: set[Node], order: dict[Node, int]) -> Node:
    """Return the last node of the forward pass that reads a call's tensors, which may be the call itself."""
    uses = [call]
    for tensor in _argument(call, "tensors"):
        for use in _base(tensor).users:
            # Neither the end of the graph nor a write of an input's new value, which must stay at the end, is a use.
            ends = use.op == "output" or use.target is torch.ops.aten.copy_.default
            if use not in backward and not ends and not _is_view_for(use, call):
                uses.append(use)
    return max(uses, key=order.__getitem__)


def _base(tensor: Node) -> Node:
    """Return the base of a view that was made for one reader only, otherwise the tensor."""
    while _is_view(tensor) and len(tensor.users) == 1:
        tensor = tensor.all_input_nodes[0]
    return tensor


def _is_view_for(node: Node, reader: Node) -> bool:
    """Return whether a node is the reader, or a view that was made for this reader only."""
    while _is_view(node) and len(node.users) == 1:
        node = next(iter(node.users))
    return node is reader


def _is_kept(tensor: Node, backward: set[Node]) -> bool:
    """Return whether a tensor's memory is needed beyond the forward pass: in the backward pass, or by the caller."""
    if any(use in backward or use.op == "output" for use in tensor.users):
        return True
    return any(_is_kept(use, backward) for use in tensor.users if _is_view(use))


def _is_view(node: Node) -> bool:
    return node.target is torch.ops.aten._unsafe_view.default or getattr(node.target, "is_view", False)


def _backward_nodes(graph: Graph) -> set[Node]:
    """Return all nodes from the first that reads a gradient on; some of them recompute parts of the forward pass."""
    nodes = list(graph.nodes)
    tangents = {node for node in nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    first = (index for index, node in enumerate(nodes) if not tangents.isdisjoint(node.all_input_nodes))
    return set(nodes[next(first, len(nodes)) :])


# ---- changing it -----------------------------------------------------------------------------------------------------


def _groups(calls: Sequence[Node], backward: set[Node]) -> Iterator[list[Node]]:
    """Split calls into groups that can be one call: not too many tensors, not too many bytes, and no row twice."""
    group: list[Node] = []
    rows: set[tuple[Node, int]] = set()
    unkept = waiting = 0
    for call in calls:
        tensors, tables, indices = (_argument(call, name) for name in ("tensors", "tables", "rows"))
        call_rows = set(zip(tables * len(indices) if len(tables) == 1 else tables, indices, strict=True))
        size = sum(map(_bytes, tensors))
        own_unkept = sum(_bytes(tensor) for tensor in tensors if not _is_kept(_base(tensor), backward))
        full = unkept + own_unkept > MAX_BYTES or waiting + size > MAX_KEPT_BYTES
        if group and (full or len(rows | call_rows) > MAX_TENSORS or not rows.isdisjoint(call_rows)):
            yield group
            group, rows, unkept, waiting = [], set(), 0, 0
        group.append(call)
        rows |= call_rows
        unkept, waiting = unkept + own_unkept, waiting + size
    if group:
        yield group


def _bytes(tensor: Node) -> int:
    """Return a tensor's size; if it depends on sizes that vary, the size when the graph was traced."""
    value: Any = tensor.meta["val"]
    elements = value.numel()
    if isinstance(elements, torch.SymInt):
        hint = elements.node.hint
        elements = MAX_BYTES if hint is None else hint
    return int(elements) * int(value.itemsize)


def _replace(calls: Sequence[Node], groups: Sequence[tuple[list[Node], Node]]) -> None:
    """Put one call for each group after its node; the flag goes through all of them as it did through the calls."""
    graph, flag, last = calls[0].graph, _flag(calls[0]), calls[0]
    for group, behind in groups:
        last = behind if last < behind else last
        with graph.inserting_after(last):
            call = graph.call_function(auto_functionalized_v2, (add_to_rows,), _fused_arguments(group, flag))
        with graph.inserting_after(call):
            last = flag = graph.call_function(operator.getitem, (call, 1))
        # The compiler's notes are copied from the replaced calls.
        call.meta, flag.meta = group[-1].meta.copy(), next(iter(group[-1].users)).meta.copy()
    after = _flag_after(calls[-1])
    if after is not None:
        after.replace_all_uses_with(flag)
    for old in reversed(calls):
        for result in list(old.users):
            graph.erase_node(result)
        graph.erase_node(old)


def _fused_arguments(group: Sequence[Node], flag: Node) -> dict[str, Any]:
    lists = {name: [item for call in group for item in _argument(call, name)] for name in ("tensors", "tables", "rows")}
    if len(set(lists["tables"])) == 1:  # Each table costs every run 0.2 µs.
        lists["tables"] = lists["tables"][:1]
    return {**group[0].kwargs, **lists, "_all_bases": [flag]}
