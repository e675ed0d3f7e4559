"""From listeners to one callable per event.

An event that nobody hears is `None` in the table: it costs its call site one branch. The inner events of a step get a
small generated function that makes direct calls; the others run a loop. Both read every value before the first hook is
called, so that an error in computing one is training's own and is never charged to a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hookline.errors import StopTraining
from hookline.events.arguments import Listener
from hookline.events.catalog import CATALOG, Event
from hookline.events.streams import Seen, Streams, look_again_lines, look_lines, watch_names

Fired = Callable[..., Any]
METRICS = ("metrics", "val_metrics", "eval_metrics")
GENERATED_UP_TO = 100  # listeners; a longer list runs as a loop


class Fire:
    """One slot per event: a callable, or None when nobody hears it. Call sites test and call the slot they read once.

    >>> if heard := fire.on_step_end:
    ...     heard(moment)
    """

    __slots__ = tuple(CATALOG)

    def __init__(self) -> None:
        for name in CATALOG:
            setattr(self, name, None)

    if TYPE_CHECKING:  # the slots are made from the catalogue, which type checkers cannot follow

        def __getattr__(self, name: str) -> Fired | None: ...


@dataclass(slots=True)
class Cost:
    """Time spent in one place: on the host, and as far as it was measured on the device."""

    calls: int = 0
    ns: int = 0
    device_calls: int = 0  # those of the calls that were timed on the device, too
    device_ns: int = 0

    def add(self, ns: int) -> None:
        self.calls += 1
        self.ns += ns

    def add_on_device(self, ns: int) -> None:
        self.device_calls += 1
        self.device_ns += ns

    @property
    def all_device_ns(self) -> float:
        """What all these calls took on the device, if the others were like those that were timed there."""
        return self.device_ns * self.calls / max(self.device_calls, 1)


@dataclass(slots=True)
class Bound:
    """A listener with what dispatch needs to know of the hook it belongs to."""

    hook: str
    owner: Any
    listener: Listener
    cost: Cost
    recovering: bool = False  # it failed the last time: a success must be told
    built_in: bool = False


class Desk(Protocol):
    """Where dispatch turns when something out of the ordinary happens; the registry has one."""

    def failed(self, event: Event, bound: Bound, error: Exception, moment: Any) -> Exception | None:
        """A hook raised; returns what must be raised once the others have been called."""

    def recovered(self, event: Event, bound: Bound) -> None:
        """A hook that had failed the last time did not."""

    def settle(self, event: Event, bound: Bound, moment: Any, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """A hook changed the event's metrics; returns them as they shall be."""

    def argument_cost(self, attribute: str) -> Cost:
        """The account of one lazy argument."""


class Watch(NamedTuple):
    """Who looks whether an event's hooks draw random numbers, and hears of it."""

    streams: Streams
    drew: Callable[[Seen], Any]


def compile_event(
    event: Event, bound: Sequence[Bound], desk: Desk, timed: bool, watch: Watch | None = None
) -> Fired | None:
    """The callable of one event for the hooks that hear it now; None when there are none."""
    if not bound:
        return None
    if event.inner and len(bound) <= GENERATED_UP_TO:
        return _generated(event, bound, desk, timed, watch)
    fired = _looped(event, tuple(bound), desk, timed or not event.inner)
    return fired if watch is None else watch.streams.guard(fired, watch.drew)


def wanted_attributes(bound: Sequence[Bound]) -> list[str]:
    """Every value these listeners name, each once, in order of first use."""
    return list(dict.fromkeys(name for item in bound for name in item.listener.wanted))


def first_raised(raised: Exception | None, error: Exception | None) -> Exception | None:
    """What an event ends in when several hooks insist: the first error; a request to stop gives way to an error."""
    if raised is None or (error is not None and isinstance(raised, StopTraining)):
        return error
    return raised


