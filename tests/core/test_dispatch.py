"""Dispatch: one callable per event, arguments before hooks, failures isolated from each other, metrics protected."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import HookRegistry, StopTraining
from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.dispatch import (
    FAILED,
    GENERATED_UP_TO,
    BoundHook,
    Dispatch,
    compile_event,
    event_source,
    first_raised,
    invoke,
    needed_arguments,
)
from hookline.core.failures import FailureHandler, Incident
from hookline.core.schedule import Reading
from hookline.core.signature import read_signature

INNER, OUTER = CATALOG["on_train_batch_end"], CATALOG["on_epoch_end"]
BOTH = pytest.mark.parametrize("event", [INNER, CATALOG["on_validation_batch_end"]], ids=["generated", "looped"])


class RecordingHandler(FailureHandler):
    """Records its calls; raises every failure if asked to."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__({}, lambda: None, lambda name: None)
        self.handled: list[tuple[str, Exception]] = []
        self.recoveries: list[str] = []
        self.restored: list[tuple[str, str]] = []
        self.raises = raises

    def reset_strikes(self, event: Event, hook: BoundHook) -> None:
        self.recoveries.append(hook.hook)

    def handle(self, event: Event, hook: BoundHook, error: Exception, args: Any) -> Exception | None:
        self.handled.append((hook.hook, error))
        return error if self.raises else None

    def restore_metrics(
        self, event: Event, hook: BoundHook, args: Any, name: str, before: dict[str, Any]
    ) -> dict[str, Any]:
        self.restored.append((hook.hook, name))
        return dict(getattr(args, name))


def bind(call: Callable[..., Any], name: str = "h", event: Event = INNER, recovering: bool = False) -> BoundHook:
    """Make a function ready for dispatch."""
    return BoundHook(name, call, read_signature(call, event, event.name, name), Cost(), recovering)


def compiled(
    event: Event, hooks: Sequence[BoundHook], failures: FailureHandler | None = None, timed: bool = False
) -> Dispatch:
    """Make the callable of an event that has listeners."""
    dispatch = compile_event(event, hooks, failures or RecordingHandler(), defaultdict(Cost), timed)
    assert dispatch is not None
    return dispatch


def test_an_event_without_listeners_has_no_callable() -> None:
    """None costs its call site one branch."""
    assert compile_event(INNER, [], RecordingHandler(), {}, False) is None


@BOTH
def test_hooks_are_called_in_order_with_what_they_named(event: Event) -> None:
    """Generated and looped dispatch call the same hooks in the same way."""
    called: list[Any] = []
    hooks = [
        bind(lambda loss, step: called.append((loss, step)), "a", event),
        bind(lambda *, loader_name: called.append(loader_name), "b", event),
        bind(lambda mine=1, step=0: called.append((mine, step)), "c", event),
    ]
    dispatch = compiled(event, hooks)
    dispatch(SimpleNamespace(loss=0.5, step=3, dataloader_name="train"))
    assert called == [(0.5, 3), "train", (1, 3)]


@BOTH
def test_each_value_is_read_once_and_before_any_hook(event: Event) -> None:
    """An exception in computing an argument is not a hook's failure, and no hook has run."""
    failures, called = RecordingHandler(), []

    class Broken:
        step = 1

        @property
        def loss(self) -> float:
            raise RuntimeError("device error")

    hooks = [bind(lambda step: called.append(step), "a", event), bind(lambda loss: called.append(loss), "b", event)]
    dispatch = compiled(event, hooks, failures)
    with pytest.raises(RuntimeError, match="device error"):
        dispatch(Broken())
    assert called == [] and failures.handled == []
    assert needed_arguments([*hooks, *hooks]) == ["step", "loss"]


@BOTH
def test_a_failing_hook_does_not_keep_the_others_from_being_called(event: Event) -> None:
    """Exceptions go to the failure handler; every other hook of the event still runs."""
    failures, called = RecordingHandler(), []
    hooks = [
        bind(lambda: called.append("a"), "a", event),
        bind(lambda: 1 / 0, "b", event),
        bind(lambda: called.append("c"), "c", event),
    ]
    dispatch = compiled(event, hooks, failures)
    dispatch(SimpleNamespace())
    assert called == ["a", "c"]
    assert [hook for hook, _ in failures.handled] == ["b"]


