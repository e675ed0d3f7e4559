"""Forward hooks in compiled code: every hook is called, statistics break no graph, and training does not change."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import make_trainer
from stats_rows_on_cpu import graphs, watching
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hookline import ForwardHook, HookManager
from hookline.activations.compile import dynamo

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo reads it
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # importing inductor
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # not used, because results must be exact
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # between two watched modules
]
INPUT = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Reset the compiler before and after each test."""
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Watch(ForwardHook):
    """Keeps what it saw."""

    def __init__(self, modules: Any = "*") -> None:
        self.modules = modules
        self.seen: list[tuple[str, Any]] = []

    def on_forward(self, name: str, output: Any) -> None:
        self.seen.append((name, output))

    @property
    def names(self) -> list[str]:
        """The modules it was called at, in order."""
        return [name for name, _ in self.seen]


def wrapper(model: nn.Module, backend: str = "eager") -> Any:
    """The model in ``torch.compile``."""
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: str = "eager") -> Any:
    """The model compiled by its own method."""
    model.compile(backend=backend)
    return model


def by_block(model: nn.Module, backend: str = "eager") -> Any:
    """Every block compiled on its own: they share one graph."""
    for block in model.blocks:
        block.compile(backend=backend)
    return model


WAYS = [wrapper, in_place, by_block]
ways = pytest.mark.parametrize("compile", WAYS, ids=lambda way: way.__name__)


