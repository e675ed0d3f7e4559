"""In which order hooks run, and why.

Lifecycle hooks: users' first, built-ins last, each in registration order. Forward and update hooks: registration order,
whoever wrote them. `before` and `after` move only the hook that asked, to the nearest legal place.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
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


@dataclass(frozen=True)
class Ask:
    """Where one hook wants to be, among the hooks that are there."""

    name: str
    before: list[str]
    after: list[str]

    def __str__(self) -> str:
        return " and ".join([f"before {name!r}" for name in self.before] + [f"after {name!r}" for name in self.after])


def in_order(hooks: Iterable[Placed], tiers: bool, strict: bool = False) -> list[Place]:
    """The resolved order; `tiers` puts users' hooks before the built-in ones.

    Circles are refused always; with `strict`, what nobody can satisfy is, too. Without it such a hook keeps its
    `after`: a wish that was legal when it was made must not break a run because another hook has been removed.
    """
    known = {hook.name: hook for hook in hooks}
    base = sorted(known.values(), key=lambda hook: (hook.last, tiers and hook.built_in, hook.number))
    places = [Place(hook.name, _tier(hook, tiers) + _in_vain(hook, known)) for hook in base]
    asks = _targets_first(list(filter(None, (_ask(hook, known) for hook in base))))
    # One round is enough unless hooks refer to each other; each further one settles at least one more of them.
    for _ in asks:
        moved = _round(places, asks)
        if [place.name for place in moved] == [place.name for place in places]:
            break
        places = moved
    if strict:
        _refuse_unsatisfied(places, asks)
    return places


def _ask(hook: Placed, known: Container[str]) -> Ask | None:
    before = [target for target in hook.before if target in known]
    after = [target for target in hook.after if target in known]
    return Ask(hook.name, before, after) if before or after else None


def _round(places: list[Place], asks: Iterable[Ask]) -> list[Place]:
    for ask in asks:
        places = _moved(places, ask)
    return places


def _tier(hook: Placed, tiers: bool) -> str:
    kind = ("built-in" if hook.built_in else "user hook") + (", after users' hooks" if tiers and hook.built_in else "")
    return f"{kind}, registered as number {hook.number}" + (", kept at the end" if hook.last else "")


def _in_vain(hook: Placed, known: Container[str]) -> str:
    """Whom it asked for that is not there: nobody of that name may ever come."""
    absent = [repr(target) for target in (*hook.before, *hook.after) if target not in known]
    return f"; asked for {' and '.join(absent)}, not there" if absent else ""


def _targets_first(asks: Sequence[Ask]) -> list[Ask]:
    """Hooks that others refer to are placed before those that refer to them; a circle of wishes is refused."""
    _refuse_circles(asks)
    by_name = {ask.name: ask for ask in asks}
    graph = {ask.name: [*ask.before, *ask.after] for ask in asks}
    try:
        return [by_name[name] for name in TopologicalSorter(graph).static_order() if name in by_name]
    except CycleError:  # hooks may refer to each other without contradiction: a before b, b after a
        return list(asks)


def _refuse_circles(asks: Sequence[Ask]) -> None:
    later: dict[str, set[str]] = {ask.name: set(ask.after) for ask in asks}
    for ask in asks:
        for target in ask.before:
            later.setdefault(target, set()).add(ask.name)
    try:
        TopologicalSorter(later).prepare()
    except CycleError as error:
        ring = " → ".join(repr(name) for name in error.args[1])
        raise RegistrationError(f"before/after go round in a circle: {ring}; drop one of them") from None


def _moved(places: list[Place], ask: Ask) -> list[Place]:
    """Only the hook that asked moves, to the nearest place that satisfies it; `after` wins where both cannot be had."""
    index = next(i for i, place in enumerate(places) if place.name == ask.name)
    rest = [*places[:index], *places[index + 1 :]]
    at = {place.name: i for i, place in enumerate(rest)}
    lowest = max((at[target] + 1 for target in ask.after), default=0)
    highest = min((at[target] for target in ask.before), default=len(rest))
    spot = max(min(index, highest), lowest)
    if spot == index:
        return places
    why = places[index].why.partition("; moved")[0]
    return [*rest[:spot], Place(ask.name, f"{why}; moved, as it asked to run {ask}"), *rest[spot:]]


def _refuse_unsatisfied(places: Sequence[Place], asks: Iterable[Ask]) -> None:
    at = {place.name: i for i, place in enumerate(places)}
    for ask in asks:
        mine = at[ask.name]
        if any(at[name] < mine for name in ask.before) or any(at[name] > mine for name in ask.after):
            raise RegistrationError(
                f"{ask.name!r} asks to run {ask}, but those run in the other order themselves; drop one of these wishes"
            )
