"""Call an event's listeners: `invoke` calls one hook under its failure policy, and each event gets one callable.

`DispatchTable` holds the callables of all events for every set of due hooks, made when an event first fires.

An event without listeners has None instead of a callable, so that it costs its call site one branch. The inner events
of a step get a small generated function that makes direct calls; all others loop over `invoke`. Both read every
argument before the first hook is called, because an exception in computing one is not a hook's failure.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.due_hooks import Decision, Scheduler
from hookline.core.failures import FailureHandler
from hookline.core.rng_guard import RngGuard
from hookline.core.signature import Listener
from hookline.errors import StopTraining

if TYPE_CHECKING:
    from hookline.core.entry import Entry

Dispatch = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""What a hook is called with, by position and by keyword."""
METRICS = ("metrics", "val_metrics", "eval_metrics")
GENERATED_UP_TO = 100  # A longer list of listeners runs as a loop.
FAILED: Final = object()
"""What `invoke` returns if the hook raised and its failure policy lets the run continue."""
_NO_KEYWORDS: Mapping[str, Any] = {}

INNER = [event.name for event in CATALOG.values() if event.inner]
OUTPUT_AND_TARGET = {"model_output", "target"}
LEADS_TO_NORM, LEADS_TO_LR = {"grad_norm", "ctx"}, {"lr", "ctx"}
BETWEEN_UPDATE_AND_CLEAR = ("on_before_optimizer_step", "on_after_optimizer_step", "on_step_skipped")
MAX_TABLES = 64  # Sets of due hooks whose callables are stored.


class EventSlots:
    """One slot per event: its dispatch, or None if the event has no listeners.

    >>> if dispatch := slots.on_step_end:
    ...     dispatch(args)
    """

    __slots__ = (*CATALOG, "__weakref__")

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

    def with_call(self, call: Callable[..., Any]) -> BoundHook:
        """Return the same hook with a wrapper that is called instead of its listener's function."""
        # The wrapper keeps the marks of the function, such as that of hooks that pass gradients through.
        return replace(self, listener=replace(self.listener, call=wraps(self.listener.call)(call)))


Compiler = Callable[[list[BoundHook], bool], Dispatch | None]
"""Makes the callable of an event from its listeners, and whether they are timed."""
Wrapper = Callable[[Event, Sequence[BoundHook], bool], list[BoundHook]]
"""Returns the listeners of an event as they are called, given whether they are timed."""


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
        if caller_mode and not grad:
            torch.set_grad_enabled(False)  # As a context manager it would take three times as long.
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
            torch.set_grad_enabled(caller_mode)
        if timed:
            hook.cost.add(perf_counter_ns() - began)


def needed_arguments(hooks: Sequence[BoundHook]) -> list[str]:
    """Return every attribute that these listeners name, each once, in order of first use."""
    return list(dict.fromkeys(name for hook in hooks for name in hook.listener.wanted))


def first_raised(raised: Exception | None, error: Exception | None) -> Exception | None:
    """Return what an event ends with if several hooks raise: the first exception, but an error before a stop."""
    if raised is None or (error is not None and isinstance(raised, StopTraining)):
        return error
    return raised


def _looped(
    event: Event, hooks: Sequence[BoundHook], failures: FailureHandler, argument_costs: Mapping[str, Cost], timed: bool
) -> Dispatch:
    needed = needed_arguments(hooks)

    def dispatch(args: Any) -> None:
        values = {}
        for name in needed:
            began = perf_counter_ns()
            values[name] = getattr(args, name)
            if timed:
                argument_costs[name].add(perf_counter_ns() - began)
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
                try:
                    changed = values[name] != copy
                except Exception:  # Tensors and arrays of several elements have no single truth value.
                    changed = True
                if changed:
                    before[name] = failures.restore_metrics(event, hook, args, name, copy)
        if interrupted is not None:
            raise interrupted
        if raised is not None:
            raise raised

    return dispatch


# ---- generated dispatch ----------------------------------------------------------------------------------------------


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
    # What must be raised is raised after the last hook: the others are called whatever one of them does.
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
            "    except Exception:",
            "        changed = True",
            "    if changed:",
            f"        before_{name} = failures.restore_metrics(event, hook{index}, m, {name!r}, before_{name})",
        ]
    return lines


def _timed(lines: list[str], add: str, timed: bool) -> list[str]:
    body = [f"    {line}" for line in lines]
    return ["    began = clock()", *body, f"    {add}(clock() - began)"] if timed else body


# ---- the callables of all events -------------------------------------------------------------------------------------


