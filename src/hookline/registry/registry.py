"""`HookRegistry`: the one place hooks live."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

from hookline.core.failures import FailureHandler
from hookline.errors import HooklineError, RegistrationError, nearest
from hookline.events.catalog import SPELLINGS, Event, Events, find_event
from hookline.events.dispatch import Bound, event_source
from hookline.events.policy import Incident
from hookline.events.schedule import Clock, Schedule
from hookline.registry.accounts import cost_table, inner_seconds
from hookline.registry.admission import make_entry, names_of
from hookline.registry.by_hand import HandFiring, dispatcher
from hookline.registry.device_time import DeviceTime
from hookline.registry.entry import Entry, HookList, hook_state, load_hook_state, set_up
from hookline.registry.guard import Guard
from hookline.registry.handle import Handle
from hookline.registry.loading import HookSpec, hook_tree, make_hook, read_hooks
from hookline.registry.order import Place, in_order
from hookline.registry.tables import Tables
from hookline.registry.telling import calling_hook, explanation


class HookRegistry(Events):
    """Registers hooks, orders them, switches them, and fires events through immutable tables.

    It answers to the same events as a hook does: ``registry.on_epoch_end(epoch, state)`` reaches every hook that hears
    the event. The trainer fires through `registry.fire` instead, whose slots are None for events nobody hears.
    """

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # a subclass's own positional orders, by spelling

    def __init__(self, config: Any = None, *, allow: Iterable[str] = (), from_file: bool = False) -> None:
        self.hooks: tuple[Any, ...] = ()
        self._entries: dict[str, Entry] = {}
        self._order: dict[str, list[Place]] = {}  # by kind; made when first asked for, forgotten at every change
        # The schedules to ask, and whether a hook that is always due has an inner event to be timed at.
        self._plan: tuple[list[tuple[str, Schedule]], bool] | None = None
        self._counter = 0
        self._constrained = 0  # hooks with before/after
        self.has_schedules = 0  # hooks that are not always due
        self.has_undemanding = 0  # listeners that can do without some of the values they take
        self._admission: list[Callable[[Entry], Any]] = []
        self._change_listeners: list[Callable[[], Any]] = []
        self._lock = threading.RLock()
        self.desk = FailureHandler(self._entries, self._changed, self.disable)
        self.guard = Guard(self.desk.report, self._changed)
        self.tables = Tables(self.listeners, self.desk, self.guard, self._lock)
        self.desk.argument_cost = self.tables.argument_costs.__getitem__
        self.desk.arguments = self.tables.argument_costs
        self.device_time = DeviceTime()
        self.tables.dress_with(self.device_time.dress)
        self.fire = self.tables.fire
        self._hand = HandFiring(self)
        if config is not None:
            self.load(config, allow=allow, from_file=from_file)

    # ---- registering -------------------------------------------------------------------------------------------

    def register(
        self,
        hook: Any,
        name: str | None = None,
        *,
        event: str | None = None,
        enabled: bool = True,
        every: Any = None,
        at: Any = None,
        start: Any = None,
        stop: Any = None,
        before: str | Iterable[str] = (),
        after: str | Iterable[str] = (),
        on_error: str | None = None,
        ranks: int | Iterable[int] | None = None,
        origin: str = "code",
        last: bool = False,
        **parameters: Any,
    ) -> Handle:
        """Attach a hook: an object, a class, a function (with `event=`), a registered name or a dotted path.

        `parameters` go to the constructor when a class, a name or a path is given.
        """
        told = name or (str(getattr(hook, "__name__", "function")) if event else "")  # what a wrong schedule is told of
        entry = make_entry(
            hook,
            name,
            event,
            parameters,
            schedule=Schedule.parse(every, at, start, stop, told),
            on_error=on_error,
            before=before,
            after=after,
            ranks=ranks,
            origin=origin,
            enabled=enabled,
            last=last,
        )
        return self._add(entry)

    register_hook = add_hook = register

    def _add(self, entry: Entry) -> Handle:
        with self._lock:
            self._check_name(entry)
            self._counter += 1
            entry.number = self._counter
            self._check_order(entry)
            for check in self._admission:
                check(entry)
        set_up(entry, self)  # the user's code, so not under the lock
        with self._lock:
            if entry.name in self._entries:  # by setup() itself, or by another thread
                self._close(entry)
                self._check_name(entry)
            self._entries[entry.name] = entry
            self._count(entry, 1)
            self._changed()
        return Handle(entry.name, partial(self._remove_if_there, entry))

    def _check_name(self, entry: Entry) -> None:
        if entry.name in self._entries:
            raise RegistrationError(
                f"a hook named {entry.name!r} is registered already; "
                "give this one another name (name=…, or `as:` in a config)"
            )

    def _check_order(self, entry: Entry) -> None:
        """Refuse before/after that cannot be had, before anything has changed."""
        if not (self._constrained or entry.before or entry.after):
            return
        for kind in entry.kinds:
            in_order([*self.entries(kind), entry], tiers=kind == "lifecycle", strict=True)
        in_order([*self.entries(), entry], tiers=True)  # circles through hooks of several kinds

    def _count(self, entry: Entry, by: int) -> None:
        """Keep count of who listens to what, so that a change costs the same for ten hooks as for a thousand."""
        self._constrained += by * bool(entry.before or entry.after)
        self.has_schedules += by * (not entry.schedule.always)
        for name, listener in entry.listeners.items():
            self.tables.count(name, listener.wanted, by)
            self.has_undemanding += by * bool(listener.optional)

    def on(self, event: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: make a plain function a hook of one event.

        >>> @registry.on("train_batch_end", every=10)
        ... def report(loss): print(loss)
        """

        def attach(function: Callable[..., Any]) -> Callable[..., Any]:
            self.register(function, event=event, **options)
            return function

        return attach

    def load(self, config: Any, *, allow: Iterable[str] = (), from_file: bool = False) -> list[Handle]:
        """Register what a configuration lists: seed-style `forward`/`update`/`lifecycle` lists or `HooksConfig` keys.

        From a file, dotted paths are refused unless they lie under a prefix in `allow`; nothing is imported before.
        """
        specs = read_hooks(config, allow=names_of(allow), from_file=from_file)
        handles: list[Handle] = []
        try:
            handles += map(self._load_one, specs)
        except Exception:
            for handle in handles:  # a config is loaded as a whole or not at all
                handle.remove()
            raise
        if "update" not in hook_tree(config) and not self.entries("update"):
            handles.append(self.register("identity", origin="default"))
        return handles

    def _load_one(self, spec: HookSpec) -> Handle:
        try:
            made = make_hook(spec.target, spec.parameters)
            handle = self.register(made, spec.name, origin=spec.origin, **spec.options)
        except RegistrationError as error:
            raise RegistrationError(f"{spec.path}: {error}") from error
        entry = self._entries[handle]
        entry.parameters.update(spec.parameters)
        if spec.kind and spec.kind not in entry.kinds:
            kinds = " and ".join(entry.kinds)
            handle.remove()
            raise RegistrationError(
                f"{spec.path}: {spec.type_name!r} is a {kinds} hook; list it under `{kinds.split()[0]}:`"
            )
        return handle

    # ---- looking and switching -----------------------------------------------------------------------------------

    def get(self, name: str) -> Any:
        """The hook object of that name."""
        return self.entry(name).hook

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def enable(self, name: str) -> None:
        """Switch a hook on again; it keeps its place."""
        self._switch(name, True)

    def disable(self, name: str) -> None:
        """Switch a hook off without removing it."""
        self._switch(name, False)

    def is_enabled(self, name: str) -> bool:
        return self.entry(name).enabled

    def remove(self, name: str) -> Any:
        """Detach a hook, close it, and return it."""
        entry = self.entry(name)
        self._remove_if_there(entry)
        return entry.hook

    enable_hook, disable_hook, remove_hook = enable, disable, remove

    def list_hooks(self) -> HookList:
        """Every hook with its status, in the order in which lifecycle hooks run."""
        entries = dict(self._entries)
        return HookList(entries[place.name].record() for place in in_order(entries.values(), tiers=True))

    def explain(self, event: str, source: bool = False) -> str:
        """Which hooks hear an event, in which order and why; with `source`, the function that calls them."""
        row = find_event(event)
        lines = [*explanation(row, self._places(row.kind), dict(self._entries))]
        if source and (bound := self.listeners(row, due=None)):
            lines.append(event_source(row, bound))
        return "\n".join(lines)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """What the registry keeps about each hook, in registration order; of one kind if asked."""
        return [entry for entry in list(self._entries.values()) if kind is None or kind in entry.kinds]

    def entry(self, name: str) -> Entry:
        """What the registry keeps about one hook; a miss names the nearest."""
        entry = self._entries.get(name)
        if entry is None:
            raise HooklineError(f"no hook is named {name!r}; {nearest(name, self._entries)}")
        return entry

    def _switch(self, name: str, enabled: bool) -> None:
        with self._lock:
            entry = self.entry(name)
            if entry.enabled != enabled:
                entry.enabled = enabled
                entry.failures.in_a_row.clear()
                self._changed()

    def _remove_if_there(self, entry: Entry) -> None:
        with self._lock:
            if self._entries.get(entry.name) is not entry:
                return
            del self._entries[entry.name]
            self.tables.agenda.forget(entry.name)
            self._count(entry, -1)
            self._changed()
        self._close(entry)

    def reopen(self) -> None:
        """Another run begins: hooks that the last one closed are set up again."""
        closed = [entry for entry in self.entries() if entry.closed]
        for entry in closed:
            entry.closed = False
            set_up(entry, self)
        if any("forward" in entry.kinds for entry in closed):
            self._changed()

    def close(self) -> None:
        """Close every hook, once for each time it was set up."""
        for entry in list(self._entries.values()):
            self._close(entry)
        if self.entries("forward"):
            self._changed()  # who is closed hears no module

    def _close(self, entry: Entry) -> None:
        close = getattr(entry.hook, "close", None)
        if callable(close) and not entry.closed:
            entry.closed = True
            try:
                close()
            except Exception as error:
                self.desk.report(
                    Incident("failed", entry.name, "close", 0, f"failed in close(): {error!r}", error), True
                )

    def silenced(self) -> AbstractContextManager[None]:
        """Forward hooks are set aside inside the block; a registry without a model has none to set aside."""
        return nullcontext()

    # ---- hooks' own state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the hooks want saved with the run, by name."""
        return {entry.name: state for entry in self.entries() if (state := hook_state(entry.hook)) is not None}

    def load_state_dict(self, states: Mapping[str, Any]) -> dict[str, list[str]]:
        """Give every hook its state back, in place; returns which names had no hook and which hooks no state."""
        for name in [name for name in states if name in self._entries]:
            hook = self._entries[name].hook
            try:
                load_hook_state(hook, states[name])
            except Exception as error:
                raise HooklineError(
                    f"hook {name!r} ({type(hook).__name__}) cannot take the state that was saved under its name: "
                    f"{type(error).__name__}: {error}. If another hook saved it, register this one under another name"
                ) from error
        stateful = [entry.name for entry in self.entries() if hook_state(entry.hook) is not None]
        return {
            "without_hook": [name for name in states if name not in self._entries],
            "without_state": [name for name in stateful if name not in states],
        }

    # ---- firing ----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The set of hooks is another: every event makes its callable anew when it next fires."""
        with self._lock:
            self.hooks = tuple(entry.hook for entry in self._entries.values())
            self._order, self._plan = {}, None
            self._hand.forget()
            self.tables.reset()
            for tell in list(self._change_listeners):
                tell()

    def watch_changes(self, listener: Callable[[], Any]) -> Callable[[], None]:
        """Hear that the set of hooks has changed; returns a function that ends it."""
        self._change_listeners.append(listener)
        return lambda: self._change_listeners.remove(listener)

    def admit_with(self, check: Callable[[Entry], Any]) -> Callable[[], None]:
        """Have every hook checked before it is in, those that are there now too; returns a function that ends it."""
        for entry in self.entries():
            check(entry)
        self._admission.append(check)
        return lambda: self._admission.remove(check)

    def who_is_calling(self) -> str | None:
        """The hook that the current call came from, found on the stack: the record says who steered the run."""
        return calling_hook(sys._getframe(1), self.entries())

    def listeners(self, event: Event, due: frozenset[str] | None) -> list[Bound]:
        """The listeners of an event in order; `due=None` counts every scheduled hook as due."""
        with self._lock:
            ordered = (self._entries[place.name] for place in self._places(event.kind))
            return [entry.bind(event) for entry in ordered if self._hears(entry, event, due)]

    def _places(self, kind: str) -> list[Place]:
        """The order of all hooks of a kind, off and not due ones included: switching one never moves another."""
        with self._lock:
            if kind not in self._order:
                self._order[kind] = in_order(self.entries(kind), tiers=kind == "lifecycle")
            return self._order[kind]

    def _hears(self, entry: Entry, event: Event, due: frozenset[str] | None) -> bool:
        if not entry.enabled or event.name not in entry.listeners:
            return False
        if entry.ranks is not None and self.desk.rank not in entry.ranks:
            return False
        return due is None or entry.hears_now(event, due)

    def begin_batch(self, clock: Clock) -> None:
        """Another micro-batch begins; costs a decrement unless a schedule or a sample comes up."""
        if self.tables.countdown > 0:
            self.tables.countdown -= 1
        else:
            self.decide_who_is_due(clock)

    def decide_who_is_due(self, clock: Clock) -> None:
        """Decide for this micro-batch which scheduled hooks hear its events."""
        with self._lock:  # or a change in another thread would lose its own question
            if self._plan is None:
                enabled = [entry for entry in self._entries.values() if entry.enabled]
                scheduled = [(entry.name, entry.schedule) for entry in enabled if not entry.schedule.always]
                self._plan = scheduled, any(entry.schedule.always and entry.hears_inner for entry in enabled)
            self.tables.decide_who_is_due(clock, *self._plan)

    def replan(self, restored: Clock | None = None) -> None:
        """Ask every schedule again at the next micro-batch: an epoch began, or counters were `restored` to a clock."""
        if restored is not None:
            self.tables.agenda.resume(restored)
        self.tables.agenda.forget_step()
        self.tables.countdown = 0

    def due_now(self, name: str) -> bool:
        """Whether a hook is due at this micro-batch."""
        return self.entry(name).schedule.always or name in self.tables.agenda.due

    def fire_by_hand(self, spelling: str, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        """Fire an event from a loop of one's own; `registry.on_…(…)` comes here."""
        event = SPELLINGS[spelling]
        self._hand.fire(event, self._orders.get(spelling, event.order), args, values)

    # ---- accounts --------------------------------------------------------------------------------------------------

    def inner_seconds(self) -> dict[str, float]:
        """Host time of every hook inside steps, scaled up from its samples."""
        return inner_seconds(self.entries(), self.tables.scale)

    def costs(self) -> list[dict[str, Any]]:
        """Time by hook and by lazy argument, most expensive first; inner events scaled up from their samples.

        Host time, and on a CUDA device its time, too, for which this waits.
        """
        self.device_time.collect(wait=True)
        return cost_table(self.entries(), self.tables.argument_costs, self.tables.scale)


for _spelling in SPELLINGS:
    setattr(HookRegistry, _spelling, dispatcher(_spelling))
