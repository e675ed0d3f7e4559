"""Statistics that compiled code computes: which hooks get them, for which step, and that every call is counted.

The kernels need a GPU. Here torch computes in their place; the operators, the graphs and the hooks are the real ones.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import make_trainer
from stats_rows_on_cpu import COMPILING, CPU, INPUT, WIDTH, Model, graphs, kernels_on_the_cpu, watching, whole
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hookline import ForwardHook, HookManager
from hookline.activations.compile.compiled_stats import CompiledStats
from hookline.activations.monitor import Monitor
from hookline.core.schedule import Reading
from hookline.ranks import Ranks
from hookline.stats import STATISTICS

pytestmark = COMPILING


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU has kernels, and the compiler has seen nothing."""
    yield from kernels_on_the_cpu(monkeypatch)


def no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a monitor fail that is called by the graph."""

    def called(self: Monitor, name: str, live_output: Any, step: int) -> None:
        raise AssertionError(f"called at {name}")

    monkeypatch.setattr(Monitor, "_observe", called)


def fired(manager: HookManager) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, fired) by hook and module."""
    return {(row.hook, row.module): (row.calls, row.fired) for row in manager.fire_report().rows}


def by_block(model: nn.Module, backend: str = "aot_eager") -> Any:
    """Every block compiled on its own: they share one graph."""
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def test_the_values_are_those_of_the_uncompiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every module, with one row for all calls of a step, and no hook was called."""
    model = Model().eval()
    values = []
    for run in (model, whole(model)):
        monitor = Monitor(["blocks.*.up", "head"], metrics=STATISTICS)
        manager = watching(model, monitor)
        manager.dispatcher.run.step = 1
        run(INPUT)
        values.append(monitor.latest())
        manager.remove("hook0")
        no_calls(monkeypatch)
    assert values[0].keys() == values[1].keys() and len(values[0]) == 11
    assert values[1]["head"]["count"] == 48
    for name, row in values[0].items():
        assert row == pytest.approx(values[1][name], rel=1e-5), name


def test_one_graph_serves_all_steps_and_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values have their true steps although nothing announces the end of a step, and the calls are counted."""
    no_calls(monkeypatch)
    model, always, rarely = Model().eval(), Monitor("head"), Monitor("*")
    manager = watching(model, always)
    manager.register(rarely, "rarely", every=3)
    run = whole(model)
    for step in range(1, 8):
        manager.begin_batch(Reading(step, step, 1))
        manager.dispatcher.run.step = step
        run(INPUT * step)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert [step for step, _ in always.history("head")] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in rarely.history("blocks.3.up")] == [3, 6]
    assert rarely.history("head") == [entry for entry in always.history("head") if entry[0] in (3, 6)]
    counts = fired(manager)
    assert counts["hook0", "head"] == (14, 14) and counts["rarely", "head"] == (14, 4)
    assert counts["rarely", "blocks.0"] == (7, 2)


