"""The tap: forward hooks see activations while the model runs, and change nothing unless they are allowed to."""

import logging
from typing import Any

import pytest
import torch

from hookline.activations.manager import HookManager
from hookline.errors import HooklineError
from hookline.events.policy import Incident
from hookline.hooks.monitoring import ActivationStats
from hookline.registry.base import ForwardHook


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are expected here."""
    caplog.set_level(logging.CRITICAL, "hookline")


def make_model() -> torch.nn.Sequential:
    """Linear, ReLU, Linear with fixed weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


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
    manager, model = HookManager(**more), make_model()
    manager.watch(model)
    for hook in hooks:
        manager.register(hook)
    return manager, model


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
    """Outputs and gradients are bit for bit those of a model without hooks; the writer is told."""

    class Vandal(ForwardHook):
        def on_forward(self, output: torch.Tensor, inputs: Any) -> torch.Tensor:
            output.zero_()
            inputs[0].fill_(7.0)
            return torch.zeros_like(output)

    manager, model = watched(Vandal())
    told: list[Incident] = []
    manager.desk.watch(told.append)
    bare = make_model()
    data = INPUT.clone()
    ours, theirs = model(data), bare(INPUT)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(data, INPUT)
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
    assert [(one.kind, one.hook, one.event) for one in told] == [("overruled", "vandal", "on_forward")]
    assert manager.entry("vandal").overruled["on_forward"] == 6  # a write and a return at each of three modules


@pytest.mark.req("000-40", "000-41")
def test_several_forward_hooks_do_not_see_each_others_writes() -> None:
    """Each gets copies of its own; one that writes and one that raises leave the others alone."""

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


def test_a_hook_that_must_raise_does_so_after_the_others_heard() -> None:
    """The error leaves the forward pass, annotated; a later hook of the module has heard it all the same."""

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
def test_a_disabled_forward_hook_hears_nothing_until_it_is_enabled_again() -> None:
    """The switch works on a model that is watched already."""
    hook = Watch()
    manager, model = watched(hook)
    manager.disable("watch")
    model(INPUT)
    assert hook.seen == []
    manager.enable("watch")
    model(INPUT)
    assert len(hook.seen) == 3


def test_a_model_nobody_watches_carries_no_torch_hook() -> None:
    """They come with the first hook that selects a module and go with the last."""
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
    """After the slip is mended each module reports once, not twice."""
    manager, model = HookManager(), make_model()
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
    """A later change of the set must not bring the old model's torch hooks back."""
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
    """intervene=True is refused without interventions enabled; with them its return goes on."""
    bare = make_model()
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
    assert torch.equal(after.seen[0][1], make_model()[0](INPUT) * 2)


def test_an_intervention_that_fails_or_returns_nothing_changes_nothing() -> None:
    """The module's own output goes on."""

    class Fails(Double):
        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            raise ValueError

    class Silent(Double):
        def on_forward(self, output: torch.Tensor) -> None:  # type: ignore[override]
            assert output.requires_grad

    _, model = watched(Fails("fails"), Silent("silent"), enable_intervention=True)
    assert torch.equal(model(INPUT), make_model()(INPUT))


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


def test_silenced_hooks_hear_nothing_and_blocks_nest() -> None:
    """Inside the block the model can be run unobserved, also when the block fails."""
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


def test_without_a_run_the_moment_has_quiet_defaults() -> None:
    """A hook that names step, phase or trainer works without a trainer."""
    heard: list[Any] = []

    class Names(ForwardHook):
        modules = "0"

        def on_forward(self, step: int, epoch: int, phase: str, trainer: Any) -> None:
            heard.append((step, epoch, phase, trainer))

    _, model = watched(Names())
    model(INPUT)
    assert heard == [(0, 0, "inference", None)]


def test_a_captured_copy_outlives_in_place_operations_of_the_model() -> None:
    """An in-place ReLU after the layer does not change what the hook kept."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    hook = Watch(modules="0")
    manager = HookManager()
    manager.watch(model)
    manager.register(hook)
    model(INPUT - 3)
    expected = torch.nn.functional.linear(INPUT - 3, model[0].weight, model[0].bias)
    assert torch.equal(hook.seen[0][1], expected) and (expected < 0).any()


def test_a_forward_pass_repeated_for_checkpointing_is_heard_once() -> None:
    """Activation checkpointing runs a module again inside backward; that is no second call."""
    from torch.utils.checkpoint import checkpoint

    hook = Watch(modules="0")
    _, model = watched(hook)
    checkpoint(model, INPUT, use_reentrant=False).sum().backward()
    assert [name for name, _ in hook.seen] == ["0"]
