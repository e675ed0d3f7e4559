"""One registered hook: how it is read when it is registered, and what the registry stores about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import FunctionType
from typing import Any

import torch

from hookline._checks import names
from hookline._console import logger
from hookline._text import counted
from hookline._words import meant, nearest
from hookline.core.base import DEFAULTS, ForwardHook, Hook, UpdateHook, hook_attribute
from hookline.core.catalog import CAPABILITIES, CATALOG, SPELLINGS, Event, Events, find_event
from hookline.core.costs import Cost
from hookline.core.dispatch import BoundHook
from hookline.core.failures import FailureCount, FailureHandler, Policy, raise_if_quit
from hookline.core.plugins import HOOKS, identity, is_redefinition, load_reference
from hookline.core.provided import PROVIDED
from hookline.core.schedule import Schedule
from hookline.core.signature import Listener, read_signature
from hookline.errors import ConfigError, HooklineError, RegistrationError, error_text, got, with_article
from hookline.ranks import Ranks

OPTIONS = ("enabled", "every", "at", "start", "stop", "before", "after", "on_error", "ranks")
"""What configs and code may say about a hook beside its parameters."""
DEFAULT_HOOKS = ("console_log",)
"""What a trainer adds to its runs with the origin "default", unless the user has removed it."""
METHODS = ("setup", "close", "check_run", "before_first_step", "after_last_step")
"""Methods that are called although they are no events."""
OTHER_METHODS = (*SPELLINGS, *METHODS, "init", "clear_states", "state_dict", "load_state_dict")
MAIN_EVENTS: dict[type, str] = {ForwardHook: "on_forward", UpdateHook: "on_update"}


RankChoice = frozenset[int] | str | None
"""The ranks on which a hook is called: numbers, 'local-zero', or None for all."""


@dataclass
class Entry:
    """A hook with its name, listeners, schedule, policy, place in the order, failures and costs."""

    name: str
    hook: Any
    number: int
    listeners: dict[str, Listener]
    built_in: bool
    policy: Policy
    schedule: Schedule
    enabled: bool = True
    off_here: bool = False  # Of several ranks, failures have switched it off on this one.
    last: bool = False  # Stays behind every hook that is registered later.
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ranks: RankChoice = None
    needs: tuple[str, ...] = ()  # Of the `CAPABILITIES` of a run.
    origin: str = "code"
    parameters: dict[str, Any] = field(default_factory=dict)
    named: bool = False  # The name was chosen for this instance; one that is derived from its class may get a number.
    failures: FailureCount = field(default_factory=FailureCount)
    overruled: dict[str, int] = field(default_factory=dict)  # Reverted changes, by event.
    costs: dict[str, Cost] = field(init=False)  # By event.
    closed: bool = False

    def __post_init__(self) -> None:
        self.costs = {event: Cost() for event in self.listeners}

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of hook it is, by the events it listens to; a lifecycle hook if it listens to none."""
        kinds = {CATALOG[event].kind for event in self.listeners}
        return [kind for kind in ("lifecycle", "forward", "update") if kind in kinds] or ["lifecycle"]

    @property
    def inner_seconds(self) -> float:
        """Its host time inside of steps."""
        return sum(cost.ns for event, cost in self.costs.items() if CATALOG[event].inner) / 1e9

    @property
    def enabled_for_ranks(self) -> bool:
        """Whether the ranks have it enabled; failures may have switched it off on this one alone."""
        return self.enabled or self.off_here

    def is_called_here(self, ranks: Ranks) -> bool:
        """Return whether it is enabled and called on this rank."""
        if isinstance(self.ranks, str):
            return self.enabled and ranks.local_rank == 0
        return self.enabled and (self.ranks is None or ranks.rank in self.ranks)

    def must_not_differ(self, ranks: Ranks) -> bool:
        """Return whether all ranks of a run do what it does alike, so that the others cannot continue if one fails.

        One process is all of its ranks, and in a user's own loop each rank acts alone.
        """
        return ranks.act_together and bool(hook_attribute(self.hook, "same_on_all_ranks"))

    def check_ranks(self, ranks: Ranks) -> None:
        """Reject a choice of ranks if all ranks of a run must call the hook.

        Raises:
            RegistrationError: If there is one; it says why.
        """
        if self.ranks is None:
            return
        hook, name = self.hook, self.name
        if "update" in self.kinds:
            raise RegistrationError(f"{name!r} changes gradients, which must be the same on all ranks")
        if hook_attribute(hook, "collective"):
            raise RegistrationError(
                f"{name!r} is collective, so it must be called on all ranks; leave out its `ranks`, or use "
                "`trainer.ranks.rank` inside of it"
            )
        if self.must_not_differ(ranks) or (ranks.act_together and hook_attribute(hook, "needs_all_ranks")):
            raise RegistrationError(
                f"{name!r} needs every rank, so it must be called on all of them; leave out its `ranks`"
            )

    def is_called(self, event: Event, due: frozenset[str] | None) -> bool:
        """Return whether ranks call it at an event, given the scheduled hooks that are due; None means all are."""
        if not self.enabled_for_ranks or event.name not in self.listeners:
            return False
        is_due = due is None or not event.inner or self.schedule.always or self.name in due
        return is_due or event.name in hook_attribute(self.hook, "events_when_not_due")

    @property
    def intervenes(self) -> bool:
        """Whether it is declared to change training."""
        declared = hook_attribute(self.hook, "intervenes")
        if declared is None:
            declared = "on_update" in self.listeners or hook_attribute(self.hook, "intervene")
        return bool(declared) or not hook_attribute(self.hook, "isolate_rng")

    def bind(self, event: Event, ranks: Ranks) -> BoundHook:
        """Return its listener at an event, as dispatch takes it.

        If the hook is called on other ranks only, the listener has its arguments computed and does nothing.
        """
        listener, cost = self.listeners[event.name], self.costs[event.name]
        if not self.is_called_here(ranks):
            listener, cost = replace(listener, call=_do_nothing), Cost()
        strikes, place = self.failures.in_a_row, (self.name, event.name)
        return BoundHook(self.name, self.hook, listener, listener.call, cost, strikes, self.built_in, place)

    def replaces(self, other: Entry) -> bool:
        """Return whether it is the same hook registered again: the same object, or one that was defined again."""
        if self.named != other.named or (self.named and self.name != other.name):
            return False
        if self.hook is other.hook:
            return self.listeners.keys() == other.listeners.keys()  # One function may listen to several events.
        return is_redefinition(self.definition, other.definition)

    @property
    def definition(self) -> Any:
        """What a user wrote: the function, or the class of an object."""
        return self.hook if isinstance(self.hook, FunctionType) else type(self.hook)

    @cached_property
    def identity(self) -> tuple[Hashable, frozenset[int]]:
        """Where its definition is, and the code of it when it was registered."""
        return identity(self.definition)

    def record(self) -> HookRecord:
        """Return what is listed and recorded about it."""
        return HookRecord(
            self.name, "+".join(self.kinds), self.enabled, self.policy, str(self.schedule), self.origin,
            self.intervenes, self.failures.total, sum(self.overruled.values()), dict(self.parameters),
        )  # fmt: skip

    def set_up(self, registry: Any) -> None:
        """Call the hook's `setup`, with the registry and the hook's name if it names them."""
        setup = hook_attribute(self.hook, "setup")
        if callable(setup):
            offered = {"registry": registry, "name": self.name}
            setup(**{name: offered[name] for name in inspect.signature(setup).parameters if name in offered})

    def close(self, failures: FailureHandler, *, at_run_end: bool = False) -> None:
        """Close the hook once. Its failure ends a run; a removal is finished in any case, and the failure is logged."""
        close = hook_attribute(self.hook, "close")
        if callable(close) and not self.closed:
            self.closed = True
            try:
                failures.call_method(self, "close", close)
            except Exception as error:
                if at_run_end:
                    raise
                logger.warning("hook %r, close: failed: %s", self.name, error_text(error), exc_info=error)

    def state(self) -> Any:
        """Return what the hook saves: its `state_dict()`, or the attributes named in `saves`; None if nothing."""
        if callable(save := hook_attribute(self.hook, "state_dict")):
            return save()
        saved = names(hook_attribute(self.hook, "saves"), "saves")
        return {name: getattr(self.hook, name) for name in saved} if saved else None

    def load_state(self, state: Any, failures: FailureHandler) -> None:
        """Restore what `state` returned.

        Raises:
            HooklineError: If the hook cannot take it.
        """
        try:
            with failures.call(self.name, "load_state_dict"):
                if callable(load := hook_attribute(self.hook, "load_state_dict")):
                    load(state)
                    return
                for name in names(hook_attribute(self.hook, "saves"), "saves"):
                    if name in state:
                        setattr(self.hook, name, state[name])
        except Exception as error:
            raise_if_quit(error, f"hook {self.name!r}, load_state_dict")
            raise HooklineError(
                f"hook {self.name!r} ({type(self.hook).__name__}) cannot load the state that was saved under its name: "
                f"{error_text(error)}. If another hook saved it, register this one under another name"
            ) from error


