"""`Registry`: register, order, enable and disable hooks. Users create a `HookManager` (run/manager.py)."""

from __future__ import annotations

import threading
from collections import ChainMap, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

from hookline._console import logger
from hookline._parameters import names
from hookline._words import nearest
from hookline.core.base import hook_attribute, is_built_in
from hookline.core.catalog import Event, find_event
from hookline.core.collectives import CollectiveGuard
from hookline.core.costs import DeviceTimer, cost_table
from hookline.core.dispatch import BoundHook, DispatchTable
from hookline.core.entry import DEFAULT_HOOKS, DerivedName, Entry, HookList, numbered, parse_ranks
from hookline.core.failures import FailureHandler, Policy, check_policy, first_failure
from hookline.core.handle import Handle, HookObjects
from hookline.core.order import check_order, explanation, in_order
from hookline.core.plugins import load_reference
from hookline.core.provided import PROVIDED
from hookline.core.registration import (
    check_attributes,
    check_needs,
    check_schedule,
    hook_name,
    hook_parameters,
    read_hook,
)
from hookline.core.rng_guard import RngGuard
from hookline.core.schedule import Clock, Schedule
from hookline.errors import HooklineError, RegistrationError
from hookline.ranks import Ranks, own_rank

if TYPE_CHECKING:
    from hookline._keywords import HookKeywords


