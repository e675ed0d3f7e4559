"""Modules with torch hooks: attached and removed without a trace, named, timed, copied and pickled."""

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import ForwardHook, HookManager, SimpleTrainer

INPUT = torch.ones(1, 4)


class Seconds(ForwardHook):
    """Keeps what each call took."""

    def __init__(self, modules: Any) -> None:
        self.modules, self.seconds = modules, []

    def on_forward(self, seconds: float) -> None:
        self.seconds.append(seconds)


def hook_counts(module: nn.Module) -> tuple[int, int, int]:
    """Forward pre-hooks and forward hooks of a module, and how many of the latter take keywords."""
    return len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_hooks_with_kwargs)


# ---- attaching -------------------------------------------------------------------------------------------------------


def test_each_hook_leaves_the_torch_hooks_that_are_needed() -> None:
    """One for all hooks, and another one while a hook measures time."""
    module, manager = nn.Linear(4, 4), HookManager()
    manager.register_capture_hook(module, "first")
    assert hook_counts(module) == (0, 1, 1)
    manager.register_monitoring_hook(module, "timed", metrics=["time"])
    manager.register_monitoring_hook(module, "timed too", metrics=["time"])
    assert hook_counts(module) == (1, 1, 1)
    manager.remove("timed")
    assert hook_counts(module) == (1, 1, 1)
    manager.remove("timed too")
    assert hook_counts(module) == (0, 1, 1)
    manager.remove("first")
    assert hook_counts(module) == (0, 0, 0)


def test_torch_hooks_of_others_keep_their_order() -> None:
    """Ours is one among them."""
    module, manager, order = nn.Linear(4, 4), HookManager(), []

    class Ours(ForwardHook):
        modules = module

        def on_forward(self) -> None:
            order.append("ours")

    module.register_forward_hook(lambda *_: order.append("first"))
    ours = manager.register(Ours())
    last = module.register_forward_hook(lambda *_: order.append("last"))
    module(INPUT)
    last.remove()
    ours.remove()
    module(INPUT)
    assert order == ["first", "ours", "last", "first"]


def test_a_module_is_not_kept_alive() -> None:
    """Not even until garbage is collected; without it, attaching and detaching do nothing."""
    module, manager = nn.Linear(4, 4), HookManager()
    manager.register_capture_hook(module, "it", capture_input=False)
    module(INPUT)
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()
    manager.register_monitoring_hook(nn.Linear(4, 4), "other", metrics=["time"])
    manager.remove("it")


def test_a_torch_hook_that_is_removed_while_its_module_runs_is_not_called() -> None:
    """Torch has its list of hooks already, and reads only then whether they take keywords."""
    module, manager = nn.Linear(4, 4), HookManager()
    hook = Seconds(module)
    module.register_forward_hook(lambda *_: manager.remove("it"))
    manager.register(hook, "it")
    module(INPUT)
    assert hook.seconds == [] and hook_counts(module) == (0, 1, 0)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_each_hook_names_a_module_object_after_itself() -> None:
    """Whichever hook was registered first."""
    module, manager = nn.Linear(4, 4), HookManager()
    manager.register_debug_hook(module, "guard", conditions={"absmax": ">= 0"})
    manager.register_monitoring_hook(module, "head", metrics=["mean"])
    manager.register_monitoring_hook(module, "cost", metrics=["time"])
    manager.register_capture_hook(module, "kept")
    module(INPUT)
    assert list(manager.get("head").latest()) == ["head"] and list(manager.get("cost").latest()) == ["cost"]
    assert manager.get("guard").findings[0].module == "guard"
    assert manager.get_captured_states("kept")[0].name == "kept"
    assert {row.hook: row.module for row in manager.fire_report().rows} == {
        name: name for name in ("guard", "head", "cost", "kept")
    }


def test_a_removed_hook_leaves_no_name() -> None:
    """The next hook on the module uses its own."""
    module, manager = nn.Linear(4, 4), HookManager()
    for name in ("first", "second"):
        with manager.register_capture_hook(module, name):
            module(INPUT)
            assert [state.name for state in manager.get_captured_states(name)] == [name]


def test_a_name_is_removed_with_its_hook() -> None:
    """A hook that is registered later under the same name, for a class, sees the root without a name."""
    model, manager = nn.Sequential(nn.Linear(4, 4)), HookManager()
    manager.watch(model)
    manager.register_capture_hook(nn.Sequential, "first")
    manager.register_capture_hook(model, "it")
    model(INPUT)
    assert [state.name for state in manager.get_captured_states("it")] == ["it"]
    manager.remove("it")
    manager.register_capture_hook(nn.Sequential, "it")
    model(INPUT)
    assert [state.name for state in manager.get_captured_states("it")] == [""]


def test_a_watched_model_names_its_modules() -> None:
    """For all hooks, whether they were registered before or after."""
    model, manager = nn.Sequential(nn.Linear(4, 4)), HookManager()
    manager.register_capture_hook(model[0], "before")
    manager.watch(model)
    manager.register_capture_hook(model[0], "after")
    model(INPUT)
    assert [manager.get_captured_states(hook)[0].name for hook in ("before", "after")] == ["0", "0"]