@BOTH
def test_what_must_be_raised_is_raised_after_the_others_and_the_first_wins(event: Event) -> None:
    """An exception is never replaced by a later one, keeps its cause, and is raised after every hook was called."""
    failures, called = RecordingHandler(raises=True), []

    def first() -> None:
        raise ValueError("first") from KeyError("cause")

    hooks = [bind(first, "a", event), bind(lambda: 1 / 0, "b", event), bind(lambda: called.append("c"), "c", event)]
    dispatch = compiled(event, hooks, failures)
    with pytest.raises(ValueError, match="first") as caught:
        dispatch(SimpleNamespace())
    assert called == ["c"] and isinstance(caught.value.__cause__, KeyError)


def test_a_request_to_stop_gives_way_to_an_error() -> None:
    """A failure is not hidden behind another hook's request to stop."""
    stop, error, later = StopTraining("enough"), ValueError(), KeyError()
    assert first_raised(None, stop) is stop
    assert first_raised(stop, error) is error
    assert first_raised(error, stop) is error and first_raised(error, later) is error
    assert first_raised(error, None) is error and first_raised(stop, None) is stop


@BOTH
def test_keyboard_interrupts_pass_straight_through(event: Event) -> None:
    """Only exceptions are a hook's failure; an interrupt is not."""
    failures = RecordingHandler()

    def interrupted() -> None:
        raise KeyboardInterrupt

    dispatch = compiled(event, [bind(interrupted, "a", event)], failures)
    with pytest.raises(KeyboardInterrupt):
        dispatch(SimpleNamespace())
    assert failures.handled == []


@BOTH
def test_the_first_success_after_a_failure_resets_the_strikes(event: Event) -> None:
    """Only a hook that failed the last time costs a call of the failure handler when it succeeds."""
    failures = RecordingHandler()
    hooks = [bind(lambda: None, "a", event, recovering=True), bind(lambda: None, "b", event)]
    dispatch = compiled(event, hooks, failures)
    dispatch(SimpleNamespace())
    assert failures.recoveries == ["a"]


@BOTH
def test_changed_metrics_are_restored_hook_by_hook(event: Event) -> None:
    """Changes are attributed to the hook that made them, also if it failed afterwards."""
    failures = RecordingHandler()

    def adds(metrics: dict[str, Any]) -> None:
        metrics["mine"] = 1.0

    def breaks(metrics: dict[str, Any]) -> None:
        del metrics["loss"]
        raise ValueError

    hooks = [bind(lambda metrics: None, "reader", event), bind(adds, "adder", event), bind(breaks, "breaker", event)]
    dispatch = compiled(event, hooks, failures)
    dispatch(SimpleNamespace(metrics={"loss": 0.5}))
    assert failures.restored == [("adder", "metrics"), ("breaker", "metrics")]


@BOTH
def test_tensors_among_the_metrics_do_not_break_the_comparison(event: Event) -> None:
    """A hook may replace a tensor of several elements; their comparison has no truth value, and the run continues."""
    failures = RecordingHandler()

    def replaces(metrics: dict[str, Any]) -> None:
        metrics["histogram"] = torch.ones(3)

    dispatch = compiled(event, [bind(replaces, "a", event)], failures)
    dispatch(SimpleNamespace(metrics={"loss": float("nan"), "histogram": torch.zeros(3)}))
    assert failures.restored == [("a", "metrics")]


def test_unchanged_nan_metrics_are_not_restored() -> None:
    """nan is not equal to itself, but an unchanged dict is."""
    failures = RecordingHandler()
    dispatch = compiled(INNER, [bind(lambda metrics: None)], failures)
    dispatch(SimpleNamespace(metrics={"loss": float("nan"), "t": torch.zeros(3)}))
    assert failures.restored == []


