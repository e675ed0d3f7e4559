"""One registered hook: what it listens to, and everything the registry keeps about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hookline.errors import RegistrationError, nearest
from hookline.events.arguments import Listener, read_signature
from hookline.events.catalog import CATALOG, SPELLINGS, Event, Events
from hookline.events.dispatch import Bound, Cost
from hookline.events.policy import Failures, Policy
from hookline.events.schedule import Schedule
from hookline.events.streams import isolates


@dataclass
class Entry:
    """A hook with its name, switch, schedule, policy, place in the order and accounts."""

    name: str
    hook: Any
    number: int
    listeners: dict[str, Listener]
    built_in: bool
    policy: Policy
    schedule: Schedule
    enabled: bool = True
    last: bool = False  # stays behind every hook that is registered later
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ranks: frozenset[int] | None = None
    origin: str = "code"
    parameters: dict[str, Any] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    overruled: dict[str, int] = field(default_factory=dict)  # by event: changes of others' things that were undone
    inner_cost: Cost = field(default_factory=Cost)  # sampled: one micro-batch in SAMPLE_EVERY
    outer_cost: Cost = field(default_factory=Cost)  # always timed
    closed: bool = False

    @cached_property
    def kinds(self) -> list[str]:
        """Which kinds of hook it is: by the methods it has, else by nothing but a lifecycle hook."""
        kinds = {CATALOG[event].kind for event in self.listeners}
        return [kind for kind in ("lifecycle", "forward", "update") if kind in kinds] or ["lifecycle"]

    @property
    def hears_inner(self) -> bool:
        """Whether it hears any of the events that repeat inside a run."""
        return any(CATALOG[event].inner for event in self.listeners)

    def hears_now(self, event: Event, due: frozenset[str]) -> bool:
        """Whether its schedule lets an event through that it listens to, when these hooks are due."""
        gated = event.inner and not self.schedule.always and self.name not in due
        return not gated or event.name in getattr(self.hook, "always_hears", ())

    @property
    def intervenes(self) -> bool:
        """Whether it is declared to change training."""
        declared = getattr(self.hook, "intervenes", None)
        if declared is None:
            declared = "on_update" in self.listeners or getattr(self.hook, "intervene", False)
        return bool(declared) or not isolates(self.hook)

    def bind(self, event: Event) -> Bound:
        """Its listener at an event, as dispatch takes it."""
        cost = self.inner_cost if event.inner else self.outer_cost
        recovering = event.name in self.failures.in_a_row
        return Bound(self.name, self.hook, self.listeners[event.name], cost, recovering, self.built_in)

    def record(self) -> HookRecord:
        return HookRecord(
            self.name, "+".join(self.kinds), self.enabled, self.policy, str(self.schedule), self.origin,
            self.intervenes, self.failures.total, sum(self.overruled.values()), dict(self.parameters),
        )  # fmt: skip


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
        marks = (", intervenes" if self.intervenes else "") + (f", {self.failures} failures" if self.failures else "")
        marks += f", overruled {self.overruled} times" if self.overruled else ""
        status = "enabled" if self.enabled else "disabled"
        return f"{self.name}: {status}, {self.kind}, {self.schedule}, on error {self.policy}, {self.origin}{marks}"

    __repr__ = __str__


class HookList(list[HookRecord]):
    """The hooks with their status; prints one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no hooks"


def default_name(hook: Any) -> str:
    """The name a hook goes by when nobody gave it one: its own `name`, else its class in snake case."""
    own = getattr(hook, "name", None)
    return own if isinstance(own, str) and own else snake_case(type(hook).__name__)


def snake_case(name: str) -> str:
    """
    >>> snake_case("JSONLogHook")
    'json_log_hook'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def find_listeners(hook: Any) -> dict[str, Listener]:
    """Every event that a hook hears, under its canonical name; a method that only looks like one is refused."""
    owner = type(hook).__name__
    listeners = {}
    for event, spelling in _heard(hook, owner):
        listeners[event.name] = read_signature(getattr(hook, spelling), event, spelling, owner)
    for name in getattr(hook, "always_hears", ()):
        if name not in listeners:
            raise RegistrationError(f"{owner}.always_hears: it does not hear {name!r}; {nearest(name, listeners, 40)}")
    return listeners


def _heard(hook: Any, owner: str) -> Iterator[tuple[Event, str]]:
    """Down an inheritance chain the most derived spelling of an event wins; two in one class are refused."""
    taken: set[str] = set()
    for namespace in (getattr(hook, "__dict__", {}), *(vars(cls) for cls in type(hook).__mro__ if cls is not Events)):
        here: dict[str, str] = {}
        for spelling in _event_like(namespace, owner):
            event = SPELLINGS[spelling]
            if event.name in here:
                raise RegistrationError(
                    f"{owner} defines {here[event.name]} and {spelling}, two spellings of one event; keep one"
                )
            here[event.name] = spelling
            if event.name not in taken and _is_event_method(getattr(hook, spelling)):
                yield event, spelling
        taken |= set(here)


def _event_like(namespace: Any, owner: str) -> Iterator[str]:
    for name, value in namespace.items():
        if not name.startswith("on_") or not _is_event_method(value):
            continue
        if name not in SPELLINGS:
            raise RegistrationError(
                f"{owner}.{name}: there is no event {name!r}; {nearest(name, SPELLINGS, 40)}. "
                "Mark a method that is no event with @hookline.not_an_event"
            )
        yield name


def _is_event_method(value: Any) -> bool:
    """Whether it can be called and is not marked; a subclass unhears an event with ``on_… = None`` or the mark."""
    method = callable(value) or isinstance(value, (staticmethod, classmethod))
    marked = (getattr(body, "__hookline_not_an_event__", False) for body in (value, getattr(value, "__func__", value)))
    return method and not any(marked)


def function_hook(function: Callable[..., Any], event: Event, spelling: str) -> dict[str, Listener]:
    """A plain function as a hook of one event."""
    return {event.name: read_signature(function, event, spelling, getattr(function, "__name__", "function"))}


def hook_state(hook: Any) -> Any:
    """What a hook wants saved: its `state_dict()`, or the attributes named in `saves`; None when it saves nothing."""
    if callable(own := getattr(hook, "state_dict", None)):
        return own()
    names = getattr(hook, "saves", ())
    return {name: getattr(hook, name) for name in names} if names else None


def load_hook_state(hook: Any, state: Any) -> None:
    """Give a hook its state back."""
    if callable(own := getattr(hook, "load_state_dict", None)):
        own(state)
        return
    for name in getattr(hook, "saves", ()):
        if name in state:
            setattr(hook, name, state[name])


def set_up(entry: Entry, registry: Any) -> None:
    """Call a hook's `setup`, with the registry and the hook's name in it if it names them."""
    setup = getattr(entry.hook, "setup", None)
    if callable(setup):
        offered = {"registry": registry, "name": entry.name}
        setup(**{name: offered[name] for name in inspect.signature(setup).parameters if name in offered})
