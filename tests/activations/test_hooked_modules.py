"""Modules with torch hooks: attached and removed without a trace, named, timed, copied and pickled."""

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn
from watched_models import watch

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


def test_the_memory_of_a_call_is_what_it_left_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator says how much is allocated before and after the call."""
    allocated = iter([1000, 1064])
    monkeypatch.setattr("hookline._device.memory_allocated", lambda device: next(allocated))
    found: list[int] = []

    class Memory(ForwardHook):
        modules = "0"

        def on_forward(self, memory: int) -> None:
            found.append(memory)

    model, manager = make_model(4, 8, 1), HookManager([Memory()])
    manager.watch(model)
    model(INPUT)
    assert found == [64]


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


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_a_wrapper_that_is_passed_stands_for_the_module_in_it(watched: bool, ran_before: bool) -> None:
    """The torch hook is on the module that the name says, as with a pattern."""
    model, manager = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), HookManager()
    inner, batch = model[0], torch.ones(1, 2)
    model[0] = torch.compile(inner, backend="eager")
    if ran_before:
        model(batch)
    if watched:
        manager.watch(model)
    manager.register_capture_hook(model[0], "states")
    model(batch)
    names = [state.name for state in manager.get_captured_states("states")]
    assert names == ["0" if watched else "states"]
    assert hook_counts(model[0]) == (0, 0, 0) and hook_counts(inner) == (0, 1, 1)


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


def watched(model: nn.Module, *metrics: str) -> HookManager:
    """A manager with a monitor on every module and a capture on the first."""
    manager = watch(model)
    manager.register_monitoring_hook("*", "monitor", metrics=["mean", *metrics])
    manager.register_capture_hook("0", "first")
    return manager


def test_a_watched_model_can_be_pickled() -> None:
    """What comes back computes the same, and calls no hook."""
    model = make_model(4, 8, 1)
    manager = watched(model, "time", "memory")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(INPUT), model(INPUT))
    again(INPUT)
    assert len(manager.get_captured_states("first")) == 1


def test_a_model_can_be_saved_inside_a_capturing_block() -> None:
    """Although it has torch hooks there."""
    model, file = make_model(4, 8, 1), io.BytesIO()
    with HookManager().capturing(model) as cache:
        output = model(INPUT)
        torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(INPUT), output) and len(cache) == 3


def test_a_saved_model_needs_no_hookline_where_it_is_loaded(tmp_path: Path) -> None:
    """The file names nothing of ours, and torch compiles the model in one graph."""
    model = make_model(4, 8, 1)
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
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_module_has_no_hooks(copied: Any) -> None:
    """A deep copy has its own weights."""
    model = make_model(4, 8, 1)
    manager = watched(model)
    twin = copied(model[0]) if copied is copy.copy else copied(model)[0]
    assert torch.equal(twin(INPUT), model[0](INPUT))
    if copied is copy.deepcopy:
        assert len(manager.get_captured_states("first")) == 1
        nn.init.zeros_(twin.weight)
        assert not torch.equal(twin(INPUT), model[0](INPUT))


def test_a_hook_may_pickle_the_model_of_a_run() -> None:
    """While a monitor of the same run has torch hooks on it."""
    model = make_model(4, 8, 1)
    saved: list[bytes] = []
    trainer = make_trainer(model=model, data=make_batches(2, features=4))
    trainer.add_hook("monitor", modules="*")
    trainer.on("train_batch_end", name="saves", on_error="raise")(lambda model: saved.append(pickle.dumps(model)))
    trainer.train()
    assert torch.equal(pickle.loads(saved[-1])(INPUT), model(INPUT))


def test_a_compiled_and_watched_model_can_be_pickled() -> None:
    """Torch does not pickle the compiled call."""
    model = make_model(4, 8, 1)
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


# ---- lifetime --------------------------------------------------------------------------------------------------------


class Calls(ForwardHook):
    """Counts its calls; has nothing to close."""

    def __init__(self) -> None:
        self.calls = 0

    def on_forward(self, name: str) -> None:
        self.calls += 1


BATCHES = make_batches(3, features=4, targets=2)


def hooked_trainer(model: nn.Module, *hooks: Any) -> SimpleTrainer:
    """A trainer of three batches, with forward hooks of every kind that the library has."""
    return make_trainer(*hooks, "monitor", "capture", "debug", model=model, data=BATCHES)


def use(trainer: SimpleTrainer, how: str) -> None:
    """Use a trainer in one of the ways in which it runs its model."""
    if how == "train":
        trainer.train()
    elif how == "abandoned":
        next(iter(trainer.stepper()))
    elif how == "training_step":
        trainer.training_step(BATCHES[0])
    elif how == "validate":
        trainer.validate(BATCHES)
    elif how == "predict":
        trainer.predict(BATCHES)


@pytest.mark.parametrize("how", ["unused", "train", "abandoned", "training_step", "validate", "predict"])
def test_a_model_does_not_keep_its_trainers(how: str) -> None:
    """Whatever a trainer did, once nothing refers to it, it is freed and nothing of it is left on the model."""
    model = make_model(4, 4, 2, between=None)
    trainer = hooked_trainer(model, Calls())
    manager, hook = weakref.ref(trainer.hooks), weakref.ref(trainer.hooks.get("calls"))
    gone = weakref.ref(trainer)
    use(trainer, how)
    del trainer
    gc.collect()
    assert gone() is None and manager() is None and hook() is None
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2


def test_hooks_of_trainers_that_share_a_model_fire_in_their_own_runs() -> None:
    """Those of a trainer that waits or has finished are not attached while another one runs, although both exist."""
    model, hooks = make_model(4, 4, 2, between=None), [Calls() for _ in range(3)]
    trainers = [hooked_trainer(model, hook) for hook in hooks]
    counts = []
    for trainer in trainers:
        trainer.train()
        counts.append([hook.calls for hook in hooks])
        assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2
    assert counts == [[6, 0, 0], [6, 6, 0], [6, 6, 6]]


def test_hooks_fire_whenever_their_trainer_runs_the_model() -> None:
    """In its steps, validations and predictions, before, in and after a run; not when other code calls the model."""
    model, hook = make_model(4, 4, 2, between=None), Calls()
    trainer = hooked_trainer(model, hook)
    model(INPUT)
    assert hook.calls == 0
    assert {row.why for row in trainer.hooks.fire_report().of("calls")} == {
        "its trainer has not run the model, or the run has ended"
    }
    for how, fired in (("predict", 6), ("validate", 6), ("train", 6), ("validate", 6), ("predict", 6)):
        before = hook.calls
        use(trainer, how)
        model(INPUT)
        assert hook.calls - before == fired, how
    trainer.training_step(BATCHES[0])
    assert hook.calls == 32


def test_a_second_run_attaches_again() -> None:
    """Hooks that were registered between the runs, too."""
    model, first, second = make_model(4, 4, 2, between=None), Calls(), Calls()
    trainer = hooked_trainer(model, first)
    trainer.train()
    trainer.add_hook(second, "second")
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2
    trainer.fit(max_epochs=2)
    assert (first.calls, second.calls) == (12, 6)


def test_predictions_in_two_threads_leave_each_other_attached() -> None:
    """The hooks are taken off with the last one, in whichever order they end."""
    model, hook = make_model(4, 4, 2, between=None), Calls()
    trainer = hooked_trainer(model, hook)
    began, may_end = threading.Event(), threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        yield INPUT
        began.set()
        assert may_end.wait(300)
        yield INPUT

    def waits_for_the_other() -> Iterator[torch.Tensor]:
        thread.start()
        assert began.wait(300)
        yield INPUT

    thread = threading.Thread(target=lambda: trainer.predict(slow()))
    trainer.predict(waits_for_the_other())
    assert hook.calls == 4
    may_end.set()
    thread.join()
    assert hook.calls == 6
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2


def test_a_block_that_begins_in_a_run_and_ends_after_it_leaves_nothing_attached() -> None:
    """The run's end leaves the hooks to the block, and the block's end takes them off."""
    model, hook = make_model(4, 4, 2, between=None), Calls()
    trainer = hooked_trainer(model, hook)
    with ExitStack() as block:
        trainer.on("train_batch_end", at=1)(lambda: block.enter_context(trainer.hooks.attached()))
        trainer.train()
        before = hook.calls
        model(INPUT)
        assert hook.calls == before + 2
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2


def test_a_trainer_that_a_hook_runs_on_the_same_model_leaves_the_outer_run_attached() -> None:
    """The inner run takes its own hooks off, and no others."""
    model, outer, inner = make_model(4, 4, 2, between=None), Calls(), Calls()
    trainer, nested = hooked_trainer(model, outer), hooked_trainer(model, inner)
    trainer.on("train_batch_end", at=1)(lambda: nested.train())
    trainer.train()
    assert inner.calls == 6 and outer.calls == 12


def test_a_forgotten_manager_leaves_nothing_on_its_model(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it watched the model or has hooks on single modules; the log says why they are no longer called."""
    for way in ("watch", "module"):
        model, hook = make_model(4, 4, 2, between=None), Calls()
        before = [vars(module).keys() for module in model]
        manager = HookManager()
        if way == "watch":
            manager.watch(model)
            manager.register(hook)
        manager.register_monitoring_hook(model[0], "timed")
        model(INPUT)
        caplog.clear()
        del manager
        gc.collect()
        model(INPUT)
        assert hook.calls == (2 if way == "watch" else 0)
        assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2
        assert [vars(module).keys() for module in model] == before
        count = "2 modules" if way == "watch" else "1 module"
        told = f"a HookManager was garbage-collected, so its hooks were removed from {count}; keep it in a variable"
        assert told in caplog.messages


