"""Dispatch of forward hooks: they get activations while the model runs, and change nothing unless allowed to."""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from watched_models import watch

from hookline import ActivationStats, ForwardHook, HooklineError, HookManager
from hookline.activations.capture import Capture
from hookline.errors import LiveWrite
from hookline.testing import assert_harmless

INPUT = torch.arange(6.0).reshape(2, 3)


class Watch(ForwardHook):
    """Keeps what it saw."""

    def __init__(self, name: str = "watch", modules: Any = "*") -> None:
        self.name, self.modules = name, modules
        self.seen: list[tuple[str, torch.Tensor]] = []

    def on_forward(self, name: str, output: torch.Tensor) -> None:
        self.seen.append((name, output))


def watched(*hooks: ForwardHook, **more: Any) -> tuple[HookManager, torch.nn.Sequential]:
    """A manager that watches a model with these hooks."""
    model = make_model(3, 4, 2)
    return watch(model, *hooks, **more), model


def torch_hooks(model: torch.nn.Module) -> int:
    """How many torch hooks a model carries."""
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.req("000-09", "000-10")
def test_a_forward_hook_receives_the_activations_while_the_model_runs() -> None:
    """Every selected module's output, in the order in which they ran, equal to what the model computed."""
    hook = Watch()
    _, model = watched(hook)
    output = model(INPUT)
    assert [name for name, _ in hook.seen] == ["0", "1", "2"]
    assert torch.equal(hook.seen[2][1], output) and torch.equal(hook.seen[0][1], model[0](INPUT))


@pytest.mark.req("000-13", "000-14", "000-09")
def test_observers_change_nothing_by_returning_or_writing() -> None:
    """Outputs and gradients are bit for bit those of a model without hooks; the write is reported."""

    class Vandal(ForwardHook):
        def on_forward(self, output: torch.Tensor, inputs: Any) -> torch.Tensor:
            output.zero_()
            inputs[0].fill_(7.0)
            return torch.zeros_like(output)

    manager, model = watched(Vandal())
    incidents: list[Any] = []
    manager.failures.subscribe(incidents.append)
    bare = make_model(3, 4, 2)
    data = INPUT.clone()
    ours, theirs = model(data), bare(INPUT)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(data, INPUT)
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
    assert [(one.kind, one.hook, one.event) for one in incidents] == [("overruled", "vandal", "on_forward")]
    assert manager.entry("vandal").overruled["on_forward"] == 6  # a write and a return at each of three modules


@pytest.mark.req("000-40", "000-41")
@pytest.mark.hooks_fail(raises=ValueError)
def test_several_forward_hooks_do_not_see_each_others_writes() -> None:
    """Each gets its own copies; one that writes and one that raises do not affect the others."""

    class Broken(ForwardHook):
        def on_forward(self, output: torch.Tensor) -> None:
            output.zero_()
            raise ValueError("boom")

    first, last = Watch("first"), Watch("last")
    manager, model = watched(first, Broken(), last)
    output = model(INPUT)
    assert torch.equal(first.seen[2][1], output) and torch.equal(last.seen[2][1], output)
    assert len(last.seen) == 3 and manager.entry("broken").failures.total == 3
    assert not manager.is_enabled("broken")


def test_a_hook_whose_policy_is_raise_does_so_after_the_others_were_called() -> None:
    """The error leaves the forward pass with a note, and a later hook of the module was called."""

    class Fatal(ForwardHook):
        on_error = "raise"

        def on_forward(self) -> None:
            raise ValueError("boom")

    last = Watch("last")
    _, model = watched(Fatal(), last)
    with pytest.raises(ValueError, match="boom") as caught:
        model(INPUT)
    assert [name for name, _ in last.seen] == ["0"]
    assert caught.value.__notes__ == ["raised by hook 'fatal' in on_forward, step 0"]


