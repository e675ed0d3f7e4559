"""The order in which hooks run, and the reasons.

Lifecycle hooks: users' first, built-ins last, each in registration order. Forward and update hooks: in registration
order. `before` and `after` move only the hook that has them, to the nearest valid position.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from hookline._text import ordinal
from hookline.errors import RegistrationError

if TYPE_CHECKING:
    from hookline.core.catalog import Event
    from hookline.core.entry import Entry


@dataclass(frozen=True)
class Position:
    """A hook's name and the reason for its position."""

    name: str
    why: str


@dataclass(frozen=True)
class Constraint:
    """The `before` and `after` of one hook, limited to registered hooks."""

    name: str
    before: list[str]
    after: list[str]

    def __str__(self) -> str:
        return " and ".join([f"before {name!r}" for name in self.before] + [f"after {name!r}" for name in self.after])


def in_order(hooks: Iterable[Entry], kind: str | None = None, strict: bool = False) -> list[Position]:
    """Resolve the order of the hooks of one kind, whether enabled or not: disabling one never moves another.

    Args:
        hooks: The hooks.
        kind: The kind; None orders hooks of all kinds as lifecycle hooks are ordered.
        strict: Whether constraints that cannot be satisfied raise an error. Otherwise such a hook keeps its `after`,
            because a constraint that was valid when it was made must not break a run when another hook is removed.

    Returns:
        The hooks' positions, in order.

    Raises:
        RegistrationError: If constraints form a cycle, or with `strict`, contradict each other.
    """
    tiers = kind in (None, "lifecycle")  # Users' hooks run before the built-in ones.
    known = {hook.name: hook for hook in hooks if kind is None or kind in hook.kinds}
    base = sorted(known.values(), key=lambda hook: (hook.last, tiers and hook.built_in, hook.number))
    positions = [Position(hook.name, _reason(hook, tiers, known)) for hook in base]
    constraints = []
    for hook in base:
        before, after = ([name for name in targets if name in known] for targets in (hook.before, hook.after))
        if before or after:
            constraints.append(Constraint(hook.name, before, after))
    if not constraints:
        return positions
    constraints = _targets_first(constraints)
    # One round is enough unless hooks refer to each other; each further one satisfies at least one more of them.
    for _ in constraints:
        names = [position.name for position in positions]
        for constraint in constraints:
            positions = _moved(positions, constraint)
        if [position.name for position in positions] == names:
            break
    if strict:
        _reject_unsatisfied(positions, constraints)
    return positions


def check_order(entry: Entry, others: Sequence[Entry]) -> None:
    """Reject the `before` and `after` of a new hook if they contradict those of the others.

    Raises:
        RegistrationError: If constraints form a cycle, or contradict each other.
    """
    if any(member.before or member.after for member in (entry, *others)):
        for kind in entry.kinds:
            in_order([*others, entry], kind, strict=True)
        in_order([*others, entry])  # Cycles through hooks of several kinds.


def _reason(hook: Entry, tiers: bool, known: Container[str]) -> str:
    kind = ("built-in" if hook.built_in else "user hook") + (" (after your hooks)" if tiers and hook.built_in else "")
    kind += ", added by default" if hook.origin == "default" else ""
    at_end = ", always last" if hook.last else ""
    absent = [repr(target) for target in (*hook.before, *hook.after) if target not in known]
    verb = "is" if len(absent) == 1 else "are"
    in_vain = f"; ignores {' and '.join(absent)}, which {verb} not registered" if absent else ""
    return f"{kind}, registered {ordinal(hook.number)}{at_end}{in_vain}"


def _targets_first(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Sort constraints so that hooks others refer to are placed before those that refer to them; reject cycles."""
    earlier: dict[str, set[str]] = {constraint.name: set(constraint.after) for constraint in constraints}
    for constraint in constraints:
        for target in constraint.before:
            earlier.setdefault(target, set()).add(constraint.name)
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError as error:
        cycle = " → ".join(repr(name) for name in error.args[1])
        raise RegistrationError(f"before/after form a cycle: {cycle}; remove one of them") from None
    by_name = {constraint.name: constraint for constraint in constraints}
    references = {constraint.name: [*constraint.before, *constraint.after] for constraint in constraints}
    try:
        return [by_name[name] for name in TopologicalSorter(references).static_order() if name in by_name]
    except CycleError:  # Hooks may refer to each other without contradiction: a before b, b after a.
        return list(constraints)


def _moved(positions: list[Position], constraint: Constraint) -> list[Position]:
    """Move one hook to the nearest position that satisfies it; `after` wins where both cannot be satisfied."""
    index = next(i for i, position in enumerate(positions) if position.name == constraint.name)
    rest = [*positions[:index], *positions[index + 1 :]]
    at = {position.name: i for i, position in enumerate(rest)}
    lowest = max((at[target] + 1 for target in constraint.after), default=0)
    highest = min((at[target] for target in constraint.before), default=len(rest))
    target = max(min(index, highest), lowest)
    if target == index:
        return positions
    why = positions[index].why.partition("; moved")[0]
    moved = Position(constraint.name, f"{why}; moved because it asks to run {constraint}")
    return [*rest[:target], moved, *rest[target:]]


def _reject_unsatisfied(positions: Sequence[Position], constraints: Iterable[Constraint]) -> None:
    at = {position.name: i for i, position in enumerate(positions)}
    for constraint in constraints:
        here = at[constraint.name]
        if any(at[name] < here for name in constraint.before) or any(at[name] > here for name in constraint.after):
            raise RegistrationError(
                f"{constraint.name!r} asks to run {constraint}, but those hooks run in the opposite order; "
                "remove one of the two"
            )


def explanation(event: Event, positions: Iterable[Position], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a line about an event, then one for each of its hooks in order: when it runs, why there, its arguments.

    Args:
        event: The event.
        positions: The order of the hooks.
        entries: The hooks by name.
    """
    yield f"{event.name}: {event.fires}; gradients: {event.gradients}"
    listed = [place for place in positions if place.name in entries and event.name in entries[place.name].listeners]
    for index, position in enumerate(listed, 1):
        entry = entries[position.name]
        status = "" if entry.enabled else " [disabled]"
        when = f" ({entry.schedule})" if event.inner and not entry.schedule.always else ""
        arguments = ", ".join(event.arguments_of(entry.listeners[event.name].wanted)) or "none"
        yield f"  {index}. {position.name}{status}{when}: {position.why}; arguments: {arguments}"
    if not listed:
        yield "  no listeners"
