"""Dispatch: one callable per event, arguments before hooks, failures isolated from each other, metrics protected."""

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline import ForwardHook, HookManager, HookRegistry, StopTraining, TrainingHook
from hookline.core.catalog import find_event
from hookline.core.schedule import Reading

EVENTS = ["on_train_batch_end", "on_validation_batch_end"]
BOTH = pytest.mark.parametrize("event", EVENTS, ids=["inside a step", "outside"])


def registry_of(event: str, *hooks: Callable[..., Any], **options: Any) -> HookRegistry:
    """Make a registry with functions of one event, named a, b, c …"""
    registry = HookRegistry()
    for name, hook in zip("abcdefgh", hooks, strict=False):
        registry.register(hook, name, event=event, **options)
    return registry


def fire(registry: HookRegistry, event: str, **values: Any) -> Any:
    """Fire an event as the training loop does."""
    return getattr(registry.slots, event)(SimpleNamespace(**{"step": 1, **values}))


def interrupts() -> None:
    """A hook during which the user presses Ctrl-C."""
    raise KeyboardInterrupt


def test_an_event_without_due_hooks_has_no_callable() -> None:
    """None costs its call site one branch."""
    registry = registry_of("on_train_batch_end", lambda: None, every=2)
    assert registry.slots.on_step_end is None
    for step in (1, 2):
        registry.begin_batch(Reading(step, step, 1))
        fire(registry, "on_train_batch_end")
        assert (registry.slots.on_train_batch_end is None) == (step == 1)


@BOTH
def test_hooks_are_called_in_order_with_what_they_named(event: str) -> None:
    """Inside and outside of steps in the same way; what they return is ignored."""
    called: list[Any] = []
    registry = registry_of(
        event,
        lambda loss, step: called.append((loss, step)) or "ignored",
        lambda *, loader_name: called.append(loader_name),
        lambda mine=1, step=0: called.append((mine, step)),
    )
    assert fire(registry, event, loss=0.5, step=3, dataloader_name="train") is None
    assert called == [(0.5, 3), "train", (1, 3)]


@BOTH
def test_each_value_is_read_once_and_before_any_hook(event: str) -> None:
    """An exception in computing an argument is not a hook's failure, and no hook has run."""
    called: list[Any] = []

    class Args:
        step, reads = 1, 0

        @property
        def loss(self) -> float:
            self.reads += 1
            if self.reads > 1:
                raise RuntimeError("device error")
            return 0.5

    args = Args()
    registry = registry_of(event, lambda step: called.append(step), lambda loss: called.append(loss), lambda loss: None)
    getattr(registry.slots, event)(args)
    assert called == [1, 0.5] and args.reads == 1
    with pytest.raises(RuntimeError, match="device error"):
        getattr(registry.slots, event)(args)
    assert called == [1, 0.5] and [hook.failures for hook in registry.list_hooks()] == [0, 0, 0]


@BOTH
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_failing_hook_does_not_keep_the_others_from_being_called(event: str) -> None:
    """The failure is counted for the hook that raised; every other hook of the event still runs."""
    called: list[str] = []
    registry = registry_of(event, lambda: called.append("a"), lambda: 1 / 0, lambda: called.append("c"))
    fire(registry, event)
    assert called == ["a", "c"] and [hook.failures for hook in registry.list_hooks()] == [0, 1, 0]


@BOTH
def test_what_must_be_raised_is_raised_after_the_others_and_the_first_wins(event: str) -> None:
    """An exception is never replaced by a later one, keeps its cause, and is raised after every hook was called."""
    called: list[str] = []

    def first() -> None:
        raise ValueError("first") from KeyError("cause")

    registry = registry_of(event, first, lambda: 1 / 0, lambda: called.append("c"), on_error="raise")
    with pytest.raises(ValueError, match="first") as caught:
        fire(registry, event)
    assert called == ["c"] and isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("order", list(itertools.permutations(["stop", "error", "nothing"])))
def test_a_request_to_stop_gives_way_to_an_error(order: tuple[str, ...]) -> None:
    """A failure is not hidden behind another hook's request to stop, whichever of them comes first."""

    def stops() -> None:
        raise StopTraining("enough")

    hooks: dict[str, Callable[[], Any]] = {"stop": stops, "error": lambda: 1 / 0, "nothing": lambda: None}
    for event in EVENTS:
        registry = registry_of(event, *(hooks[name] for name in order), on_error="raise")
        with pytest.raises(ZeroDivisionError):
            fire(registry, event)


@BOTH
def test_keyboard_interrupts_pass_straight_through(event: str) -> None:
    """Only exceptions are a hook's failure; an interrupt is not, and the hooks behind it are not called."""
    called: list[str] = []
    registry = registry_of(event, interrupts, lambda: called.append("b"))
    with pytest.raises(KeyboardInterrupt):
        fire(registry, event)
    assert called == [] and [hook.failures for hook in registry.list_hooks()] == [0, 0]