def test_blocks_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than Dynamo would compile one by one, each with its own row."""
    no_calls(monkeypatch)
    model, monitor = Model().eval(), Monitor("blocks.*.up")
    manager = watching(model, monitor)
    run = by_block(model)
    manager.dispatcher.run.step = 1
    run(INPUT.clone().requires_grad_())
    run(INPUT.clone().requires_grad_())
    assert counters["stats"]["unique_graphs"] == 1
    means = [values["mean"] for values in monitor.latest().values()]
    assert len(set(means)) == 10 and set(fired(manager).values()) == {(2, 2)}


def inputs_of(model: nn.Module, compile: Callable[..., Any]) -> list[int]:
    """How many tensors come with each run of each graph."""
    counts = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        counts.append(len(inputs))
        return graph

    compile(model, backend)(INPUT.clone().requires_grad_())
    return counts


def test_only_blocks_get_their_rows_with_each_run() -> None:
    """A graph of the whole model refers to its rows directly, which is faster; no other model can use it."""
    model = Model().eval()
    plain, plain_block = inputs_of(model, whole), inputs_of(Model().eval(), by_block)[0]
    torch._dynamo.reset()
    _manager = watching(model, Monitor(["blocks.*.up", "head"]))
    assert inputs_of(model, whole) == plain
    blocks = Model().eval()
    _other = watching(blocks, Monitor(["blocks.*.up", "head"]))
    assert inputs_of(blocks, by_block) == [plain_block + 1]


def test_inductor_makes_one_call_for_all() -> None:
    """With the values of the uncompiled model, and nothing copied."""
    from torch._inductor.utils import run_and_get_code

    model, monitor = Model().eval(), Monitor(["blocks.*.up", "blocks.?"], metrics=["mean", "count"])
    manager = watching(model, monitor)
    manager.dispatcher.run.step = 1
    with torch.no_grad():
        model(INPUT)
        values = monitor.latest()
        manager.dispatcher.run.step = 2
        _, (code,) = run_and_get_code(torch.compile(model), INPUT)
    calls = [line for line in code.splitlines() if "hookline.add_to_rows.default(" in line]
    assert len(calls) == 1 and "hookline.begin_run.default(" in code
    assert ".clone(" not in code and monitor.latest().keys() == values.keys()
    for name, row in monitor.latest().items():
        assert row == pytest.approx(values[name], rel=1e-5, abs=1e-6), name


def test_without_a_run_each_forward_pass_has_its_own_rows() -> None:
    """As many entries as forward passes."""
    model, monitor = Model().eval(), Monitor("blocks.1")
    _manager = watching(model, monitor)
    run = whole(model)
    for factor in (1, 2, 3):
        run(INPUT * factor)
    entries = monitor.history("blocks.1")
    assert len(entries) == 3 and len({values["mean"] for _, values in entries}) == 3


@pytest.mark.parametrize("compile", [whole, by_block], ids=lambda way: way.__name__)
def test_a_checkpointed_forward_counts_once(compile: Callable[..., Any]) -> None:
    """The repetition inside backward is left out."""
    model, monitor = Model(checkpointed=True), Monitor("blocks.*.up", metrics=["count"])
    manager = watching(model, monitor)
    run = compile(model)
    manager.dispatcher.run.step = 1
    run(INPUT).sum().backward()
    assert {values["count"] for values in monitor.latest().values()} == {48}
    assert {count for _, count in fired(manager).values()} == {1}


def test_silence_validation_and_switching_off() -> None:
    """Nothing is computed that the monitor would not have observed."""
    model, monitor = Model().eval(), Monitor("head", metrics=["count"])
    manager = watching(model, monitor)
    run = whole(model)
    manager.dispatcher.run.step = 1
    with manager.silenced():
        run(INPUT)
    manager.dispatcher.run.phase = "validation"
    run(INPUT)
    manager.dispatcher.run.phase = "train"
    manager.disable("hook0")
    run(INPUT)
    assert monitor.latest() == {}
    manager.enable("hook0")
    run(INPUT)
    assert monitor.latest()["head"]["count"] == 48


class Numbers(nn.Module):
    """Gives integers, then numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0).long(), x * 2


