"""When a hook is due, as a value: the same in configs and in code, printable, and exact across a resume.

`Scheduler` decides which of a registry's hooks are due; schedules are evaluated only when the answer may change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hookline._words import nearest
from hookline.errors import ConfigError

if TYPE_CHECKING:
    from hookline.core.catalog import Event
    from hookline.core.entry import Entry
    from hookline.run.progress import Progress

_UNITS = {
    "step": ("steps", 1.0), "steps": ("steps", 1.0),
    "batch": ("batches", 1.0), "batches": ("batches", 1.0),
    "epoch": ("epochs", 1.0), "epochs": ("epochs", 1.0),
    "token": ("tokens", 1.0), "tokens": ("tokens", 1.0),
    "s": ("seconds", 1.0), "sec": ("seconds", 1.0), "second": ("seconds", 1.0), "seconds": ("seconds", 1.0),
    "m": ("seconds", 60.0), "min": ("seconds", 60.0), "minute": ("seconds", 60.0), "minutes": ("seconds", 60.0),
    "h": ("seconds", 3600.0), "hour": ("seconds", 3600.0), "hours": ("seconds", 3600.0),
}  # fmt: skip
_UNIT_NAMES = ("steps", "batches", "epochs", "tokens", "seconds", "minutes", "hours")  # Without short forms.
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
FAR = 2**31
"""More micro-batches than any run has."""
_EXAMPLES = {
    "10": "steps", "'10 batches'": "batches", "'10 batches of b'": "batches", "'1 epoch'": "epochs",
    "'30 s'": "seconds", "'1M tokens'": "tokens",
}  # fmt: skip
Clock: TypeAlias = "Progress | Reading"
"""What schedules read: the current or earlier counters of a run."""
_QUANTITY = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)([kKMGBT]?)\s*([A-Za-z]*)(?:\s+of\s+(\S.*?))?\s*")


@dataclass(slots=True)
class Reading:
    """Where a run was, in every unit that a schedule counts, including the current micro-batch."""

    steps: int = 0
    batches: int = 0
    epochs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loader: str = ""  # The loader of the current batch.
    by_loader: Mapping[str, int] = field(default_factory=dict)  # The number of batches of each loader.

    @classmethod
    def of(cls, clock: Clock) -> Reading:
        """Copy the readings of a clock, except for the loaders."""
        return cls(clock.steps, clock.batches, clock.epochs, clock.tokens, clock.seconds)


@dataclass(frozen=True)
class Quantity:
    """An amount of one unit: ``10 steps``, ``30 s``, ``1M tokens``, ``10 batches of b``."""

    amount: float
    unit: str
    loader: str = ""

    def __str__(self) -> str:
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        singular = self.unit.removesuffix("es" if self.unit == "batches" else "s")
        of = f" of {self.loader}" if self.loader else ""
        return f"{amount} {singular if amount == 1 else self.unit}{of}"

    def reading(self, clock: Clock) -> float:
        """Return the reading of a clock in this unit."""
        return clock.by_loader.get(self.loader, 0) if self.loader else getattr(clock, self.unit)

    def passed(self, now: Clock, before: Clock) -> tuple[float, float]:
        """Return the current and the previous reading of the clock; everything between the two has just been passed.

        A counted unit passes at each micro-batch that belongs to it; a loader's batches pass only at that loader's.
        """
        here = self.reading(now)
        if not self.whole:
            return here, self.reading(before)
        is_counted = not self.loader or self.loader == now.loader
        return here, max(here - 1, 0) if is_counted else here

    @cached_property
    def whole(self) -> bool:
        """Whether it is counted one by one; time and tokens pass between two micro-batches."""
        return self.unit in ("steps", "batches", "epochs")

    @classmethod
    def parse(cls, value: Any, path: str = "every", units: Collection[str] = ()) -> Quantity:
        """Read an integer (steps) or a string.

        Args:
            value: The given value.
            path: Where it is written, for messages.
            units: The units that are valid here, which are not those of one loader; all if empty.

        Raises:
            ConfigError: If it is negative, a fraction of a whole unit, or has an invalid unit.
        """
        if isinstance(value, Quantity):
            return value
        written = isinstance(value, (int, str)) and not isinstance(value, bool)
        match = _QUANTITY.fullmatch(str(value)) if written else None
        if not match:
            *most, last = [example for example, unit in _EXAMPLES.items() if not units or unit in units]
            remedy = f"write {', '.join(most)} or {last}" if most else f"write {last}"
            raise ConfigError(path, f"{value!r} is not a schedule; {remedy}")
        number, factor, word, loader = match.groups()
        unit = _UNITS.get(word.lower() or "steps")
        if unit is None:
            valid = [name for name in _UNIT_NAMES if not units or _UNITS[name][0] in units]
            raise ConfigError(path, f"{word!r} is not a unit; {nearest(word, valid)}")
        if units and (loader or unit[0] not in units):
            raise ConfigError(path, f"{value!r}: count in {' or '.join(units)}")
        amount = float(number.replace("_", "")) * _FACTORS[factor] * unit[1]
        if unit[0] != "seconds" and amount != int(amount):
            raise ConfigError(path, f"{value!r}: {unit[0]} are whole numbers")
        if loader and unit[0] != "batches":
            raise ConfigError(path, f"{value!r}: a loader has batches, not {unit[0]}; write '10 batches of {loader}'")
        return cls(amount, unit[0], loader or "")


@dataclass(frozen=True)
class Schedule:
    """Due with a period or at given points, from a start to a stop, inclusive."""

    every: Quantity | None = None
    at: tuple[Quantity, ...] = ()
    start: Quantity | None = None
    stop: Quantity | None = None

    @classmethod
    def parse(cls, every: Any = None, at: Any = None, start: Any = None, stop: Any = None, path: str = "") -> Schedule:
        """Read a schedule as users write it in code or in a config.

        Args:
            every: The period.
            at: One point or several.
            start: When it is first due.
            stop: When it is last due.
            path: Where it is written, for messages.

        Raises:
            ConfigError: If one of them is not valid.
        """
        here = f"{path}." if path else ""
        period = None if every is None else Quantity.parse(every, f"{here}every")
        if period is not None and period.amount <= 0:
            raise ConfigError(f"{here}every", f"{every!r} is never due; the minimum is 1")
        given = () if at is None else at if isinstance(at, (list, tuple)) else (at,)
        points = tuple(Quantity.parse(point, f"{here}at") for point in given)
        if any(point.amount <= 0 for point in points):
            raise ConfigError(f"{here}at", f"{at!r} is never reached; counting starts at 1")
        return cls(
            period,
            points,
            None if start is None else Quantity.parse(start, f"{here}start"),
            None if stop is None else Quantity.parse(stop, f"{here}stop"),
        )

    @property
    def always(self) -> bool:
        """Whether it is due at every step or micro-batch."""
        return self.every in (None, Quantity(1, "steps"), Quantity(1, "batches")) and not (
            self.at or self.start or self.stop
        )

    @property
    def marks(self) -> list[Quantity]:
        """All quantities that it names."""
        return [mark for mark in (self.every, *self.at, self.start, self.stop) if mark is not None]

    @property
    def loaders(self) -> list[str]:
        """The loaders whose batches it counts."""
        return [mark.loader for mark in self.marks if mark.loader]

    @property
    def by_tokens_or_time(self) -> bool:
        """Whether it depends on the previous micro-batch, because tokens and time are passed, not reached."""
        return any(mark is not None and not mark.whole for mark in (self.every, *self.at))

    def __str__(self) -> str:
        parts = [f"every {self.every}"] if self.every else [] if self.at else ["always"]
        parts += [f"at {', '.join(map(str, self.at))}"] if self.at else []
        parts += [f"from {self.start}"] if self.start else []
        parts += [f"until {self.stop}"] if self.stop else []
        return ", ".join(parts)

    def due(self, now: Clock, before: Clock) -> bool:
        """Return whether a hook is due at `now`, when the previous micro-batch was at `before`."""
        if self.start and self.start.reading(now) < self.start.amount:
            return False
        if self.stop and self.stop.reading(now) > self.stop.amount:
            return False
        if self.every is None and not self.at:
            return True
        if self.every is not None:
            here, then = self.every.passed(now, before)
            if here // self.every.amount > then // self.every.amount:
                return True
        for point in self.at:
            here, then = point.passed(now, before)
            if then < point.amount <= here:
                return True
        return False

    def wait(self, now: Clock) -> int:
        """Return for how many micro-batches `due` stays False: a lower bound; 0 if it must be evaluated again."""
        marks = [mark for mark in (self.every, *self.at, self.start) if mark is not None]
        if not marks or not all(mark.whole for mark in marks):
            return 0
        return max(0, min(self._distance(mark, now) for mark in marks) - 1)

    def _distance(self, mark: Quantity, now: Clock) -> int:
        if mark.unit == "epochs":
            return FAR  # Schedules are evaluated when an epoch begins.
        here = int(mark.reading(now))
        if mark is self.every:
            return int(mark.amount) - here % int(mark.amount)
        return int(mark.amount) - here if mark.amount > here else FAR


# ---- due hooks -------------------------------------------------------------------------------------------------------


class Decision(NamedTuple):
    """Everything that the callables of events depend on."""

    due: frozenset[str] = frozenset()
    """Scheduled hooks that are due at this micro-batch."""
    due_at_step: frozenset[str] = frozenset()
    """Scheduled hooks that are due at one of this step's micro-batches so far."""

    def due_for(self, event: Event) -> frozenset[str]:
        """Return the scheduled hooks that are called at an event.

        A hook that came due within a step's window is called at the step's events, which come when the window ends.
        """
        return self.due_at_step if event.of_step else self.due


