"""What happens when a hook fails: annotated, counted, isolated or raised, never replaced and never hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hookline.errors import ConfigError, nearest

Policy = Literal["warn", "disable", "raise"]
POLICIES = {
    "warn": "report once with traceback, count, switch off after 3 failures in a row at one event",
    "disable": "report and switch off at the first failure",
    "raise": "end the run",
}
STRIKES = 3
logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class Incident:
    """Something that happened to a hook and belongs in the record: failed, switched off, overruled, stopped a run."""

    kind: str
    hook: str
    event: str
    step: int
    message: str
    error: BaseException | None = None


@dataclass
class Failures:
    """One hook's failures: how many in all, and how many in a row at each event."""

    total: int = 0
    in_a_row: dict[str, int] = field(default_factory=dict)

    def add(self, event: str) -> int:
        """Count one more; returns how many in a row at this event."""
        self.total += 1
        self.in_a_row[event] = self.in_a_row.get(event, 0) + 1
        return self.in_a_row[event]


def check_policy(value: str, path: str = "on_error") -> Policy:
    """A policy by name; a miss lists the choices."""
    for policy in ("warn", "disable", "raise"):
        if value == policy:
            return policy
    raise ConfigError(path, f"{value!r} is no failure policy; {nearest(str(value), POLICIES)}")


def annotate(error: BaseException, hook: str, event: str, step: int, rank: int) -> None:
    """Say on the exception itself where it came from."""
    where = f"raised by hook {hook!r} in {event}, step {step}" + (f", rank {rank}" if rank else "")
    if where not in getattr(error, "__notes__", ()):
        error.add_note(where)


def must_raise(error: BaseException, policy: Policy) -> bool:
    """Whether a failure ends the run: by the hook's policy, or because the error itself insists (strict monitors)."""
    return policy == "raise" or getattr(error, "always_raise", False)


def report(incident: Incident, first: bool, listeners: list[Callable[[Incident], Any]]) -> None:
    """Tell whoever keeps the record; the console hears the first failure of a hook with its traceback."""
    for tell in listeners:
        tell(incident)
    if first:
        logger.warning(
            "hook %r, %s, step %d: %s", incident.hook, incident.event, incident.step, incident.message,
            exc_info=incident.error,
        )  # fmt: skip