class Halves(nn.Module):
    """Gives every other element."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class Odd(nn.Module):
    """Modules whose outputs are not just one tensor, or one that no kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.halves, self.whole, self.narrow = Numbers(), Halves(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        signs, doubled = self.numbers(x)
        whole: Tensor = self.whole(signs)
        narrow: Tensor = self.narrow(x.to(torch.float8_e4m3fn))
        return self.halves(doubled) + whole[:, ::2] + narrow.float()[:, ::2]


def test_the_first_floating_point_tensor_counts() -> None:
    """Also in a tuple; for an output without any the hook is called, and there is no row."""
    model, monitor = Odd(), Monitor(["numbers", "halves", "whole", "narrow"], metrics=["count", "absmax"])
    manager = watching(model, monitor)
    whole(model)(INPUT)
    assert monitor.latest() == {
        "numbers": {"count": 24, "absmax": pytest.approx(2 * INPUT.abs().max().item())},
        "halves": {"count": 12, "absmax": pytest.approx(2 * INPUT[:, ::2].abs().max().item())},
        "narrow": {"count": 24, "absmax": pytest.approx(INPUT.to(torch.float8_e4m3fn).float().abs().max().item())},
    }
    assert set(fired(manager).values()) == {(1, 1)}


def test_beside_a_hook_that_must_be_called_the_monitor_is_called() -> None:
    """Each of them once."""

    class Watch(ForwardHook):
        modules = "head"
        seen = 0

        def on_forward(self, output: Tensor) -> None:
            self.seen += 1

    model, monitor, watch = Model().eval(), Monitor(["head", "blocks.0"], metrics=["count"]), Watch()
    manager = watching(model, monitor, watch)
    manager.dispatcher.run.step = 1
    whole(model)(INPUT)
    assert watch.seen == 2 and {name: row["count"] for name, row in monitor.latest().items()} == {
        "blocks.0": 24,
        "head": 48,
    }
    assert fired(manager)["hook0", "head"] == (2, 2)


def test_through_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulated micro-batches are one row, and every row has its step."""
    no_calls(monkeypatch)
    model, monitor = Model(), Monitor("head", metrics=["count"])
    batches = [(INPUT, torch.zeros(3, 8)) for _ in range(6)]
    with torch.compiler.set_stance(force_backend="aot_eager"):
        make_trainer(monitor, model=model, data=batches, accumulate=2, compile=True).train()
    assert [(step, values["count"]) for step, values in monitor.history("head")] == [(1, 96), (2, 96), (3, 96)]


class Recording:
    """Stands for a trainer with a record: the steps whose layers it got."""

    ranks = Ranks()

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ranks = Ranks()

    def log(self, *_: Any, reduce: str | None = "mean") -> None: ...

    def log_layers(self, series: str, names: Any, columns: Any, values: Tensor, step: int) -> None:
        self.steps.append(step)


def test_rows_are_recorded_with_their_step() -> None:
    """None waits for later steps, so that a checkpoint leaves none behind."""
    model, monitor, trainer = Model().eval(), Monitor("head"), Recording()
    manager = watching(model, monitor)
    run = whole(model)
    for step in (1, 2, 3):
        manager.dispatcher.run.step = step
        run(INPUT)
        monitor.on_step_end(step, trainer)
    assert trainer.steps == [1, 2, 3] and monitor.state_dict() == {}


def test_the_last_hook_frees_the_rows() -> None:
    """A hook that is registered again gets new ones."""
    model, monitor = Model().eval(), Monitor("head", metrics=["count"])
    manager = watching(model, monitor)
    run = whole(model)
    run(INPUT)
    (hooked,) = manager.dispatcher.modules
    stats = manager.dispatcher.compiled_stats
    assert stats is not None and hooked.stats_row is not None
    assert hooked.stats_row.numel() == 2 + WIDTH
    manager.remove("hook0")
    assert hooked.stats_row is None and stats.due_flag is None
    manager.register(monitor, "again")
    manager.dispatcher.run.step = 1
    run(INPUT)
    assert monitor.latest()["head"]["count"] == 48 and fired(manager)["again", "head"][1] == 2


def test_another_device_is_refused() -> None:
    """All rows are where the first output was; elsewhere the operator calls the hooks."""
    stats = CompiledStats(HookManager().dispatcher)
    assert stats.admit(torch.device("meta")) == "refused"
    assert stats.admit(CPU) == "later"  # No graph is being traced.
    assert stats.admit(torch.device("meta")) == "refused"


@pytest.mark.parametrize(("helper", "name"), [("_traced_graph", "TracingContext"), ("_keep_address", "mark_static")])
def test_a_torch_that_lacks_a_name_calls_the_hooks(
    helper: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning in a process, and the same statistics."""

    def missing(*_: Any) -> Any:
        raise ImportError(f"cannot import name {name!r}")

    monkeypatch.setattr("hookline.activations.compile.custom_ops._warned", False)
    monkeypatch.setattr(f"hookline.activations.compile.compiled_stats.{helper}", missing)
    model, monitor = Model().eval(), Monitor(["blocks.0", "head"], metrics=["count"])
    manager = watching(model, monitor)
    manager.dispatcher.run.step = 1
    whole(model)(INPUT)
    assert {name: row["count"] for name, row in monitor.latest().items()} == {"blocks.0": 24, "head": 48}
    (record,) = [record for record in caplog.records if record.name == "hookline"]
    assert name in record.message and "module by module" in record.message


# ---- which graph serves ----------------------------------------------------------------------------------------------


def counts(monitor: Monitor) -> dict[str, float]:
    """How many elements each module's outputs had."""
    return {name: values["count"] for name, values in monitor.latest().items()}


def test_hooks_that_are_added_and_disabled_use_graphs_again() -> None:
    """A new hook causes a graph; disabled and enabled again, the existing graphs serve."""
    model, monitor = Model().eval(), Monitor(["blocks.*.up", "head"], metrics=["count"])
    manager = watching(model, monitor)
    run = whole(model)
    manager.dispatcher.run.step = 1
    run(INPUT)
    manager.register_capture_hook("blocks.3.drop", "late", max_captured_states=10)
    run(INPUT)
    assert len(manager.get_captured_states("late")) == 1 and graphs() == 2
    for _ in range(2):
        manager.disable("late")
        run(INPUT)
        manager.enable("late")
        run(INPUT)
    assert len(manager.get_captured_states("late")) == 3 and graphs() <= 3
    assert counts(monitor)["head"] == 6 * 48


def test_a_hook_of_another_manager_is_called() -> None:
    """Two managers may watch one model; the graph without the second one's hook serves again."""
    model, other = Model().eval(), HookManager()
    _manager = watching(model, Monitor("head", metrics=["count"]))
    run = whole(model)
    run(INPUT)
    other.register_capture_hook(model.head, "head")
    run(INPUT)
    assert len(other.get_captured_states("head")) == 2  # The head runs twice.
    other.remove("head")
    run(INPUT)
    assert graphs() == 2


def test_another_model_of_the_class_gets_its_own_graph() -> None:
    """Although it shares the code and one block; nothing it computes is counted for the first."""
    model, other, monitor = Model().eval(), Model().eval(), Monitor(["blocks.*.up", "head"], metrics=["count"])
    other.blocks[0] = model.blocks[0]
    manager = watching(model, monitor)
    run, run_other = whole(model), whole(other)
    manager.dispatcher.run.step = 1
    run(INPUT)
    run_other(INPUT)
    run(INPUT)
    assert counts(monitor) == {"head": 96, "blocks.0.up": 3 * 48, **{f"blocks.{n}.up": 96 for n in range(1, 10)}}


def test_a_module_that_was_replaced_is_not_taken_for_the_old_one() -> None:
    """The new module has no hooks, so another graph is compiled."""
    model, monitor = Model().eval(), Monitor(["blocks.*.up", "head"], metrics=["count"])
    manager = watching(model, monitor)
    run = whole(model)
    manager.dispatcher.run.step = 1
    run(INPUT)
    model.blocks[4] = Model().blocks[4]
    run(INPUT)
    assert counts(monitor)["blocks.4.up"] == 48 and counts(monitor)["blocks.5.up"] == 96 and graphs() == 2


def test_torch_hooks_of_others_are_guarded() -> None:
    """One that is replaced is called."""
    model, calls = Model().eval(), []
    _manager = watching(model, Monitor("head", metrics=["count"]))
    handle = model.blocks[2].register_forward_hook(lambda *_: None)
    run = whole(model)
    run(INPUT)
    handle.remove()
    model.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    run(INPUT)
    assert calls and graphs() == 2
