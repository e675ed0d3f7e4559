"""Fire accounting: how often each forward hook fired at each of its modules, and why one never did.

A hook that stays silent looks just like a hook that found nothing. This tells the two apart.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hookline.activations.direct import is_compiled
from hookline.activations.site import Site
from hookline.registry.entry import Entry

if TYPE_CHECKING:  # the manager makes these reports, so it imports this module
    from hookline.activations.manager import HookManager

OFF = "off"
OTHER_RANK = "not for this rank"
NOT_DUE = "not due yet"
BYPASSED = "the module was never called (bypassed)"
COMPILED = "compiled, and not called there since the hook was registered"
WAITING = "its patterns wait for a model"
GONE = "the module no longer exists"
FAILED = "it failed every time"
UNHEARD = "not called since the hook was registered, or only while hooks were set aside"


@dataclass(frozen=True)
class FireRow:
    """One hook at one module."""

    hook: str
    module: str
    calls: int
    """Calls of the module since it is watched, by whichever hook."""
    fired: int
    """How often the hook was called there and came back without an error."""
    why: str = ""
    """Why it never fired; empty when it did."""


@dataclass(frozen=True)
class FireReport:
    """Every forward hook at every module it selects; prints as a table."""

    rows: tuple[FireRow, ...]

    @property
    def silent(self) -> list[str]:
        """The hooks that fired nowhere, in registration order."""
        fired = {row.hook for row in self.rows if row.fired}
        return [hook for hook in dict.fromkeys(row.hook for row in self.rows) if hook not in fired]

    def of(self, hook: str) -> list[FireRow]:
        """The rows of one hook."""
        return [row for row in self.rows if row.hook == hook]

    def __str__(self) -> str:
        if not self.rows:
            return "no forward hooks"
        cells = [(row.hook, row.module or "-", str(row.calls), str(row.fired), row.why) for row in self.rows]
        table = aligned(("hook", "module", "calls", "fired", "why not"), cells)
        return f"{table}\nnever fired: {', '.join(self.silent)}" if self.silent else table


def fire_report(manager: HookManager) -> FireReport:
    """How often each forward hook of a manager fired at each of its modules, and why not where it never did."""
    manager.tap.ledger.settle()
    compiled = _compiled_modules(manager.tap.sites.model)
    entries = manager.entries("forward")
    return FireReport(tuple(row for entry in entries for row in _rows(manager, entry, compiled)))


def _rows(manager: HookManager, entry: Entry, compiled: set[int]) -> Iterator[FireRow]:
    for site in manager.tap.sites.of(entry):
        fired = site.fired.of(entry.name)
        why = "" if fired else _why(manager, entry, site, compiled)
        yield FireRow(entry.name, site.name_for(entry.name), site.all_calls, fired, why)
    if manager.tap.sites.model is None and _has_patterns(entry):
        yield FireRow(entry.name, "", 0, 0, WAITING)


def _why(manager: HookManager, entry: Entry, site: Site, compiled: set[int]) -> str:
    """The nearest cause: the hook's own switch first, then the module, then the schedule."""
    failures = entry.failures.total
    if not entry.enabled:
        return f"{OFF} ({failures} failures)" if failures else OFF
    if entry.ranks is not None and manager.desk.rank not in entry.ranks:
        return OTHER_RANK
    if site.module is None:
        return GONE
    if site.all_calls == 0:
        return COMPILED if id(site.module) in compiled or is_compiled(site.module) else BYPASSED
    if failures:
        return f"{FAILED} ({failures} failures)"
    return UNHEARD if entry.schedule.always else f"{NOT_DUE} ({entry.schedule})"


def _has_patterns(entry: Entry) -> bool:
    """Whether a hook selects by anything but modules given as they are, which need no model."""
    pattern = getattr(entry.hook, "modules", "*")
    patterns = pattern if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
    return not all(isinstance(one, (torch.nn.Module, weakref.ref)) for one in patterns)


def _compiled_modules(model: torch.nn.Module | None) -> set[int]:
    """Ids of the modules that run inside compiled code: their own, an ancestor's, or that of a wrapper around them."""
    inside = [module for module in model.modules() if is_compiled(module)] if model is not None else []
    return {id(inner) for outer in (*inside, *_compile_wrappers()) for inner in outer.modules()}


def _compile_wrappers() -> list[torch.nn.Module]:
    """What ``torch.compile(module)`` has returned: a module does not know its wrapper, and torch keeps no list."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import; where it is not, nothing is compiled
    if dynamo is None:
        return []
    return [found for found in gc.get_objects() if issubclass(type(found), dynamo.OptimizedModule)]


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as plain text: every column as wide as its widest cell."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
