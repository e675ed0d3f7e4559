"""Report how often each forward hook was called at each of its modules, and why one never was.

A hook that is never called looks just like a hook that found nothing. The report tells the two apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hookline._text import format_table
from hookline.activations.hooked_modules import HookedModule, patterns_of
from hookline.core.entry import Entry

if TYPE_CHECKING:  # The manager makes these reports, so it imports this module.
    from hookline.activations.registry import ModelRegistry


@dataclass(frozen=True)
class FireRow:
    """One hook at one module."""

    hook: str
    module: str
    calls: int
    """Calls of the module since any hook selects it."""
    fired: int
    """How often the hook was called there and returned without an error."""
    why: str = ""
    """Why it never was; empty if it was."""


@dataclass(frozen=True)
class FireReport:
    """Every forward hook at every module it selects; prints as a table."""

    rows: tuple[FireRow, ...]

    @property
    def silent(self) -> list[str]:
        """The hooks that were called nowhere, in registration order."""
        fired = {row.hook for row in self.rows if row.fired}
        return [hook for hook in dict.fromkeys(row.hook for row in self.rows) if hook not in fired]

    def of(self, hook: str) -> list[FireRow]:
        """Return the rows of one hook."""
        return [row for row in self.rows if row.hook == hook]

    def __str__(self) -> str:
        if not self.rows:
            return "no forward hooks"
        cells = [(row.hook, row.module or "-", str(row.calls), str(row.fired), row.why) for row in self.rows]
        table = format_table(("hook", "module", "calls", "fired", "why not"), cells)
        return f"{table}\nnever fired: {', '.join(self.silent)}" if self.silent else table


def fire_report(manager: ModelRegistry) -> FireReport:
    """Return how often each forward hook of a manager was called at each of its modules."""
    if manager.dispatcher.compiled_stats is not None:
        manager.dispatcher.compiled_stats.count_calls()
    return FireReport(tuple(row for entry in manager.entries("forward") for row in _rows(manager, entry)))


def _rows(manager: ModelRegistry, entry: Entry) -> Iterator[FireRow]:
    for hooked, name in manager.dispatcher.selected_by(entry).items():
        fired = hooked.fired.get(entry.name, 0)
        why = "" if fired else _reason(manager, entry, hooked)
        yield FireRow(entry.name, name, hooked.calls, fired, why)
    # Modules that are passed as objects need no model.
    waiting = [pattern for pattern in patterns_of(entry) if not isinstance(pattern, (torch.nn.Module, weakref.ref))]
    if waiting and manager.dispatcher.model is None:
        yield FireRow(entry.name, "", 0, 0, "its patterns wait for a model")


def _reason(manager: ModelRegistry, entry: Entry, hooked: HookedModule) -> str:
    """Return the nearest cause: first the hook's own switches, then the module, then the schedule."""
    failures = entry.failures.total
    if not entry.enabled:
        return f"off ({failures} failures)" if failures else "off"
    if not entry.is_called_here(manager.ranks):
        return "not for this rank"
    if hooked.module_ref() is None:
        return "the module no longer exists"
    if not manager.dispatcher.attached:
        return "its trainer has not run the model, or its run is over"
    if hooked.calls == 0:
        return "the module was never called (bypassed)"
    if failures:
        return f"it failed every time ({failures} failures)"
    if not entry.schedule.always:
        return f"not due yet ({entry.schedule})"
    return "not called since the hook was registered, or only while hooks were silenced"