@dataclass(frozen=True)
class HookRecord:
    """A hook as it is listed and recorded."""

    name: str
    kind: str
    enabled: bool
    policy: str
    schedule: str
    origin: str
    intervenes: bool = False
    failures: int = 0
    overruled: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        marks = ", intervenes" if self.intervenes else ""
        marks += f", {counted(self.failures, 'failure')}" if self.failures else ""
        marks += f", overruled {counted(self.overruled, 'time')}" if self.overruled else ""
        status = "enabled" if self.enabled else "disabled"
        return f"{self.name}: {status}, {self.kind}, {self.schedule}, on error {self.policy}, {self.origin}{marks}"

    __repr__ = __str__


class HookList(list[HookRecord]):
    """The hooks with their status; prints one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no hooks"


# ---- registration ----------------------------------------------------------------------------------------------------


def read_hook(
    hook: Any, event: str | None, parameters: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Any, dict[str, Listener]]:
    """Make a hook if a class, a name or a dotted path is given, and read its listeners.

    Args:
        hook: What is registered.
        event: The event of a function.
        parameters: The parameters of the hook's constructor.
        options: `every`, if it was given; changed as by `make_hook`.

    Returns:
        The hook object and its listeners.

    Raises:
        RegistrationError: If the hook implements no event, misspells one, or names arguments that an event lacks.
    """
    is_finished = bool(event) or not isinstance(hook, (str, type))
    for key in parameters if is_finished else ():  # It has no constructor to call, so this is a misspelt option.
        raise RegistrationError(f"{key!r} is not an option of a hook; {nearest(key, OPTIONS)}")
    if event:
        row, spelling = find_event(event), event if event.startswith("on_") else f"on_{event}"
        return hook, {row.name: read_signature(hook, row, spelling, getattr(hook, "__name__", "function"))}
    instance = hook if is_finished else load_reference(PROVIDED["make_hook"])(hook, parameters, options)
    listeners = find_listeners(instance)
    # Methods that are no events are called, too, such as `setup`.
    cls = type(instance)
    is_called = isinstance(instance, Hook) and any(getattr(cls, name) is not getattr(Hook, name) for name in METHODS)
    if isinstance(instance, Mapping):
        raise RegistrationError("a dict is not a hook; put it into a config of hooks, such as {'lifecycle': [{…}]}")
    if not listeners and not is_called:
        raise RegistrationError(
            f"{getattr(instance, '__name__', cls.__name__)!r} listens to no event: give a function its event "
            f"(event=…), or a class a method named after one{_method_hint(instance)}"
        )
    for kind, method in MAIN_EVENTS.items():
        if isinstance(instance, kind) and method not in listeners:
            raise RegistrationError(f"{cls.__name__!r} is {with_article(kind.__name__)} without a method {method!r}")
    return instance, listeners


def parse_ranks(given: Any, path: str = "ranks") -> RankChoice:
    """Return the ranks that code, a class or a config names.

    Raises:
        ConfigError: If it is neither 'all', 'zero', 'local-zero', a rank, nor a list of ranks.
    """
    if given is None or given == "all" or given == "local-zero":
        return None if given == "all" else given
    listed = [0] if given == "zero" else [given] if isinstance(given, int) else given
    is_listed = isinstance(listed, Iterable) and not isinstance(listed, (str, Mapping))
    ranks = list(listed) if is_listed else []
    if not ranks or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
        raise ConfigError(path, f"expected 'all', 'zero', 'local-zero', a rank or a list of ranks, {got(given)}")
    return frozenset(ranks)


def check_attributes(hook: Any, name: str, listeners: Container[str], ranks: Ranks) -> None:
    """Reject what a user's hook has under a name that is read from hooks, if it cannot be meant so.

    Raises:
        RegistrationError: It names the attribute, and says what is expected under this name.
    """
    attributes: Mapping[str, Any] = getattr(hook, "__dict__", {})
    namespaces = [attributes, *(vars(cls) for cls in type(hook).__mro__ if not cls.__module__.startswith("hookline."))]
    for attribute in sorted(READ_AS.keys() & set().union(*namespaces)):
        value = next(namespace[attribute] for namespace in namespaces if attribute in namespace)
        is_computed = isinstance(value, property) or inspect.ismemberdescriptor(value)
        if value is None or is_computed or (attribute in READ_BY and READ_BY[attribute] not in listeners):
            continue
        is_right, expected = READ_AS[attribute]
        is_wrong = not is_right(value)
        if attribute == "ranks" and attribute in attributes and not is_wrong:
            # In a class it is a declaration; on an object it may be anything, such as the ranks of matrices.
            chosen, expected = parse_ranks(value), f"ranks of this run, which has {ranks.world_size}"
            is_wrong = isinstance(chosen, frozenset) and min(chosen) >= ranks.world_size
        if is_wrong:
            raise RegistrationError(
                f"{name!r}: Hookline reads the attribute {attribute!r} of hooks and expects {expected}, {got(value)}; "
                "rename it if it means something else"
            )


def check_needs(hook: Any, name: str) -> tuple[str, ...]:
    """Return what a hook needs of a run.

    Raises:
        RegistrationError: If one of its `needs` is not a capability of runs; the message has the nearest one.
    """
    needs = names(hook_attribute(hook, "needs"), "needs")
    for capability in needs:
        if capability not in CAPABILITIES:
            nearby = nearest(capability, CAPABILITIES)
            raise RegistrationError(f"{name!r} needs {capability!r}, which is not a capability of runs; {nearby}")
    return needs


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Iterable) and all(isinstance(item, str) for item in value))


def _are_ranks(value: Any) -> bool:
    try:
        parse_ranks(value)
    except ConfigError:
        return False
    return True


def _is_selection(value: Any) -> bool:
    patterns = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return all(isinstance(item, (str, torch.Tensor)) or callable(item) for item in patterns)


_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_METHOD = callable, "a method"
_SELECTION = _is_selection, "a name, a pattern, a class, a predicate or a list of these"
READ_AS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: _FLAG for name, default in DEFAULTS.items() if isinstance(default, bool)},
    **{name: _METHOD for name, default in DEFAULTS.items() if callable(default)},
    **{name: (_are_names, "names") for name, default in DEFAULTS.items() if isinstance(default, tuple)},
    "state_dict": _METHOD,
    "load_state_dict": _METHOD,
    "unsaved_hint": (lambda value: isinstance(value, str), "a string"),
    "intervenes": _FLAG,
    "check_finite": _FLAG,
    "modules": _SELECTION,
    "params": _SELECTION,
    "ranks": (_are_ranks, "'all', 'zero', 'local-zero', a rank or a list of ranks"),
    "schedule": (lambda value: isinstance(value, Schedule), "a Schedule (pass every=… for a period)"),
}
"""Attributes of hooks that are checked at registration, and what is expected."""
READ_BY = {"modules": "on_forward", "params": "on_update"}
"""Attributes that are read only if the hook listens to an event."""


def _do_nothing(*arguments: Any, **keywords: Any) -> None:
    """Stand in for a hook that is called on other ranks."""


def check_schedule(hook: Any, listeners: Iterable[str], schedule: Schedule) -> None:
    """Reject a schedule for a hook that is called at no event inside steps.

    Raises:
        RegistrationError: If there is a schedule; it says what would be right.
    """
    if schedule == Schedule() or any(CATALOG[event].inner for event in listeners):
        return
    takes_every = schedule.every is not None and "every" in inspect.signature(type(hook)).parameters
    remedy = f"; {_with_period(hook, str(schedule.every))}" if takes_every else ""
    where = f"this {type(hook).__name__} listens to no event inside steps"
    raise RegistrationError(f"{schedule} has no effect: {where}{remedy}")


def _with_period(hook: Any, every: str) -> str:
    """Say how to make a built-in hook with a period, or why it cannot have this one."""
    others = hook_parameters(hook, {})
    try:
        type(hook)(**{name: others[name] for name in others if name not in hook.every_aliases}, every=every)
    except ConfigError as refused:
        return str(refused)
    return f"pass every={every!r} to {type(hook).__name__} instead"


def _method_hint(hook: Any) -> str:
    """Name the event that a method of the hook seems to mean, such as `step_end`; "" if there is none."""
    methods = [name for name in dir(type(hook)) if not name.startswith("_") and callable(getattr(type(hook), name))]
    events = {name: event for name in methods if name not in OTHER_METHODS and (event := meant(name, SPELLINGS))}
    return "".join(f"; did you mean {event!r} by {name!r}?" for name, event in list(events.items())[:1])


def hook_parameters(hook: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hook's parameters for the record: its constructor's, as the instance holds them."""
    try:
        keys = list(inspect.signature(type(hook)).parameters)
    except (TypeError, ValueError):
        return dict(given)
    held = {name: getattr(hook, name) for name in keys if name != "name" and hasattr(hook, name)}
    return {**given, **held}  # A module that was given may be held weakly.


