"""Which tallies of a compiled graph are added to in one call, and where in the graph it stands.

A call for each module would cost the host more than reading all outputs costs the device. So neighbours wait for each
other. What waits is kept alive for that, unless somebody needs it anyway, and may come to so many bytes.

A call stands behind the other uses of what it reads. Before `torch.compile` makes a forward and its backward pass from
one graph, it decides what the one saves for the other, and it thinks that an operator of somebody else's ends what can
be done in one go: what follows it shall not be computed again in the backward pass. Right behind a module's output it
would so make it save other, larger tensors.
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

from hookline.activations.adding_up import adds

MOST_BYTES = 256 * 1024 * 1024  # that nobody else keeps
MOST_KEPT_BYTES = 4 * MOST_BYTES  # in all: what the backward pass needs, it may also compute again
MOST_TENSORS = 32  # what one launch takes


def add_together() -> None:
    """Have graphs that are compiled from now on add to several tallies at once, and save what they would without.

    A process has one place for such a wish; if it is taken, it stays so, and tallies cost time and perhaps memory.
    """
    if config.joint_custom_pre_pass is None:
        config.joint_custom_pre_pass = TalliesTogether()


class TalliesTogether(CustomGraphPass):
    """Replaces the calls for single tallies, in a graph in which nothing is written in place, by a few for many."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        places = {node: place for place, node in enumerate(graph.nodes)}
        backward = _backward_of(graph)
        for calls in _chains(graph):
            behind = {call: _last_use(call, backward, places) for call in calls}
            calls_in_turn = sorted(calls, key=lambda call: places[behind[call]])
            groups = list(_groups(calls_in_turn, backward))
            if len(groups) < len(calls) or behind != {call: call for call in calls}:
                _replace(calls, [(group, behind[group[-1]]) for group in groups])

    def uuid(self) -> str:
        """Graphs that are kept on disk are told apart by this."""
        return f"hookline: tallies together, a table once, {MOST_TENSORS} of {MOST_BYTES} or {MOST_KEPT_BYTES} bytes"


# ---- reading a graph -------------------------------------------------------------------------------------------------


def _is_call(node: Node) -> bool:
    return node.target is auto_functionalized_v2 and node.args[0] is adds


def _chains(graph: Graph) -> list[list[Node]]:
    """The calls that follow each other: each passes on the flag, as it may have been written to, to the next alone."""
    chains: list[list[Node]] = []
    for node in filter(_is_call, graph.nodes):
        if chains and _flag(node) is _passed_on(chains[-1][-1]) and len(_flag(node).users) == 1:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _flag(call: Node) -> Node:
    flag: Node = _listed(call, "_all_bases")[0]
    return flag


def _passed_on(call: Node) -> Node | None:
    """The flag behind a call; None where nobody asks for it."""
    return next(iter(call.users), None)


def _listed(call: Node, name: str) -> list[Any]:
    return call.kwargs[name]  # type: ignore[return-value]


def _tallies(call: Node) -> set[tuple[Node, int]]:
    tables, rows = _listed(call, "tables"), _listed(call, "rows")
    return set(zip(tables * len(rows) if len(tables) == 1 else tables, rows, strict=True))


def _last_use(call: Node, backward: set[Node], places: dict[Node, int]) -> Node:
    """Behind which node of the forward pass nobody else reads what a call reads; itself, where nobody does at all."""
    uses = [use for use in _uses_beside(call) if use not in backward and not _writes(use)]
    return max([call, *uses], key=places.__getitem__)


def _uses_beside(call: Node) -> Iterator[Node]:
    """Who else reads what a call reads."""
    for tensor in _listed(call, "tensors"):
        yield from (use for use in _shared(tensor).users if use is not call and not _is_view_for(use, call))


def _shared(tensor: Node) -> Node:
    """What a tensor is a view of that was made for one reader alone; itself if it is none."""
    while _is_view(tensor) and len(tensor.users) == 1:
        tensor = tensor.all_input_nodes[0]
    return tensor


def _is_view_for(node: Node, reader: Node) -> bool:
    """Whether a node is a view that was made for this reader alone."""
    while _is_view(node) and len(node.users) == 1:
        node = next(iter(node.users))
    return node is reader


