"""How deeply values may be nested: one limit for configs, records and saved states."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 50  # levels; real values have fewer than ten, and Python's recursion limit is far beyond
TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Return whether dicts and lists, as a parser returns them, are nested deeper than the limit."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(
        is_too_deep(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)
    )