class DerivedName(str):
    """A name that nobody chose for this instance; it gets a number if it is taken."""


def hook_name(hook: Any, type_name: str = "") -> str:
    """Return the name of a hook that was registered without one.

    It is the name that the object was given, as by ``super().__init__("my_hook")``. Otherwise it is derived: the `name`
    in the body of its class, else the name of its type: the one by which a config or code asked for it, or under which
    its class was registered; else an inherited `name`, that of a function, or the class in snake case.

    >>> hook_name(JSONLogHook())
    'json_log_hook'
    """
    given, cls = hook_attribute(hook, "name"), type(hook)
    inherited = getattr(cls, "name", None)
    if isinstance(given, str) and given and given != inherited:
        return given
    # A user's function may make a built-in hook, whose name the user did not choose.
    chosen = None if vars(cls).get("built_in") else vars(cls).get("name")
    for name in (chosen, type_name, HOOKS.name_of(cls), inherited, getattr(hook, "__name__", None)):
        if isinstance(name, str) and name:
            return DerivedName(name)
    return DerivedName(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower())


class Definitions:
    """Finds the hooks without a name of their own that another may replace, without looking at all of them."""

    def __init__(self) -> None:
        self._by_code: dict[Hashable, dict[frozenset[int], list[Entry]]] = {}  # by place; mostly one code each

    def add(self, entry: Entry) -> None:
        """Add a hook that was registered."""
        place, code = entry.identity
        self._by_code.setdefault(place, {}).setdefault(code, []).append(entry)

    def discard(self, entry: Entry) -> None:
        """Remove a hook."""
        place, code = entry.identity
        self._by_code[place][code] = [other for other in self._by_code[place][code] if other is not entry]

    def replaced_by(self, entry: Entry) -> list[Entry]:
        """Return the hooks that a new one replaces, in the order of registration."""
        place, code = entry.identity
        replaced: list[Entry] = []
        for known, entries in self._by_code.get(place, {}).items():
            # Several objects of one code are several definitions; one object may listen to several events.
            others = [other for other in entries if other.hook is entry.hook] if known == code else entries
            replaced += filter(entry.replaces, others)
        return sorted(replaced, key=lambda other: other.number)


