"""Document 003's code block, as written there; only the import line is ours. And its list of methods and settings."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from hookline import ForwardHook, HooklineError, HookManager


@pytest.mark.req("003-15", "003-16", "003-17", "003-18")
def test_usage_example_runs_as_written(capsys):
    """The example registers hooks, captures inputs and outputs of a layer, and cleans up."""
    import torch.nn as nn

    from hookline import HookManager

    # Initialize hook manager
    hook_manager = HookManager()

    # Example transformer layer (replace with actual model layer)
    transformer_layer = nn.TransformerEncoderLayer(d_model=512, nhead=8)

    # Register a capture hook
    hook_id = hook_manager.register_capture_hook(
        module=transformer_layer,
        hook_id="encoder_layer_4",
        layer_idx=4,
        capture_input=True,
        capture_output=True,
    )
    assert hook_id == "encoder_layer_4"

    # During model execution, states will be captured
    given = torch.randn(3, 2, 512)
    output = transformer_layer(given)

    # Retrieve captured states
    captured = hook_manager.get_captured_states(hook_id)
    print(f"Captured states: {len(captured)}")
    assert torch.equal(captured[0].inputs[0], given) and torch.equal(captured[0].outputs, output)

    # Cleanup when done
    hook_manager.remove_hook(hook_id)
    assert capsys.readouterr().out == "Captured states: 1\n"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


INPUT = torch.arange(12.0).reshape(3, 4)


@pytest.mark.req("003-08", "003-12", "003-21", "003-19")
def test_capture_of_inputs_outputs_or_both():
    """capture_input and capture_output choose what is captured; the sequence grows with every call."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "inputs", 0, capture_output=False)
    manager.register_capture_hook(model[0], "outputs", 0, capture_input=False)
    manager.register_capture_hook(model[0], "both", 0)
    for count in (1, 2, 3):
        model(INPUT)
        assert [len(manager.get_captured_states(name)) for name in ("inputs", "outputs", "both")] == [count] * 3
    inputs, outputs, both = (manager.get_captured_states(name)[-1] for name in ("inputs", "outputs", "both"))
    assert torch.equal(inputs.inputs[0], INPUT) and inputs.outputs is None
    assert torch.equal(outputs.outputs, model[0](INPUT)) and outputs.inputs is None
    assert both.inputs is not None and both.outputs is not None and both.call == 3


@pytest.mark.req("003-02", "003-22", "003-14")
def test_any_module_by_itself_or_by_pattern():
    """A hook takes a module without a model, or patterns in a watched one. One factory serves all."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[1], "by_module")
    manager.watch(model)
    manager.register_capture_hook("[02]", "by_pattern", capture_input=False)
    model(INPUT)
    assert [state.name for state in manager.get_captured_states("by_module")] == ["1"]
    assert [state.name for state in manager.get_captured_states("by_pattern")] == ["0", "2"]
    torch_hooks = [hook for module in model for hook in module._forward_hooks.values()]
    assert {hook.__name__ for hook in torch_hooks} == {"hookline_forward_hook"}


@pytest.mark.req("003-02", "003-14")
def test_every_module_of_a_model_can_be_hooked():
    """The model itself, containers, layers without parameters and a layer used twice, each with its values."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Identity())
            self.shared = self.again = nn.Tanh()

        def forward(self, inputs):
            return self.again(self.inner(self.shared(inputs)))

    torch.manual_seed(0)
    model, manager, expected = Twice(), HookManager(), {}
    for index, module in enumerate(model.modules()):
        calls = expected[manager.register_capture_hook(module, f"hook_{index}", index)] = []
        module.register_forward_hook(
            lambda _, args, output, calls=calls: calls.append((args[0].clone(), output.clone()))
        )
    model(INPUT)
    assert [len(calls) for calls in expected.values()] == [1, 1, 1, 1, 1, 2]
    for index, (hook_id, calls) in enumerate(expected.items()):
        states = manager.get_captured_states(hook_id)
        assert [state.layer_idx for state in states] == [index] * len(calls)
        for state, (given, output) in zip(states, calls, strict=True):
            assert torch.equal(state.inputs[0], given) and torch.equal(state.outputs, output)


@pytest.mark.req("003-11")
def test_remove_hook_takes_a_hook_id():
    """By position and as `hook_id`, with the id that registering returned and with the chosen one."""
    model, manager = make_model(), HookManager()
    for remove in (
        manager.remove_hook,
        lambda hook_id: manager.remove_hook(hook_id=hook_id),
        lambda hook_id: manager.remove_hook(hook_id="one"),
    ):
        hook_id = manager.register_capture_hook(module=model[0], hook_id="one")
        assert "one" in manager and model[0]._forward_hooks
        remove(hook_id)
        assert "one" not in manager and not model[0]._forward_hooks