@pytest.mark.req("000-11", "000-12")
def test_activation_statistics_are_torchs_and_can_be_read() -> None:
    """Mean and std of each module's output, kept by name."""
    stats = ActivationStats(modules=["0", "2"])
    _, model = watched(stats)
    output = model(INPUT)
    latest = stats.latest()
    assert latest["2"] == pytest.approx({"mean": output.mean().item(), "std": output.std().item()}, rel=1e-5)
    assert set(latest) == {"0", "2"}


@pytest.mark.req("000-05", "000-06")
def test_a_disabled_forward_hook_is_not_called_until_it_is_enabled_again() -> None:
    """The switch works on a model that is watched already."""
    hook = Watch()
    manager, model = watched(hook)
    manager.disable("watch")
    model(INPUT)
    assert hook.seen == []
    manager.enable("watch")
    model(INPUT)
    assert len(hook.seen) == 3


def test_a_model_without_forward_hooks_has_no_torch_hooks() -> None:
    """They are added with the first hook that selects a module and removed with the last."""
    manager, model = watched()
    assert torch_hooks(model) == 0
    first = manager.register(Watch("a", modules="0"))
    second = manager.register(Watch("b", modules=["0", "1"]))
    assert torch_hooks(model) == 2
    second.remove()
    assert torch_hooks(model) == 1
    first.remove()
    assert torch_hooks(model) == 0


def test_a_pattern_that_matches_nothing_is_refused_at_registration() -> None:
    """Nothing has changed afterwards, and the hook is not in."""
    manager, model = watched()
    with pytest.raises(HooklineError, match="module pattern '3' matches nothing"):
        manager.register(Watch(modules="3"))
    assert len(manager) == 0 and torch_hooks(model) == 0


def test_watching_with_a_wrong_pattern_fails_cleanly_and_can_be_repeated() -> None:
    """After the pattern is corrected each module reports once, not twice."""
    manager, model = HookManager(), make_model(3, 4, 2)
    manager.register(Watch("typo", modules="3"))
    with pytest.raises(HooklineError, match="matches nothing"):
        manager.watch(model)
    manager.remove("typo")
    hook = Watch()
    manager.register(hook)
    manager.watch(model)
    model(INPUT)
    assert len(hook.seen) == 3


def test_watching_another_model_leaves_the_first_for_good() -> None:
    """A later registration must not bring the old model's torch hooks back."""
    hook = Watch()
    manager, old = watched(hook)
    new = torch.nn.Sequential(torch.nn.Tanh())
    manager.watch(new)
    manager.register(Watch("more", modules="0"))
    old(INPUT)
    new(INPUT)
    assert torch_hooks(old) == 0 and [name for name, _ in hook.seen] == ["0"]


class Double(ForwardHook):
    """Doubles the first layer's output."""

    modules = "0"
    intervene = True

    def on_forward(self, output: torch.Tensor) -> torch.Tensor:
        return output * 2


def test_an_intervention_needs_both_switches() -> None:
    """intervene=True is refused unless interventions are enabled; then what it returns replaces the output."""
    bare = make_model(3, 4, 2)
    with pytest.raises(HooklineError, match="enable_intervention=True"):
        watched(Double())
    _, changed = watched(Double(), enable_intervention=True)
    expected = bare[2](bare[1](bare[0](INPUT) * 2))
    assert torch.equal(changed(INPUT), expected)


def test_gradients_flow_through_an_intervention_and_later_hooks_see_it() -> None:
    """The live tensors carry their graph; what it returns is what the next hook gets."""
    after = Watch("after", modules="0")
    _, model = watched(Double(), after, enable_intervention=True)
    model(INPUT).sum().backward()
    assert model[0].weight.grad is not None
    assert torch.equal(after.seen[0][1], make_model(3, 4, 2)[0](INPUT) * 2)


@pytest.mark.hooks_fail(raises=ValueError)
def test_an_intervention_that_fails_or_returns_nothing_changes_nothing() -> None:
    """The model continues with the module's output."""

    class Fails(Double):
        on_error = "warn"

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            raise ValueError

    class Silent(Double):
        def on_forward(self, output: torch.Tensor) -> None:
            assert output.requires_grad

    _, model = watched(Fails("fails"), Silent("silent"), enable_intervention=True)
    assert torch.equal(model(INPUT), make_model(3, 4, 2)(INPUT))


