"""The tap: one torch hook per watched module, and the callable of `on_forward`.

Torch hooks are attached when the first forward hook that selects a module is registered and removed with the last, so a
model nobody watches carries none. A hook that is off or not due costs its modules one branch per call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch

from hookline.activations.moment import ForwardMoment, Measured, NoRun
from hookline.activations.sites import Site, Sites
from hookline.errors import LiveWrite, RegistrationError
from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Fired, first_raised
from hookline.events.moment import known_step
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry

ON_FORWARD = CATALOG["on_forward"]
MEASURED = ("seconds", "memory")  # arguments that need a look before the module runs


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
        self._clean_up, self._cleanup_interval, self._until_clean_up = clean_up, cleanup_interval, cleanup_interval
        self.enable_intervention = enable_intervention
        self.sites = Sites()
        self.run: Any = NoRun()
        self._aside = threading.local()  # forward hooks are set aside for the thread that asked
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
        entries = self.registry.entries("forward")
        self.sites.forget_others(entries)
        wanted: dict[int, bool] = {}
        for entry in entries:
            measured = any(name in entry.listeners["on_forward"].wanted for name in MEASURED)
            for site in self.sites.of(entry):
                wanted[id(site)] = wanted.get(id(site), False) or measured
        for site in self.sites:
            site.attach(self._before if wanted.get(id(site)) else None, self._after if id(site) in wanted else None)

    def detach(self) -> None:
        """Leave every module as it was."""
        for site in self.sites:
            site.attach(None, None)

    # ---- firing ----------------------------------------------------------------------------------------------------

    def _before(self, site: Site) -> Callable[..., None]:
        def hookline_tap_before(module: torch.nn.Module, inputs: Any) -> None:
            if self.registry.fire.on_forward is not None:
                site.begin()

        return hookline_tap_before

    def _after(self, site: Site) -> Callable[..., Any]:
        fire = self.registry.fire

        def hookline_tap(module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
            site.calls += 1
            heard = fire.on_forward
            return None if heard is None else heard(site, module, inputs, kwargs, output, None)

        def hookline_tap_measuring(module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
            site.calls += 1
            measured = site.end()
            heard = fire.on_forward
            return None if heard is None else heard(site, module, inputs, kwargs, output, measured)

        return hookline_tap_measuring if site.measures else hookline_tap

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The callable of `on_forward` for the hooks that are due now."""
        if not bound:
            return None
        listening: dict[Site, list[Bound]] = {}
        for item in bound:
            for site in self.sites.of(self.registry.entry(item.hook)):
                listening.setdefault(site, []).append(item)

        def on_forward(
            site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
        ) -> Any:
            hearing = listening.get(site)
            if hearing is None or self._silent() or _recomputing():
                return None
            raised: Exception | None = None
            for item in hearing:
                began = perf_counter_ns() if timed else 0
                try:
                    moment = ForwardMoment(self.run, site.name, module, inputs, kwargs, output, measured)
                    output = self._call(item, moment, site)
                except Exception as error:  # the others still hear the event
                    raised = first_raised(raised, error)
                if timed:
                    item.cost.add(perf_counter_ns() - began)
            self._until_clean_up -= 1
            if self._until_clean_up <= 0 and self._clean_up is not None:
                self._until_clean_up = self._cleanup_interval
                self._clean_up()
            if raised is not None:
                raise raised
            return output

        return on_forward

    def _call(self, item: Bound, moment: ForwardMoment, site: Site) -> Any:
        """Call one hook; returns the output that goes on, which only an intervention may change."""
        live = bool(getattr(item.owner, "intervene", False)) and self.enable_intervention
        values = moment.values(item.listener.wanted, live)
        raised: Exception | None = None
        returned = None
        try:
            with torch.set_grad_enabled(live and torch.is_grad_enabled()):
                returned = item.listener.with_values(values)
        except Exception as error:
            raised = self.registry.desk.failed(ON_FORWARD, item, error, moment)
        else:
            site.fired[item.hook] = site.fired.get(item.hook, 0) + 1
            if item.recovering:
                self.registry.desk.recovered(ON_FORWARD, item)
        if moment.live_written():
            raise LiveWrite(f"hook {item.hook!r} wrote into live_output of {moment.name!r}, which is there to be read")
        if moment.copies.written():
            message = f"wrote into its copy of the activations of {moment.name!r}; the model's own are unchanged"
            self.registry.desk.overruled(item.hook, "on_forward", known_step(moment), message)
        if raised is not None:
            raise raised
        if returned is not None and not live:
            message = "returned something, which is ignored: it only observes (intervene=True changes the output)"
            self.registry.desk.overruled(item.hook, "on_forward", known_step(moment), message)
        return returned if live and returned is not None else moment.live_output

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """No forward hook hears what this thread runs inside the block."""
        self._aside.depth = self._silent() + 1
        try:
            yield
        finally:
            self._aside.depth -= 1

    def _silent(self) -> int:
        """How many such blocks this thread is in."""
        return int(self._aside.__dict__.get("depth", 0))


def _recomputing() -> bool:
    """Whether this forward pass is a repetition inside backward (activation checkpointing): it was heard already."""
    return bool(torch._C._current_graph_task_id() != -1)