def _looped(event: Event, bound: tuple[Bound, ...], desk: Desk, timed: bool) -> Fired:
    wanted = wanted_attributes(bound)

    def read(moment: Any) -> dict[str, Any]:
        values = {}
        for name in wanted:
            began = perf_counter_ns()
            values[name] = getattr(moment, name)
            if timed:
                desk.argument_cost(name).add(perf_counter_ns() - began)
        return values

    def fire(moment: Any) -> None:
        values = read(moment)
        raised: Exception | None = None
        interrupted: BaseException | None = None
        seen = {name: dict(values[name]) for name in METRICS if name in values}
        for item in bound:
            began = perf_counter_ns()
            try:
                item.listener.with_values(values)
            except Exception as error:
                raised = first_raised(raised, desk.failed(event, item, error, moment))
            except BaseException as error:
                if not event.closing:
                    raise
                interrupted = error  # every hook hears that the run ends, whatever the others do
            else:
                if item.recovering:
                    desk.recovered(event, item)
            if timed:
                item.cost.add(perf_counter_ns() - began)
            for name, before in seen.items():
                if _differ(values[name], before):
                    seen[name] = desk.settle(event, item, moment, name, before)
        if interrupted is not None or raised is not None:
            raise interrupted or raised  # type: ignore[misc]

    return fire


def _differ(metrics: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return metrics != before
    except Exception:  # tensors and arrays of several elements have no single truth value
        return True


def _generated(event: Event, bound: Sequence[Bound], desk: Desk, timed: bool, watch: Watch | None) -> Fired:
    make = _factory(event_source(event, bound, timed, watch))
    costs = {name: desk.argument_cost(name) for name in wanted_attributes(bound)} if timed else {}
    watched = {} if watch is None else watch_names(*watch)
    fired: Fired = make(event, tuple(bound), [item.listener.call for item in bound], desk, costs, **watched)
    return fired


@lru_cache(maxsize=512)
def _factory(source: str) -> Callable[..., Fired]:
    """Compiled once per shape of listeners, whoever they belong to."""
    namespace: dict[str, Any] = {"clock": perf_counter_ns, "first_raised": first_raised}
    exec(compile(source, "<hookline dispatch>", "exec"), namespace)
    make: Callable[..., Fired] = namespace["make"]
    return make


def event_source(event: Event, bound: Sequence[Bound], timed: bool = False, watch: Watch | None = None) -> str:
    """The Python source of the function that calls these listeners (`explain(event, source=True)` prints it)."""
    wanted = wanted_attributes(bound)
    lines = [f"def {event.name}(m):"]
    for name in wanted:
        lines += _timed([f"{name} = m.{name}"], f"cost_{name}.add", timed)
    watched = [name for name in wanted if name in METRICS]
    lines += [f"    seen_{name} = dict({name})" for name in watched]
    lines += ["    raised = None"]
    if watch is not None:
        lines += [f"    {line}" for line in look_lines(watch.streams)]
    for index, item in enumerate(bound):
        lines += _call_lines(index, item, watched, timed)
    if watch is not None:
        lines += [f"    {line}" for line in look_again_lines(watch.streams)]
    lines += ["    if raised is not None:", "        raise raised"]
    more = "" if watch is None else f", {', '.join(watch_names(*watch))}"
    header = [f"def make(event, bound, calls, desk, costs{more}):"]
    header += ["    failed, recovered, settle = desk.failed, desk.recovered, desk.settle"]
    header += [f"    call{index}, bound{index} = calls[{index}], bound[{index}]" for index in range(len(bound))]
    if timed:
        header += [f"    cost{index} = bound{index}.cost" for index in range(len(bound))]
        header += [f"    cost_{name} = costs[{name!r}]" for name in wanted]
    return "\n".join([*header, *(f"    {line}" for line in lines), f"    return {event.name}"])


def _call_lines(index: int, item: Bound, watched: Sequence[str], timed: bool) -> list[str]:
    arguments = [*item.listener.positional, *(f"{key}={name}" for key, name in item.listener.keywords.items())]
    lines = [
        "try:",
        f"    call{index}({', '.join(arguments)})",
        "except Exception as error:",
        f"    raised = first_raised(raised, failed(event, bound{index}, error, m))",
    ]
    if item.recovering:
        lines += ["else:", f"    recovered(event, bound{index})"]
    lines = _timed(lines, f"cost{index}.add", timed)
    for name in (name for name in watched if name in item.listener.wanted):
        lines += [
            "    try:",
            f"        changed = {name} != seen_{name}",
            "    except Exception:",  # tensors and arrays of several elements have no single truth value
            "        changed = True",
            "    if changed:",
            f"        seen_{name} = settle(event, bound{index}, m, {name!r}, seen_{name})",
        ]
    return lines


def _timed(lines: list[str], add: str, timed: bool) -> list[str]:
    body = [f"    {line}" for line in lines]
    return ["    began = clock()", *body, f"    {add}(clock() - began)"] if timed else body