@pytest.mark.parametrize("event", ["on_exception", "on_train_end"])
def test_an_interrupt_at_the_end_of_a_run_still_calls_the_other_hooks(event: str) -> None:
    """Hooks close files and post messages there; the interrupt is raised once all of them were called."""
    called: list[str] = []
    registry = registry_of(
        event, lambda: called.append("a"), interrupts, lambda: 1 / 0, lambda: called.append("d"), on_error="raise"
    )
    with pytest.raises(KeyboardInterrupt):
        fire(registry, event, exception=None)
    assert called == ["a", "d"] and [hook.failures for hook in registry.list_hooks()] == [0, 0, 1, 0]


@BOTH
@pytest.mark.hooks_fail(raises=ValueError)
def test_changed_metrics_are_restored_hook_by_hook(event: str) -> None:
    """Changes are attributed to the hook that made them, even if it failed afterwards."""

    def breaks(metrics: dict[str, Any]) -> None:
        del metrics["loss"]
        raise ValueError

    registry, metrics = registry_of(event, lambda metrics: None, lambda metrics: metrics.update(mine=1.0), breaks), {}
    metrics["loss"] = 0.5
    fire(registry, event, metrics=metrics)
    assert metrics == {"loss": 0.5, "mine": 1.0}
    assert [hook.overruled for hook in registry.list_hooks()] == [0, 0, 1]


@BOTH
def test_tensors_among_the_metrics_do_not_break_the_comparison(event: str) -> None:
    """Tensors of several elements have no truth value, and nan is not equal to itself; a replaced value is put back."""

    def replaces(metrics: dict[str, Any]) -> None:
        metrics["histogram"] = torch.ones(3)

    registry = registry_of(event, lambda metrics: None, replaces)
    metrics = {"loss": float("nan"), "histogram": torch.zeros(3)}
    fire(registry, event, metrics=metrics)
    assert metrics["histogram"].tolist() == [0, 0, 0]
    assert [hook.overruled for hook in registry.list_hooks()] == [0, 1]


@BOTH
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_every_call_is_timed(event: str) -> None:
    """The first one as well as any other, and the reading of each argument beside it."""
    registry = registry_of(event, lambda step: None, lambda: 1 / 0, lambda step, loss: None)
    for step in range(1, 4):
        registry.begin_batch(Reading(step, step, 1))
        fire(registry, event, loss=0.5)
    costs = [entry.costs[find_event(event).name] for entry in registry.entries()]
    assert [cost.calls for cost in costs] == [3, 3, 3] and all(cost.ns > 0 for cost in costs)
    assert {name: cost.calls for name, cost in registry.dispatch_table.argument_costs.items()} == {"step": 3, "loss": 3}


def test_a_hook_cannot_change_what_another_is_called_with() -> None:
    """Hooks that name the same arguments share the values, not the collections in which they are passed."""
    seen: list[Any] = []

    def takes(**values: Any) -> None:
        seen.append(dict(values))
        values.clear()

    registry = registry_of("on_train_batch_end", takes, takes, lambda *, step: seen.append(step))
    fire(registry, "on_train_batch_end", **dict.fromkeys(find_event("train_batch_end").attributes.values(), 1))
    assert seen[0] == seen[1] and seen[0] and seen[2] == 1


# ---- what is known about a call --------------------------------------------------------------------------------------


@pytest.mark.hooks_fail(raises=ValueError)
def test_the_calling_hook_is_known_through_nested_events_and_failures() -> None:
    """After a hook has fired another event, it is the caller again; after a failure nobody is."""
    registry, answers = HookRegistry(), list[Any]()

    def outer() -> None:
        registry.on_validation_end()
        answers.append(registry.calling_hook())
        raise ValueError

    registry.register(outer, "outer", event="epoch_end")
    registry.register(lambda: answers.append(registry.calling_hook()), "inner", event="validation_end")
    registry.on_epoch_end()
    assert answers == ["inner", "outer"] and registry.calling_hook() is None


def test_each_thread_has_its_own_calling_hook() -> None:
    """A thread that a hook starts is not the hook's, and others can ask what a thread is in."""
    registry, answers = HookRegistry(), list[Any]()

    def starts() -> None:
        main = threading.get_ident()
        thread = threading.Thread(target=lambda: answers.extend([registry.calling_hook(), registry.hook_in(main)]))
        thread.start()
        thread.join()
        answers.append(registry.calling_hook())

    registry.register(starts, "starts", event="epoch_end")
    registry.on_epoch_end()
    assert answers == [None, ("starts", "on_epoch_end"), "starts"]