def test_inner_events_are_timed_only_when_sampled() -> None:
    """The clock is read on sampled micro-batches only, for a few hooks as for very many; outer events always."""
    few = [bind(lambda step: None)]
    many = [bind(lambda step: None, f"h{i}") for i in range(GENERATED_UP_TO + 1)]
    outer = [bind(lambda step: None, event=OUTER)]
    arguments: dict[str, Cost] = defaultdict(Cost)
    for event, hooks, timed in [(INNER, few, False), (INNER, many, False), (INNER, few, True), (OUTER, outer, False)]:
        dispatch = compile_event(event, hooks, RecordingHandler(), arguments, timed)
        assert dispatch is not None
        dispatch(SimpleNamespace(step=1))
    assert few[0].cost.calls == 1 and few[0].cost.ns > 0
    assert {item.cost.calls for item in many} == {0}
    assert outer[0].cost.calls == 1
    assert arguments["step"].calls == 2


def test_a_thousand_hooks_run_as_a_loop_in_order() -> None:
    """A long list does not make a function of thousands of lines."""
    called: list[int] = []
    hooks = [bind(lambda step, index=index: called.append(index), f"h{index}") for index in range(1000)]
    dispatch = compiled(INNER, hooks)
    dispatch(SimpleNamespace(step=1))
    assert called == list(range(1000))


def test_the_generated_source_is_small_and_makes_direct_calls() -> None:
    """What explain prints is what runs: values first, then one call per hook."""
    source = event_source(INNER, [bind(lambda loss: None), bind(lambda *, step: None)])
    assert "call0(loss)" in source and "call1(step=step)" in source
    assert source.index("step = m.step") < source.index("call0(loss)")
    assert "clock" not in source and "clock()" in event_source(INNER, [bind(lambda loss: None)], timed=True)


def test_returned_values_of_lifecycle_hooks_are_ignored() -> None:
    """What an observer returns changes nothing."""
    dispatch = compiled(INNER, [bind(lambda loss: "ignored")])
    assert dispatch(SimpleNamespace(loss=1.0)) is None


# ---- invoke ----------------------------------------------------------------------------------------------------------


def test_invoke_returns_what_the_hook_returned_and_times_it() -> None:
    """A timed call is added to the hook's cost, whether it succeeds or fails."""
    hook = bind(lambda loss: loss + 1)
    assert invoke(INNER, hook, RecordingHandler(), SimpleNamespace(), [1.0]) == 2.0
    assert invoke(INNER, hook, RecordingHandler(), SimpleNamespace(), [1.0], timed=True) == 2.0
    assert invoke(INNER, hook, RecordingHandler(), SimpleNamespace(), ["text"], timed=True) is FAILED
    assert hook.cost.calls == 2 and hook.cost.ns > 0


def test_invoke_applies_the_failure_policy_to_what_is_called_but_not_to_reading_its_arguments() -> None:
    """A handled exception gives FAILED, one that must be raised is raised, and `read` raises past the policy."""
    handled, raised = RecordingHandler(), RecordingHandler(raises=True)
    hook = bind(lambda loss: 1 / 0)
    assert invoke(INNER, hook, handled, SimpleNamespace(), [1.0]) is FAILED
    with pytest.raises(ZeroDivisionError):
        invoke(INNER, hook, raised, SimpleNamespace(), [1.0])
    with pytest.raises(AttributeError):
        invoke(INNER, hook, handled, SimpleNamespace(), read=lambda args: ([args.loss], {}))
    assert len(handled.handled) == len(raised.handled) == 1


def test_invoke_calls_without_autograd_where_asked_and_restores_the_mode() -> None:
    """The hook's arguments are read in the same mode, and a hook that switches it changes nothing for the caller."""
    modes: list[bool] = []

    def observe(loss: Any) -> None:
        modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not torch.is_grad_enabled())

    def read(args: Any) -> tuple[list[Any], dict[str, Any]]:
        modes.append(torch.is_grad_enabled())
        return [args.loss], {}

    for grad in (False, True):
        invoke(INNER, bind(observe), RecordingHandler(), SimpleNamespace(loss=1.0), read=read, grad=grad)
        assert torch.is_grad_enabled()
    with torch.no_grad():
        invoke(INNER, bind(observe), RecordingHandler(), SimpleNamespace(loss=1.0), read=read, grad=True)
    assert modes == [False, False, True, True, False, False]


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


def observed(incident: Incident) -> tuple[Any, ...]:
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
