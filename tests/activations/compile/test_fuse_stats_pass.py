"""Statistics of several modules are fused into one call, behind the other uses of their tensors."""

import operator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, Node

from hookline.activations.compile.compiled_stats import add_to_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor


@pytest.fixture
def stats_pass() -> Any:
    """The module; importing it imports inductor."""
    from hookline.activations.compile import fuse_stats_pass

    return fuse_stats_pass


class Traced:
    """A graph as the compiler has it, with a flag that goes through all calls."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.gradient = self.graph.placeholder("primals_1"), self.graph.placeholder("tangents_1")
        self.rows = [self.graph.placeholder(f"row_{number}") for number in range(40)]
        self.flag = self.graph.placeholder("flag")

    def output(self, name: str, *inputs: Node, size: Any = 4) -> Node:
        """Some operation."""
        node = self.graph.call_function(torch.add, inputs or (self.x,))
        node.name, node.meta["val"] = name, torch.empty(size, device="meta")
        return node

    def view(self, name: str, of: Node) -> Node:
        """A view of what an operation gives."""
        node = self.graph.call_function(torch.ops.aten.view.default, (of, [-1]))
        node.name, node.meta["val"] = name, of.meta["val"]
        return node

    def add(self, tensor: Node, row: int) -> None:
        """Add a tensor to a row, as a graph does it."""
        kwargs = {
            "tensors": [tensor],
            "tables": [self.rows[row]],
            "rows": [0],
            "_due_flag_base_index": 0,
            "_all_bases": [self.flag],
        }
        call = self.graph.call_function(auto_functionalized_v2, (add_to_rows,), kwargs)
        call.meta["val"] = (None, "the flag")
        self.flag = self.graph.call_function(operator.getitem, (call, 1))
        self.flag.meta["val"] = "the flag"

    def after(self, stats_pass: Any) -> list[str]:
        """Apply the pass; return operations by name, and calls as what they add to which rows."""
        end = self.graph.output(self.flag)
        stats_pass.FuseStatsPass()(self.graph)
        self.graph.lint()
        assert all("val" in node.meta for node in self.graph.nodes if node.op == "call_function")
        last = end.args[0]
        assert isinstance(last, Node) and (last.target is operator.getitem or not self.calls())
        return [
            self._describe(node) for node in self.graph.nodes if node.op == "call_function" and not self._passes(node)
        ]

    def calls(self) -> list[Node]:
        """The calls, in their order."""
        return [node for node in self.graph.nodes if node.target is auto_functionalized_v2]

    @staticmethod
    def _passes(node: Node) -> bool:
        return node.target is operator.getitem

    @staticmethod
    def _describe(node: Node) -> str:
        if node.target is not auto_functionalized_v2:
            return node.name
        tensors, rows = node.kwargs["tensors"], node.kwargs["tables"]
        return " ".join(f"{one}->{other}" for one, other in zip(tensors, rows, strict=False))


def test_neighbours_become_one_call_behind_the_last(stats_pass: Any) -> None:
    """The flag passes through it as it passed through the calls."""
    traced = Traced()
    start = traced.flag
    for number in range(3):
        traced.add(traced.output(f"output_{number}"), number)
    assert traced.after(stats_pass) == [
        "output_0", "output_1", "output_2", "output_0->row_0 output_1->row_1 output_2->row_2"
    ]  # fmt: skip
    (call,) = traced.calls()
    assert call.kwargs["_all_bases"] == [start] and call.kwargs["_due_flag_base_index"] == 0


def test_tensors_and_bytes_that_wait_are_limited(stats_pass: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is kept alive; a tensor that is too large is read alone."""
    monkeypatch.setattr(stats_pass, "MAX_TENSORS", 2)
    monkeypatch.setattr(stats_pass, "MAX_BYTES", 1000)
    traced = Traced()
    for number, size in enumerate([10, 10, 10, 200, 100, 9999]):
        traced.add(traced.output(f"o{number}", size=size), number)
    calls = [one for one in traced.after(stats_pass) if "->" in one]
    assert calls == ["o0->row_0 o1->row_1", "o2->row_2 o3->row_3", "o4->row_4", "o5->row_5"]
    flags = [call.kwargs["_all_bases"][0] for call in traced.calls()[1:]]
    assert [flag.args[0] for flag in flags] == traced.calls()[:-1]