def torch_hooks(model: nn.Module) -> int:
    """How many torch hooks a model carries."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# ---- every hook fires ------------------------------------------------------------------------------------------------


@ways
def test_a_hook_registered_before_compiling_fires(compile: Callable[..., Any]) -> None:
    """At every call, with what the module gave; also when it is on the second of blocks that share a graph."""
    model, hook = Model().eval(), Watch(["blocks.1.up", "head"])
    _manager = watching(model, hook)
    run = compile(model)
    result = run(INPUT)
    run(INPUT)
    assert hook.names == ["blocks.1.up", "head"] * 2
    torch.testing.assert_close(hook.seen[1][1], result)
    expected = model.blocks[1].up(model.blocks[0](INPUT))
    torch.testing.assert_close(hook.seen[0][1], expected)


@ways
def test_a_hook_registered_after_the_first_compiled_call_fires(compile: Callable[..., Any]) -> None:
    """A model without forward hooks has no torch hooks; it is compiled again when one is added."""
    model, hook = Model(), Watch("blocks.*.act")
    manager = watching(model)
    run = compile(model)
    run(INPUT)
    assert torch_hooks(model) == 0
    manager.register(hook)
    run(INPUT)
    assert hook.names == ["blocks.0.act", "blocks.1.act"]


@pytest.mark.parametrize("compile", [wrapper, by_block], ids=lambda way: way.__name__)
def test_switched_on_and_off(compile: Callable[..., Any]) -> None:
    """A hook enabled later fires; switching costs one more graph for each side and then none."""
    model, hook = Model(), Watch("blocks.1.down")
    manager = watching(model)
    manager.register(hook, "watch", enabled=False)
    run = compile(model)
    run(INPUT)
    assert hook.seen == [] and torch_hooks(model) > 0
    manager.enable("watch")
    run(INPUT)
    assert hook.names == ["blocks.1.down"]
    manager.disable("watch")
    run(INPUT)
    before = graphs()
    manager.enable("watch")
    run(INPUT)
    assert len(hook.seen) == 2 and graphs() == before


@pytest.mark.parametrize("compile", [wrapper, by_block], ids=lambda way: way.__name__)
def test_another_hook_on_another_module_fires(compile: Callable[..., Any]) -> None:
    """Compiled code sees it come on a module that had none when it was compiled."""
    model, late = Model(), Watch("blocks.1")
    manager = watching(model, Watch("head"))
    run = compile(model)
    run(INPUT)
    manager.register(late, "late")
    run(INPUT)
    assert late.names == ["blocks.1"]


@pytest.mark.parametrize("compile", [wrapper, by_block], ids=lambda way: way.__name__)
def test_a_removed_hook_is_not_called_and_leaves_nothing(compile: Callable[..., Any]) -> None:
    """Every torch hook is removed with the last one, and the model still runs."""
    model, hook = Model(), Watch()
    manager = watching(model, hook)
    run = compile(model)
    run(INPUT)
    calls = len(hook.seen)
    manager.remove("hook0")
    run(INPUT)
    assert len(hook.seen) == calls == 11 and torch_hooks(model) == 0


def test_two_models_of_one_class_are_distinguished() -> None:
    """They share the compiled code: that of the one without hooks must not serve the other."""
    student, teacher, hook = Model(), Model(), Watch("head")
    _manager = watching(student, hook)
    run_teacher, run_student = wrapper(teacher), wrapper(student)
    for _ in range(2):
        run_teacher(INPUT)
        run_student(INPUT)
    assert hook.names == ["head", "head"]


def test_a_hook_on_a_module_object() -> None:
    """Without a watched model, too."""
    model, manager = Model(), HookManager()
    run = wrapper(model)
    run(INPUT)
    manager.register_capture_hook(model.head, "head")
    run(INPUT)
    (state,) = manager.get_captured_states("head")
    assert state.outputs.shape == (3, 2) and state.inputs[0].shape == (3, 8)


def test_through_the_trainer() -> None:
    """``compile=True`` and hooks of every sort."""
    model, hook = Model(), Watch("blocks.0.up")
    batches = [(INPUT, torch.zeros(3, 2)) for _ in range(3)]
    with torch.compiler.set_stance(force_backend="aot_eager"):
        make_trainer(hook, model=model, data=batches, compile=True).train()
    assert hook.names == ["blocks.0.up"] * 3


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [["mean", "std"], ["mean", "histogram", "dead_units"]], ids=str)
def test_statistics_break_no_graph_and_make_no_second_one(metrics: list[str]) -> None:
    """The whole model is one graph with a monitor on every module, over several steps and a schedule."""
    from hookline.core.schedule import Reading

    model = Model()
    manager = watching(model)
    manager.register_monitoring_hook("*", "monitor", metrics=metrics)
    manager.register_monitoring_hook("head", "rarely", metrics=["mean"], every=3)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(1, 7):
        manager.begin_batch(Reading(step, step, 1))
        manager.dispatcher.run.step = step
        run(INPUT).sum().backward()
    assert graphs() == 1 and not counters["graph_break"] and not counters["recompile_limit"]
    fired = {(row.hook, row.module): row.fired for row in manager.fire_report().rows}
    assert fired["monitor", "blocks.0.up"] == 6 and fired["rarely", "head"] == 2


def test_statistics_are_those_of_the_uncompiled_model() -> None:
    """Values and not what a buffer held later."""
    model = Model().eval()
    values = []
    for run in (model, wrapper(model, "aot_eager")):
        manager = watching(model)
        manager.register_monitoring_hook("*", "monitor", metrics=["mean", "std", "absmax"])
        run(INPUT)
        values.append(manager.get("monitor").latest())
        manager.remove("monitor")
    assert values[0].keys() == values[1].keys() and len(values[0]) == 11
    for name, row in values[0].items():
        assert row == pytest.approx(values[1][name], rel=1e-5), name


def test_blocks_of_one_class_share_a_graph() -> None:
    """A tensor identifies the module: a number would cause a graph for every block."""
    model, hook = Model(), Watch("blocks.*.act")
    _manager = watching(model, hook)
    run = by_block(model)
    for _ in range(3):
        run(INPUT.clone().requires_grad_())
    assert graphs() == 1 and len(hook.seen) == 6


class Structured(nn.Module):
    """Gives a tuple with a dict in it, and gets keywords."""

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool = True) -> Any:
        return x * scale, {"double": x * 2, "none": None}


class Around(nn.Module):
    """Calls one with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.inner(x, scale=x + 1, flag=False)
        return first + rest["double"]


def test_nested_outputs_and_keywords_arrive_in_their_structure() -> None:
    """Tuples, dicts, None and constants go through the graph."""
    model, manager = Around(), HookManager()
    manager.register_capture_hook(model.inner, "inner")
    torch.compile(model, backend="eager", fullgraph=True)(INPUT)
    (state,) = manager.get_captured_states("inner")
    assert torch.equal(state.outputs[1]["double"], INPUT * 2) and state.outputs[1]["none"] is None
    assert torch.equal(state.kwargs["scale"], INPUT + 1) and state.kwargs["flag"] is False
    assert torch.equal(state.inputs[0], INPUT)