def test_observers_run_without_grad_and_leave_the_mode_alone() -> None:
    """A hook that switches gradients on does not leave them on."""
    modes: list[bool] = []

    class Switches(ForwardHook):
        def on_forward(self) -> None:
            modes.append(torch.is_grad_enabled())
            torch.set_grad_enabled(True)

    _, model = watched(Switches())
    with torch.no_grad():
        model(INPUT)
        assert not torch.is_grad_enabled()
    assert model(INPUT).requires_grad and modes == [False] * 6


def test_silenced_hooks_are_not_called_and_blocks_nest() -> None:
    """Inside the block the model can be run unobserved, even when the block fails."""
    hook = Watch()
    manager, model = watched(hook)
    with pytest.raises(ValueError), manager.silenced():
        with manager.silenced():
            model(INPUT)
        model(INPUT)
        raise ValueError
    assert hook.seen == []
    model(INPUT)
    assert len(hook.seen) == 3


def test_without_a_run_the_arguments_have_defaults() -> None:
    """A hook that names step, phase or trainer works without a trainer."""
    seen: list[Any] = []

    class Names(ForwardHook):
        modules = "0"

        def on_forward(self, step: int, epoch: int, phase: str, trainer: Any) -> None:
            seen.append((step, epoch, phase, trainer))

    _, model = watched(Names())
    model(INPUT)
    assert seen == [(0, 0, "inference", None)]


def test_a_captured_copy_outlives_in_place_operations_of_the_model() -> None:
    """An in-place ReLU after the layer does not change what the hook kept."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    hook = Watch(modules="0")
    watch(model, hook)
    model(INPUT - 3)
    expected = torch.nn.functional.linear(INPUT - 3, model[0].weight, model[0].bias)
    assert torch.equal(hook.seen[0][1], expected) and (expected < 0).any()


def test_a_forward_pass_repeated_for_checkpointing_counts_once() -> None:
    """Activation checkpointing runs a module again inside backward, which is not a second call."""
    from torch.utils.checkpoint import checkpoint

    hook = Watch(modules="0")
    _, model = watched(hook)
    checkpoint(model, INPUT, use_reentrant=False).sum().backward()
    assert [name for name, _ in hook.seen] == ["0"]


@pytest.mark.parametrize("policy", ["warn", "disable", "raise"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.hooks_fail(raises=ValueError)
def test_an_observer_that_writes_into_the_live_output_ends_the_run(policy: str, fails: bool) -> None:
    """Whatever its failure policy, and also if it raises after it wrote: the model's own values have changed."""

    class Writes(ForwardHook):
        modules = "0"

        def on_forward(self, live_output: torch.Tensor) -> None:
            live_output.zero_()
            if fails:
                raise ValueError("after the write")

    model, manager = make_model(3, 4, 2), HookManager()
    manager.watch(model)
    manager.register(Writes(), "writes", on_error=policy)
    with torch.no_grad(), pytest.raises(HooklineError, match="hook 'writes' wrote into live_output of '0'"):
        model(INPUT)


