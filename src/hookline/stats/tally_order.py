"""Where tallies stand in a training graph: behind the other uses of what they read.

Before it compiles a forward and its backward pass, `torch.compile` decides what the one saves for the other. It thinks
that a kernel of somebody else's ends what can be done in one go: what follows it in the graph shall not be computed
again in the backward pass. A tally right behind a module's output would so make it save other, larger tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node


def keep_what_is_saved() -> None:
    """Have graphs that are compiled from now on save the same tensors with tallies as without.

    A process has one place for such a wish; if it is taken, it stays so, and tallies may cost memory.
    """
    if config.joint_custom_pre_pass is None:
        config.joint_custom_pre_pass = TalliesBehind()


class TalliesBehind(CustomGraphPass):
    """Moves every tally behind the last use of its tensor in the forward pass; values cannot change by that."""

    def __call__(self, graph: Graph) -> None:
        """Change the order of a graph in which nothing is written in place."""
        places = {node: place for place, node in enumerate(graph.nodes)}
        backward = _backward_of(graph)
        for tally in [node for node in graph.nodes if _is_tally(node)]:
            uses = [use for use in _uses_beside(tally) if use not in backward]
            last = max(uses, key=places.__getitem__, default=tally)
            results = list(tally.users)
            soonest = min((places[use] for result in results for use in result.users), default=len(places))
            if places[tally] < places[last] < soonest:
                for node in [*reversed(results), tally]:
                    last.append(node)

    def uuid(self) -> str:
        """Graphs that are kept on disk are told apart by this."""
        return "hookline: tallies behind other uses"


def _is_tally(node: Node) -> bool:
    return node.target is triton_kernel_wrapper_functional and "tally" in _arguments(node)


def _arguments(node: Node) -> dict[str, Node]:
    arguments: dict[str, Node] = node.kwargs["kwargs"]  # type: ignore[assignment]
    return arguments


def _uses_beside(tally: Node) -> Iterator[Node]:
    """Who else reads the tensor that a tally reads, perhaps as a view that is made for it alone."""
    reader, tensor = tally, _arguments(tally)["tensor"]
    while len(tensor.users) == 1 and len(tensor.all_input_nodes) == 1:
        reader, tensor = tensor, tensor.all_input_nodes[0]
    return (use for use in tensor.users if use is not reader)


def _backward_of(graph: Graph) -> set[Node]:
    """The nodes that need a gradient from outside."""
    found: set[Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