# ---- measuring -------------------------------------------------------------------------------------------------------


class Recursive(nn.Module):
    """Runs itself a number of times, then something else."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.last = last

    def forward(self, depth: int) -> None:
        if depth:
            time.sleep(0.002)
            self(depth - 1)
        else:
            self.last()


def test_nested_calls_are_measured_separately() -> None:
    """The inner one took less."""
    module, manager = Recursive(lambda: None), HookManager()
    hook = Seconds(module)
    manager.register(hook)
    module(1)
    inner, outer = hook.seconds
    assert 0 < inner < outer and outer > 0.002


def test_a_call_whose_start_was_not_seen_has_no_time() -> None:
    """The hook was registered while the module ran."""
    manager = HookManager()
    manager.register_capture_hook(module := Recursive(lambda: manager.register(hook)), "earlier")
    hook = Seconds(module)
    module(0)
    module.last = lambda: None
    module(0)
    first, second = hook.seconds
    assert math.isnan(first) and second > 0


def test_starts_of_calls_that_raised_do_not_pile_up() -> None:
    """They are dropped beyond a limit, and the next call is measured."""

    def fail() -> None:
        raise RuntimeError("the model fails")

    module, manager = Recursive(fail), HookManager()
    hook = Seconds(module)
    manager.register(hook)
    for _ in range(300):
        with pytest.raises(RuntimeError, match="the model fails"):
            module(0)
    module.last = lambda: None
    module(0)
    assert 0 < hook.seconds[0] < 1


# ---- copies and pickles ----------------------------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    """Three modules."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def watched(model: nn.Module, *metrics: str) -> HookManager:
    """A manager with a monitor on every module and a capture on the first."""
    manager = HookManager()
    manager.watch(model)
    manager.register_monitoring_hook("*", "monitor", metrics=["mean", *metrics])
    manager.register_capture_hook("0", "first")
    return manager


def test_a_watched_model_can_be_pickled() -> None:
    """What comes back computes the same, and calls no hook."""
    model = make_model()
    manager = watched(model, "time", "memory")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(INPUT), model(INPUT))
    again(INPUT)
    assert len(manager.get_captured_states("first")) == 1


def test_a_model_can_be_saved_inside_a_capturing_block() -> None:
    """Although it has torch hooks there."""
    model, file = make_model(), io.BytesIO()
    with HookManager().capturing(model) as cache:
        output = model(INPUT)
        torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(INPUT), output) and len(cache) == 3


def test_a_saved_model_needs_no_hookline_where_it_is_loaded(tmp_path: Path) -> None:
    """The file names nothing of ours, and torch compiles the model in one graph."""
    model = make_model()
    manager = watched(model, "time")
    torch.save(model, tmp_path / "model.pt")
    manager.remove("monitor")
    program = f"""
import sys, torch
from torch._dynamo.testing import CompileCounter
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
counter = CompileCounter()
torch.compile(model, backend=counter)(torch.ones(2, 4))
assert counter.frame_count == 1, counter.frame_count
assert not [name for name in sys.modules if name.startswith("hookline")]
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_module_has_no_hooks(copied: Any) -> None:
    """A deep copy has its own weights."""
    model = make_model()
    manager = watched(model)
    twin = copied(model[0]) if copied is copy.copy else copied(model)[0]
    assert torch.equal(twin(INPUT), model[0](INPUT))
    if copied is copy.deepcopy:
        assert len(manager.get_captured_states("first")) == 1
        nn.init.zeros_(twin.weight)
        assert not torch.equal(twin(INPUT), model[0](INPUT))


def test_a_hook_may_pickle_the_model_of_a_run() -> None:
    """While a monitor of the same run has torch hooks on it."""
    model = make_model()
    data = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(2)]
    saved: list[bytes] = []
    trainer = SimpleTrainer(
        model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=nn.functional.mse_loss, record=False, console=False,
    )  # fmt: skip
    trainer.add_hook("monitor", modules="*")
    trainer.on("train_batch_end", name="saves", on_error="raise")(lambda model: saved.append(pickle.dumps(model)))
    trainer.train()
    assert torch.equal(pickle.loads(saved[-1])(INPUT), model(INPUT))


def test_a_compiled_and_watched_model_can_be_pickled() -> None:
    """Torch does not pickle the compiled call."""
    model = make_model()
    watched(model)
    model[0].compile(backend="eager")
    expected = model(INPUT)
    assert torch.equal(pickle.loads(pickle.dumps(model))(INPUT), expected)


def test_a_removed_hook_is_freed() -> None:
    """The manager forgets which modules it selected, and with that the hook."""
    module, manager = nn.Linear(4, 4), HookManager()
    manager.register_capture_hook(module, "kept")
    module(INPUT)
    hook = weakref.ref(manager.get("kept"))
    manager.remove("kept")
    gc.collect()
    assert hook() is None