class Sized(nn.Module):
    """Gets a number, which may vary."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        return x * times


class Counting(nn.Module):
    """Calls one with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sized()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 1, 3) + 1


def test_what_cannot_go_through_a_graph_breaks_it_there() -> None:
    """The hook still gets the very values."""
    model, manager = Counting(), HookManager()
    manager.register_capture_hook(model.inner, "inner")
    result = torch.compile(model, backend="eager")(INPUT)
    (state,) = manager.get_captured_states("inner")
    assert state.inputs[1] == 3 and torch.equal(state.outputs + 1, result)


def test_time_and_interventions_break_the_graph_and_work() -> None:
    """They are called outside: the time is the module's, and the model continues with what the hook returns."""

    class Double(ForwardHook):
        modules = "head"
        intervene = True

        def on_forward(self, output: Tensor) -> Tensor:
            return output * 2

    model = Model().eval()
    plain = model(INPUT)
    manager = watching(model, Double(), enable_intervention=True)
    manager.register_monitoring_hook("blocks.1", "time", metrics=["time"])
    run = wrapper(model)
    for _ in range(2):
        result = run(INPUT)
    torch.testing.assert_close(result, plain * 2)
    assert result.requires_grad and manager.get("time").latest()["blocks.1"]["time"] > 0
    torch._dynamo.reset()
    with pytest.raises(Exception, match="outside of the graph"):
        torch.compile(model, backend="eager", fullgraph=True)(INPUT)


def test_a_capture_for_one_block_of_code_runs_the_model_uncompiled() -> None:
    """Nothing is compiled for it, the compiled code is there again afterwards, and an early stop works."""
    model, manager = Model().eval(), HookManager()
    run = wrapper(model)
    plain = run(INPUT)
    before = graphs()
    with manager.capturing(model, "blocks.*.up") as cache:
        run(INPUT)
    with manager.capturing(model, "blocks.0.up", early_stop=True) as early:
        assert early.run(INPUT) is None
    assert len(cache) == 2 and len(early) == 1
    assert torch.equal(run(INPUT), plain) and graphs() == before and torch_hooks(model) == 0


# ---- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_writes_or_fails_in_compiled_code(caplog: pytest.LogCaptureFixture) -> None:
    """It got its own copy; a failure is attributed to its hook and the graph continues."""
    caplog.set_level(logging.CRITICAL, "hookline")

    class Vandal(ForwardHook):
        def on_forward(self, output: Tensor) -> Tensor:
            output.zero_()
            return output

    class Broken(ForwardHook):
        def on_forward(self, output: Tensor) -> None:
            raise ValueError("boom")

    model, last = Model().eval(), Watch("head")
    plain = model(INPUT)
    manager = watching(model, Vandal(), Broken(), last)
    run = wrapper(model, "aot_eager")
    torch.testing.assert_close(run(INPUT), plain)
    torch.testing.assert_close(last.seen[-1][1], plain)
    assert manager.entry("hook0").overruled["on_forward"] > 0 and manager.entry("hook1").failures.total == 3


def test_an_error_under_the_policy_raise_leaves_the_graph() -> None:
    """With its type and its note."""

    class Fatal(ForwardHook):
        on_error = "raise"

        def on_forward(self, output: Tensor) -> None:
            raise ValueError("boom")

    model = Model()
    _manager = watching(model, Fatal())
    with pytest.raises(ValueError, match="boom") as caught:
        wrapper(model, "aot_eager")(INPUT)
    assert "raised by hook 'hook0' in on_forward, step 0" in caught.value.__notes__


@pytest.mark.parametrize("compile", [None, wrapper, by_block], ids=["eager", "wrapper", "by_block"])
def test_a_checkpointed_forward_counts_once(compile: Callable[..., Any] | None) -> None:
    """The repetition inside backward is not a second call, compiled or not."""
    model, hook = Model(checkpointed=True), Watch("blocks.*.up")
    _manager = watching(model, hook)
    run = compile(model, "aot_eager") if compile else model
    for _ in range(2):
        run(INPUT).sum().backward()
    assert hook.names == ["blocks.0.up", "blocks.1.up"] * 2


