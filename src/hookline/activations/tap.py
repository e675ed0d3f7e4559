"""The tap: keeps torch hooks on the modules that forward hooks select, and makes the callable of `on_forward`.

Torch hooks are attached when the first forward hook that selects a module is registered and removed with the last, so a
model nobody watches carries none. A hook that is not due costs its modules one branch per call. One that is off costs
nothing: its torch hooks are taken away, unless a compiler is in use, which would compile anew when they come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookline.activations import compiled, direct
from hookline.activations.adding_up import renew_editions
from hookline.activations.caller import Call, ShortWay, calls_of, one_after_the_other
from hookline.activations.compiler_import import when_imported
from hookline.activations.ledger import Due, Ledger, Page
from hookline.activations.moment import Measured, NoRun
from hookline.activations.site import Site
from hookline.activations.sites import Sites
from hookline.errors import RegistrationError
from hookline.events.dispatch import Bound, Fired
from hookline.registry.base import Hook
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry

MEASURED = ("seconds", "memory")
LIVE_TRAITS = ("intervene", "watches_backward")  # of hooks that need the output itself, with its graph
SHOWN = {"inputs": compiled.INPUTS, "kwargs": compiled.KWARGS, "output": compiled.OUTPUT, "live_output": compiled.LIVE}


class Tap:
    """Keeps the torch hooks on modules in step with the forward hooks of a registry."""

    def __init__(
        self,
        registry: HookRegistry,
        enable_intervention: bool = False,
        clean_up: Callable[[], None] | None = None,
        cleanup_interval: int = 1000,
    ) -> None:
        self.registry = registry
        self._clean_up, self.cleanup_interval, self._until_clean_up = clean_up, cleanup_interval, cleanup_interval
        self.enable_intervention = enable_intervention
        self.sites = Sites(registry.fire)
        self.ledger = Ledger(registry.fire)
        self.run: Any = NoRun()
        self._aside = threading.local()  # forward hooks are set aside for the thread that asked
        self.asides = 0  # blocks that set them aside, in all threads
        self._lifted = False
        self._heard_by: Fired | None = None  # the callable of `on_forward` that waits while the torch hooks are off
        self._lock = threading.RLock()
        registry.admit_with(self._check)
        registry.watch_changes(self.sync)
        registry.tables.compile_with("on_forward", self.compile)

    # ---- attaching -------------------------------------------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> None:
        """Resolve patterns against this model from now on; a pattern that matches nothing in it is an error."""
        for entry in self.registry.entries("forward"):
            self.sites.check(entry, model)
        self.sites.watch(model)
        self.registry.tables.reset()
        self.sync()

    def _check(self, entry: Entry) -> None:
        """Refuse a pattern that matches nothing when the hook is registered, not when it should fire."""
        if "on_forward" not in entry.listeners:
            return
        if getattr(entry.hook, "intervene", False) and not self.enable_intervention:
            raise RegistrationError(
                f"{entry.name!r} intervenes, and interventions are off: "
                "give enable_intervention=True to the trainer or to HookManager"
            )
        self.sites.check(entry, self.sites.model)

    def sync(self) -> None:
        """Attach to the modules that are watched now, detach from the others."""
        with self._lock:
            entries = self.registry.entries("forward")
            self.sites.forget_others(entries)
            if not entries:
                self.detach()
                return
            if self._lifted:
                return
            self._attach([entry for entry in entries if _listens(entry) or compiled.is_used()])
            if compiled.is_used():
                compiled.notice_hooks()
                self._enter_graphs(entries)
            elif compiled.is_loaded():
                compiled.when_back(self.sync)
            else:
                when_imported(self.sync)
            renew_editions()

    def detach(self) -> None:
        """Leave every module as it was."""
        with self._lock:
            self.ledger.close()
            for site in self.sites:
                site.detach()
            renew_editions()

    def lift(self) -> None:
        """Take the torch hooks off for a while; what is known of the modules stays.

        Nobody hears anything until they are back, not even of a call that has begun already.
        """
        fire = self.registry.fire
        with self._lock:
            self._lifted, self._heard_by = True, fire.on_forward
            fire.on_forward = None  # type: ignore[attr-defined]
            for site in self.sites:
                site.take_off()
            renew_editions()

    def put_back(self) -> None:
        """Have the torch hooks where `lift` took them off."""
        with self._lock:
            self._lifted = False
            self.registry.fire.on_forward = self._heard_by  # type: ignore[attr-defined]
            directly = direct.is_open()
            for site in self.sites:
                site.put_on(directly)
            renew_editions()

    def _attach(self, entries: list[Entry]) -> None:
        """Have the torch hooks that are wanted, and no others."""
        measured: dict[Site, bool] = {}
        for entry in entries:
            measures = _measures(entry)
            for site in self.sites.of(entry):
                measured[site] = measured.get(site, False) or measures
        directly = direct.is_open()
        for site in self.sites:
            if site in measured:
                site.attach(measured[site], directly)
            else:
                site.detach()

    def _enter_graphs(self, entries: list[Entry]) -> None:
        """Have compiled code show the hooks that are switched on what they name."""
        shown: dict[Site, set[str]] = {}
        for entry in entries:
            parts = _shown(entry)
            if _wants_statistics(entry.hook):
                entry.hook.take_from(self.ledger.hand_over)
            for site in self.sites.of(entry):
                shown.setdefault(site, set()).update(parts)
        for site, parts in shown.items():
            site.enter_graphs(self.ledger.signed(compiled.wish(parts)))
        counted = [site for site in shown if site.wants.startswith(compiled.STATISTICS)]
        self.ledger.serve(counted, self.sites.model)

    # ---- firing ----------------------------------------------------------------------------------------------------

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The callable of `on_forward` for the hooks that are due now; the ledger is told who they are."""
        bound = [item for item in bound if not _has_let_go(self.registry.entry(item.hook))]
        if not bound:
            return None
        calls: dict[Site, list[Call]] = {}
        for item in bound:
            call_at = calls_of(self, item, timed)
            for site in self.sites.of(self.registry.entry(item.hook)):
                calls.setdefault(site, []).append(call_at(site))
        listening: dict[Any, Call] = {site: one_after_the_other(at_site) for site, at_site in calls.items()}

        def on_forward(
            site: Any, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
        ) -> Any:
            call = listening.get(site)
            if call is None or (self.asides and self._silent()) or _recomputing():
                return None
            self.ran(1)
            return call(site, module, inputs, kwargs, output, measured)

        alone = {site: call for site, call in listening.items() if isinstance(call, ShortWay)}
        on_forward.direct = direct.direct_calls(alone, on_forward, self)  # type: ignore[attr-defined]
        listening[self.ledger] = self._open_page(bound)
        return on_forward

    def _open_page(self, bound: list[Bound]) -> Call:
        """What tells the ledger for whom compiled code adds up now; None for nobody."""
        takers = [item for item in bound if _wants_statistics(item.owner)]
        sites = {item.hook: frozenset(self.sites.of(self.registry.entry(item.hook))) for item in takers}
        due = [Due(item.hook, item.owner, sites[item.hook]) for item in takers]

        def page(*_: Any) -> Page | None:
            listening = tuple([one for one in due if one.taker.listens()])
            return Page(self.run.step, listening) if listening else None

        return page

    def ran(self, calls: int) -> None:
        """Count module calls, and clean up after every so many."""
        self._until_clean_up -= calls
        if self._until_clean_up <= 0:
            self._until_clean_up = self.cleanup_interval
            if self._clean_up is not None:
                self._clean_up()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """No forward hook hears what this thread runs inside the block."""
        self._set_aside(1)
        try:
            yield
        finally:
            self._set_aside(-1)

    def _set_aside(self, by: int) -> None:
        self._aside.depth = self._silent() + by
        with self._lock:
            self.asides += by

    def _silent(self) -> int:
        """How many such blocks this thread is in."""
        return int(self._aside.__dict__.get("depth", 0))