@pytest.mark.parametrize("method", ["close", "state_dict", "load_state_dict", "setup"])
def test_the_calling_hook_is_known_in_its_other_methods(method: str) -> None:
    """In `setup` when another run begins: before it is registered, a hook is not known yet."""
    registry, answers = HookRegistry(), list[Any]()

    def asks(self: Any, *args: Any) -> dict[str, Any]:
        answers.append(registry.hook_in(threading.get_ident()))
        return {}

    methods = {"close": lambda self: None, method: asks, "on_epoch_end": lambda self: None}
    registry.register(type("Asks", (), methods)(), "asks")
    registry.state_dict()
    registry.load_state_dict({"asks": {}})
    registry.close()
    registry.reopen()
    assert answers[-1] == ("asks", method) and registry.calling_hook() is None


def test_a_hook_that_removed_itself_calls_no_more() -> None:
    """Nothing is stored about it by which its requests could be judged."""
    registry, answers = HookRegistry(), list[Any]()

    @registry.on("epoch_end", name="gone")
    def removes_itself() -> None:
        registry.remove("gone")
        answers.append(registry.calling_hook())

    registry.on_epoch_end()
    assert answers == [None]


# ---- which arguments are named ---------------------------------------------------------------------------------------


def named_at(registry: HookRegistry, event: str) -> set[str]:
    """Return what the hooks name that are due at an event now."""
    return set(registry.dispatch_table.named_at(event))


def test_the_arguments_of_due_hooks_are_known_before_the_event(registry: HookRegistry) -> None:
    """Of hooks that are due and enabled, at each micro-batch; the same after every change."""
    assert named_at(registry, "on_train_batch_end") == set()
    registry.register(lambda loss: None, "always", event="train_batch_end")
    registry.register(lambda metrics: None, "rarely", event="train_batch_end", every=2)
    found = []
    for step in range(1, 5):
        registry.begin_batch(Reading(step, step, 1))
        found.append(named_at(registry, "on_train_batch_end"))
    assert found == [{"loss"}, {"loss", "metrics"}] * 2
    registry.disable("always")
    assert named_at(registry, "on_train_batch_end") == {"metrics"}
    registry.enable("always")
    registry.remove("rarely")
    assert named_at(registry, "on_train_batch_end") == {"loss"} and named_at(registry, "on_step_end") == set()


def test_the_arguments_are_right_when_hooks_change_within_an_event() -> None:
    """A hook that adds another one asks for its arguments with it; in the step's events what came due before counts."""
    registry, found = HookRegistry(), list[set[str]]()

    def adds() -> None:
        registry.register(lambda grad_norm: None, "added", event="step_end")
        found.append(named_at(registry, "on_step_end"))

    registry.register(lambda ctx: None, "window", event="step_end", every="3 batches")
    registry.register(adds, "adds", event="train_batch_start")
    for batch in (3, 4):  # two micro-batches of one step
        registry.begin_batch(Reading(2, batch, 1))
    fire(registry, "on_train_batch_start")
    assert found == [{"ctx", "grad_norm"}] and named_at(registry, "on_step_end") == {"ctx", "grad_norm"}


def test_the_arguments_include_events_that_reach_a_hook_when_it_is_not_due(registry: HookRegistry) -> None:
    """It reads them there as well."""

    class Waits(TrainingHook):
        events_when_not_due = ("on_step_end",)

        def on_train_batch_end(self, loss: float) -> None: ...

        def on_step_end(self, lr: float) -> None: ...

    registry.register(Waits(), every=10)
    registry.begin_batch(Reading(1, 1, 1))
    assert (named_at(registry, "on_step_end"), named_at(registry, "on_train_batch_end")) == ({"lr"}, set())


def test_the_arguments_include_those_of_hooks_on_other_ranks(registry: HookRegistry) -> None:
    """Computing one may be a collective, in which all ranks take part."""
    registry.register(lambda grad_norm: None, "elsewhere", event="step_end", ranks=1)
    assert named_at(registry, "on_step_end") == set()
    registry.set_ranks(SimpleNamespace(rank=0, local_rank=0, world_size=2, act_together=False))
    assert named_at(registry, "on_step_end") == {"grad_norm"}


def test_an_intervening_hook_runs_in_the_callers_autograd_mode_which_is_restored() -> None:
    """A hook that switches autograd changes nothing for the model behind it."""
    modes: list[bool] = []

    class Switches(ForwardHook):
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            modes.append(torch.is_grad_enabled())
            doubled = output * 2
            torch.set_grad_enabled(not torch.is_grad_enabled())
            return doubled

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    manager = HookManager(enable_intervention=True)
    manager.watch(model)
    manager.register(Switches())
    assert model(torch.ones(1, 2)).requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        model(torch.ones(1, 2))
        assert not torch.is_grad_enabled()
    assert modes == [True, True, False, False]