class Binds(ForwardHook):
    """Prepares a function for each module, which may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[str] = []

    def on_forward(self, name: str) -> None:
        self.seen.append(f"{name} by on_forward")

    def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
        """Return what is called instead of `on_forward`."""

        def keep(inputs: Any, kwargs: Any, output: Any) -> None:
            self.seen.append(name)
            if self.error is not None:
                raise self.error

        return keep


def bound(**hooks: tuple[Binds, str]) -> tuple[HookManager, nn.Module]:
    """A model of two modules, and these hooks with their policies."""
    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    for name, (hook, policy) in hooks.items():
        manager.register(hook, name, on_error=policy)
    return manager, model


@pytest.mark.hooks_fail(raises=KeyError)
def test_all_bound_functions_are_called_whichever_fails() -> None:
    """A failure under `warn` is counted; of those under `raise`, the first is raised when all were called."""
    quietly, first, second, last = Binds(KeyError()), Binds(ValueError("first")), Binds(OSError("second")), Binds()
    hooks = {"q": (quietly, "warn"), "a": (first, "raise"), "b": (second, "raise"), "z": (last, "warn")}
    manager, model = bound(**hooks)
    with pytest.raises(ValueError, match="first"):
        model(torch.ones(1, 2))
    assert all(hook.seen == ["0"] for hook, _ in hooks.values())
    assert [manager.entry(name).failures.total for name in hooks] == [1, 1, 1, 0]


def test_a_users_hook_may_bind_a_function_to_each_module() -> None:
    """It gets the module's own tensors without autograd, reads the step where it is, and is counted as fired."""
    seen: list[Any] = []

    class Sums(ForwardHook):
        modules = "0"

        def on_forward(self, name: str) -> None:
            seen.append("on_forward")

        def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
            kind = type(module).__name__

            def observe(inputs: Any, kwargs: Any, output: torch.Tensor) -> None:
                seen.append((name, kind, run.step, inputs[0] is batch, (output * 2).requires_grad))

            return observe

    batch, run = torch.ones(1, 2), SimpleNamespace(step=7)
    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model, run)
    manager.register(Sums(), "sums")
    model(batch)
    run.step = 8
    model(batch)
    assert seen == [("0", "Linear", 7, True, False), ("0", "Linear", 8, True, False)]
    assert [(row.module, row.fired) for row in manager.fire_report().of("sums")] == [("0", 2)]


@pytest.mark.parametrize("part", ["inputs", "output"])
def test_a_bound_function_that_writes_into_live_tensors_ends_the_pass(part: str) -> None:
    """As for `live_output`, whatever the failure policy."""

    class Writes(ForwardHook):
        def on_forward(self) -> None:
            """Do nothing."""

        def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
            return lambda inputs, kwargs, output: (inputs[0] if part == "inputs" else output).zero_()

    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    manager.register(Writes(), "writes")
    with pytest.raises(LiveWrite, match="'writes' wrote into the tensors of"):
        model(torch.ones(1, 2))


def test_a_bound_function_that_draws_leaves_training_alone() -> None:
    """After its first draw the hook is called by `on_forward`, with random numbers of its own."""
    called: list[str] = []

    class Draws(ForwardHook):
        def on_forward(self) -> None:
            called.append("on_forward")
            torch.rand(3)

        def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
            def observe(inputs: Any, kwargs: Any, output: Any) -> None:
                called.append("bound")
                torch.rand(3)

            return observe

    assert_harmless(Draws())
    assert called[0] == "bound" and called[-1] == "on_forward"


def test_bound_functions_and_interventions_are_called_in_order() -> None:
    """The hook after an intervention gets the changed output."""
    seen: list[float] = []

    class Sees(Binds):
        def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
            return lambda inputs, kwargs, output: seen.append(output.sum().item())

    class Doubles(ForwardHook):
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    model, manager = nn.Sequential(nn.Identity()), HookManager(enable_intervention=True)
    manager.watch(model)
    for name, hook in {"a": Sees(), "b": Doubles(), "c": Sees()}.items():
        manager.register(hook, name)
    assert model(torch.ones(1, 2)).sum().item() == 4
    assert seen == [2, 4]


def test_bound_functions_are_timed_when_their_hook_is_due() -> None:
    """One hook or several at a module: each call counts as its hook's cost."""
    trainer = make_trainer(model=nn.Linear(3, 1), data=make_batches(8))
    trainer.add_hook(Binds(), "often", every=2)
    trainer.add_hook(Binds(), "rarely", every=4)
    trainer.train()
    costs = {name: trainer.hooks.entry(name).costs["on_forward"] for name in ("often", "rarely")}
    assert [cost.calls for cost in costs.values()] == [4, 2]
    assert all(cost.ns > 0 for cost in costs.values())