def _shown(entry: Entry) -> set[str]:
    """What compiled code must show a hook."""
    if not _listens(entry):
        return set()
    if _measures(entry) or any(getattr(entry.hook, trait, False) for trait in LIVE_TRAITS):
        return {compiled.OUTSIDE}
    if _wants_statistics(entry.hook):
        return {compiled.STATISTICS}
    wanted = entry.listeners["on_forward"].wanted
    return {compiled.CALLED, *(SHOWN[name] for name in wanted if name in SHOWN)}


def _listens(entry: Entry) -> bool:
    """Whether a hook hears modules."""
    return entry.enabled and not _has_let_go(entry)


def _has_let_go(entry: Entry) -> bool:
    """Whether a hook was closed with its run and had something to close; others hear the model on."""
    return entry.closed and getattr(entry.hook.close, "__func__", None) is not Hook.close


def _wants_statistics(hook: Any) -> bool:
    """Whether a hook wants statistics and nothing else, so that it need not be called."""
    return bool(getattr(hook, "statistics_only", False))


def _measures(entry: Entry) -> bool:
    """Whether a hook names what needs a look before the module runs."""
    return any(name in entry.listeners["on_forward"].wanted for name in MEASURED)


def _recomputing() -> bool:
    """Whether this forward pass is a repetition inside backward (activation checkpointing): it was heard already."""
    return bool(torch._C._current_graph_task_id() != -1)