@pytest.mark.req("003-11", "003-20", "003-34")
def test_remove_hook_leaves_nothing():
    """After removal nothing is captured, no torch hook is left on the model, and its states are gone."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "gone")
    model(INPUT)
    manager.remove_hook("gone")
    model(INPUT)
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert len(manager.captures) == 0 and manager.captures.bytes == 0
    with pytest.raises(HooklineError, match="no hook is named 'gone'"):
        manager.get_captured_states("gone")
    with manager.register_capture_hook(model[0], "short") as hook_id:
        model(INPUT)
        assert len(manager.get_captured_states(hook_id)) == 1
    assert not model[0]._forward_hooks and "short" not in manager


@pytest.mark.req("003-13", "003-04")
def test_clear_one_or_all():
    """clear_captured_states deletes the states of one hook, or of all; the hooks stay registered."""
    model, manager = make_model(), HookManager()
    for name in ("a", "b"):
        manager.register_capture_hook(model[0], name)
    model(INPUT)
    manager.clear_captured_states("a")
    assert [len(manager.get_captured_states(name)) for name in "ab"] == [0, 1]
    manager.clear_captured_states()
    assert len(manager.captures) == 0 and len(manager) == 2


@pytest.mark.req("003-36", "003-07")
def test_ids_are_unique_and_counted():
    """A duplicate id is refused with a clear error; hooks and states can be listed and counted."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "layer", layer_idx=7)
    with pytest.raises(HooklineError, match="'layer' is registered already"):
        manager.register_capture_hook(model[1], "layer")
    model(INPUT)
    assert [hook.name for hook in manager.list_hooks()] == ["layer"] and len(manager) == 1
    assert [state.layer_idx for state in manager.get_captured_states("layer")] == [7]


@pytest.mark.req("003-30", "003-06")
def test_max_captured_states_holds_at_every_capture():
    """The oldest states are deleted first; the limit is per hook, and a hook may have a different one."""
    model, manager = make_model(), HookManager(max_captured_states=3)
    manager.register_capture_hook(model[0], "default")
    manager.register_capture_hook(model[0], "own", max_captured_states=1)
    for _ in range(5):
        model(INPUT)
        assert len(manager.get_captured_states("default")) <= 3
    assert [state.call for state in manager.get_captured_states("default")] == [3, 4, 5]
    assert [state.call for state in manager.get_captured_states("own")] == [5]


@pytest.mark.req("003-32", "003-35")
def test_memory_limit_is_a_hard_budget_by_unique_storage():
    """Bytes are measured, tensors shared by two states count once, and the oldest are deleted at the limit."""
    layer = nn.Linear(256, 256)  # an output of 4 rows has 4 KB
    manager = HookManager(memory_limit_mb=16 / 1024)
    manager.register_capture_hook(layer, "first", capture_input=False)
    manager.register_capture_hook(layer, "second", capture_input=False)
    for count in range(1, 9):
        layer(torch.randn(4, 256))
        assert manager.captures.bytes <= 16 * 1024
        assert manager.captures.bytes == min(count, 4) * 4096
    assert manager.captures.dropped == 8
    manager.clear_captured_states()
    assert manager.captures.bytes == 0


@pytest.mark.req("003-31")
def test_cleanup_interval_deletes_states_of_dead_modules():
    """After every cleanup_interval module calls, states of modules that no longer exist are deleted."""
    manager = HookManager(cleanup_interval=4)
    passing, staying = nn.Linear(4, 4), nn.Linear(4, 4)
    manager.register_capture_hook(passing, "passing")
    manager.register_capture_hook(staying, "staying", max_captured_states=1)
    passing(INPUT)
    gone = weakref.ref(passing)
    del passing
    gc.collect()
    assert gone() is None and len(manager.captures) == 1
    staying(INPUT)
    staying(INPUT)
    assert len(manager.get_captured_states("passing")) == 1  # the first call was the dead module's: three of four
    staying(INPUT)
    assert manager.get_captured_states("passing") == [] and len(manager.captures) == 1


