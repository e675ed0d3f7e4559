"""Dispatch: one callable per event, values before hooks, failures apart from each other, metrics kept whole."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.errors import StopTraining
from hookline.events.arguments import read_signature
from hookline.events.catalog import CATALOG, Event
from hookline.events.dispatch import (
    GENERATED_UP_TO,
    Bound,
    Cost,
    compile_event,
    event_source,
    first_raised,
    wanted_attributes,
)

INNER, OUTER = CATALOG["on_train_batch_end"], CATALOG["on_epoch_end"]
BOTH = pytest.mark.parametrize("event", [INNER, CATALOG["on_validation_batch_end"]], ids=["generated", "looped"])


class Office:
    """A desk that writes down what it is told and raises what it is asked to."""

    def __init__(self, raises: bool = False) -> None:
        self.failures: list[tuple[str, Exception]] = []
        self.recoveries: list[str] = []
        self.settled: list[tuple[str, str]] = []
        self.raises = raises
        self.arguments: dict[str, Cost] = {}

    def argument_cost(self, attribute: str) -> Cost:
        return self.arguments.setdefault(attribute, Cost())

    def recovered(self, event: Event, bound: Bound) -> None:
        self.recoveries.append(bound.hook)

    def failed(self, event: Event, bound: Bound, error: Exception, moment: Any) -> Exception | None:
        self.failures.append((bound.hook, error))
        return error if self.raises else None

    def settle(self, event: Event, bound: Bound, moment: Any, name: str, before: dict[str, Any]) -> dict[str, Any]:
        self.settled.append((bound.hook, name))
        return dict(getattr(moment, name))


def bind(call: Callable[..., Any], name: str = "h", event: Event = INNER, recovering: bool = False) -> Bound:
    """A function, ready for dispatch."""
    return Bound(name, call, read_signature(call, event, event.name, name), Cost(), recovering)


def test_an_event_nobody_hears_has_no_callable() -> None:
    """None costs its call site one branch."""
    assert compile_event(INNER, [], Office(), False) is None


@BOTH
def test_hooks_are_called_in_order_with_what_they_named(event: Event) -> None:
    """Generated and looped dispatch call the same hooks in the same way."""
    heard: list[Any] = []
    bound = [
        bind(lambda loss, step: heard.append((loss, step)), "a", event),
        bind(lambda *, loader_name: heard.append(loader_name), "b", event),
        bind(lambda mine=1, step=0: heard.append((mine, step)), "c", event),
    ]
    fired = compile_event(event, bound, Office(), False)
    assert fired is not None
    fired(SimpleNamespace(loss=0.5, step=3, dataloader_name="train"))
    assert heard == [(0.5, 3), "train", (1, 3)]


@BOTH
def test_each_value_is_read_once_and_before_any_hook(event: Event) -> None:
    """An error in computing a value is training's own: no hook has run and none is blamed."""
    office, heard = Office(), []

    class Broken:
        step = 1

        @property
        def loss(self) -> float:
            raise RuntimeError("device error")

    bound = [bind(lambda step: heard.append(step), "a", event), bind(lambda loss: heard.append(loss), "b", event)]
    fired = compile_event(event, bound, office, False)
    assert fired is not None
    with pytest.raises(RuntimeError, match="device error"):
        fired(Broken())
    assert heard == [] and office.failures == []
    assert wanted_attributes([*bound, *bound]) == ["step", "loss"]


@BOTH
def test_a_failing_hook_does_not_keep_the_others_from_hearing(event: Event) -> None:
    """Errors go to the desk; every other hook of the event still runs."""
    office, heard = Office(), []
    bound = [
        bind(lambda: heard.append("a"), "a", event),
        bind(lambda: 1 / 0, "b", event),
        bind(lambda: heard.append("c"), "c", event),
    ]
    fired = compile_event(event, bound, office, False)
    assert fired is not None
    fired(SimpleNamespace())
    assert heard == ["a", "c"]
    assert [hook for hook, _ in office.failures] == ["b"]


@BOTH
def test_what_must_be_raised_is_raised_after_the_others_and_the_first_wins(event: Event) -> None:
    """An exception is never replaced by a later one, keeps its cause, and comes when all have heard."""
    office, heard = Office(raises=True), []

    def first() -> None:
        raise ValueError("first") from KeyError("cause")

    bound = [bind(first, "a", event), bind(lambda: 1 / 0, "b", event), bind(lambda: heard.append("c"), "c", event)]
    fired = compile_event(event, bound, office, False)
    assert fired is not None
    with pytest.raises(ValueError, match="first") as caught:
        fired(SimpleNamespace())
    assert heard == ["c"] and isinstance(caught.value.__cause__, KeyError)


