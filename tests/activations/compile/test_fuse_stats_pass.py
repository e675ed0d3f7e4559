"""Tallies are added to together, behind the other uses of their tensors and before what needs the result."""

import operator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, Node

from hookline.activations.compile.stats_ops import add_to_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor


@pytest.fixture
def together() -> Any:
    """The module; importing it imports inductor."""
    from hookline.activations.compile import fuse_stats_pass

    return fuse_stats_pass


class Traced:
    """A graph as the compiler has it, with a flag that goes through all calls."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.gradient = self.graph.placeholder("primals_1"), self.graph.placeholder("tangents_1")
        self.tallies = [self.graph.placeholder(f"tally_{number}") for number in range(40)]
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

    def add(self, tensor: Node, tally: int) -> None:
        """Add a tensor to a tally, as a graph does it."""
        kwargs = {
            "tensors": [tensor],
            "tables": [self.tallies[tally]],
            "rows": [0],
            "_due_flag_base_index": 0,
            "_all_bases": [self.flag],
        }
        call = self.graph.call_function(auto_functionalized_v2, (add_to_rows,), kwargs)
        call.meta["val"] = (None, "the flag")
        self.flag = self.graph.call_function(operator.getitem, (call, 1))
        self.flag.meta["val"] = "the flag"

    def after(self, together: Any) -> list[str]:
        """What the pass leaves: operations by their names, calls as what they add to which tallies."""
        end = self.graph.output(self.flag)
        together.FuseStatsPass()(self.graph)
        self.graph.lint()
        assert all("val" in node.meta for node in self.graph.nodes if node.op == "call_function")
        last = end.args[0]
        assert isinstance(last, Node) and (last.target is operator.getitem or not self.calls())
        return [self._told(node) for node in self.graph.nodes if node.op == "call_function" and not self._passes(node)]

    def calls(self) -> list[Node]:
        """The calls, in their order."""
        return [node for node in self.graph.nodes if node.target is auto_functionalized_v2]

    @staticmethod
    def _passes(node: Node) -> bool:
        return node.target is operator.getitem

    @staticmethod
    def _told(node: Node) -> str:
        if node.target is not auto_functionalized_v2:
            return node.name
        tensors, tallies = node.kwargs["tensors"], node.kwargs["tables"]
        return " ".join(f"{one}->{other}" for one, other in zip(tensors, tallies, strict=False))  # type: ignore[arg-type]


def test_neighbours_are_one_call_behind_the_last_of_them(together: Any) -> None:
    """The flag comes from before the first and goes to who had it from the last."""
    traced = Traced()
    start = traced.flag
    for number in range(3):
        traced.add(traced.output(f"output_{number}"), number)
    assert traced.after(together) == [
        "output_0", "output_1", "output_2", "output_0->tally_0 output_1->tally_1 output_2->tally_2"
    ]  # fmt: skip
    (call,) = traced.calls()
    assert call.kwargs["_all_bases"] == [start] and call.kwargs["_due_flag_base_index"] == 0


def test_not_too_many_and_not_too_much_wait(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is kept alive; a tensor that is too large for any company is read alone."""
    monkeypatch.setattr(together, "MAX_TENSORS", 2)
    monkeypatch.setattr(together, "MAX_BYTES", 1000)
    traced = Traced()
    for number, size in enumerate([10, 10, 10, 200, 100, 9999]):
        traced.add(traced.output(f"o{number}", size=size), number)
    told = [one for one in traced.after(together) if "->" in one]
    assert told == ["o0->tally_0 o1->tally_1", "o2->tally_2 o3->tally_3", "o4->tally_4", "o5->tally_5"]
    flags = [call.kwargs["_all_bases"][0] for call in traced.calls()[1:]]  # type: ignore[index]
    assert [flag.args[0] for flag in flags] == traced.calls()[:-1]  # type: ignore[union-attr]