class Scheduler:
    """Counts down to the next micro-batch at which a schedule must be evaluated."""

    def __init__(self) -> None:
        self.decision = Decision()
        self.countdown = 0
        """Micro-batches until a hook may become due."""
        self.groups: dict[Schedule, list[str]] | None = None
        """Hooks that are not always due, by schedule; None if the hooks have changed since the last decision."""
        self._previous: Reading | None = Reading()  # None if no schedule was evaluated at the previous micro-batch.
        self._window: tuple[int, int] | None = None  # Step and epoch of the last decision.

    def replan(self, restored: Clock | None) -> None:
        """Evaluate every schedule at the next micro-batch: an epoch began, or counters were `restored`."""
        if restored is not None:
            self._previous = Reading.of(restored)
        self._window = None  # A step begins with it, even if it has the number of one that was abandoned.
        self.countdown = 0

    def forget(self, hook: str) -> None:
        """Forget a removed hook, because another may take its name."""
        decision = self.decision
        self.decision = Decision(decision.due - {hook}, decision.due_at_step - {hook})

    def decide(self, now: Clock, entries: Iterable[Entry], counts_down: bool = True) -> None:
        """Decide which of the registry's hooks are due now, and for how many further micro-batches that holds.

        Args:
            now: Where the loop is.
            entries: The hooks.
            counts_down: Whether the next micro-batches follow this one; otherwise the next one is decided by itself.
        """
        if self.groups is None:  # Usually several hooks share a schedule, which is evaluated only once.
            self.groups = {}
            for entry in entries:
                if entry.enabled_for_ranks and not entry.schedule.always:
                    self.groups.setdefault(entry.schedule, []).append(entry.name)
        window = now.steps, now.epochs
        in_window = self.decision.due_at_step if self._window == window else frozenset()
        due = self._due(now, self.groups, in_window)
        self.decision, self._window = Decision(due, in_window | due), window
        # While a hook is due, the answer may differ at the next micro-batch.
        is_settled = counts_down and not self.decision.due_at_step
        self.countdown = min((schedule.wait(now) for schedule in self.groups), default=FAR) if is_settled else 0
        self._previous = None if self.countdown else Reading.of(now)

    def _due(self, now: Clock, groups: dict[Schedule, list[str]], in_window: frozenset[str]) -> frozenset[str]:
        """Return the scheduled hooks that are due now, given those that were due earlier in the step's window."""
        previous: Clock | None = self._previous
        if previous is None or (previous.batches == 0 and now.batches > 1):
            previous = now  # Points that were passed while no schedule was evaluated are past.
        names: list[str] = []
        for schedule, group in groups.items():
            if schedule.due(now, previous):
                names += group
            elif in_window and schedule.by_tokens_or_time:
                # A hook that becomes due by tokens or time in the middle of a window is called at the rest of its
                # micro-batches.
                names += [name for name in group if name in in_window]
        return frozenset(names)
