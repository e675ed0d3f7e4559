"""The alerts of a run, and the verdict on it: healthy, not judged, look at this, or broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hookline.record.events import SEVERITIES, Severity

Health = Literal["healthy", "not judged", "look at this", "broken"]
_HEALTH: Mapping[Severity, Health] = {"error": "broken", "warning": "look at this", "info": "healthy"}
NO_LOSS = "no_loss"
"""The kind of the notice that nothing shows whether a run learned."""

_MAX_LENGTH = 1000  # characters of a reason: exceptions may quote any text


@dataclass(frozen=True)
class Alert:
    """Something that deserves attention."""

    kind: str
    """What it is in one word, such as ``loss_spike``."""
    severity: Severity
    step: int | None
    text: str
    place: Mapping[str, str] = field(default_factory=dict)
    """Where to look: a curve, a hook, or the series, name and column of a layer's statistic."""
    parts: Sequence[Alert] = ()
    """For a story, the alerts that it combines, in their order; empty for a single alert."""
    good_until: int | None = None
    """The last step before `step` at which all was well, if that is measured rarely, like validation metrics."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run can be trusted, and why not."""

    health: Health
    reason: str = ""
    """The shortened text of the worst alert, or of the earliest if there are several; empty if the run is healthy."""
    step: int | None = None
    """The step of that alert, if it has one."""

    def __str__(self) -> str:
        """Return the verdict in one line."""
        at = "" if self.step is None else f"step {self.step:,}: "
        return f"{self.health}: {at}{self.reason}" if self.reason else self.health


def judge(alerts: Sequence[Alert]) -> Verdict:
    """Return the verdict on a run, given its alerts: the worst of them decides."""
    worst = min(alerts, key=badness, default=None)
    if worst is not None and worst.kind == NO_LOSS:
        return Verdict("not judged", worst.text)
    if worst is None or worst.severity == "info":
        return Verdict("healthy")
    reason = worst.text if len(worst.text) <= _MAX_LENGTH else f"{worst.text[: _MAX_LENGTH - 1]}…"
    return Verdict(_HEALTH[worst.severity], reason, worst.step)


def badness(alert: Alert) -> tuple[int, bool, bool, int]:
    """Return the sort key of alerts: the worst first, among notices the one that decides, and then by step."""
    return SEVERITIES.index(alert.severity), alert.kind != NO_LOSS, alert.step is None, alert.step or 0
