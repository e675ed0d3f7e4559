"""Tell alerts with one cause as one story: ruined numbers ruin others, and a hook that fails is disabled."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.record.events import EVENTS, HOOK_FAILURE_MARK, NAN_MARK, SEVERITIES
from hookline.runs.verdict import Alert

_TOLD = 4  # alerts in the text of a story
_NON_FINITE = {"non_finite", *(kind.kind for kind in EVENTS.values() if kind.mark == NAN_MARK)}
_RUINED = {"diverged", "worse_than_best", *_NON_FINITE}
_HOOK_FAILURES = {kind.kind for kind in EVENTS.values() if kind.mark == HOOK_FAILURE_MARK}
_NOT_NUMBERS = {"input_bound"}  # alerts about curves of the clock


def tell_stories(alerts: Sequence[Alert]) -> list[Alert]:
    """Join the alerts that share a cause: ruined numbers, or the failures of one hook.

    Once a run has a NaN or infinity, diverges or loses what it learned, everything its numbers show is
    one story.
    """
    ruined = [alert for alert in alerts if alert.kind in _RUINED and alert.severity == "error"]
    begin = min(map(_begin, ruined), default=None)
    stories: dict[object, list[Alert]] = {}
    for alert in alerts:
        is_part = begin is not None and _is_number(alert) and _step(alert) >= begin
        cause = "numbers" if is_part else alert.place.get("hook") if alert.kind in _HOOK_FAILURES else None
        stories.setdefault(id(alert) if cause is None else cause, []).append(alert)
    return [_tell(sorted(parts, key=_order)) if len(parts) > 1 else parts[0] for parts in stories.values()]


def _order(alert: Alert) -> tuple[float, bool]:
    """Return the sort key for the parts of a story: the step, then what a step computes first.

    A backward pass spreads a NaN to every layer, so the outputs and the loss of its step say where it came from.
    """
    return _step(alert), alert.place.get("series", "").startswith("gradient")


def _tell(parts: Sequence[Alert]) -> Alert:
    """Return one alert for several: it has the kind and the step of the first, and the place of the first layer."""
    told = first_of_each_kind(parts)[:_TOLD]
    texts = [told[0].text, *(_with_step(part) for part in told[1:])]
    more = f"; and {len(parts) - len(told)} more" if len(parts) > len(told) else ""
    severity = min((part.severity for part in parts), key=SEVERITIES.index)
    place = next((part.place for part in parts if "series" in part.place), parts[0].place)
    return Alert(parts[0].kind, severity, parts[0].step, f"{'; then '.join(texts)}{more}", place, tuple(parts))


def first_of_each_kind(parts: Sequence[Alert]) -> list[Alert]:
    """Return the parts of a story that are worth reading: others say the same about another metric or step."""
    kinds = [part.kind for part in parts]
    return [part for place, part in enumerate(parts) if part.kind not in kinds[:place]]


def _is_number(alert: Alert) -> bool:
    is_of_numbers = not alert.place.keys().isdisjoint(("curve", "series")) and alert.kind not in _NOT_NUMBERS
    return is_of_numbers or alert.kind in _RUINED


def _begin(alert: Alert) -> float:
    """Return the step from which on everything may have the cause of an alert."""
    return _step(alert) if alert.good_until is None else alert.good_until + 1


def _step(alert: Alert) -> float:
    return float("inf") if alert.step is None else alert.step


def _with_step(alert: Alert) -> str:
    return alert.text if alert.step is None else f"{alert.text} (step {alert.step:,})"