# ---- beside torch hooks of others and threads ------------------------------------------------------------------------


def captured(model: nn.Module, modules: Any = "?") -> HookManager:
    """A manager that captures inputs and outputs."""
    manager = watch(model)
    manager.register(Capture(modules, what="both"), "it")
    return manager


def names(manager: HookManager) -> list[str]:
    """The modules of the captured states."""
    return [state.name for state in manager.get_captured_states("it")]


def test_torch_hooks_that_others_clear_are_gone() -> None:
    """Ours is an ordinary torch hook on the module."""
    model = make_model(3, 4, 2)
    manager = captured(model)
    model[0]._forward_hooks.clear()
    model[1]._forward_hooks = type(model[1]._forward_hooks)()
    model(INPUT)
    assert len(model[2]._forward_hooks) == 1 and names(manager) == ["2"]


TORCH_HOOKS: list[Callable[[nn.Module, Callable[..., None]], Any]] = [
    lambda module, call: module.register_forward_hook(lambda *_: call()),
    lambda module, call: module.register_forward_pre_hook(lambda *_: call()),
    lambda module, call: module.register_full_backward_hook(lambda *_: call()),
    lambda module, call: module.register_full_backward_pre_hook(lambda *_: call()),
    lambda module, call: register_module_forward_hook(lambda ran, *_: call() if ran is module else None),
]


@pytest.mark.parametrize(
    "register", TORCH_HOOKS, ids=["forward", "before forward", "backward", "before backward", "global"]
)
def test_torch_hooks_of_others_are_called(register: Callable[..., Any]) -> None:
    """Every kind, beside ours."""
    model, calls = make_model(3, 4, 2), []
    manager = captured(model)
    handle = register(model[0], lambda: calls.append(1))
    model(INPUT.clone().requires_grad_()).sum().backward()
    handle.remove()
    assert calls == [1] and names(manager) == ["0", "1", "2"]


def test_the_output_of_an_earlier_torch_hook_is_captured() -> None:
    """Ours comes after it."""
    model = make_model(3, 4, 2)
    model[0].register_forward_hook(lambda module, inputs, output: output * 0 + 7)
    manager = captured(model)
    model(INPUT)
    assert torch.equal(manager.get_captured_states("it")[0].outputs, torch.full((2, 4), 7.0))


def test_a_forward_that_is_replaced_later_is_called() -> None:
    """Some libraries replace it on the instance."""
    model = nn.Sequential(nn.Linear(3, 3))
    manager = captured(model)
    model[0].forward = lambda x: x + 1
    model(INPUT)
    assert torch.equal(manager.get_captured_states("it")[0].outputs, INPUT + 1)


def test_a_model_that_bypasses_modules_without_torch_hooks() -> None:
    """In evaluation an encoder layer uses a fused kernel unless it sees torch hooks."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad(), HookManager().capturing(layer, "linear?") as cache:
        layer(torch.ones(1, 3, 4))
    assert sorted(cache["*"]) == ["linear1", "linear2"]


def test_a_watched_model_can_be_traced_by_jit() -> None:
    """With the same outputs."""
    model = make_model(3, 4, 2)
    _ = captured(model)
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(model, INPUT)
    assert torch.equal(traced(INPUT), model(INPUT))


@pytest.mark.parametrize("take_away", ["remove", "disable"])
def test_nothing_is_left_on_the_modules(take_away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed hook takes its torch hooks along, and so does a disabled one unless something was compiled."""
    monkeypatch.setattr("hookline.activations.compile.detection.has_compiled", lambda: False)
    model = make_model(3, 4, 2)
    before = [dict(vars(module)) for module in model]
    manager = captured(model)
    model(INPUT)
    getattr(manager, take_away)("it")
    assert torch_hooks(model) == 0 and [vars(module).keys() for module in model] == [one.keys() for one in before]


