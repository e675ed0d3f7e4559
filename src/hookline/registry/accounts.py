"""What hooks cost: time by hook and by lazy argument, scaled up from samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.events.dispatch import Cost
from hookline.registry.entry import Entry

WORTH_TELLING = 100_000  # ns; reading a free argument is no news

Scale = Callable[[str], float]
"""By a hook's name: how many micro-batches each of its samples stands for."""


def inner_seconds(entries: Iterable[Entry], scale: Scale) -> dict[str, float]:
    """Host time of every hook inside steps."""
    return {entry.name: entry.inner_cost.ns / 1e9 * scale(entry.name) for entry in entries}


def cost_table(entries: Iterable[Entry], arguments: Mapping[str, Cost], scale: Scale) -> list[dict[str, Any]]:
    """A row for each hook and each lazy argument that was worth it, most expensive first."""
    rows = [_hook_row(entry, scale(entry.name)) for entry in entries]
    rows += [_argument_row(name, cost) for name, cost in list(arguments.items()) if cost.ns > WORTH_TELLING]
    told = [row for row in rows if row["calls"] or row["kind"] != "update"]  # a default link that never had to run
    return sorted(told, key=lambda row: -float(str(row["seconds"])))


def _hook_row(entry: Entry, scale: float) -> dict[str, Any]:
    row = {
        "hook": entry.name,
        "kind": "+".join(entry.kinds),
        "calls": round(entry.inner_cost.calls * scale) + entry.outer_cost.calls,
        "seconds": (entry.inner_cost.ns * scale + entry.outer_cost.ns) / 1e9,
    }
    on_device = entry.inner_cost.all_device_ns * scale / 1e9
    return row | ({"device_seconds": on_device} if on_device else {})


def _argument_row(name: str, cost: Cost) -> dict[str, Any]:
    return {"hook": f"reading {name}", "kind": "argument", "calls": cost.calls, "seconds": cost.ns / 1e9}
