"""The registry's entry for one hook: its listeners, its options, its failures and costs, and its state."""

from __future__ import annotations

import inspect
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import FunctionType
from typing import Any

from hookline._console import logger
from hookline._parameters import names
from hookline._text import counted
from hookline.core.base import hook_attribute
from hookline.core.catalog import CATALOG, Event
from hookline.core.costs import Cost
from hookline.core.dispatch import BoundHook
from hookline.core.failures import FailureCount, FailureHandler, Policy, raise_if_quit
from hookline.core.plugins import identity, is_redefinition
from hookline.core.schedule import Schedule
from hookline.core.signature import Listener
from hookline.errors import ConfigError, HooklineError, RegistrationError, error_text, got
from hookline.ranks import Ranks

OPTIONS = ("enabled", "every", "at", "start", "stop", "before", "after", "on_error", "ranks")
"""What configs and code may specify about a hook besides its parameters."""
DEFAULT_HOOKS = ("console_log",)
"""What a trainer adds to its runs with the origin "default", unless the user has removed it."""


RankChoice = frozenset[int] | str | None
"""The ranks on which a hook is called: numbers, 'local-zero', or None for all."""


@dataclass(eq=False)
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
    off_here: bool = False  # Failures have disabled it on this rank, though perhaps not on others.
    last: bool = False  # Stays after every hook that is registered later.
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ranks: RankChoice = None
    needs: tuple[str, ...] = ()  # The `CAPABILITIES` that a run must have.
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
        """The kinds of hook that it is, by the events it listens to; a lifecycle hook if it listens to none."""
        kinds = {CATALOG[event].kind for event in self.listeners}
        return [kind for kind in ("lifecycle", "forward", "update") if kind in kinds] or ["lifecycle"]

    @property
    def inner_seconds(self) -> float:
        """Its host time inside of steps."""
        return sum(cost.ns for event, cost in self.costs.items() if CATALOG[event].inner) / 1e9

    @property
    def enabled_for_ranks(self) -> bool:
        """Whether the ranks have it enabled; failures may have disabled it on this rank alone."""
        return self.enabled or self.off_here

    def is_called_here(self, ranks: Ranks) -> bool:
        """Return whether it is enabled and called on this rank."""
        if isinstance(self.ranks, str):
            return self.enabled and ranks.local_rank == 0
        return self.enabled and (self.ranks is None or ranks.rank in self.ranks)

    def must_not_differ(self, ranks: Ranks) -> bool:
        """Return whether all ranks of a run do the same with it, so that the others cannot continue if one fails.

        One process is all of its ranks, and in a user's own loop each rank acts alone.
        """
        return ranks.act_together and bool(hook_attribute(self.hook, "same_on_all_ranks"))

    def check_ranks(self, ranks: Ranks) -> None:
        """Reject a choice of ranks if all ranks of a run must call the hook.

        Raises:
            RegistrationError: If there is one; the message says why.
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
        """The user's definition: the function, or the class of an object."""
        return self.hook if isinstance(self.hook, FunctionType) else type(self.hook)

    @cached_property
    def identity(self) -> tuple[Hashable, frozenset[int]]:
        """Where its definition is, and the code of it when it was registered."""
        return identity(self.definition)

    def record(self) -> HookRecord:
        """Return the facts that are listed and recorded about it."""
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


def _do_nothing(*arguments: Any, **keywords: Any) -> None:
    """Stand in for a hook that is called only on other ranks."""


class DerivedName(str):
    """A name that was not chosen for this instance; it gets a number if it is taken."""


def numbered(name: str, taken: Container[str], first: int = 2) -> str:
    """Return a derived name, with a number if it is taken: `my_hook`, `my_hook_2`, `my_hook_3`; try `first` first."""
    candidates = chain([name], (f"{name}_{number}" for number in count(first)))
    return next(candidate for candidate in candidates if candidate not in taken)
