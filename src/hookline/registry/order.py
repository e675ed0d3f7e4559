"""In which order hooks run, and why.

Lifecycle hooks: users' first, built-ins last, each in registration order. Forward and update hooks: registration order,
whoever wrote them. `before` and `after` move only the hook that asked, to the nearest legal place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Protocol

from hookline.errors import RegistrationError


class Placed(Protocol):
    """What ordering needs to know of a hook."""

    name: str
    number: int
    built_in: bool
    last: bool
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A hook's name and the reason for its position."""

    name: str
    why: str


def in_order(hooks: Iterable[Placed], tiers: bool) -> list[Place]:
    """The resolved order; `tiers` puts users' hooks before the built-in ones."""
    known = {hook.name: hook for hook in hooks}
    base = sorted(known.values(), key=lambda hook: (hook.last, tiers and hook.built_in, hook.number))
    places = [Place(hook.name, _tier(hook, tiers)) for hook in base]
    for name in _targets_first(base):
        asked = known[name]
        before = [target for target in asked.before if target in known]
        after = [target for target in asked.after if target in known]
        if before or after:
            places = _moved(places, name, before, after)
    return places


def _tier(hook: Placed, tiers: bool) -> str:
    kind = ("built-in" if hook.built_in else "user hook") + (", runs last" if tiers and hook.built_in else "")
    return f"{kind}, registered as number {hook.number}" + (", kept at the end" if hook.last else "")


def _targets_first(hooks: Sequence[Placed]) -> list[str]:
    """Hooks that others refer to are placed before those that refer to them; a cycle is refused."""
    known = {hook.name for hook in hooks}
    graph = {hook.name: [name for name in (*hook.before, *hook.after) if name in known] for hook in hooks}
    _refuse_contradictions(hooks, known)
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError:
        # Two hooks may refer to each other without contradiction (a before b, b after a): any order of placing works.
        return [hook.name for hook in hooks]


def _refuse_contradictions(hooks: Sequence[Placed], known: set[str]) -> None:
    later: dict[str, set[str]] = {hook.name: {name for name in hook.after if name in known} for hook in hooks}
    for hook in hooks:
        for target in hook.before:
            if target in known:
                later[target].add(hook.name)
    try:
        TopologicalSorter(later).prepare()
    except CycleError as error:
        ring = " → ".join(repr(name) for name in error.args[1])
        raise RegistrationError(f"before/after go round in a circle: {ring}; drop one of them") from None


def _moved(places: list[Place], name: str, before: list[str], after: list[str]) -> list[Place]:
    index = next(i for i, place in enumerate(places) if place.name == name)
    rest = [place for place in places if place.name != name]
    at = {place.name: i for i, place in enumerate(rest)}
    lowest = max((at[target] + 1 for target in after), default=0)
    highest = min((at[target] for target in before), default=len(rest))
    if lowest > highest:
        raise RegistrationError(
            f"{name!r} asks to run after {after} and before {before}, but those run in the other order themselves"
        )
    spot = min(max(index, lowest), highest)
    if spot == index:
        return places
    asked = [f"before {target!r}" for target in before] + [f"after {target!r}" for target in after]
    return [*rest[:spot], Place(name, f"{places[index].why}; moved, as it asked to run {' and '.join(asked)}"), *rest[spot:]]