class DispatchTable:
    """Fills the slots of events for the hooks that are due; everything is made again when the hooks change.

    An event in progress holds its callable, so that it finishes with the hooks it started with.
    """

    def __init__(
        self,
        listeners: Callable[[Event, frozenset[str]], list[BoundHook]],
        failures: FailureHandler,
        rng_guard: RngGuard,
        lock: threading.RLock,
    ) -> None:
        self.slots = EventSlots()
        self.scheduler = Scheduler()
        self.listener_counts = dict.fromkeys(CATALOG, 0)
        """Listeners of each event, whether due and enabled or not."""
        self.argument_costs: defaultdict[str, Cost] = defaultdict(Cost)
        # Some values cost every step something, and are computed only if a listener may read them: at on_step_end the
        # norm of gradients that are gone by then and the step's learning rate, anywhere metrics that hooks add to, and
        # at the end of a batch the model's output.
        self.norm_readers = self.lr_readers = self.metric_readers = 0
        self.output_readers = dict.fromkeys(CATALOG, 0)
        """Listeners of each event that read the model's output or the target."""
        self.gradient_writers = 0
        """User listeners between the update chain and zero_grad, which may clear or replace gradients."""
        self.optional_arguments = 0
        """Listeners that can do without some of their arguments."""
        self._listeners, self._failures, self._rng_guard, self._lock = listeners, failures, rng_guard, lock
        self._tables: dict[Decision, dict[str, Dispatch | None]] = {}
        self.compilers: dict[str, Compiler] = {}
        """The parts that make the callable of an event themselves, by event."""
        self._wrappers: list[Wrapper] = []

    def count(self, entry: Entry, by: int) -> None:
        """Count the listeners of a hook that was added (1) or removed (-1), and what they may read or write."""
        for event, listener in entry.listeners.items():
            wanted, at_step_end = listener.wanted, event == "on_step_end"
            self.listener_counts[event] += by
            self.optional_arguments += by * bool(listener.optional)
            self.norm_readers += by * (at_step_end and not LEADS_TO_NORM.isdisjoint(wanted))
            self.lr_readers += by * (at_step_end and not LEADS_TO_LR.isdisjoint(wanted))
            self.metric_readers += by * ("metrics" in wanted)
            self.output_readers[event] += by * (not OUTPUT_AND_TARGET.isdisjoint(wanted))
            self.gradient_writers += by * (not entry.built_in and event in BETWEEN_UPDATE_AND_CLEAR)

    def reset(self) -> None:
        """Forget all callables, because the hooks have changed; each event makes its own when it next fires."""
        self._tables = {}
        self.scheduler.evaluate_next(hooks_changed=True)
        self.install()
        # The slots of inner events with listeners were just filled, and stay so: another thread may be firing them.
        for name, event in CATALOG.items():
            if not self.listener_counts[name]:
                setattr(self.slots, name, None)
            elif not event.inner:
                setattr(self.slots, name, partial(self._first_dispatch, None, name))

    def install(self) -> None:
        """Put the callables for the scheduler's decision into the slots of the inner events that have listeners."""
        key = self.scheduler.decision
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()  # With many schedules nearly every step has another set of due hooks.
            table = self._tables[key] = {}
            for name in filter(self.listener_counts.get, INNER):
                table[name] = partial(self._first_dispatch, table, name)
        for name, dispatch in table.items():
            setattr(self.slots, name, dispatch)

    def _first_dispatch(self, table: dict[str, Dispatch | None] | None, name: str, *values: Any) -> Any:
        """Occupy a slot until the event first fires, then make the real callable and call it."""
        # Made as late as this, because registering a thousand hooks resets all slots a thousand times. Under the lock,
        # so that no change comes between reading the listeners and filling the slot.
        with self._lock:
            event, decision = CATALOG[name], self.scheduler.decision
            hooks = self._rng_guard.wrap(event, self._listeners(event, decision.due_for(event)))
            for wrap in self._wrappers:
                hooks = wrap(event, hooks, decision.timed)
            compiler = self.compilers.get(name)
            dispatch = self.compile(event, hooks) if compiler is None else compiler(hooks, decision.timed)
            dispatch = self._rng_guard.around(event, hooks, dispatch)
            # A table of another decision, or from before a change, gets none of this: it was made for other hooks.
            if table is None or self._tables.get(decision) is table:
                setattr(self.slots, name, dispatch)
                if table is not None:
                    table[name] = dispatch
        return dispatch(*values) if dispatch else None

    def compile(self, event: Event, hooks: Sequence[BoundHook]) -> Dispatch | None:
        """Make the callable of one event for given listeners, in order; None if there are none."""
        if not hooks:
            return None
        timed = self.scheduler.decision.timed
        if not event.inner or len(hooks) > GENERATED_UP_TO:
            return _looped(event, hooks, self._failures, self.argument_costs, timed or not event.inner)
        make = _factory(event_source(event, hooks, timed))
        return make(event, hooks, [hook.listener.call for hook in hooks], self._failures, self.argument_costs)

    def compile_with(self, event: str, compiler: Compiler) -> None:
        """Let another part make the callable of one event, as the update chain and the forward hooks do."""
        self.compilers[event] = compiler
        self.reset()

    def add_wrapper(self, wrapper: Wrapper) -> None:
        """Let another part wrap the listeners of events before they are compiled."""
        self._wrappers.append(wrapper)
        self.reset()
