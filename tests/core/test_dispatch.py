"""Dispatch: one callable per event, arguments before hooks, failures isolated from each other, metrics protected."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import ForwardHook, HookManager, HookRegistry, StopTraining
from hookline.core.schedule import Reading

EVENTS = ["on_train_batch_end", "on_validation_batch_end"]
BOTH = pytest.mark.parametrize("event", EVENTS, ids=["generated", "looped"])


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
    """Generated and looped dispatch call the same hooks in the same way; what they return is ignored."""
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
def test_changed_metrics_are_restored_hook_by_hook(event: str) -> None:
    """Changes are attributed to the hook that made them, also if it failed afterwards."""

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
    assert metrics["histogram"].tolist() == [0, 0, 0]  # type: ignore[attr-defined]
    assert [hook.overruled for hook in registry.list_hooks()] == [0, 1]


@pytest.mark.parametrize("listeners", [1, 1000])
def test_inner_events_are_timed_only_when_sampled(listeners: int) -> None:
    """The clock is read on one micro-batch in 17, for a few hooks as for very many; the estimate covers all of them."""
    registry, called = HookRegistry(), []
    for index in range(listeners):
        registry.register(lambda step, index=index: called.append(index), f"h{index}", event="on_train_batch_end")
    for step in range(1, 18):
        registry.begin_batch(Reading(step, step, 1))
        fire(registry, "on_train_batch_end", step=step)
    assert called == list(range(listeners)) * 17  # A list that is too long for a generated function keeps its order.
    assert {entry.inner_cost.calls for entry in registry.entries()} == {1}
    assert {row["calls"] for row in registry.costs() if row["kind"] != "argument"} == {17}


def test_the_generated_source_is_small_and_makes_direct_calls() -> None:
    """What explain prints is what runs: values first, then one call per hook, and no clock."""
    source = registry_of("on_train_batch_end", lambda loss: None, lambda *, step: None).explain(
        "batch_end", source=True
    )
    assert "call0(loss)" in source and "call1(step=step)" in source
    assert source.index("step = m.step") < source.index("call0(loss)") and "clock" not in source


# ---- generated dispatch against a loop over invoke -------------------------------------------------------------------

ACTIONS = ["nothing", "fail", "insist", "stop", "add", "change", "remove", "reserve", "draw"]
HOOKS = st.fixed_dictionaries(
    {
        "actions": st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4),
        "named": st.sampled_from(["step metrics", "metrics * step", "step", "* loss metrics", "step loss metrics"]),
        "on_error": st.sampled_from(["warn", "disable", "raise"]),
        "every": st.sampled_from([None, 2, 3]),
    }
)


class Insists(Exception):
    """An exception that ends the run whatever the policy."""

    always_raise = True


def act(action: str, name: str, values: dict[str, Any], called: list[Any]) -> None:
    """Do what a hook does at one step."""
    called.append((name, values.get("step"), values.get("loss"), dict(values.get("metrics", {}))))
    metrics = values.get("metrics", {})
    if action == "fail":
        raise ValueError(name)
    if action == "insist":
        raise Insists(name)
    if action == "stop":
        raise StopTraining(name)
    if action == "draw":
        called.append(random.random())
    elif action == "remove":
        metrics.pop("loss", None)
    elif action != "nothing":
        metrics[{"add": name, "change": "loss", "reserve": "epoch"}[action]] = 0.25


def make_hook(name: str, spec: dict[str, Any], called: list[Any]) -> Callable[..., Any]:
    """Make a function hook with the signature and the actions of a specification."""
    turn = iter(range(1000))
    namespace: dict[str, Any] = {
        "run": lambda values: act(spec["actions"][next(turn) % len(spec["actions"])], name, values, called)
    }
    exec(f"def hook({', '.join(spec['named'].split())}):\n    run(locals())", namespace)
    made: Callable[..., Any] = namespace["hook"]
    return made


class Args:
    """The arguments of one micro-batch; counts how often each is read, and takes requests to stop."""

    def __init__(self, step: int, log: list[Any]) -> None:
        self.step, self.metrics, self._log = step, {"loss": 0.5}, log

    @property
    def loss(self) -> float:
        self._log.append("read loss")
        return 0.5

    def request_stop(self, reason: str, by: str) -> None:
        self._log.append((reason, by))


def trace(specs: list[dict[str, Any]], debug: bool) -> list[Any]:
    """Fire an inner event 20 times, the timed ones included, and return everything that can be observed."""
    registry, log = HookRegistry(), []
    registry.failures.debug = debug
    for index, spec in enumerate(specs):
        hook = make_hook(f"h{index}", spec, log)
        registry.register(hook, f"h{index}", event="train_batch_end", every=spec["every"], on_error=spec["on_error"])
    registry.failures.subscribe(lambda incident: log.append(observed(incident)))
    random.seed(7)
    registry.rng_guard.begin(0, lambda: 0)
    for step in range(1, 21):
        registry.begin_batch(Reading(steps=step, batches=step, epochs=1))
        args = Args(step, log)
        try:
            if dispatch := registry.slots.on_train_batch_end:
                dispatch(args)
        except Exception as error:
            log.append((repr(error), error.__notes__ if hasattr(error, "__notes__") else None))
        log.append((args.metrics, random.getstate()[1][-1]))
    entries = registry.entries()
    costs = [(row["hook"], row["calls"]) for row in registry.costs() if row["kind"] != "argument"]
    return [log, [entry.record() for entry in entries], [entry.failures for entry in entries], sorted(costs)]


def observed(incident: Any) -> tuple[Any, ...]:
    """Return an incident without its exception object."""
    return incident.kind, incident.hook, incident.event, incident.step, incident.message, repr(incident.error)


@settings(deadline=None)
@given(specs=st.lists(HOOKS, min_size=1, max_size=5), debug=st.booleans())
def test_generated_dispatch_does_what_a_loop_over_invoke_does(specs: list[dict[str, Any]], debug: bool) -> None:
    """Order, arguments, failures, stops, metrics, incidents, strikes, random numbers and costs are the same."""
    state = random.getstate()
    try:
        generated = trace(specs, debug)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hookline.core.dispatch.GENERATED_UP_TO", 0)
            looped = trace(specs, debug)
    finally:
        random.setstate(state)
    assert generated == looped


def test_an_intervening_hook_runs_in_the_callers_autograd_mode_which_is_restored() -> None:
    """A hook that switches autograd changes nothing for the model behind it."""
    modes: list[bool] = []

    class Switches(ForwardHook):
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
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