@pytest.mark.req("003-23")
def test_capture_can_be_configured():
    """Captured values can be cast, reduced, cloned and scheduled."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "small", capture_input=False, dtype="bfloat16", reduce="batch_mean")
    manager.register_capture_hook(model[0], "cloned", capture_input=False, clone=True)
    output = model[0](INPUT)
    (small,) = manager.get_captured_states("small")
    assert small.outputs.dtype == torch.bfloat16 and small.outputs.shape == (8,)
    assert torch.allclose(small.outputs.float(), output.mean(0), rtol=1e-2)
    with pytest.raises(HooklineError, match="did you mean 'bfloat16'"):
        manager.register_capture_hook(model[0], "typo", dtype="bfloat61")


@pytest.mark.req("003-18", "003-35")
def test_a_capture_stays_true_when_the_model_writes_in_place():
    """A later in-place operation of the model does not change what was captured."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.layer(inputs).mul_(0.0)

    model, manager = InPlace(), HookManager()
    manager.register_capture_hook(model.layer, "layer")
    with torch.no_grad():
        assert not model(INPUT).any()
    assert torch.equal(manager.get_captured_states("layer")[0].outputs, model.layer(INPUT))


@pytest.mark.req("003-05")
def test_threads_run_register_and_read_at_once():
    """Two threads run the model while a third registers and removes: no state is lost or under a wrong owner."""
    model, manager = make_model(), HookManager(max_captured_states=None)
    manager.register_capture_hook(model[0], "layer")
    problems: list[str] = []

    def run(value: float) -> None:
        for _ in range(200):
            model(torch.full((1, 4), value))

    def meddle() -> None:
        for index in range(50):
            with manager.register_capture_hook(model[2], f"extra_{index}"):
                manager.list_hooks()
                manager.get_captured_states("layer")

    threads = [threading.Thread(target=run, args=(value,), name=f"runs_{value}") for value in (1.0, 2.0)]
    threads.append(threading.Thread(target=meddle))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = manager.get_captured_states("layer")
    for state in states:
        if state.thread != f"runs_{state.inputs[0][0, 0].item()}":
            problems.append(state.thread)
    assert not problems and len(states) == 400
    assert sorted(state.call for state in states) == list(range(1, 401))
    assert not model[2]._forward_hooks


@pytest.mark.req("003-38", "003-37")
@pytest.mark.hooks_fail(raises=ValueError)
def test_an_error_in_a_callback_is_named_and_does_not_break_the_forward_pass(caplog):
    """The forward pass gives its output, the failing hook is named in the log, and each hook's cost is reported."""

    class Broken(ForwardHook):
        modules = "*"

        def on_forward(self, name):
            raise ValueError("broken")

    model, manager = make_model(), HookManager()
    manager.watch(model)
    expected = model(INPUT)
    manager.register(Broken())
    manager.register_capture_hook(model[0], "layer")
    assert torch.equal(model(INPUT), expected)
    assert "hook 'broken'" in caplog.text and len(manager.get_captured_states("layer")) == 1
    assert {row["hook"] for row in manager.costs()} == {"broken", "layer"}


def test_capturing_for_one_block():
    """A cache is read by name or glob, the forward pass can stop early, and nothing stays on the model."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "*") as cache:
        output = model(INPUT)
    assert torch.equal(cache["2"], output) and set(cache["[01]"]) == {"0", "1"}
    with manager.capturing(model, ["0", "1"], early_stop=True) as cache:
        assert cache.run(INPUT) is None
    assert "1" in cache and "2" not in cache
    with pytest.raises(HooklineError, match="nothing was captured from '7'"):
        cache["7"]
    assert not any(module._forward_hooks for module in model.modules())


def test_captures_are_written_to_safetensors(tmp_path):
    """Every captured tensor is in the file under its module, call and part."""
    from safetensors.torch import load_file

    model, manager = make_model(), HookManager()
    with manager.capturing(model, "0", what="both") as cache:
        model(INPUT)
    loaded = load_file(cache.save(tmp_path / "states.safetensors"))
    assert torch.equal(loaded["0/1/inputs/0"], INPUT) and torch.equal(loaded["0/1/outputs/0"], cache["0"])


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_structures_are_kept(kind):
    """Nested tuples are captured as they are."""
    module = nn.LSTM(4, 3) if kind == "lstm" else nn.MultiheadAttention(4, 2)
    manager = HookManager()
    manager.register_capture_hook(module, "module")
    output = module(INPUT) if kind == "lstm" else module(INPUT, key=INPUT, value=INPUT)
    (state,) = manager.get_captured_states("module")
    assert type(state.outputs) is tuple and torch.equal(state.outputs[0], output[0])
    if kind == "lstm":
        assert torch.equal(state.outputs[1][1], output[1][1])
    else:
        assert set(state.kwargs) == {"key", "value"}


@pytest.mark.req("003-09", "003-24", "003-25", "003-26")
def test_monitoring_hook_measures_what_it_is_asked_for():
    """Statistics equal torch's, time and memory are available on request, and per-step values are kept."""
    model, manager = make_model(), HookManager()
    hook_id = manager.register_monitoring_hook(model[0], "head", metrics=["mean", "std", "absmax", "time", "memory"])
    manager.dispatcher.run.step = 1
    output = model[0](INPUT)
    latest = manager.get(hook_id).latest()["head"]
    assert latest["mean"] == pytest.approx(output.mean().item(), rel=1e-5)
    assert latest["std"] == pytest.approx(output.std().item(), rel=1e-5)
    assert latest["absmax"] == pytest.approx(output.abs().max().item(), rel=1e-6)
    assert latest["time"] > 0 and latest["memory"] == output.nbytes
    manager.dispatcher.run.step = 2
    model[0](INPUT * 2)
    steps = [step for step, values in manager.get(hook_id).history("head") if "mean" in values]
    assert steps == [1, 2]
    with pytest.raises(HooklineError, match="did you mean 'absmax'"):
        manager.register_monitoring_hook(model[0], "typo", metrics=["absmx"])