def _is_kept(tensor: Node, backward: set[Node]) -> bool:
    """Whether somebody needs a tensor's memory beyond the forward pass: the backward pass, or who called the graph."""
    if any(use in backward or use.op == "output" for use in tensor.users):
        return True
    return any(_is_kept(use, backward) for use in tensor.users if _is_view(use))


def _is_view(node: Node) -> bool:
    return node.target is torch.ops.aten._unsafe_view.default or getattr(node.target, "is_view", False)


def _writes(node: Node) -> bool:
    """Whether a node stands for an input's new value, which only the end of a graph may write, or is that end."""
    return node.op == "output" or node.target is torch.ops.aten.copy_.default


def _backward_of(graph: Graph) -> set[Node]:
    """The nodes from the first on that needs a gradient from outside; some there compute parts of the forward again."""
    nodes = list(graph.nodes)
    given = {node for node in nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    first = (place for place, node in enumerate(nodes) if not given.isdisjoint(node.all_input_nodes))
    return set(nodes[next(first, len(nodes)) :])


# ---- changing it -----------------------------------------------------------------------------------------------------


def _groups(calls: Sequence[Node], backward: set[Node]) -> Iterator[list[Node]]:
    """Calls that can be made as one: not too many, not too much, and no tally twice."""
    group: list[Node] = []
    tallies: set[tuple[Node, int]] = set()
    alone = waiting = 0
    for call in calls:
        tensors, own = _listed(call, "tensors"), _tallies(call)
        size = sum(map(_bytes, tensors))
        only_here = sum(_bytes(tensor) for tensor in tensors if not _is_kept(_shared(tensor), backward))
        full = alone + only_here > MOST_BYTES or waiting + size > MOST_KEPT_BYTES
        if group and (full or len(tallies | own) > MOST_TENSORS or not tallies.isdisjoint(own)):
            yield group
            group, tallies, alone, waiting = [], set(), 0, 0
        group.append(call)
        tallies |= own
        alone, waiting = alone + only_here, waiting + size
    if group:
        yield group


def _bytes(tensor: Node) -> int:
    """How large a tensor is; where that depends on sizes that vary, what it was when the graph was traced."""
    value: Any = tensor.meta["val"]
    elements = value.numel()
    if isinstance(elements, torch.SymInt):
        hint = elements.node.hint
        elements = MOST_BYTES if hint is None else hint
    return int(elements) * int(value.itemsize)


def _replace(calls: Sequence[Node], groups: Sequence[tuple[list[Node], Node]]) -> None:
    """Put one call for each group behind its node; the flag goes through all of them as it did through the calls."""
    graph, flag, before = calls[0].graph, _flag(calls[0]), calls[0]
    for group, behind in groups:
        before = behind if before < behind else before
        with graph.inserting_after(before):
            call = graph.call_function(auto_functionalized_v2, (adds,), _together(group, flag))
        with graph.inserting_after(call):
            before = flag = graph.call_function(operator.getitem, (call, 1))
        _describe_as(group[-1], call)
    last = _passed_on(calls[-1])
    if last is not None:
        last.replace_all_uses_with(flag)
    _erase(calls)


def _together(group: Sequence[Node], flag: Node) -> dict[str, Any]:
    """The arguments of one call for several."""
    lists = {name: [one for call in group for one in _listed(call, name)] for name in ("tensors", "tables", "rows")}
    if len(set(lists["tables"])) == 1:  # each one costs every run 0.2 µs
        lists["tables"] = lists["tables"][:1]
    return {**group[0].kwargs, **lists, "_all_bases": [flag]}


def _describe_as(known: Node, call: Node) -> None:
    """What the compiler notes at nodes: the same as at those that are replaced."""
    call.meta = known.meta.copy()
    for result in call.users:
        result.meta = next(iter(known.users)).meta.copy()


def _erase(calls: Sequence[Node]) -> None:
    for call in reversed(calls):
        for result in list(call.users):
            call.graph.erase_node(result)
        call.graph.erase_node(call)