def trained(
    dtype: torch.dtype, compile: Callable[[nn.Module], Any], *hooks: ForwardHook, device: str = "cpu"
) -> list[Any]:
    """Losses, parameters, gradients and the random streams of a few steps with dropout."""
    torch._dynamo.reset()
    model = Model().to(device, dtype)
    manager = watching(model, *hooks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run, losses = compile(model), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = run(INPUT.to(device, dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not manager.fire_report().silent
    gradients = [parameter.grad for parameter in model.parameters()]
    streams = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device == "cuda" else [])]
    return [*losses, *gradients, *(parameter.detach() for parameter in model.parameters()), *streams]


def same_with_observers(dtype: torch.dtype, compile: Callable[[nn.Module], Any]) -> bool:
    """Whether training is bit for bit the same with observers of every sort on every module."""
    from hookline.activations.capture import Capture
    from hookline.activations.monitor import Monitor

    plain = trained(dtype, compile)
    watched = trained(dtype, compile, Monitor(), Watch(), Capture(what="both"))
    return len(plain) == len(watched) and all(map(torch.equal, plain, watched))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compile", [lambda model: model, lambda model: wrapper(model, "aot_eager")], ids=["no", "yes"])
def test_observers_change_no_bit(dtype: torch.dtype, compile: Callable[[nn.Module], Any]) -> None:
    """Losses, parameters, gradients and random streams, with dropout, compiled or not."""
    assert same_with_observers(dtype, compile)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [wrapper, by_block], ids=lambda way: way.__name__)
def test_observers_change_no_bit_under_inductor(dtype: torch.dtype, way: Callable[..., Any]) -> None:
    """In bf16 with casts as written: else inductor rounds what is observed, and not what stays inside a kernel."""
    from torch._inductor import config

    with config.patch(emulate_precision_casts=dtype is torch.bfloat16):
        assert same_with_observers(dtype, lambda model: way(model, "inductor"))