@pytest.mark.req("003-25")
def test_time_is_in_seconds_and_spent_inside_the_module():
    """At least what the module itself waits, at most what its caller measures around it."""

    class Waits(nn.Module):
        def forward(self, inputs):
            start = time.perf_counter()
            time.sleep(0.01)
            inside.append(time.perf_counter() - start)
            return inputs

    inside, around = [], []
    module, manager = Waits(), HookManager()
    manager.register_monitoring_hook(module, "clock", metrics=["time"])
    start = time.perf_counter()
    module(INPUT)
    around.append(time.perf_counter() - start)
    measured = manager.get("clock").latest()["clock"]["time"]
    assert inside[0] <= measured <= around[0]


@pytest.mark.req("003-05", "003-25")
def test_each_thread_measures_its_own_calls():
    """A call that begins in another thread while a module runs does not shorten the time of that module."""

    class Meets(nn.Module):
        def forward(self, inputs):
            start = time.perf_counter()
            if threading.current_thread() is first:
                first_inside.set()
                assert second_inside.wait(30)
                inside.append(time.perf_counter() - start)
            else:
                second_inside.set()
                first.join(30)
            return inputs

    def call_later():
        assert first_inside.wait(30)
        time.sleep(0.01)
        module(INPUT)

    inside, first_inside, second_inside = [], threading.Event(), threading.Event()
    module, manager = Meets(), HookManager()
    manager.register_monitoring_hook(module, "clock", metrics=["time"])
    first, second = threading.Thread(target=module, args=(INPUT,)), threading.Thread(target=call_later)
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    times = [values["time"] for _, values in manager.get("clock").history("clock")]
    assert len(times) == 2 and times[0] >= inside[0]


@pytest.mark.req("003-10", "003-03", "003-01")
def test_the_three_kinds_are_hooks_of_one_manager():
    """Capture, monitoring and debug hooks are registered, listed and removed by one manager."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "capture")
    manager.register_monitoring_hook(model[0], "monitor", metrics=["mean"])
    manager.register_debug_hook(model[0], "guard", conditions={"nan": True, "absmax": "> 1e4"})
    model(INPUT)
    model(INPUT * 1e6)
    assert [finding.condition for finding in manager.get("guard").findings] != []
    assert sorted(hook.name for hook in manager.list_hooks()) == ["capture", "guard", "monitor"]
    assert not manager.fire_report().silent
    for name in list(manager):
        manager.remove_hook(name)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.req("003-39")
def test_every_kind_returns_and_clears_what_it_has_gathered():
    """get_captured_states is the one method of retrieval: measurements and findings are states, too."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "capture")
    manager.register_monitoring_hook(model, "monitor", metrics=["mean", "time"])
    manager.register_debug_hook(model[1], "guard", conditions="absmax > 0", inspect=True)
    outputs = [model(INPUT), model(INPUT * 2)]
    assert [state.call for state in manager.get_captured_states("capture")] == [1, 2]
    measured = manager.get_captured_states("monitor")
    assert [(state.name, state.step, set(state.values)) for state in measured] == [("monitor", 0, {"mean", "time"})] * 2
    assert [state.values["mean"] for state in measured] == [
        pytest.approx(output.mean().item(), rel=1e-5) for output in outputs
    ]
    gathered = manager.get_captured_states("guard")
    assert [type(one).__name__ for one in gathered] == ["Inspection"] * 2 + ["Finding"] * 2
    assert [(one.module, one.call) for one in gathered] == [("guard", 1), ("guard", 2)] * 2
    manager.clear_captured_states("monitor")
    assert manager.get_captured_states("monitor") == [] and len(manager.get_captured_states("guard")) == 4
    manager.clear_captured_states()
    assert [len(manager.get_captured_states(name)) for name in manager] == [0, 0, 0]
    model(INPUT)
    assert [len(manager.get_captured_states(name)) for name in manager] == [1, 1, 2]