class Registry:
    """Registers hooks, orders them, enables and disables them.

    Events are fired through `slots`, which are None for events without listeners.
    """

    def __init__(self) -> None:
        self.audits_every_call = False
        """Whether everything that a hook may write to is compared at each of its calls, not only at some."""
        self._entries: dict[str, Entry] = {}
        self._by_place: defaultdict[Hashable, list[Entry]] = defaultdict(list)  # those without a name of their own
        self._constrained: set[str] = set()  # the hooks with `before` or `after`
        self._free_numbers: dict[str, int] = {}  # by derived name: all numbers below this one are taken
        self._registered = 0
        self._reserved: set[str] = set()  # Names of hooks whose `setup` has not returned.
        self._disabled_defaults: set[str] = set()
        self._checks: list[Callable[[Entry], Any]] = []
        self._change_subscribers: list[Callable[[], Any]] = []
        # Held while the set of hooks or the decision about due hooks changes, and while a callable is built; never
        # while an event calls its hooks. It is reentrant, because every change takes it again in `_changed`.
        self.lock = threading.RLock()
        self.failures = FailureHandler(self._entries, partial(self._switch, enabled=False, failed=True))
        self.rng_guard = RngGuard(self.failures, self._changed)
        self.device_timer = DeviceTimer()
        self.collectives = CollectiveGuard(self)
        self.failures.around_method = self.collectives.around
        self.dispatch_table = DispatchTable(self)
        self.slots, self.scheduler = self.dispatch_table.slots, self.dispatch_table.scheduler
        self.ranks = self.failures.ranks = own_rank()
        """The processes of the run that fires the events: a trainer's, or those of a user's own loop."""
        self.update_chain: Any = None
        """Runs the update hooks: a run's chain, created with it or when a user's own loop first passes gradients."""

    def set_ranks(self, ranks: Ranks) -> None:
        """Call hooks as one of several processes: each hook has the ranks on which it is called.

        Raises:
            RegistrationError: If a hook that all ranks must call is called on only some of them.
        """
        with self.lock:
            for entry in self._entries.values():
                entry.check_ranks(ranks)
            self.ranks = self.failures.ranks = ranks
            self._changed()

    @property
    def hooks(self) -> HookObjects:
        """The hook objects, in registration order; appending registers a hook, assigning a list replaces all."""
        objects = HookObjects(entry.hook for entry in self.entries())
        objects.registry = self
        return objects

    @hooks.setter
    def hooks(self, hooks: Iterable[Any]) -> None:
        wanted = list(hooks)
        for entry in self.entries():
            if not any(entry.hook is hook for hook in wanted):
                self._remove_entry(entry)
        kept: list[str] = []
        for hook in wanted:
            kept += [entry.name for entry in self.entries() if entry.hook is hook] or [self.register(hook)]
        with self.lock:
            ordered = [self._entries.pop(name) for name in dict.fromkeys(kept)]
            for number, entry in zip(sorted(entry.number for entry in ordered), ordered, strict=True):
                entry.number = number
                self._entries[entry.name] = entry
            self._changed()

    # ---- registering -------------------------------------------------------------------------------------------

    def register(
        self,
        hook: Any,
        name: str | None = None,
        *,
        event: str | None = None,
        enabled: bool = True,
        every: int | str | None = None,
        at: int | str | Sequence[int | str] | None = None,
        start: int | str | None = None,
        stop: int | str | None = None,
        before: str | Iterable[str] = (),
        after: str | Iterable[str] = (),
        on_error: Policy | None = None,
        ranks: str | int | Iterable[int] | None = None,
        origin: str = "code",
        last: bool = False,
        **parameters: Any,
    ) -> Handle:
        """Register a hook.

        Args:
            hook: An object, a class, a function (with `event`), a registered name or a dotted path.
            name: Its name, which must be unique; by default its own `name`. A name derived from its class or its type
                gets a number if it is taken.
            event: The event of a function.
            enabled: Whether it is called from the start.
            every: Its period, such as 10 or ``"1M tokens"``.
            at: The points at which it is due.
            start: When it is first due.
            stop: When it is last due.
            before: Hooks that it must run before.
            after: Hooks that it must run after.
            on_error: Its failure policy: 'warn', 'disable' or 'raise'; by default the hook's own, as `Hook.on_error`.
            ranks: The ranks on which it is called: 'all', 'zero', 'local-zero' (the first of each machine), a rank or a
                list of them; by default the hook's own `ranks`.
            origin: Where it comes from, for listings.
            last: Whether it stays after every hook that is registered later.
            **parameters: Passed to the constructor if a class, a name or a path is given.

        Returns:
            A handle: the hook's name, which can also remove it.

        Raises:
            RegistrationError: If the hook, its name or its order is not valid.
        """
        type_name = hook if isinstance(hook, str) and "." not in hook else ""
        if event:
            name = name or DerivedName(getattr(hook, "__name__", "function"))
        elif isinstance(name, DerivedName):  # A config has created the hook from this type.
            name, type_name = None, str(name)
        given: dict[str, Any] = {"every": every, "at": at, "start": start, "stop": stop, "before": before}
        given |= {"after": after, "on_error": on_error, "ranks": ranks}
        options = {key: value for key, value in given.items() if value is not None and value != ()}
        instance, listeners = read_hook(hook, event, parameters, options)  # Its constructor may take `every`.
        schedule = Schedule.parse(options.get("every"), at, start, stop, name or type_name)
        built_in = is_built_in(type(instance))
        if not built_in and not event:
            check_attributes(instance, name or type(instance).__name__, listeners, self.ranks)
        own_schedule: Schedule = hook_attribute(instance, "schedule") or Schedule()
        if every is None and not schedule.at and (schedule.start or schedule.stop):  # These limit its own period.
            schedule = replace(schedule, every=own_schedule.every)
        name = name or hook_name(instance, type_name)
        if origin != "default":
            self._disabled_defaults.discard(str(name))
        if built_in:
            check_schedule(instance, listeners, schedule)
        changes_training = "on_update" in listeners or hook_attribute(instance, "intervene")
        if hook_attribute(instance, "intervenes") is False:
            changes_training = False
        policy = on_error or hook_attribute(instance, "on_error") or ("raise" if changes_training else "warn")
        is_collective = bool(hook_attribute(instance, "collective"))
        if is_collective and on_error not in (None, "raise"):
            raise RegistrationError(f"{str(name)!r} is collective: its failure ends the run; leave out its `on_error`")
        entry = Entry(
            name=str(name),
            named=not isinstance(name, DerivedName),
            hook=instance,
            number=0,
            listeners=listeners,
            built_in=built_in,
            # The other ranks wait in its collectives, whatever happened to it on this rank.
            policy="raise" if is_collective else check_policy(str(policy)),
            schedule=schedule if schedule != Schedule() else own_schedule,
            enabled=enabled and str(name) not in self._disabled_defaults,
            last=last or bool(hook_attribute(instance, "runs_last")),
            before=names(before, "before"),
            after=names(after, "after"),
            ranks=parse_ranks(hook_attribute(instance, "ranks") if ranks is None else ranks),
            needs=check_needs(instance, str(name)),
            origin="built-in" if built_in and origin == "code" else origin,
            parameters={} if event else hook_parameters(instance, parameters),
        )
        entry.check_ranks(self.ranks)
        return self._add(entry)

    register_hook = add_hook = register

    def _add(self, entry: Entry) -> Handle:
        with self.lock:
            before = self._claim_name(entry)
            if before is None:
                self._registered += 1
            entry.number = self._registered if before is None else before.number  # A replacement keeps the position.
            if entry.before or entry.after or self._constrained:
                check_order(entry, [other for other in self._entries.values() if other is not before])
            for check in self._checks:
                check(entry)
            self._reserved.add(entry.name)
        try:
            if before is None or before.hook is not entry.hook:
                entry.set_up(self)  # This is user code, so it must not run under the lock.
            with self.lock:
                if self._entries.get(entry.name) is not before:  # Changed by setup() itself, or by another thread.
                    entry.close(self.failures)
                    raise _name_taken(entry.name)
                if before is not None:
                    self.scheduler.forget(entry.name)
                    self.dispatch_table.listener_counts.subtract(before.listeners.keys())
                    self._forget(before)
                self._entries[entry.name] = entry
                if not entry.named:
                    self._by_place[entry.identity[0]].append(entry)
                if entry.before or entry.after:
                    self._constrained.add(entry.name)
                self.dispatch_table.listener_counts.update(entry.listeners.keys())
                self._changed()
        finally:
            self._reserved.discard(entry.name)
        if before is not None:
            if before.hook is not entry.hook:
                before.close(self.failures)
            logger.warning("hook %r: replaced, because it was defined again or registered again", entry.name)
        return Handle(entry.name, partial(self._remove_entry, entry))

    def _claim_name(self, entry: Entry) -> Entry | None:
        """Give a hook the name it gets, and return the entry that it replaces; None if it is another hook.

        Raises:
            RegistrationError: If its name was chosen for it, and another hook has it or is being registered with it.
        """
        if entry.named:
            earlier = [
                other for other in [self._entries.get(entry.name)] if other is not None and entry.replaces(other)
            ]
        else:
            place, code = entry.identity
            # Several objects of one code are several definitions; one object may listen to several events.
            others = [other for other in self._by_place[place] if other.hook is entry.hook or other.identity[1] != code]
            earlier = sorted(filter(entry.replaces, others), key=lambda other: other.number)
        if earlier:
            same_events = [other for other in earlier if other.listeners.keys() == entry.listeners.keys()]
            entry.name = (same_events or earlier)[0].name
            return self._entries[entry.name]
        if not entry.named:
            stem, taken = entry.name, ChainMap[str, Any](self._entries, dict.fromkeys(self._reserved))
            entry.name = numbered(stem, taken, self._free_numbers.get(stem, 2))
            self._free_numbers[stem] = int(entry.name.removeprefix(f"{stem}_")) if entry.name != stem else 2
        elif entry.name in self._entries:
            raise _name_taken(entry.name)
        elif entry.name in self._reserved:
            problem = f"a hook named {entry.name!r} is being registered: its setup() has not returned"
            raise RegistrationError(f"{problem}; give this one another name (name=…)")
        return None

    def on(
        self, event: str, *, name: str | None = None, **options: Unpack[HookKeywords]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that registers a function as a hook of one event.

        >>> @registry.on("train_batch_end", every=10)
        ... def report(loss): print(loss)
        """

        def attach(function: Callable[..., Any]) -> Callable[..., Any]:
            self.register(function, name, event=event, **options)
            return function

        return attach

    def load(self, config: Any, *, allow: Iterable[str] = (), from_file: bool = False) -> list[Handle]:
        """Register all hooks that a configuration lists, or none if one fails.

        Args:
            config: Lists by kind (`forward`, `update`, `lifecycle`) or the keys of `HooksConfig`; or the path of a file
                with these, or with them under `hooks`.
            allow: Prefixes of dotted paths that a config from a file may import; nothing is imported before the check.
            from_file: Whether the config comes from a file.

        Returns:
            The handles of the hooks.
        """
        handles: list[Handle] = load_reference(PROVIDED["load_hooks"])(self, config, allow=allow, from_file=from_file)
        return handles

    # ---- looking up, enabling and removing ---------------------------------------------------------------------

    def get(self, name: str) -> Any:
        """Return the hook object of a name."""
        return self.entry(name).hook

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def enable(self, name: str) -> None:
        """Enable a hook again; it keeps its position."""
        if not self._is_added_later(name, enabled=True):
            self._switch(name, True)

    def disable(self, name: str) -> None:
        """Disable a hook without removing it."""
        if not self._is_added_later(name, enabled=False):
            self._switch(name, False)

    def is_enabled(self, name: str) -> bool:
        """Return whether a hook is enabled."""
        return self.entry(name).enabled

    def remove(self, name: str) -> Any:
        """Detach a hook, close it, and return it.

        You may remove a hook that a trainer adds to its runs by default (`console_log`) before the trainer has added
        it. This method then returns None, and the trainer's runs have it disabled.
        """
        if self._is_added_later(name, enabled=False):
            return None
        entry = self.entry(name)
        self._remove_entry(entry)
        return entry.hook

    def _is_added_later(self, name: str, enabled: bool) -> bool:
        """Remember whether a default hook is enabled when a run adds it; return whether none has done so yet."""
        if name not in DEFAULT_HOOKS:
            return False
        (self._disabled_defaults.discard if enabled else self._disabled_defaults.add)(name)
        return name not in self._entries

    def remove_hook(self, name: str = "", *, hook_id: str = "") -> Any:
        """Detach a hook, close it, and return it; `hook_id` is its name in the methods for captures."""
        return self.remove(hook_id or name)

    def remove_all(self) -> None:
        """Detach and close every hook."""
        for entry in self.entries():
            self._remove_entry(entry)

    get_hook, enable_hook, disable_hook = get, enable, disable

    def list_hooks(self) -> HookList:
        """Return every hook with its status, in the order in which lifecycle hooks run."""
        entries = dict(self._entries)
        return HookList(entries[position.name].record() for position in in_order(entries.values()))

    def explain(self, event: str) -> str:
        """Explain which hooks listen to an event, in which order and why."""
        row = find_event(event)
        entries = dict(self._entries)
        return "\n".join(explanation(row, in_order(entries.values(), row.kind), entries))

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Return the entry of each hook in registration order; if given, only of one kind."""
        return [entry for entry in list(self._entries.values()) if kind is None or kind in entry.kinds]

    def entry(self, name: str) -> Entry:
        """Return the entry of one hook.

        Raises:
            HooklineError: If no hook has this name; the message suggests the nearest one.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise HooklineError(f"no hook is named {name!r}; {nearest(name, self._entries)}")
        return entry

    def _switch(self, name: str, enabled: bool, failed: bool = False) -> None:
        """Enable or disable a hook. `failed` says that it failed on this rank; others may still have it enabled."""
        with self.lock:
            entry = self.entry(name)
            if entry.enabled != enabled or (entry.off_here and not failed):
                entry.enabled, entry.off_here = enabled, failed and self.ranks.world_size > 1
                entry.failures.in_a_row.clear()
                self._changed()

    def _remove_entry(self, entry: Entry) -> None:
        with self.lock:
            if self._entries.get(entry.name) is not entry:
                return
            del self._entries[entry.name]
            self._forget(entry)
            self.scheduler.forget(entry.name)
            self.dispatch_table.listener_counts.subtract(entry.listeners.keys())
            self._changed()
        entry.close(self.failures)

    def _forget(self, entry: Entry) -> None:
        """Free the data about a hook's name and its definition."""
        self._free_numbers.clear()
        self._constrained.discard(entry.name)
        if not entry.named:
            self._by_place[entry.identity[0]].remove(entry)

    def reopen(self) -> None:
        """Set up the hooks again that the last run closed, because another run begins."""
        closed = [entry for entry in self.entries() if entry.closed]
        for entry in closed:
            entry.closed = False
            self.failures.call_method(entry, "setup", partial(entry.set_up, self))
        if any("forward" in entry.kinds for entry in closed):
            self._changed()  # Forward hooks that were closed are called again.

    def close(self) -> None:
        """Close every hook, once for each time it was set up.

        Raises:
            Exception: The first exception of a `close()` whose policy ends the run, after all hooks were closed.
        """
        raised = first_failure(*(partial(entry.close, self.failures, at_run_end=True) for entry in self.entries()))
        if self.entries("forward"):
            self._changed()  # Closed forward hooks are not called.
        if raised is not None:
            raise raised

    # ---- the hooks' state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the hooks save with the run, by name; failing hooks follow their failure policies."""
        states = {entry.name: self.failures.state_of(entry, entry.state) for entry in self.entries()}
        return {name: state for name, state in states.items() if state is not None}

    def load_state_dict(self, states: Mapping[str, Any]) -> dict[str, list[str]]:
        """Restore the state of every hook, in place.

        Returns:
            The names of states `without_hook`, and of hooks `without_state`.

        Raises:
            HooklineError: If a hook cannot load its state.
        """
        for name in [name for name in states if name in self._entries]:
            self._entries[name].load_state(states[name], self.failures)
        return {
            "without_hook": [name for name in states if name not in self._entries],
            "without_state": [name for name in self.state_dict() if name not in states],
        }

    # ---- changes -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Make everything again that depends on the set of hooks."""
        with self.lock:
            self.dispatch_table.reset()
            # This comes last, because subscribers read the new order; it iterates over a copy, because one may end its
            # subscription.
            for subscriber in list(self._change_subscribers):
                subscriber()

    def on_change(self, subscriber: Callable[[], Any]) -> Callable[[], None]:
        """Call a function whenever the set of hooks changes; returns a function that ends the subscription."""
        self._change_subscribers.append(subscriber)
        return lambda: self._change_subscribers.remove(subscriber)

    def add_registration_check(self, check: Callable[[Entry], Any]) -> Callable[[], None]:
        """Check every hook before it is registered, and those that already are; returns a function that ends this."""
        for entry in self.entries():
            check(entry)
        self._checks.append(check)
        return lambda: self._checks.remove(check)

    # ---- events and costs --------------------------------------------------------------------------------------

    def listeners(self, event: Event, due: frozenset[str] | None) -> list[BoundHook]:
        """Return the listeners of an event in order, given the scheduled hooks that are due; None means all are."""
        with self.lock:
            ordered = (self._entries[position.name] for position in in_order(self.entries(), event.kind))
            # An argument may be a collective, which needs all ranks, including those on which the hook is not called.
            shares_arguments = self.ranks.world_size > 1 and event.kind == "lifecycle"
            return [
                entry.bind(event, self.ranks)
                for entry in ordered
                if entry.is_called(event, due) and (shares_arguments or entry.is_called_here(self.ranks))
            ]

    def calling_hook(self) -> str | None:
        """Return the hook that this thread is currently calling; None if it calls none.

        Hookline does not attribute a thread to the hook that started it, so its requests must name the hook with `by`.
        """
        hook = self.hook_in(threading.get_ident())
        return None if hook is None else hook[0]

    def hook_in(self, thread: int) -> tuple[str, str] | None:
        """Return the hook that a thread is calling, and its event or method; None if it calls none."""
        hook = self.failures.calling.get(thread)
        return hook if hook is not None and hook[0] in self._entries else None

    def begin_batch(self, clock: Clock) -> None:
        """Begin another micro-batch; costs a decrement unless a schedule must be evaluated."""
        if self.scheduler.countdown > 0:
            self.scheduler.countdown -= 1
        else:
            self.decide_due_hooks(clock)

    def decide_due_hooks(self, clock: Clock, counts_down: bool = True) -> None:
        """Decide which scheduled hooks are called at the events of this micro-batch; `counts_down` as in `decide`."""
        with self.lock:  # A change in another thread would otherwise be lost.
            before = self.scheduler.decision
            self.scheduler.decide(clock, self._entries.values(), counts_down)
            if self.scheduler.decision != before:
                self.dispatch_table.install()

    def replan(self, restored: Clock | None = None) -> None:
        """Evaluate every schedule at the next micro-batch: an epoch began, or counters were `restored`."""
        self.scheduler.replan(restored)

    def due_now(self, name: str) -> bool:
        """Return whether a hook is due at this micro-batch."""
        return self.entry(name).schedule.always or name in self.scheduler.decision.due

    def inner_seconds(self) -> dict[str, float]:
        """Return the host time of every hook inside steps."""
        return {entry.name: entry.inner_seconds for entry in self.entries()}

    def reset_costs(self) -> None:
        """Reset the costs of hooks and arguments, because a run begins."""
        self.device_timer.collect(wait=True)
        costs = [entry.costs for entry in self.entries()]
        for cost in chain.from_iterable(each.values() for each in [*costs, self.dispatch_table.argument_costs]):
            cost.reset()  # in place: the callables of events hold it

    def costs(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """Return calls and host time by hook and by argument, most expensive first; every call of a run is timed.

        The time on an accelerator is estimated from some of the calls; this waits for it unless `wait` is False.
        """
        self.device_timer.collect(wait=wait)
        return cost_table(self.entries(), self.dispatch_table.argument_costs)


def _name_taken(name: str) -> RegistrationError:
    remedy = "give this one another name (name=…, or `as:` in a config), or remove the other first"
    return RegistrationError(f"a hook named {name!r} is registered already; {remedy}")
