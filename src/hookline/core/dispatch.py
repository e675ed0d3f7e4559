"""Call an event's listeners: `invoke` calls one hook under its failure policy, and each event gets one callable.

`DispatchTable` holds the callables of all events for every set of due hooks, built when an event first fires. An event
without listeners has None instead of a callable, so that it costs its call site one branch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.failures import FailureHandler
from hookline.core.schedule import Decision, Scheduler
from hookline.core.signature import Listener
from hookline.errors import MissingArgument, StopTraining

if TYPE_CHECKING:
    from hookline.core.change_audit import ChangeAudit
    from hookline.core.registry import Registry

Dispatch = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any] | None]
"""The arguments for a hook, by position and by keyword."""
METRICS = ("metrics", "val_metrics", "eval_metrics", "epoch_metrics")
FAILED: Final = object()
"""What `invoke` returns if the hook raised and its failure policy lets the run continue."""

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

    if TYPE_CHECKING:  # Type checkers cannot follow slots that are generated from the catalog.

        def __getattr__(self, name: str) -> Dispatch | None: ...


@dataclass(slots=True)
class BoundHook:
    """A listener with what dispatch needs to know about its hook."""

    hook: str
    owner: Any
    listener: Listener
    call: Callable[..., Any]  # The listener's function, or the outermost of the wrappers around it.
    cost: Cost
    strikes: dict[str, int]  # Its consecutive failures, by event; a success resets the count.
    built_in: bool
    place: tuple[str, str]  # The hook and the event, as reports name them.

    def with_call(self, call: Callable[..., Any]) -> BoundHook:
        """Return the same hook with a wrapper around its function."""
        return replace(self, call=call)


Maker = Callable[[list[BoundHook]], Dispatch | None]
"""Makes the callable of an event from its listeners."""
Callables = dict[str, Dispatch | None]
"""The callables of all events for one set of due hooks, each built when the event first fires."""


def invoke(
    event: Event,
    hook: BoundHook,
    failures: FailureHandler,
    args: Any,
    positional: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    call: Callable[..., Any] | None = None,
    read: Callable[[Any], Arguments] | None = None,
    grad: bool | None = None,
) -> Any:
    """Call one hook under its failure policy and add the call to its cost. All hook calls go through here.

    The wrappers, such as the random-number guard, are part of `hook.call`.

    Args:
        event: The event at which the hook is called.
        hook: The hook.
        failures: Applies the hook's failure policy, and knows which hook each thread is calling.
        args: The event's arguments, for reports.
        positional: The hook's positional arguments.
        keywords: The hook's keyword arguments.
        call: The function to call instead of the hook's listener; it calls the listener and checks its effects. What it
            raises counts as the hook's failure.
        read: Returns the arguments for the hook, instead of `positional` and `keywords`. What it raises is not the
            hook's failure; its time counts as the hook's.
        grad: False calls the hook without autograd, True in the mode of the caller; in both cases the mode is restored
            afterwards. None leaves the mode alone.

    Returns:
        The hook's result, or `FAILED` if it raised and its policy lets the run continue.

    Raises:
        Exception: The hook's exception, if its policy ends the run.
    """
    calling, thread = failures.calling, get_ident()
    outer = calling.get(thread)  # The hook that caused this event, for example by starting a validation.
    calling[thread] = hook.place
    if grad is not None:
        caller_mode = torch.is_grad_enabled()
        if caller_mode and not grad:
            torch.set_grad_enabled(False)  # As a context manager it would take three times as long.
    began = perf_counter_ns()
    try:
        if read is not None:
            positional, keywords = read(args)
        if call is None:
            call = hook.call
        try:
            returned = call(*positional, **keywords) if keywords else call(*positional)
        except Exception as error:
            if failures.handle(event, hook, error, args) is None:
                return FAILED
            raise
        if hook.strikes:
            hook.strikes.pop(event.name, None)
        return returned
    finally:
        ns, cost = perf_counter_ns() - began, hook.cost
        cost.calls += 1  # Written out, because a call of `add` would take as long as the two clocks.
        cost.ns += ns
        if grad is not None:
            torch.set_grad_enabled(caller_mode)
        calling[thread] = outer


def check_optional(event: Event, hooks: Sequence[BoundHook], missing: str) -> None:
    """Let hooks keep their default for an argument of an event that was fired by hand without it.

    Raises:
        MissingArgument: If some of them have none; the message names them, and the remedy.
    """
    if insisting := [hook.hook for hook in hooks if missing in hook.listener.required]:
        listed, named = ", ".join(map(repr, insisting)), event.arguments_of([missing])[0]
        problem = f"{event.name}: {listed} names {named!r}, which the call did not pass"
        raise MissingArgument(f"{problem}; pass {named}=… when you fire it") from None


def first_raised(raised: Exception | None, error: Exception | None) -> Exception | None:
    """Return the exception to raise if several hooks raised: the first, but an error takes precedence over a stop."""
    if raised is None or (error is not None and isinstance(raised, StopTraining)):
        return error
    return raised


# ---- the callables of all events -------------------------------------------------------------------------------------


class DispatchTable:
    """Fills the slots of events for the hooks that are due; everything is rebuilt when the hooks change.

    An event in progress holds its callable, so that it finishes with the hooks it started with.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.slots = EventSlots()
        self.scheduler = Scheduler()
        self.listener_counts: Counter[str] = Counter()
        """Listeners of each event, whether due and enabled or not."""
        self.argument_costs: defaultdict[str, Cost] = defaultdict(Cost)
        self.makers: dict[str, Maker] = {}
        """By event, the parts that build its callable themselves."""
        self.change_audit: ChangeAudit | None = None
        """Notes what hooks write to; after another one is assigned, `reset` is called."""
        self._tables: dict[Decision, tuple[Callables, dict[str, frozenset[str]]]] = {}
        # For the current decision: the callables, and by event the arguments that hooks name.
        self._callables: Callables = {}
        self._named: dict[str, frozenset[str]] = {}

    def named_at(self, event: str) -> frozenset[str]:
        """Return the arguments that the hooks name which are due at an event, with several ranks on any of them.

        Some values cost something at every step, and are computed only if a hook is going to read them: the norm of
        gradients that are gone when the step ends, the model's output, what hooks add to metrics. Every
        hook that is called may change the answer, so it is looked up each time. A hook that is
        enabled later in the same step may find such a value gone.
        """
        named = self._named.get(event)
        if named is None:
            # Under the lock, so that no change comes between reading the listeners and storing the answer.
            with self._registry.lock:
                row = CATALOG[event]
                hooks = self._registry.listeners(row, self.scheduler.decision.due_for(row))
                named = self._named[event] = frozenset(name for hook in hooks for name in hook.listener.wanted)
        return named

    def reset(self) -> None:
        """Drop all callables, because the hooks have changed; each event builds its own when it next fires."""
        self._tables = {}
        self.scheduler.countdown, self.scheduler.groups = 0, None
        self.install()
        # The slots of events with listeners were just filled, and stay filled, because another thread may be firing
        # them.
        for name in CATALOG:
            if not self.listener_counts.get(name):
                setattr(self.slots, name, None)

    def install(self) -> None:
        """Put the callables for the scheduler's decision into the slots of the events that have listeners."""
        key = self.scheduler.decision
        if key not in self._tables:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()  # With many schedules nearly every step has another set of due hooks.
            made: Callables = {}
            for name in filter(self.listener_counts.get, CATALOG):
                made[name] = partial(self._first_dispatch, made, name)
            self._tables[key] = made, {}
        self._callables, self._named = self._tables[key]
        for name, dispatch in self._callables.items():
            setattr(self.slots, name, dispatch)

    def _first_dispatch(self, callables: Callables, name: str, *values: Any) -> Any:
        """Occupy a slot until the event first fires, then make the real callable and call it."""
        # Built this late, because registering a thousand hooks resets all slots a thousand times. Under the lock,
        # so that no change comes between reading the listeners and filling the slot.
        with self._registry.lock:
            event = CATALOG[name]
            hooks = self._wrap(event, self._registry.listeners(event, self.scheduler.decision.due_for(event)))
            maker = self.makers.get(name)
            dispatch = self.make_dispatch(event, hooks) if maker is None else maker(hooks)
            dispatch = self._registry.rng_guard.around(event, hooks, dispatch)
            # Callables of another decision, or from before a change, stay as they are: they are for other hooks.
            if callables is self._callables:
                setattr(self.slots, name, dispatch)
                callables[name] = dispatch
        return dispatch(*values) if dispatch else None

    def _wrap(self, event: Event, hooks: list[BoundHook]) -> list[BoundHook]:
        """Return an event's listeners as they are called; a wrapper may return some of them unchanged."""
        # From the inside to the outside:
        # 1. Random streams: the hook draws from its own; the wrappers around it do not.
        # 2. Time on the device: the audit's reads of tensors are not the hook's work.
        # 3. Collectives: the mode that refuses them sees every operation, and would slow down the audit's.
        # 4. Changes: the audit compares the run before and after everything else.
        # One check of the random streams around the whole event is usually enough; it is outside of all of these.
        hooks = self._registry.rng_guard.wrap(event, hooks)
        wrappers = (self._registry.device_timer, self._registry.collectives, self.change_audit)
        for wrapper in wrappers:
            if wrapper is not None:
                hooks = [wrapper.wrap(event, hook) for hook in hooks]
        return hooks

    def make_dispatch(self, event: Event, hooks: Sequence[BoundHook]) -> Dispatch | None:
        """Build the callable of one event for the given listeners, in order; None if there are none.

        It reads the arguments, then calls one hook after another.
        """
        if not hooks:
            return None
        failures = self._registry.failures
        # Every attribute that these listeners name, each once, in order of first use.
        needed = {name: self.argument_costs[name] for hook in hooks for name in hook.listener.wanted}
        # Hooks that name the same arguments in the same way share them, so they are assembled only once.
        distinct: dict[Any, Listener] = {}
        calls = []
        for hook in hooks:
            form = hook.listener.positional, hook.listener.names, *hook.listener.keywords.items()
            distinct.setdefault(form, hook.listener)
            metrics = tuple(name for name in METRICS if name in hook.listener.wanted)
            calls.append((hook, list(distinct).index(form), metrics))
        listeners, restored = list(distinct.values()), [name for name in needed if name in METRICS]

        def dispatch(args: Any) -> None:
            # All arguments are read before the first hook is called, so an error while reading is not a hook's failure.
            values, began = {}, perf_counter_ns()
            for name, cost in needed.items():
                try:
                    values[name] = getattr(args, name)
                except MissingArgument:
                    check_optional(event, hooks, name)
                now = perf_counter_ns()
                cost.add(now - began)
                began = now
            before = {name: dict(values[name]) for name in restored if name in values} if restored else {}
            arguments = [listener.arguments(values) for listener in listeners]
            # An error that must end the run is raised after the last hook, because the others must be called, too.
            raised: Exception | None = None
            interrupted: BaseException | None = None
            for hook, index, metrics in calls:
                positional, keywords = arguments[index]
                try:
                    invoke(event, hook, failures, args, positional, keywords)
                except Exception as error:
                    raised = first_raised(raised, error)
                except BaseException as error:
                    if not event.closing:
                        raise
                    interrupted = error  # Every hook is called at the end of the run, even after an interrupt.
                for name in metrics:
                    try:
                        changed = name in before and values[name] != before[name]
                    except Exception:  # Tensors and arrays of several elements have no single truth value.
                        changed = True
                    if changed:
                        failures.restore_metrics(event, hook, args, name, before[name])
                        before = {other: dict(values[other]) for other in before}  # The two mirror each other.
            if interrupted is not None:
                raise interrupted
            if raised is not None:
                raise raised

        return dispatch

    def set_maker(self, event: str, maker: Maker) -> None:
        """Let another part make the callable of one event, as the update chain and the forward hooks do."""
        self.makers[event] = maker
        self.reset()