@pytest.mark.req("003-39")
def test_a_hook_that_gathers_nothing_says_so():
    """An empty list would look like a hook that has not fired yet; a user's hook takes part with `states`."""

    class Silent(ForwardHook):
        def on_forward(self, name): ...

    class Gathers(Silent):
        states = ("one", "two")

    manager = HookManager()
    manager.register(Silent())
    manager.register(Gathers())
    with pytest.raises(HooklineError, match=r"hook 'silent' \(Silent\) collects no states: .* get_hook\('silent'\)"):
        manager.get_captured_states("silent")
    assert manager.get_captured_states("gathers") == ["one", "two"]
    assert manager.get_hook("gathers") is manager.get("gathers")
    manager.clear_captured_states()  # it has nothing to clear


@pytest.mark.req("003-40", "003-24", "003-25", "003-26")
def test_a_monitoring_hook_without_metrics_gives_statistics_time_and_memory():
    """Layer statistics, performance and resource usage, as the document lists them."""
    model, manager = make_model(), HookManager()
    manager.register_monitoring_hook(model[0], "head")
    output = model[0](INPUT)
    (state,) = manager.get_captured_states("head")
    assert set(state.values) == {"mean", "std", "absmax", "zeros", "nans", "infs", "time", "memory"}
    assert state.values["time"] > 0 and state.values["memory"] == output.nbytes
    assert state.values["std"] == pytest.approx(output.std().item(), rel=1e-5)


@pytest.mark.req("003-41", "003-29", "003-27")
@pytest.mark.parametrize(
    ("condition", "label"),
    [
        ("grad_absmax > 100", "grad_absmax > 100"),
        ({"grad_absmax": "> 100", "grad_nan": True, "nan": True}, "grad_absmax > 100"),
        (lambda name, gradient: gradient.abs().max() > 100, "<lambda>"),
    ],
)
def test_debug_hooks_take_conditions_on_gradients(condition, label):
    """The gradient of a module's output is checked in the backward pass, and the finding has its numbers."""
    model, manager = make_model(), HookManager()
    manager.watch(model)
    manager.register_debug_hook(["0", "1"], "guard", conditions=condition)
    model(INPUT).sum().backward()
    assert manager.get_captured_states("guard") == []
    (model[1](model[0](INPUT)) * torch.tensor([1000.0] + [0.0] * 7)).sum().backward()
    first = manager.get_captured_states("guard")[0]
    assert (first.module, first.condition, first.call) == ("1", label, 2)
    assert first.statistics["absmax"] == 1000 and first.outputs == ("float32 (3, 8) on cpu",)
    assert any("backward" in line for line in first.stack)


@pytest.mark.req("003-41")
@pytest.mark.parametrize("wrong", [lambda output: True, lambda: True, lambda name, output, more: True])
def test_a_condition_with_a_wrong_signature_is_refused_at_registration(wrong):
    """Not at the first forward pass, where it would be a failure of the hook."""
    model, manager = make_model(), HookManager()
    for conditions in (wrong, ["nan", wrong]):
        with pytest.raises(HooklineError, match=r"takes other arguments; .*\(name, output\) or \(name, gradient\)"):
            manager.register_debug_hook(model[0], "guard", conditions=conditions)
    assert len(manager) == 0


def test_monitoring_in_training_is_logged_under_its_true_step():
    """With a trainer the values are in the record's layers at their own steps, and training is unchanged."""
    from hookline import SimpleTrainer

    results = []
    for monitored in (True, False):
        model = make_model()
        data = [(torch.full((2, 4), float(index)), torch.zeros(2, 2)) for index in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = SimpleTrainer(
            model, data, optimizer, "cpu", loss_fn=nn.functional.mse_loss, record=False, console=False
        )
        expected = [model[0](batch[0]).mean().item() for batch in data]
        if monitored:
            trainer.add_hook("monitor", modules="0", metrics=["mean", "time"])
        trainer.train()
        results.append(trainer.record)
    means = [layers for layers in results[0].layer_rows if layers.header.columns == ("mean",)]
    logged = {layers.step: layers.values.item() for layers in means}
    assert logged == {step: pytest.approx(value, rel=1e-5) for step, value in enumerate(expected, 1)}
    watched, plain = ([record["train/loss"] for record in result.metrics] for result in results)
    assert watched == plain
