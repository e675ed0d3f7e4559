"""`HookRegistry`: the one place hooks live."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from hookline.errors import HooklineError, RegistrationError, StopTraining, nearest
from hookline.events.arguments import by_hand
from hookline.events.catalog import CATALOG, SPELLINGS, Event, Events, find_event
from hookline.events.dispatch import Bound, Desk, Fire, Fired, compile_event, event_source, wanted_attributes
from hookline.events.moment import HandMoment, known, known_step
from hookline.events.policy import STRIKES, Incident, annotate, check_policy, must_raise, report
from hookline.events.schedule import Clock, Schedule
from hookline.registry.due import Agenda, HandClock
from hookline.registry.entry import (
    Entry,
    HookList,
    default_name,
    find_listeners,
    function_hook,
    hook_state,
    load_hook_state,
)
from hookline.registry.handle import Handle
from hookline.registry.loading import OPTIONS, HookSpec, hook_parameters, hook_tree, make_hook, read_hooks
from hookline.registry.order import Place, in_order

INNER = [event.name for event in CATALOG.values() if event.inner]
OUTER = [event.name for event in CATALOG.values() if not event.inner]
TABLES_KEPT = 64  # sets of due hooks whose callables are kept


class HookRegistry(Events):
    """Registers hooks, orders them, switches them, and fires events through immutable tables.

    It answers to the same events as a hook does: ``registry.on_epoch_end(epoch, state)`` reaches every hook that hears
    the event. The trainer fires through `registry.fire` instead, whose slots are None for events nobody hears.
    """

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # a subclass's own positional orders, by spelling

    def __init__(self, config: Any = None, *, allow: Iterable[str] = (), from_file: bool = False) -> None:
        self.fire = Fire()
        self.hooks: tuple[Any, ...] = ()
        self.debug = False  # every hook's policy is 'raise'
        self.rank = 0
        self._entries: dict[str, Entry] = {}
        self._counter = 0
        self._constrained = 0  # hooks with before/after
        self._scheduled = 0  # hooks that are not always due
        self._undemanding = 0  # listeners that can do without some of the values they take
        self._by_hand: dict[tuple[str, frozenset[str], frozenset[str], bool], Fired] = {}
        self._order: dict[str, list[Place]] = {}  # by kind; made when first asked for, forgotten at every change
        self._hearers = dict.fromkeys(CATALOG, 0)
        self._lock = threading.RLock()
        self._agenda = Agenda()
        self._hand_clock = HandClock()
        self.countdown = 0  # micro-batches until somebody may become due; see begin_batch
        self._tables: dict[tuple[frozenset[str], bool], dict[str, Fired | None]] = {}
        self._compilers: dict[str, Callable[[list[Bound], bool], Fired | None]] = {}
        self._incident_listeners: list[Callable[[Incident], Any]] = []
        self._change_listeners: list[Callable[[], Any]] = []
        self._desk = Desk(self.failed, self.recovered, self._settle)
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
        made = _function(hook, parameters) if event else make_hook(hook, parameters)
        if event:
            listeners = function_hook(made, find_event(event), event if event.startswith("on_") else f"on_{event}")
            name = name or getattr(made, "__name__", "function")
        else:
            listeners = find_listeners(made)
            _refuse_deaf(made, listeners)
        schedule = Schedule.parse(every, at, start, stop, name or "")
        if schedule == Schedule():
            schedule = getattr(made, "schedule", None) or schedule
        entry = Entry(
            name=name or default_name(made),
            hook=made,
            number=0,
            listeners=listeners,
            built_in=bool(vars(type(made)).get("built_in", False)),
            policy=check_policy(on_error or str(getattr(made, "on_error", "warn"))),
            schedule=schedule,
            enabled=enabled,
            last=last,
            before=_names(before),
            after=_names(after),
            ranks=_ranks(ranks),
            origin="built-in" if vars(type(made)).get("built_in", False) and origin == "code" else origin,
            parameters={} if event else hook_parameters(made, parameters),
        )
        return self._add(entry)

    register_hook = add_hook = register

    def _add(self, entry: Entry) -> Handle:
        with self._lock:
            self._check_name(entry)
            self._counter += 1
            entry.number = self._counter
            self._check_order(entry)
            self._check_admissible(entry)
            setup = getattr(entry.hook, "setup", None)
            if callable(setup):
                setup()
            if entry.name in self._entries:  # by setup() itself
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
        self._scheduled += by * (not entry.schedule.always)
        for name, listener in entry.listeners.items():
            self._hearers[name] += by
            self._undemanding += by * bool(listener.optional)

    def _check_admissible(self, entry: Entry) -> None:
        """A door for subclasses to refuse a hook before it is in (unmatched module patterns, for one)."""

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
        specs = read_hooks(config, allow=_names(allow), from_file=from_file)
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
        lines = [f"{row.name}: {row.fires}; gradients: {row.gradients}"]
        entries = dict(self._entries)
        places = [place for place in self._places(row.kind) if place.name in entries]
        hearing = [place for place in places if row.name in entries[place.name].listeners]
        for index, place in enumerate(hearing, 1):
            entry = entries[place.name]
            status = "" if entry.enabled else " [disabled]"
            when = f" ({entry.schedule})" if row.inner and not entry.schedule.always else ""
            named = ", ".join(entry.listeners[row.name].wanted) or "nothing"
            lines.append(f"  {index}. {place.name}{status}{when}: {place.why}; names {named}")
        if source and (bound := self._bound(row, due=None)):
            lines.append(event_source(row, bound))
        return "\n".join(lines if hearing else [*lines, "  nobody hears it"])

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
            self._count(entry, -1)
            self._changed()
        self._close(entry)

    def close(self) -> None:
        """Close every hook; each is closed once in its life."""
        for entry in list(self._entries.values()):
            self._close(entry)

    def _close(self, entry: Entry) -> None:
        close = getattr(entry.hook, "close", None)
        if callable(close) and not entry.closed:
            entry.closed = True
            try:
                close()
            except Exception as error:
                self._report(Incident("failed", entry.name, "close", 0, f"failed in close(): {error!r}", error), True)

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
            load_hook_state(self._entries[name].hook, states[name])
        stateful = [entry.name for entry in self.entries() if hook_state(entry.hook) is not None]
        return {
            "without_hook": [name for name in states if name not in self._entries],
            "without_state": [name for name in stateful if name not in states],
        }

    # ---- tables ------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The set of hooks is another: forget all callables; each event makes its own when it next fires."""
        with self._lock:
            self.hooks = tuple(entry.hook for entry in self._entries.values())
            self._order, self._by_hand = {}, {}
            self._tables = {}
            self.countdown = 0
            self._install()
            for name in OUTER:
                setattr(self.fire, name, partial(self._first_fire, None, name) if self._hearers[name] else None)
            for tell in list(self._change_listeners):
                tell()

    def _install(self) -> None:
        """Put the callables for the current set of due hooks into the slots of the inner events."""
        key = (self._agenda.due, self._agenda.timed)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            table = self._tables[key] = {}
            for name in INNER:
                table[name] = partial(self._first_fire, table, name) if self._hearers[name] else None
        for name, fired in table.items():
            setattr(self.fire, name, fired)

    def _first_fire(self, table: dict[str, Fired | None] | None, name: str, *values: Any) -> Any:
        """Stands in a slot until the event first fires, then makes way for the real callable."""
        with self._lock:
            fired = self._compile(CATALOG[name])
            if table is not None:
                table[name] = fired
            if table is None or self._tables.get((self._agenda.due, self._agenda.timed)) is table:
                setattr(self.fire, name, fired)
        return fired(*values) if fired else None

    def _compile(self, event: Event) -> Fired | None:
        bound = self._bound(event, self._agenda.due)
        special = self._compilers.get(event.name)
        if special is not None:
            return special(bound, self._agenda.timed)
        return compile_event(event, bound, self._desk, self._agenda.timed)

    def _bound(self, event: Event, due: frozenset[str] | None) -> list[Bound]:
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
        if entry.ranks is not None and self.rank not in entry.ranks:
            return False
        return not event.inner or due is None or entry.schedule.always or entry.name in due

    def compile_with(self, event: str, compiler: Callable[[list[Bound], bool], Fired | None]) -> None:
        """Let another part make the callable of one event: the update chain and the forward tap do."""
        self._compilers[event] = compiler
        self._changed()

    # ---- being due ------------------------------------------------------------------------------------------------

    def begin_batch(self, clock: Clock) -> None:
        """Another micro-batch begins; costs a decrement unless a schedule or a sample comes up."""
        if self.countdown > 0:
            self.countdown -= 1
        else:
            self.decide_who_is_due(clock)

    def decide_who_is_due(self, clock: Clock) -> None:
        """Ask the schedules, put the callables for those who are due in place, and count down to the next question."""
        with self._lock:  # or a change in another thread would lose its own question
            before = (self._agenda.due, self._agenda.timed)
            scheduled = [
                (entry.name, entry.schedule)
                for entry in self._entries.values()
                if entry.enabled and not entry.schedule.always
            ]
            sample = any(getattr(self.fire, name) is not None for name in INNER)
            self.countdown = self._agenda.ask(clock, scheduled, sample)
            if (self._agenda.due, self._agenda.timed) != before:
                self._install()

    def replan(self, restored: Clock | None = None) -> None:
        """Ask every schedule again at the next micro-batch: an epoch began, or counters were `restored` to a clock."""
        if restored is not None:
            self._agenda.resume(restored)
        self.countdown = 0

    def due_now(self, name: str) -> bool:
        """Whether a hook is due at this micro-batch."""
        entry = self.entry(name)
        return entry.schedule.always or name in self._agenda.due

    # ---- firing by hand ---------------------------------------------------------------------------------------------

    def _fire_by_hand(self, spelling: str, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        event = SPELLINGS[spelling]
        named = by_hand(event, self._orders.get(spelling, event.order), args, values)
        self._hand_clock.read(named)
        if event.inner and self._hand_clock.moved():
            begin = self.decide_who_is_due if self._scheduled else self.begin_batch  # steps fired by hand may jump
            begin(self._hand_clock.now)
        heard = getattr(self.fire, event.name)
        if heard:
            moment = HandMoment(event, named, partial(self._who_names, event))
            if self._undemanding and event.name not in self._compilers:
                heard = self._without_missing(event, frozenset(vars(moment)))
            heard(moment)

    def _without_missing(self, event: Event, passed: frozenset[str]) -> Fired:
        """The callable for a call that passed only these values: hooks keep their defaults for the rest."""
        key = (event.name, passed, self._agenda.due, self._agenda.timed)
        if key not in self._by_hand:
            bound = self._bound(event, self._agenda.due)
            missing = set(wanted_attributes(bound)) - passed
            reduced = [replace(item, listener=item.listener.without(missing)) for item in bound]
            self._by_hand[key] = compile_event(event, reduced, self._desk, self._agenda.timed) or _nobody
        return self._by_hand[key]

    def _who_names(self, event: Event, attribute: str) -> list[str]:
        return [bound.hook for bound in self._bound(event, self._agenda.due) if attribute in bound.listener.wanted]

    # ---- when a hook fails ----------------------------------------------------------------------------------------

    def watch_incidents(self, listener: Callable[[Incident], Any]) -> Callable[[], None]:
        """Hear of failures, switched-off hooks and stops; returns a function that ends it."""
        self._incident_listeners.append(listener)
        return lambda: self._incident_listeners.remove(listener)

    def watch_changes(self, listener: Callable[[], Any]) -> Callable[[], None]:
        """Hear that the set of hooks has changed; returns a function that ends it."""
        self._change_listeners.append(listener)
        return lambda: self._change_listeners.remove(listener)

    def overruled(self, hook: str, event: str, step: int, message: str) -> None:
        """A hook changed what is not its own and it was undone: counted always, reported once per hook and event."""
        entry = self._entries.get(hook)
        if entry is not None:
            entry.overruled[event] = entry.overruled.get(event, 0) + 1
            if entry.overruled[event] == 1:
                self._report(Incident("overruled", hook, event, step, message), True)

    def _report(self, incident: Incident, first: bool) -> None:
        report(incident, first, self._incident_listeners)

    def failed(self, event: Event, bound: Bound, error: Exception, moment: Any) -> Exception | None:
        """Treat a hook's exception by its policy; returns what must be raised once the other hooks have been called."""
        entry = self._entries.get(bound.hook)
        step = known_step(moment)
        if isinstance(error, StopTraining):
            return self._stop(bound.hook, event, error, moment)
        annotate(error, bound.hook, event.name, step, self.rank)
        kind, message = "failed", f"failed: {type(error).__name__}: {error}"
        if entry is None:  # removed while it was running
            self._report(Incident(kind, bound.hook, event.name, step, message, error), True)
            return error if must_raise(error, "raise" if self.debug else "warn") and not event.closing else None
        strikes = entry.failures.add(event.name)
        if must_raise(error, "raise" if self.debug else entry.policy) and not event.closing:
            self._report(Incident(kind, bound.hook, event.name, step, message, error), False)
            return error
        if event.closing and (original := known(moment, "exception", None)) not in (None, error):
            original.add_note(f"hook {bound.hook!r} then failed in {event.name}: {error!r}")
        self._report(Incident(kind, bound.hook, event.name, step, message, error), entry.failures.total == 1)
        if entry.policy == "disable" or strikes >= STRIKES:
            self._switch_off(entry, event, step, strikes)
        elif strikes == 1:
            self._changed()  # from now on a success must be noticed, to break the row
        return None

    def _switch_off(self, entry: Entry, event: Event, step: int, strikes: int) -> None:
        self._switch(entry.name, False)
        message = f"switched off after {strikes} failure{'s' if strikes > 1 else ''} in a row"
        self._report(Incident("disabled", entry.name, event.name, step, message), True)

    def _stop(self, hook: str, event: Event, error: StopTraining, moment: Any) -> Exception | None:
        request = getattr(moment, "request_stop", None) if not isinstance(moment, HandMoment) else None
        if request is None:
            return error  # nobody here can stop the loop but its owner
        request(str(error) or "StopTraining", by=hook)
        return None

    def recovered(self, event: Event, bound: Bound) -> None:
        """A hook that had failed at this event succeeded: its row of failures is broken."""
        entry = self._entries.get(bound.hook)
        if entry is not None and entry.failures.in_a_row.pop(event.name, 0):
            self._changed()

    def _settle(self, event: Event, bound: Bound, moment: Any, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """A hook changed the event's metrics: keep what it added, undo what it did to others' keys, and say so."""
        metrics = getattr(moment, name)
        lost = [key for key, value in before.items() if key not in metrics or metrics[key] is not value]
        for key in lost:
            metrics[key] = before[key]
        if lost:
            what = ", ".join(repr(key) for key in lost)
            message = f"changed or removed {what} in metrics; put back. Add keys of your own instead"
            self.overruled(bound.hook, event.name, known_step(moment), message)
        if (mirror := getattr(type(moment), "mirror_metrics", None)) is not None:
            mirror(moment, name)
        return dict(metrics)

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def costs(self) -> list[dict[str, Any]]:
        """Host time by hook and by lazy argument, most expensive first; inner events scaled up from their samples."""
        rows = [_cost_row(entry, self._agenda.scale(entry.name)) for entry in self.entries()]
        for name, cost in list(self._desk.arguments.items()):
            if cost.ns > 100_000:  # reading a free argument is no news
                seconds = cost.ns / 1e9
                rows.append({"hook": f"reading {name}", "kind": "argument", "calls": cost.calls, "seconds": seconds})
        return sorted(rows, key=lambda row: -float(str(row["seconds"])))

    def count_batches(self, batches: int) -> None:
        """Tell how many micro-batches there were, to scale sampled times up."""
        self._agenda.batches = batches


class HookRunner(HookRegistry):
    """The registry for those who fire events from their own loop; an unused one costs a branch per call site."""

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "on_train_begin": ("config",),
        "on_step_end": ("ctx",),
        "on_eval_end": ("metrics", "step"),
        "on_checkpoint_save": ("step", "path"),
        "on_train_end": ("step", "tokens_seen"),
    }

    def __init__(self, hooks: Iterable[Any] = ()) -> None:
        super().__init__()
        for hook in hooks:
            self.register(hook)


def _dispatcher(spelling: str) -> Callable[..., None]:
    def dispatch(self: HookRegistry, *args: Any, **values: Any) -> None:
        if not self.hooks:
            return
        self._fire_by_hand(spelling, args, values)

    dispatch.__name__ = spelling
    dispatch.__doc__ = SPELLINGS[spelling].doc
    return dispatch


for _spelling in SPELLINGS:
    setattr(HookRegistry, _spelling, _dispatcher(_spelling))


def _nobody(moment: Any) -> None:
    """Stands for an event that no hook hears now."""


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ranks(value: int | Iterable[int] | None) -> frozenset[int] | None:
    if value is None:
        return None
    return frozenset((value,)) if isinstance(value, int) else frozenset(value)


def _function(function: Any, unknown: Mapping[str, Any]) -> Any:
    """A plain function has no constructor: what is left over is a misspelt option."""
    for key in unknown:
        raise RegistrationError(f"{key!r} is no option of a hook; {nearest(key, OPTIONS)}")
    return function


def _refuse_deaf(hook: Any, listeners: Mapping[str, Any]) -> None:
    """An object that hears nothing and is not even meant as a hook is somebody's slip."""
    if not listeners and not isinstance(hook, Events):
        raise RegistrationError(
            f"{getattr(hook, '__name__', type(hook).__name__)!r} hears no event: give a function its event (event=…), "
            "or a class a method named after one"
        )


def _cost_row(entry: Entry, scale: float) -> dict[str, Any]:
    return {
        "hook": entry.name,
        "kind": "+".join(entry.kinds),
        "calls": round(entry.inner_cost.calls * scale) + entry.outer_cost.calls,
        "seconds": (entry.inner_cost.ns * scale + entry.outer_cost.ns) / 1e9,
    }