def test_a_manager_is_forgotten_while_a_graph_is_made() -> None:
    """The collector may run at any time, even while torch traces with tensors that have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make_model(4, 4, 2, between=None)
    manager = HookManager(model)
    manager.register(Calls())
    torch.compile(model, backend="eager")(INPUT)  # the graph identifies each module by the number in a tensor
    with FakeTensorMode():
        del manager
        gc.collect()
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2


def test_a_handle_keeps_its_manager() -> None:
    """A function may return the handle, or the hook's own registry, instead of the manager."""
    model, hook = make_model(4, 4, 2, between=None), Calls()
    handle = HookManager(model).register(hook)
    gc.collect()
    model(INPUT)
    assert hook.calls == 2
    handle.remove()
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2


@pytest.mark.parametrize("end", ["with", "remove_all", "close"])
def test_the_end_of_a_manager_leaves_nothing_on_its_model(end: str) -> None:
    """Neither after a block, nor after remove_all() or close(); an exception in the block changes nothing of that."""
    model, hook = make_model(4, 4, 2, between=None), Calls()
    before = [vars(module).keys() for module in model]
    manager = HookManager(model)
    manager.register(hook, "calls")
    manager.register_monitoring_hook("0", "timed")
    model(INPUT)
    if end == "with":
        with pytest.raises(ZeroDivisionError), manager as entered:
            assert entered is manager and manager.get_captured_states("timed")
            raise ZeroDivisionError
    else:
        getattr(manager, end)()
    model(INPUT)
    assert hook.calls == 2 and list(manager) == (["calls", "timed"] if end == "close" else [])
    assert [hook_counts(module) for module in model] == [(0, 0, 0)] * 2
    assert [vars(module).keys() for module in model] == before