def numbered(name: str, taken: Container[str], first: int = 2) -> str:
    """Return a derived name, with a number if it is taken: `my_hook`, `my_hook_2`, `my_hook_3`; try `first` first."""
    candidates = chain([name], (f"{name}_{number}" for number in count(first)))
    return next(candidate for candidate in candidates if candidate not in taken)


def find_listeners(hook: Any) -> dict[str, Listener]:
    """Return a hook's listeners by the canonical names of their events.

    Down an inheritance chain the most derived spelling of an event wins; two in one class are rejected.

    Raises:
        RegistrationError: If a method only looks like an event, or names arguments that its event lacks.
    """
    owner = type(hook).__name__
    listeners: dict[str, Listener] = {}
    taken: set[str] = set()
    for namespace in (getattr(hook, "__dict__", {}), *(vars(cls) for cls in type(hook).__mro__ if cls is not Events)):
        here: dict[str, str] = {}
        for name, value in namespace.items():
            if not name.startswith("on_") or not _is_event_method(value):
                continue
            event = SPELLINGS.get(name)
            if event is None:
                raise RegistrationError(
                    f"{owner}.{name}: no event is named {name!r}; {nearest(name, SPELLINGS, '`hookline events`')}. "
                    "Mark a method that is not an event with @hookline.not_an_event"
                )
            if event.name in here:
                raise RegistrationError(
                    f"{owner} defines {here[event.name]} and {name}, two spellings of one event; keep one"
                )
            here[event.name] = name
            if event.name not in taken and _is_event_method(getattr(hook, name)):
                listeners[event.name] = read_signature(getattr(hook, name), event, name, owner)
        taken |= set(here)
    for name in names(hook_attribute(hook, "events_when_not_due"), "events_when_not_due"):
        if name not in listeners:
            problem = f"{owner}.events_when_not_due: it does not listen to {name!r}"
            raise RegistrationError(f"{problem}; {nearest(name, listeners)}")
    return listeners


def _is_event_method(value: Any) -> bool:
    """Return whether it can be called and is not marked.

    A subclass drops an inherited event with ``on_… = None`` or with the mark.
    """
    method = callable(value) or isinstance(value, (staticmethod, classmethod))
    marked = (getattr(body, "__hookline_not_an_event__", False) for body in (value, getattr(value, "__func__", value)))
    return method and not any(marked)
