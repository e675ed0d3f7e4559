"""Write numbers of a run's progress for people: metrics, rates and counts."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Return a loss or a metric as text."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4f}"
    return f"{value:.3e}"


def rate(per_second: float, unit: str) -> str:
    """Return a rate as text, of slow things as a duration."""
    if per_second >= 100:
        return f"{per_second:,.0f} {unit}s/s"
    return f"{per_second:.1f} {unit}s/s" if per_second >= 1 else f"{1 / max(per_second, 1e-9):,.1f} s/{unit}"


def of_total(count: int, total: int | None, unit: str = "") -> str:
    """Return a count as text, with its total if that is known."""
    return f"{count:,}" + (f"/{total:,}" if total else "") + (f" {unit}" if unit else "")