def test_what_the_backward_pass_needs_may_wait_longer(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept anyway, perhaps as a view, or else computed again; so there is a limit for that, too."""
    monkeypatch.setattr(together, "MAX_BYTES", 1000)
    monkeypatch.setattr(together, "MAX_KEPT_BYTES", 3000)
    traced = Traced()
    outputs = [traced.output(f"o{number}", size=200) for number in range(5)]
    views = [traced.view(f"view_of_{output}", output) for output in outputs[:-1]]
    for number, output in enumerate(outputs):
        traced.add(output, number)
    for view in views:
        traced.output(f"{view}_in_backward", view, traced.gradient)
    told = [one for one in traced.after(together) if "->" in one]
    assert told == ["o0->tally_0 o1->tally_1 o2->tally_2", "o3->tally_3 o4->tally_4"]


def test_behind_the_last_use_in_the_forward_pass(together: Any) -> None:
    """Not behind uses in the backward pass, which come later; a view of its own does not count as a use."""
    traced = Traced()
    output = traced.output("output_of_module")
    traced.add(traced.view("own_view", output), 0)
    used = traced.output("first_use", output)
    traced.output("second_use", output, used)
    traced.output("later", used)
    traced.output("in_backward", output, traced.gradient)
    assert traced.after(together) == [
        "output_of_module", "own_view", "first_use", "second_use", "own_view->tally_0", "later", "in_backward"
    ]  # fmt: skip


def test_what_is_used_late_keeps_nobody_waiting(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made in the order in which others are done with their tensors."""
    monkeypatch.setattr(together, "MAX_TENSORS", 2)
    traced = Traced()
    early = traced.output("early")
    traced.add(early, 0)
    for number in (1, 2):
        traced.add(traced.output(f"output_{number}"), number)
    traced.output("late_use", early)
    assert traced.after(together) == [
        "early", "output_1", "output_2", "output_1->tally_1 output_2->tally_2", "late_use", "early->tally_0"
    ]  # fmt: skip


def test_no_tally_stands_twice_in_a_call(together: Any) -> None:
    """A module that runs twice adds to its tally one after the other."""
    traced = Traced()
    for number in range(2):
        traced.add(traced.output(f"output_{number}"), 7)
    assert [one for one in traced.after(together) if "->" in one] == ["output_0->tally_7", "output_1->tally_7"]


def test_before_an_input_gets_its_new_value(together: Any) -> None:
    """Where a module gives the input of the graph itself, and that is written to at the end."""
    traced = Traced()
    traced.x.meta["val"] = torch.empty(4, device="meta")
    traced.add(traced.x, 0)
    changed = traced.output("changed")
    written = traced.graph.call_function(torch.ops.aten.copy_.default, (traced.x, changed))
    written.name, written.meta["val"] = "written", None
    assert traced.after(together) == ["changed", "primals_1->tally_0", "written"]


def test_ledgers_do_not_meet(together: Any) -> None:
    """Each has a flag of its own; nothing of one waits for the other."""
    traced = Traced()
    other = traced.graph.placeholder("other_flag")
    traced.add(traced.output("output_0"), 0)
    traced.flag, own = other, traced.flag
    traced.add(traced.output("output_1"), 1)
    traced.graph.call_function(torch.mul, (own, traced.flag)).meta["val"] = None
    assert len([one for one in traced.after(together) if "->" in one]) == 2


def test_sizes_that_vary_count_as_when_they_were_traced(together: Any) -> None:
    """And where nothing is known of them, nobody waits."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    node = Traced().output("output")
    node.meta["val"] = mode.from_tensor(torch.empty(6, 4))
    assert isinstance(node.meta["val"].shape[0], torch.SymInt) and together._bytes(node) == 96
    node.meta["val"] = mode.from_tensor(torch.empty(6, 4)).new_empty(mode.shape_env.create_unbacked_symint())
    assert together._bytes(node) > together.MAX_BYTES


def test_a_place_that_is_taken_stays_so(together: Any) -> None:
    """Somebody else's pass is not replaced; where there is none, ours is put."""
    from torch._inductor import config

    def theirs(graph: Graph) -> None: ...

    with config.patch(joint_custom_pre_pass=theirs):
        together.install()
        assert config.joint_custom_pre_pass is theirs
    with config.patch(joint_custom_pre_pass=None):
        together.install()
        assert isinstance(config.joint_custom_pre_pass, together.FuseStatsPass)


def test_a_table_that_all_are_in_stands_there_once(together: Any) -> None:
    """Each costs every run; where there are several, each tensor needs its own."""
    traced = Traced()
    for number in range(3):
        traced.add(traced.output(f"output_{number}"), 0)
    for row, call in enumerate(traced.calls()):
        call.kwargs = {**call.kwargs, "rows": [row]}
    assert traced.after(together)[-1] == "output_0->tally_0"
    (call,) = traced.calls()
    assert call.kwargs["rows"] == [0, 1, 2] and len(call.kwargs["tables"]) == 1  # type: ignore[arg-type]