def test_a_request_to_stop_gives_way_to_an_error() -> None:
    """A real failure is not hidden behind another hook's wish to end."""
    stop, error, later = StopTraining("enough"), ValueError(), KeyError()
    assert first_raised(None, stop) is stop
    assert first_raised(stop, error) is error
    assert first_raised(error, stop) is error and first_raised(error, later) is error
    assert first_raised(error, None) is error and first_raised(stop, None) is stop


@BOTH
def test_keyboard_interrupts_pass_straight_through(event: Event) -> None:
    """Only exceptions are a hook's failure; an interrupt is not."""
    office = Office()

    def interrupted() -> None:
        raise KeyboardInterrupt

    fired = compile_event(event, [bind(interrupted, "a", event)], office, False)
    assert fired is not None
    with pytest.raises(KeyboardInterrupt):
        fired(SimpleNamespace())
    assert office.failures == []


@BOTH
def test_a_hook_on_its_way_back_is_reported_recovered(event: Event) -> None:
    """Only a hook that had failed costs a call to the desk when it succeeds."""
    office = Office()
    bound = [bind(lambda: None, "a", event, recovering=True), bind(lambda: None, "b", event)]
    fired = compile_event(event, bound, office, False)
    assert fired is not None
    fired(SimpleNamespace())
    assert office.recoveries == ["a"]


@BOTH
def test_changed_metrics_are_settled_hook_by_hook(event: Event) -> None:
    """The desk hears who changed the metrics, at once, also when that hook failed afterwards."""
    office = Office()

    def adds(metrics: dict[str, Any]) -> None:
        metrics["mine"] = 1.0

    def breaks(metrics: dict[str, Any]) -> None:
        del metrics["loss"]
        raise ValueError

    bound = [bind(lambda metrics: None, "reader", event), bind(adds, "adder", event), bind(breaks, "breaker", event)]
    fired = compile_event(event, bound, office, False)
    assert fired is not None
    fired(SimpleNamespace(metrics={"loss": 0.5}))
    assert office.settled == [("adder", "metrics"), ("breaker", "metrics")]


@BOTH
def test_tensors_among_the_metrics_do_not_break_the_comparison(event: Event) -> None:
    """A hook may replace a tensor of several elements; comparing has no truth value, and the run goes on."""
    office = Office()

    def replaces(metrics: dict[str, Any]) -> None:
        metrics["histogram"] = torch.ones(3)

    fired = compile_event(event, [bind(replaces, "a", event)], office, False)
    assert fired is not None
    fired(SimpleNamespace(metrics={"loss": float("nan"), "histogram": torch.zeros(3)}))
    assert office.settled == [("a", "metrics")]


def test_nan_metrics_that_nobody_touched_are_not_settled() -> None:
    """nan is not equal to itself, yet an untouched dict is."""
    office = Office()
    fired = compile_event(INNER, [bind(lambda metrics: None)], office, False)
    assert fired is not None
    fired(SimpleNamespace(metrics={"loss": float("nan"), "t": torch.zeros(3)}))
    assert office.settled == []


def test_inner_events_are_timed_only_when_sampled() -> None:
    """The clock is read on sampled micro-batches only, for a few hooks as for very many; outer events always."""
    few = [bind(lambda step: None)]
    many = [bind(lambda step: None, f"h{i}") for i in range(GENERATED_UP_TO + 1)]
    outer = [bind(lambda step: None, event=OUTER)]
    desk = Office()
    for event, bound, timed in [(INNER, few, False), (INNER, many, False), (INNER, few, True), (OUTER, outer, False)]:
        fired = compile_event(event, bound, desk, timed)
        assert fired is not None
        fired(SimpleNamespace(step=1))
    assert few[0].cost.calls == 1 and few[0].cost.ns > 0
    assert {item.cost.calls for item in many} == {0}
    assert outer[0].cost.calls == 1
    assert desk.arguments["step"].calls == 2


def test_a_thousand_hooks_run_as_a_loop_in_order() -> None:
    """A long list does not make a function of thousands of lines."""
    heard: list[int] = []
    bound = [bind(lambda step, index=index: heard.append(index), f"h{index}") for index in range(1000)]
    fired = compile_event(INNER, bound, Office(), False)
    assert fired is not None
    fired(SimpleNamespace(step=1))
    assert heard == list(range(1000))


def test_the_generated_source_is_small_and_makes_direct_calls() -> None:
    """What explain prints is what runs: values first, then one call per hook."""
    source = event_source(INNER, [bind(lambda loss: None), bind(lambda *, step: None)])
    assert "call0(loss)" in source and "call1(step=step)" in source
    assert source.index("step = m.step") < source.index("call0(loss)")
    assert "clock" not in source and "clock()" in event_source(INNER, [bind(lambda loss: None)], timed=True)


def test_returned_values_of_lifecycle_hooks_are_ignored() -> None:
    """What an observer returns changes nothing."""
    fired = compile_event(INNER, [bind(lambda loss: "ignored")], Office(), False)
    assert fired is not None
    assert fired(SimpleNamespace(loss=1.0)) is None
