"""When a hook is due, as a value: the same in configs and in code, printable, and exact over a resume."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from hookline._words import nearest
from hookline.errors import ConfigError

_UNITS = {
    "step": ("steps", 1.0), "steps": ("steps", 1.0),
    "batch": ("batches", 1.0), "batches": ("batches", 1.0),
    "epoch": ("epochs", 1.0), "epochs": ("epochs", 1.0),
    "token": ("tokens", 1.0), "tokens": ("tokens", 1.0),
    "s": ("seconds", 1.0), "sec": ("seconds", 1.0), "second": ("seconds", 1.0), "seconds": ("seconds", 1.0),
    "m": ("seconds", 60.0), "min": ("seconds", 60.0), "minute": ("seconds", 60.0), "minutes": ("seconds", 60.0),
    "h": ("seconds", 3600.0), "hour": ("seconds", 3600.0), "hours": ("seconds", 3600.0),
}  # fmt: skip
_UNIT_NAMES = ("steps", "batches", "epochs", "tokens", "seconds", "minutes", "hours")  # Without their short forms.
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
FAR = 2**31
"""More micro-batches than a run has."""
_EXAMPLES = {
    "10": "steps", "'10 batches'": "batches", "'10 batches of b'": "batches", "'1 epoch'": "epochs",
    "'30 s'": "seconds", "'1M tokens'": "tokens",
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)([kKMGBT]?)\s*([A-Za-z]*)(?:\s+of\s+(\S.*?))?\s*")


class Clock(Protocol):
    """Where the run is, in every unit that a schedule counts, with the current micro-batch included."""

    @property
    def steps(self) -> int: ...
    @property
    def batches(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def loader(self) -> str:
        """The loader of the current batch."""

    @property
    def by_loader(self) -> Mapping[str, int]:
        """The number of batches of each loader."""


@dataclass(slots=True)
class Reading:
    """A clock that does not move."""

    steps: int = 0
    batches: int = 0
    epochs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loader: str = ""
    by_loader: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, clock: Clock) -> Reading:
        """Copy what a clock shows, except for the loaders."""
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
        """Return what a clock shows in this unit."""
        return clock.by_loader.get(self.loader, 0) if self.loader else getattr(clock, self.unit)

    @cached_property
    def whole(self) -> bool:
        """Whether it is counted one by one; time and tokens pass between two micro-batches."""
        return self.unit in ("steps", "batches", "epochs")

    @classmethod
    def parse(cls, value: Any, path: str = "every", units: Collection[str] = ()) -> Quantity:
        """Read an integer (steps) or text.

        Args:
            value: What was given.
            path: Where it is written, for messages.
            units: The units that are valid here, which are not those of one loader; all if empty.

        Raises:
            ConfigError: If it is negative, a fraction of what is whole, or has a unit that is not valid.
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
    """Due with a period or at given points, from a start to a stop, both included."""

    every: Quantity | None = None
    at: tuple[Quantity, ...] = ()
    start: Quantity | None = None
    stop: Quantity | None = None

    @classmethod
    def parse(cls, every: Any = None, at: Any = None, start: Any = None, stop: Any = None, path: str = "") -> Schedule:
        """Read what users write in code or in a config.

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
            raise ConfigError(f"{here}every", f"{every!r} is never due; the smallest is 1")
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
    def loaders(self) -> list[str]:
        """The loaders whose batches it counts."""
        marks = (self.every, *self.at, self.start, self.stop)
        return [mark.loader for mark in marks if mark is not None and mark.loader]

    @property
    def by_tokens_or_time(self) -> bool:
        """Whether it depends on the previous micro-batch, because tokens and time are passed, not reached."""
        return any(not mark.whole for mark in (*self.at, *([self.every] if self.every else [])))

    def __str__(self) -> str:
        parts = [f"every {self.every}"] if self.every else [] if self.at else ["always"]
        parts += [f"at {', '.join(map(str, self.at))}"] if self.at else []
        parts += [f"from {self.start}"] if self.start else []
        parts += [f"until {self.stop}"] if self.stop else []
        return ", ".join(parts)

    @cached_property
    def _period(self) -> tuple[str, int] | None:
        """Unit and amount if it is a plain period, as most are: then one division decides."""
        every = self.every
        if every is None or every.loader or every.unit not in ("steps", "batches"):
            return None
        return None if self.at or self.start or self.stop else (every.unit, int(every.amount))

    def due(self, now: Clock, before: Clock) -> bool:
        """Return whether a hook is due at `now`, when the previous micro-batch was at `before`."""
        if self._period is not None:
            unit, amount = self._period
            here: int = getattr(now, unit)
            return here > 0 and here % amount == 0
        if self.start and self.start.reading(now) < self.start.amount:
            return False
        if self.stop and self.stop.reading(now) > self.stop.amount:
            return False
        if self.every is None and not self.at:
            return True
        return (self.every is not None and _reached(self.every, now, before)) or any(
            _passed(point, now, before) for point in self.at
        )

    def wait(self, now: Clock) -> int:
        """Return for how many micro-batches `due` stays False: a lower bound; 0 if it must be evaluated again."""
        if self._period is not None:
            unit, amount = self._period
            return amount - int(getattr(now, unit)) % amount - 1
        marks = [*self.at, *([self.every] if self.every else []), *([self.start] if self.start else [])]
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


def _reached(period: Quantity, now: Clock, before: Clock) -> bool:
    """Return whether a period is due: counted units at their multiples, time and tokens when one was passed."""
    here = period.reading(now)
    if period.whole:
        return _is_of_loader(period, now) and here > 0 and here % period.amount == 0
    return here // period.amount > period.reading(before) // period.amount


def _passed(point: Quantity, now: Clock, before: Clock) -> bool:
    here = point.reading(now)
    if point.whole:
        return _is_of_loader(point, now) and here == point.amount
    return point.reading(before) < point.amount <= here


def _is_of_loader(mark: Quantity, now: Clock) -> bool:
    """Return whether the current batch counts: one loader's batches are not counted at those of others."""
    return not mark.loader or mark.loader == now.loader
