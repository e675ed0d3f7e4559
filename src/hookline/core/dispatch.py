"""Call an event's listeners: `invoke` calls one hook under its failure policy, and each event gets one callable.

An event without listeners has None instead of a callable, so that it costs its call site one branch. The inner events
of a step get a small generated function that makes direct calls; all others loop over `invoke`. Both read every
argument before the first hook is called, because an exception in computing one is not a hook's failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.failures import FailureHandler
from hookline.core.signature import Listener
from hookline.errors import StopTraining

Dispatch = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""What a hook is called with, by position and by keyword."""
ArgumentCosts = Mapping[str, Cost]
METRICS = ("metrics", "val_metrics", "eval_metrics")
GENERATED_UP_TO = 100  # A longer list of listeners runs as a loop.
FAILED: Final = object()
"""What `invoke` returns if the hook raised and its failure policy lets the run continue."""
_NO_KEYWORDS: Mapping[str, Any] = {}


class EventSlots:
    """One slot per event: its dispatch, or None if the event has no listeners.

    >>> if dispatch := slots.on_step_end:
    ...     dispatch(args)
    """

    __slots__ = tuple(CATALOG)

    def __init__(self) -> None:
        for name in CATALOG:
            setattr(self, name, None)

    if TYPE_CHECKING:  # Type checkers cannot follow slots that are made from the catalog.

        def __getattr__(self, name: str) -> Dispatch | None: ...


@dataclass(slots=True)
class BoundHook:
    """A listener with what dispatch needs to know about its hook."""

    hook: str
    owner: Any
    listener: Listener
    cost: Cost
    recovering: bool = False  # It failed the last time, so that a success resets its strikes.
    built_in: bool = False


def invoke(
    event: Event,
    hook: BoundHook,
    failures: FailureHandler,
    args: Any,
    positional: Sequence[Any] = (),
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    *,
    call: Callable[..., Any] | None = None,
    read: Callable[[Any], Arguments] | None = None,
    timed: bool = False,
    grad: bool | None = None,
) -> Any:
    """Call one hook under its failure policy; everything that calls hooks does it here, or in code generated from it.

    The random-number guard and other wrappers are part of `hook.listener.call`.

    Args:
        event: The event at which the hook is called.
        hook: The hook.
        failures: Applies the hook's failure policy.
        args: The event's arguments, for reports.
        positional: What the hook is called with by position.
        keywords: What the hook is called with by keyword.
        call: What to call instead of the hook's listener: a function that calls it and checks what it did. What it
            raises counts as the hook's failure.
        read: Returns what the hook is called with, instead of `positional` and `keywords`. What it raises is not the
            hook's failure; its time counts as the hook's.
        timed: Whether the call is added to the hook's cost.
        grad: False calls the hook without autograd, True in the mode of the caller; in both cases the mode is restored
            afterwards. None leaves the mode alone.

    Returns:
        What the hook returned, or `FAILED` if it raised and its policy lets the run continue.

    Raises:
        Exception: What the hook raised, if its policy ends the run.
    """
    began = perf_counter_ns() if timed else 0
    if grad is not None:
        caller_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(caller_mode and grad)  # The context manager would cost 1.5 µs.
    try:
        if read is not None:
            positional, keywords = read(args)
        try:
            returned = (hook.listener.call if call is None else call)(*positional, **keywords)
        except Exception as error:
            if failures.handle(event, hook, error, args) is None:
                return FAILED
            raise
        if hook.recovering:
            failures.reset_strikes(event, hook)
        return returned
    finally:
        if grad is not None:
            torch._C._set_grad_enabled(caller_mode)
        if timed:
            hook.cost.add(perf_counter_ns() - began)


def compile_event(
    event: Event,
    hooks: Sequence[BoundHook],
    failures: FailureHandler,
    argument_costs: ArgumentCosts,
    timed: bool,
) -> Dispatch | None:
    """Make the callable of one event for the hooks that are due now.

    Args:
        event: The event.
        hooks: Its listeners in order.
        failures: Applies the hooks' failure policies.
        argument_costs: Where the cost of computing each argument is added, by its name.
        timed: Whether hooks and arguments are timed; outer events always are.

    Returns:
        A function of the event's arguments; None if there are no listeners.
    """
    if not hooks:
        return None
    if event.inner and len(hooks) <= GENERATED_UP_TO:
        return _generated(event, hooks, failures, argument_costs, timed)
    return _looped(event, tuple(hooks), failures, argument_costs, timed or not event.inner)


def needed_arguments(hooks: Sequence[BoundHook]) -> list[str]:
    """Return every attribute that these listeners name, each once, in order of first use."""
    return list(dict.fromkeys(name for hook in hooks for name in hook.listener.wanted))


def first_raised(raised: Exception | None, error: Exception | None) -> Exception | None:
    """Return what an event ends with if several hooks raise: the first exception, but an error before a stop."""
    if raised is None or (error is not None and isinstance(raised, StopTraining)):
        return error
    return raised