def test_inductor_keeps_the_operator_and_shows_true_values() -> None:
    """The operator is not dead code, and a buffer that is reused was read before."""
    model, hook = Block().eval(), Watch(["up", "act", "down"])
    manager = watching(model, hook)
    manager.register_monitoring_hook("*", "monitor", metrics=["mean"])
    with torch.no_grad():
        torch.compile(model)(INPUT)
    with torch.no_grad(), manager.silenced():
        up = model.up(INPUT)
        expected = {"up": up, "act": model.act(up), "down": model.down(model.act(up))}
    assert hook.names == ["up", "act", "down"]
    means = manager.get("monitor").latest()
    for name, output in hook.seen:
        torch.testing.assert_close(output, expected[name])
        assert means[name]["mean"] == pytest.approx(expected[name].mean().item(), abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_every_hook_fires_without_a_wait(mode: str) -> None:
    """CUDA graphs, too, which replay kernels without calling Python: a watched module stays out of them."""
    model, data = Model().cuda().eval(), INPUT.cuda()
    manager = watching(model)
    manager.register_monitoring_hook("*", "monitor", metrics=["mean", "absmax"])
    manager.register_capture_hook("blocks.1.act", "capture", max_captured_states=100)
    run = torch.compile(model, mode=mode)

    def steps(count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            run(data).sum().backward()

    steps(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {row.fired for row in manager.fire_report().rows if row.module != "blocks"} == {8}
    with manager.silenced(), torch.no_grad():
        first = model.blocks[0](data)
        expected = model.blocks[1].act(model.blocks[1].up(first))
    for state in manager.get_captured_states("capture"):
        torch.testing.assert_close(state.outputs, expected, rtol=1e-3, atol=1e-3)
    assert manager.get("monitor").latest()["blocks.1.act"]["mean"] == pytest.approx(expected.mean().item(), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_statistics_are_added_up_in_the_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook is called and nothing waits; steps, values, a schedule and the accounts are right, all in one graph."""
    from hookline.activations.monitor import Monitor
    from hookline.core.schedule import Reading

    model, data = Model().cuda().eval(), INPUT.cuda()
    manager = watching(model, Monitor(metrics=["mean", "std", "absmax", "count"]))
    manager.register_monitoring_hook("head", "rarely", metrics=["mean"], every=3)
    run, monitor = torch.compile(model, mode=mode), manager.get("hook0")

    def steps(first: int, last: int, run: Any) -> None:
        for step in range(first, last + 1):
            manager.begin_batch(Reading(step, step, 1))
            manager.dispatcher.run.step = step
            run(data * step).sum().backward()
            monitor.on_step_end(step)

    steps(1, 4, model)
    expected = {name: dict(monitor.history(name)) for name in ("blocks.0.up", "blocks.1.act", "head", "blocks.1")}
    monkeypatch.setattr(Monitor, "_observe", lambda self, name, live_output, step: pytest.fail(f"called at {name}"))
    steps(5, 7, run)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(8, 12, run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps(1, 4, run)
    assert graphs() == 1 and not counters["graph_break"]
    for name, values in expected.items():
        history = monitor.history(name)
        assert [step for step, _ in history] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4]
        for step, row in history[-4:]:
            assert row == pytest.approx(values[step], rel=2e-3, abs=2e-3), (name, step)
    assert [step for step, _ in manager.get("rarely").history("head")] == [3, 6, 9, 12, 3]
    counted = {(row.hook, row.calls, row.fired) for row in manager.fire_report().rows if row.module != "blocks"}
    assert counted == {("hook0", 16, 16), ("rarely", 16, 5)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [wrapper, by_block], ids=lambda way: way.__name__)
def test_on_a_gpu_a_monitor_changes_no_bit(dtype: torch.dtype, way: Callable[..., Any]) -> None:
    """Losses, parameters, gradients and random streams, with dropout; in bf16 with casts as written."""
    from torch._inductor import config

    from hookline.activations.monitor import Monitor

    def compile(model: nn.Module) -> Any:
        return way(model, "inductor")

    with config.patch(emulate_precision_casts=dtype is torch.bfloat16):
        plain = trained(dtype, compile, device="cuda")
        watched = trained(dtype, compile, Monitor(), device="cuda")
    assert len(plain) == len(watched) and all(map(torch.equal, plain, watched))


# ---- details ---------------------------------------------------------------------------------------------------------


def test_an_id_that_was_given_back_leads_nowhere() -> None:
    """Compiled code may be older than the removal of a hook."""
    hook = Watch("0")
    model = nn.Sequential(nn.Linear(8, 2))
    manager = watching(model, hook)
    manager.dispatcher.sync(compiling=True)
    (hooked,) = manager.dispatcher.modules
    graph_id = hooked.graph_id
    dynamo.call_hooks([INPUT], "(None, None, 0)", graph_id)
    assert hook.names == ["0"]
    manager.remove("hook0")
    dynamo.call_hooks([INPUT], "(None, None, 0)", graph_id)
    assert hook.names == ["0"]


@pytest.mark.parametrize(
    ("parts", "wants"),
    [
        ((), ""),
        ({"output", "called"}, "called output"),
        ({"called", "output", "outside"}, "outside"),
        ({"statistics"}, "statistics"),
        ({"statistics", "called", "output"}, "called live output"),
    ],
)
def test_what_hooks_want_together(parts: Any, wants: str) -> None:
    """Nothing, parts in one order, statistics alone, or a graph break if any hook needs it."""
    assert dynamo.combine(parts) == wants


def test_a_hook_registered_while_models_run_uncompiled_fires_in_compiled_code_afterwards() -> None:
    """Inside `capturing` nothing is compiled; a hook registered there is called by graphs afterwards."""
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), HookManager()
    manager.watch(model)
    compiled_model = torch.compile(model, backend="aot_eager")
    batch = torch.ones(2, 4)
    compiled_model(batch)
    with manager.capturing(model, "0"):
        manager.register_capture_hook(model[1], "late")
    compiled_model(batch)
    assert len(manager.get_captured_states("late")) == 1


def test_further_runs_of_a_trainer_compile_nothing() -> None:
    """Its hooks leave the model between the runs; graphs with and without them serve every later one."""
    model, graphs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 0

    def count_graphs(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=count_graphs)
    batch = torch.ones(2, 4)
    trainer = make_trainer(model=model, data=[batch], step_fn=lambda _, batch: compiled(batch).sum(), loss_fn=None)
    calls: list[str] = []
    trainer.on("forward")(lambda name, output: calls.append(name))
    counts = []
    for epochs in range(1, 5):
        trainer.fit(max_epochs=epochs)
        compiled(batch)
        counts.append(graphs)
    assert len(set(counts[1:])) == 1 and calls == ["0", "1"] * 4
