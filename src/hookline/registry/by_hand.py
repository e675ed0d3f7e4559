"""Firing events from a loop of one's own: ``registry.on_epoch_end(epoch, state)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.events.arguments import by_hand
from hookline.events.catalog import SPELLINGS, Event
from hookline.events.dispatch import Fired, wanted_attributes
from hookline.events.moment import HandMoment
from hookline.registry.due import HandClock

if TYPE_CHECKING:
    from hookline.registry.registry import HookRegistry


class HandFiring:
    """Gives the values of a call their names, tells from them who is due, and fires."""

    def __init__(self, registry: HookRegistry) -> None:
        self._registry, self._tables = registry, registry.tables
        self._clock = HandClock()
        self._reduced: dict[tuple[str, frozenset[str], frozenset[str], bool], Fired] = {}

    def forget(self) -> None:
        """The set of hooks is another."""
        self._reduced = {}

    def fire(self, event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> None:
        """Fire one event with what the caller passed."""
        registry, tables = self._registry, self._tables
        named = by_hand(event, order, args, values)
        self._clock.read(named)
        if event.inner and self._clock.moved():
            jumps = registry.has_schedules  # steps fired by hand need not follow each other
            (registry.decide_who_is_due if jumps else registry.begin_batch)(self._clock.now)
        heard = getattr(tables.fire, event.name)
        if heard:
            moment = HandMoment(event, named, partial(self._who_names, event))
            if registry.has_undemanding and not tables.has_own_compiler(event.name):
                heard = self._without_missing(event, frozenset(vars(moment)))
            heard(moment)

    def _without_missing(self, event: Event, passed: frozenset[str]) -> Fired:
        """The callable for a call that passed only these values: hooks keep their defaults for the rest."""
        agenda = self._tables.agenda
        due = agenda.due_for(event)
        key = (event.name, passed, due, agenda.timed)
        if key not in self._reduced:
            bound = self._registry.listeners(event, due)
            missing = set(wanted_attributes(bound)) - passed
            reduced = [replace(item, listener=item.listener.without(missing)) for item in bound]
            self._reduced[key] = self._tables.compile(event, reduced) or _nobody
        return self._reduced[key]

    def _who_names(self, event: Event, attribute: str) -> list[str]:
        bound = self._registry.listeners(event, self._tables.agenda.due_for(event))
        return [item.hook for item in bound if attribute in item.listener.wanted]


def dispatcher(spelling: str) -> Callable[..., None]:
    """The method of a registry that fires one event; with no hooks it costs one branch."""

    def dispatch(self: HookRegistry, *args: Any, **values: Any) -> None:
        if not self.hooks:
            return
        self.fire_by_hand(spelling, args, values)

    dispatch.__name__ = spelling
    dispatch.__doc__ = SPELLINGS[spelling].doc
    return dispatch


def _nobody(moment: Any) -> None:
    """Stands for an event that no hook hears now."""
