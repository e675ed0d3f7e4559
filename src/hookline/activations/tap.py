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
        listening: dict[Site, list[Caller]] = {}
        for item in bound:
            caller = Caller(self, item, timed)
            for site in self.sites.of(self.registry.entry(item.hook)):
                listening.setdefault(site, []).append(caller)

        def on_forward(
            site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
        ) -> Any:
            hearing = listening.get(site)
            if hearing is None or self._silent() or _recomputing():
                return None
            raised: Exception | None = None
            for caller in hearing:
                try:
                    moment = ForwardMoment(self.run, site.name, module, inputs, kwargs, output, measured)
                    output = caller.call(moment, site)
                except Exception as error:  # the others still hear the event
                    raised = first_raised(raised, error)
            self._until_clean_up -= 1
            if self._until_clean_up <= 0 and self._clean_up is not None:
                self._until_clean_up = self._cleanup_interval
                self._clean_up()
            if raised is not None:
                raise raised
            return output

        return on_forward

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


class Caller:
    """One forward hook as the tap calls it; what can be known beforehand is."""

    def __init__(self, tap: Tap, item: Bound, timed: bool) -> None:
        listener = item.listener
        self.item, self.desk, self.timed = item, tap.registry.desk, timed
        self.live = bool(getattr(item.owner, "intervene", False)) and tap.enable_intervention
        self.reads_live = "live_output" in listener.wanted
        self.function, self.positional, self.keywords = listener.call, listener.positional, listener.keywords

    def call(self, moment: ForwardMoment, site: Site) -> Any:
        """Call the hook; returns the output that goes on, which only an intervention may change."""
        began = perf_counter_ns() if self.timed else 0
        item, raised, returned = self.item, None, None
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(grad and self.live)  # the context manager would cost 1.5 µs
        try:
            arguments, named = self.arguments(moment)
            try:
                returned = self.function(*arguments, **named)
            except Exception as error:
                raised = self.desk.failed(ON_FORWARD, item, error, moment)
            else:
                site.fired[item.hook] = site.fired.get(item.hook, 0) + 1
                if item.recovering:
                    self.desk.recovered(ON_FORWARD, item)
        finally:
            torch._C._set_grad_enabled(grad)  # a hook may have switched it
        self.look_back(moment, returned)
        if self.timed:
            item.cost.add(perf_counter_ns() - began)
        if raised is not None:
            raise raised
        return returned if self.live and returned is not None else moment.live_output

    def arguments(self, moment: ForwardMoment) -> tuple[list[Any], dict[str, Any]]:
        """What the hook names. An intervention gets the live tensors: gradients flow through what it returns."""
        if self.live:
            values = moment.live_values(self.item.listener.wanted)
            return [values[name] for name in self.positional], {
                key: values[name] for key, name in self.keywords.items()
            }
        if self.reads_live:
            moment.remember_versions()
        arguments = [getattr(moment, name) for name in self.positional]
        return arguments, {key: getattr(moment, name) for key, name in self.keywords.items()} if self.keywords else {}

    def look_back(self, moment: ForwardMoment, returned: Any) -> None:
        """Whether an observer did what observers don't: wrote, or wanted to change the output."""
        hook = self.item.hook
        if self.reads_live and moment.live_written():
            raise LiveWrite(f"hook {hook!r} wrote into live_output of {moment.name!r}, which is there to be read")
        if moment.made_copies and moment.copies.written():
            message = f"wrote into its copy of the activations of {moment.name!r}; the model's own are unchanged"
            self.desk.overruled(hook, "on_forward", known_step(moment), message)
        if returned is not None and not self.live:
            message = "returned something, which is ignored: it only observes (intervene=True changes the output)"
            self.desk.overruled(hook, "on_forward", known_step(moment), message)


def _recomputing() -> bool:
    """Whether this forward pass is a repetition inside backward (activation checkpointing): it was heard already."""
    return bool(torch._C._current_graph_task_id() != -1)