def test_hooks_that_come_and_go_while_threads_run_the_model() -> None:
    """Every thread gets its outputs, and afterwards no torch hook is left."""
    model, over, failures = make_model(3, 4, 2), threading.Event(), []

    def run() -> None:
        try:
            while not over.is_set():
                model(INPUT)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(60):
            manager = HookManager()
            manager.watch(model)
            # Hooks that take no tensors: torch's lazy copies cannot be released by two threads at the same time,
            # because a reference is counted down before its lock is taken. Once in many runs a thread never returned.
            manager.register(lambda name: None, "it", event="forward")
            manager.register(lambda name: None, "beside", event="forward")
            manager.remove("beside")
            manager.remove("it")
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert failures == [] and torch_hooks(model) == 0


@pytest.mark.parametrize("removed", [False, True])
def test_attaching_that_was_interrupted_is_completed_by_the_next_change(
    removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every module that a hook selects has one torch hook then, and the others none."""
    model, manager = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), HookManager()
    manager.watch(model)
    register, registered = nn.Module.register_forward_hook, []

    def interrupt_third(module: nn.Module, *args: Any, **options: Any) -> Any:
        registered.append(module)
        if len(registered) == 3:
            raise KeyboardInterrupt
        return register(module, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(nn.Module, "register_forward_hook", interrupt_third)
        manager.register_capture_hook("[0-9]", "all")
    if removed:
        manager.remove("all")
    manager.register_capture_hook("0", "first")
    model(torch.ones(1, 2))
    assert len(manager.get_captured_states("first")) == 1
    assert removed or len(manager.get_captured_states("all")) == 5
    assert [len(module._forward_hooks) for module in model] == ([1, 0, 0, 0, 0] if removed else [1] * 5)
    for name in list(manager):
        manager.remove(name)
    assert not any(module._forward_hooks for module in model)


@pytest.mark.req("003-05")
def test_two_threads_that_attach_at_once_leave_one_torch_hook() -> None:
    """A module whose registration is slow is attached once, however many threads register hooks on it meanwhile."""
    both_inside = threading.Barrier(2)

    class SlowToAttach(nn.Linear):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):  # nobody else is inside, as it should be
                both_inside.wait(timeout=0.3)
            return super().register_forward_hook(*args, **kwargs)

    module, manager = SlowToAttach(3, 3), HookManager()
    names = ("one", "two")
    threads = [threading.Thread(target=manager.register_capture_hook, args=(module, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module(INPUT)
    assert torch_hooks(module) == 1
    assert [len(manager.get_captured_states(name)) for name in names] == [1, 1]
    for name in names:
        manager.remove(name)
    assert torch_hooks(module) == 0


def run_both(first: Callable[[], Any], second: Callable[[], Any], inside: threading.Event) -> None:
    """Call the second function in another thread when the first is inside; both must return."""
    failures: list[BaseException] = []

    def call(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in (first, second)]
    threads[0].start()
    assert inside.wait(timeout=300)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads) and failures == []


@pytest.mark.req("003-05")
def test_two_threads_that_watch_at_once_leave_one_torch_hook() -> None:
    """Watching does not change the set of hooks: nothing but the attaching itself keeps the threads apart."""
    inside, both_inside = threading.Event(), threading.Barrier(2)

    class SlowToAttach(nn.Linear):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            inside.set()
            with contextlib.suppress(threading.BrokenBarrierError):  # nobody else is inside, as it should be
                both_inside.wait(timeout=0.5)
            return super().register_forward_hook(*args, **kwargs)

    model, manager, hook = nn.Sequential(SlowToAttach(3, 3)), HookManager(), Watch(modules="0")
    manager.register(hook)
    run_both(lambda: manager.watch(model), lambda: manager.watch(model), inside)
    model(INPUT)
    assert torch_hooks(model) == 1 and [name for name, _ in hook.seen] == ["0"]
    manager.remove("watch")
    assert torch_hooks(model) == 0


@pytest.mark.req("003-05")
def test_a_hook_that_is_registered_while_another_model_is_watched_is_attached_to_that_model() -> None:
    """Also if it was selecting modules of the old model when the other thread began to watch the new one."""
    inside, watched_new = threading.Event(), threading.Event()

    class SlowToList(nn.Sequential):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            inside.set()
            watched_new.wait(timeout=0.5)  # the other thread waits for this one, as it should
            return super().named_modules(*args, **kwargs)

    old, new, manager, hook = SlowToList(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)), HookManager(), Watch()
    manager.watch(old)

    def watch_new() -> None:
        manager.watch(new)
        watched_new.set()

    run_both(lambda: manager.register(hook), watch_new, inside)
    old(INPUT)
    assert hook.seen == []
    new(INPUT)
    assert [name for name, _ in hook.seen] == ["0"]
    assert (torch_hooks(old), torch_hooks(new)) == (0, 1)


@pytest.mark.req("003-05")
def test_each_state_has_the_name_of_its_thread() -> None:
    """In the first call of a thread as in others."""
    model = make_model(3, 4, 2)
    manager = captured(model, "0")
    for name in ("one", "two"):
        thread = threading.Thread(target=lambda: [model(INPUT) for _ in range(2)], name=name)
        thread.start()
        thread.join()
    assert [state.thread for state in manager.get_captured_states("it")] == ["one", "one", "two", "two"]


@pytest.mark.req("003-06", "003-31")
@pytest.mark.parametrize(
    ("interval", "passes", "left"), [(1, 4, 1), (3, 9, 1), (3, 8, 3), (100, 99, 99), (100, 112, 13)]
)
def test_clean_up_after_a_number_of_module_calls(interval: int, passes: int, left: int) -> None:
    """Counted over the calls that hooks listen to; every state that was there is too old."""
    module = nn.Linear(3, 3)
    manager = HookManager(cleanup_interval=interval, max_age_seconds=0, max_captured_states=None)
    manager.register_capture_hook(module, "it", capture_input=False)
    for _ in range(passes):
        module(INPUT)
    assert len(manager.get_captured_states("it")) == left


def test_hooks_listen_until_the_next_set_of_hooks_is_due() -> None:
    """Call numbers and fire counts continue when hooks are registered and removed."""
    model, manager = make_model(3, 4, 2), HookManager()
    manager.watch(model)
    manager.register(Capture("0"), "first")
    model(INPUT)
    model(INPUT)
    assert [state.call for state in manager.get_captured_states("first")] == [1, 2]
    manager.register(Capture("0", what="both"), "second")
    model(INPUT)
    manager.remove("first")
    model(INPUT)
    (row,) = manager.fire_report().rows
    assert (row.hook, row.calls, row.fired) == ("second", 4, 2)


def test_a_predicate_is_asked_once_for_each_module() -> None:
    asked: list[str] = []

    def first_three(name: str, module: Any) -> bool:
        asked.append(name)
        return len(asked) <= 3

    manager, model = HookManager(), make_model(3, 4, 2)
    manager.register(Watch(modules=first_three))
    manager.watch(model)
    model(INPUT)
    assert len(asked) == len(list(model.modules()))
    assert len(manager.get("watch").seen) == 3


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_bound_function_that_writes_and_fails_is_switched_off() -> None:
    """Its own failure counts under its policy, and the write is refused beside it."""

    class Writes(ForwardHook):
        modules = "0"

        def bind_module(self, name: str, module: Any, run: Any) -> Callable[[Any, Any, Any], None]:
            def observe(inputs: Any, kwargs: Any, output: Any) -> None:
                output.add_(1)
                raise ValueError("its own")

            return observe

        def on_forward(self, output: Any) -> None: ...

    manager, model = HookManager(), make_model(3, 4, 2)
    manager.register(Writes(), "writes", on_error="disable")
    manager.watch(model)
    with pytest.raises(LiveWrite, match="wrote into the tensors of '0'"):
        model(INPUT)
    model(INPUT)
    (hook,) = manager.list_hooks()
    assert (hook.enabled, hook.failures) == (False, 1)