def _looped(
    event: Event, hooks: tuple[BoundHook, ...], failures: FailureHandler, argument_costs: ArgumentCosts, timed: bool
) -> Dispatch:
    needed = needed_arguments(hooks)

    def read_all(args: Any) -> dict[str, Any]:
        values = {}
        for name in needed:
            began = perf_counter_ns()
            values[name] = getattr(args, name)
            if timed:
                argument_costs[name].add(perf_counter_ns() - began)
        return values

    def dispatch(args: Any) -> None:
        values = read_all(args)
        raised: Exception | None = None
        interrupted: BaseException | None = None
        before = {name: dict(values[name]) for name in METRICS if name in values}
        for hook in hooks:
            try:
                invoke(event, hook, failures, args, *hook.listener.arguments(values), timed=timed)
            except Exception as error:
                raised = first_raised(raised, error)
            except BaseException as error:
                if not event.closing:
                    raise
                interrupted = error  # Every hook is called at the end of the run, whatever the others do.
            for name, copy in before.items():
                if _differ(values[name], copy):
                    before[name] = failures.restore_metrics(event, hook, args, name, copy)
        if interrupted is not None or raised is not None:
            raise interrupted or raised  # type: ignore[misc]

    return dispatch


def _differ(metrics: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return metrics != before
    except Exception:  # Tensors and arrays of several elements have no single truth value.
        return True


# ---- generated dispatch ----------------------------------------------------------------------------------------------


def _generated(
    event: Event, hooks: Sequence[BoundHook], failures: FailureHandler, argument_costs: ArgumentCosts, timed: bool
) -> Dispatch:
    make = _factory(event_source(event, hooks, timed))
    costs = {name: argument_costs[name] for name in needed_arguments(hooks)} if timed else {}
    return make(event, tuple(hooks), [hook.listener.call for hook in hooks], failures, costs)


@lru_cache(maxsize=512)
def _factory(source: str) -> Callable[..., Dispatch]:
    """Compile the source once per shape of listeners, whichever hooks they belong to."""
    namespace: dict[str, Any] = {"clock": perf_counter_ns, "first_raised": first_raised}
    exec(compile(source, "<hookline dispatch>", "exec"), namespace)
    make: Callable[..., Dispatch] = namespace["make"]
    return make


def event_source(event: Event, hooks: Sequence[BoundHook], timed: bool = False) -> str:
    """Return the source of the function that calls these listeners; ``explain(event, source=True)`` prints it.

    It does what a loop over `invoke` does, with the calls written out: a tenth of the time per hook.
    """
    needed = needed_arguments(hooks)
    lines = [f"def {event.name}(m):"]
    for name in needed:
        lines += _timed([f"{name} = m.{name}"], f"cost_{name}.add", timed)
    metrics = [name for name in needed if name in METRICS]
    lines += [f"    before_{name} = dict({name})" for name in metrics]
    lines += ["    raised = None"]
    for index, hook in enumerate(hooks):
        lines += _call_lines(index, hook, metrics, timed)
    lines += ["    if raised is not None:", "        raise raised"]
    header = ["def make(event, hooks, calls, failures, costs):"]
    header += ["    handle, reset_strikes = failures.handle, failures.reset_strikes"]
    header += [f"    call{index}, hook{index} = calls[{index}], hooks[{index}]" for index in range(len(hooks))]
    if timed:
        header += [f"    cost{index} = hook{index}.cost" for index in range(len(hooks))]
        header += [f"    cost_{name} = costs[{name!r}]" for name in needed]
    return "\n".join([*header, *(f"    {line}" for line in lines), f"    return {event.name}"])


def _call_lines(index: int, hook: BoundHook, metrics: Sequence[str], timed: bool) -> list[str]:
    arguments = [*hook.listener.positional, *(f"{key}={name}" for key, name in hook.listener.keywords.items())]
    lines = [
        "try:",
        f"    call{index}({', '.join(arguments)})",
        "except Exception as error:",
        f"    raised = first_raised(raised, handle(event, hook{index}, error, m))",
    ]
    if hook.recovering:
        lines += ["else:", f"    reset_strikes(event, hook{index})"]
    lines = _timed(lines, f"cost{index}.add", timed)
    for name in (name for name in metrics if name in hook.listener.wanted):
        lines += [
            "    try:",
            f"        changed = {name} != before_{name}",
            "    except Exception:",  # Tensors and arrays of several elements have no single truth value.
            "        changed = True",
            "    if changed:",
            f"        before_{name} = failures.restore_metrics(event, hook{index}, m, {name!r}, before_{name})",
        ]
    return lines


def _timed(lines: list[str], add: str, timed: bool) -> list[str]:
    body = [f"    {line}" for line in lines]
    return ["    began = clock()", *body, f"    {add}(clock() - began)"] if timed else body
