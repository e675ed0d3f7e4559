"""Tallies stand behind the other uses of their tensors, and before what needs their results."""

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Graph, Node

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor


@pytest.fixture
def order() -> type:
    """The pass; importing it imports inductor."""
    from hookline.stats.tally_order import TalliesBehind

    return TalliesBehind


def names_after(order: type, graph: Graph) -> list[str]:
    """The nodes in the order that the pass gives them."""
    graph.output(None)
    order()(graph)
    graph.lint()
    return [node.name for node in graph.nodes if node.op == "call_function"]


def tally(graph: Graph, tensor: Node, before: Node, name: str) -> Node:
    """Add a tensor to a tally, as a graph does it; what comes out is the tally's next state."""
    kernel = graph.call_function(
        triton_kernel_wrapper_functional, kwargs={"kernel_idx": 0, "kwargs": {"tensor": tensor, "tally": before}}
    )
    kernel.name = name
    return graph.call_function(dict.__getitem__, (kernel, "tally"))


def called(graph: Graph, name: str, *inputs: Node) -> Node:
    """Some operation."""
    node = graph.call_function(torch.add, inputs)
    node.name = name
    return node


def test_behind_the_last_use_in_the_forward_pass(order: type) -> None:
    """Not behind uses in the backward pass, which come later; a view of its own does not count as a use."""
    graph = Graph()
    x, gradient, start = (graph.placeholder(name) for name in ("primals_1", "tangents_1", "primals_2"))
    output = called(graph, "output_of_module", x)
    after = tally(graph, called(graph, "own_view", output), start, "tally")
    after.name = "state"
    used = called(graph, "first_use", output)
    called(graph, "second_use", output, used)
    called(graph, "later", used)
    called(graph, "in_backward", output, gradient)
    assert names_after(order, graph) == [
        "output_of_module", "own_view", "first_use", "second_use", "tally", "state", "later", "in_backward"
    ]  # fmt: skip


def test_never_behind_what_needs_its_result(order: type) -> None:
    """A module that runs twice adds to the same tally twice, one after the other."""
    graph = Graph()
    x, start = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    output = called(graph, "output_of_module", x)
    after = tally(graph, output, start, "first")
    second = tally(graph, called(graph, "again", x), after, "second")
    after.name, second.name = "after_first", "after_second"
    called(graph, "late_use", output)
    names = names_after(order, graph)
    assert names.index("first") < names.index("after_first") < names.index("second")


def test_a_place_that_is_taken_stays_so(monkeypatch: pytest.MonkeyPatch, order: type) -> None:
    """Somebody else's pass is not replaced; where there is none, ours is put."""
    from torch._inductor import config

    from hookline.stats.tally_order import keep_what_is_saved

    def theirs(graph: Graph) -> None: ...

    monkeypatch.setattr(config, "joint_custom_pre_pass", theirs)
    keep_what_is_saved()
    assert config.joint_custom_pre_pass is theirs
    monkeypatch.setattr(config, "joint_custom_pre_pass", None)
    keep_what_is_saved()
    assert isinstance(config.joint_custom_pre_pass, order)