def test_tensors_that_the_backward_pass_needs_may_wait_longer(stats_pass: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept anyway, perhaps as a view, or recomputed; so there is a limit for them, too."""
    monkeypatch.setattr(stats_pass, "MAX_BYTES", 1000)
    monkeypatch.setattr(stats_pass, "MAX_KEPT_BYTES", 3000)
    traced = Traced()
    outputs = [traced.output(f"o{number}", size=200) for number in range(5)]
    views = [traced.view(f"view_of_{output}", output) for output in outputs[:-1]]
    for number, output in enumerate(outputs):
        traced.add(output, number)
    for view in views:
        traced.output(f"{view}_in_backward", view, traced.gradient)
    calls = [one for one in traced.after(stats_pass) if "->" in one]
    assert calls == ["o0->row_0 o1->row_1 o2->row_2", "o3->row_3 o4->row_4"]


def test_behind_the_last_use_in_the_forward_pass(stats_pass: Any) -> None:
    """Not behind uses in the backward pass, which come later; a view for the call does not count as a use."""
    traced = Traced()
    output = traced.output("output_of_module")
    traced.add(traced.view("own_view", output), 0)
    used = traced.output("first_use", output)
    traced.output("second_use", output, used)
    traced.output("later", used)
    traced.output("in_backward", output, traced.gradient)
    assert traced.after(stats_pass) == [
        "output_of_module", "own_view", "first_use", "second_use", "own_view->row_0", "later", "in_backward"
    ]  # fmt: skip


def test_a_tensor_that_is_used_late_delays_no_other(stats_pass: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are in the order of the last uses of their tensors."""
    monkeypatch.setattr(stats_pass, "MAX_TENSORS", 2)
    traced = Traced()
    early = traced.output("early")
    traced.add(early, 0)
    for number in (1, 2):
        traced.add(traced.output(f"output_{number}"), number)
    traced.output("late_use", early)
    assert traced.after(stats_pass) == [
        "early", "output_1", "output_2", "output_1->row_1 output_2->row_2", "late_use", "early->row_0"
    ]  # fmt: skip


def test_no_row_is_twice_in_a_call(stats_pass: Any) -> None:
    """A module that runs twice adds to its row in two calls."""
    traced = Traced()
    for number in range(2):
        traced.add(traced.output(f"output_{number}"), 7)
    assert [one for one in traced.after(stats_pass) if "->" in one] == ["output_0->row_7", "output_1->row_7"]


def test_before_an_input_gets_its_new_value(stats_pass: Any) -> None:
    """Where a module gives the input of the graph itself, and that is written to at the end."""
    traced = Traced()
    traced.x.meta["val"] = torch.empty(4, device="meta")
    traced.add(traced.x, 0)
    changed = traced.output("changed")
    written = traced.graph.call_function(torch.ops.aten.copy_.default, (traced.x, changed))
    written.name, written.meta["val"] = "written", None
    assert traced.after(stats_pass) == ["changed", "primals_1->row_0", "written"]


def test_rows_of_different_owners_are_not_fused(stats_pass: Any) -> None:
    """Each has its own flag."""
    traced = Traced()
    other = traced.graph.placeholder("other_flag")
    traced.add(traced.output("output_0"), 0)
    traced.flag, own = other, traced.flag
    traced.add(traced.output("output_1"), 1)
    traced.graph.call_function(torch.mul, (own, traced.flag)).meta["val"] = None
    assert len([one for one in traced.after(stats_pass) if "->" in one]) == 2


def test_dynamic_sizes_count_as_when_they_were_traced(stats_pass: Any) -> None:
    """Where they are unknown, nothing waits."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    node = Traced().output("output")
    node.meta["val"] = mode.from_tensor(torch.empty(6, 4))
    assert isinstance(node.meta["val"].shape[0], torch.SymInt) and stats_pass._bytes(node) == 96
    node.meta["val"] = mode.from_tensor(torch.empty(6, 4)).new_empty(mode.shape_env.create_unbacked_symint())
    assert stats_pass._bytes(node) > stats_pass.MAX_BYTES


def test_a_pass_of_others_is_not_replaced(stats_pass: Any) -> None:
    """Where there is none, ours is installed."""
    from torch._inductor import config

    def theirs(graph: Graph) -> None: ...

    with config.patch(joint_custom_pre_pass=theirs):
        stats_pass.install()
        assert config.joint_custom_pre_pass is theirs
    with config.patch(joint_custom_pre_pass=None):
        stats_pass.install()
        assert isinstance(config.joint_custom_pre_pass, stats_pass.FuseStatsPass)


def test_a_common_table_is_passed_once(stats_pass: Any) -> None:
    """Each table costs every run; where there are several, each tensor needs its own."""
    traced = Traced()
    for number in range(3):
        traced.add(traced.output(f"output_{number}"), 0)
    for row, call in enumerate(traced.calls()):
        call.kwargs = {**call.kwargs, "rows": [row]}
    assert traced.after(stats_pass)[-1] == "output_0->row_0"
    (call,) = traced.calls()
    assert call.kwargs["rows"] == [0, 1, 2] and len(call.kwargs["tables"]) == 1