def test_a_closed_manager_leaves_its_model_until_it_is_opened_or_watches_again() -> None:
    """Hooks stay registered, also those that have nothing to close."""
    model, hook, manager = make_model(4, 4, 2, between=None), Calls(), HookManager()
    manager.watch(model)
    manager.register(hook)
    for open_again in (manager.reopen, manager.attach, lambda: manager.watch(model)):
        manager.close()
        before = hook.calls
        model(INPUT)
        assert hook.calls == before and [hook_counts(module) for module in model] == [(0, 0, 0)] * 2
        open_again()
        model(INPUT)
        assert hook.calls == before + 2


def test_a_capturing_block_keeps_neither_its_model_nor_its_manager() -> None:
    """Both are released when nothing else refers to them."""
    model, manager = make_model(4, 4, 2, between=None), HookManager()
    with manager.capturing(model, "*") as cache:
        model(INPUT)
    gone = weakref.ref(model), weakref.ref(manager)
    del model, manager, cache
    gc.collect()
    assert [one() for one in gone] == [None, None]


def count_calls(function: Any) -> int:
    """Return how many calls, of Python functions and of built-in ones, a function makes."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("compiled", [False, True])
def test_registering_a_hook_visits_the_modules_of_no_other(compiled: bool) -> None:
    """The thirtieth hook on 300 modules takes about as many calls as the second, and so does removing it."""
    torch.compiler.reset()
    if compiled:  # From now on hooks are prepared for graphs.
        torch.compile(torch.neg, backend="eager")(INPUT)
    manager, model = HookManager(), nn.Sequential(*(nn.Identity() for _ in range(300)))
    manager.watch(model)
    register = [count_calls(lambda name=str(n): manager.register(Calls(), name)) for n in range(30)]
    assert register[-1] < 1.5 * register[1]
    remove = [count_calls(lambda name=str(n): manager.remove(name)) for n in range(29)]
    assert remove[0] < 1.5 * remove[-1]


class Closing(ForwardHook):
    """Counts the calls of a model's first module, and can be closed."""

    modules = "0"

    def __init__(self) -> None:
        self.calls = 0

    def on_forward(self) -> None:
        self.calls += 1

    def close(self) -> None:
        """Release nothing."""


def test_a_hook_that_its_run_has_closed_is_not_called_until_the_next_one() -> None:
    """What a hook without `close` sees of predictions after a run, it does not."""
    model, hook = make_model(4, 8, 1), Closing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = SimpleTrainer(
        model, [INPUT] * 2, optimizer, "cpu", step_fn=lambda model, batch: model(batch).mean(), record=False,
        console=False, max_epochs=1,
    )  # fmt: skip
    trainer.add_hook(hook)
    trainer.train()
    trainer.predict([INPUT])
    assert hook.calls == 2
    trainer.fit(max_epochs=2)
    assert hook.calls == 4
