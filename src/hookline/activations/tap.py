"""The tap: one torch hook per watched module, and the callable of `on_forward`.

Torch hooks are attached when the first forward hook that selects a module is registered and removed with the last, so a
model nobody watches carries none. A hook that is off or not due costs its modules one branch per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.activations.copies import Copies
from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Fired, first_raised
from hookline.events.moment import known_step
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry
from hookline.registry.select import select

ON_FORWARD = CATALOG["on_forward"]


class ForwardMoment:
    """What a forward hook can name; tensors become copy-on-write views when they are read."""

    def __init__(self, run: Any, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._run = run
        self.name = name
        self.module = module
        self.live_inputs = inputs
        self.live_output = output
        self.copies = Copies()

    @property
    def inputs(self) -> Any:
        return self.copies.of(self.live_inputs)

    @property
    def output(self) -> Any:
        return self.copies.of(self.live_output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)  # step, epoch, phase, trainer, model: the run's


class NoRun:
    """Stands for the run when there is none."""

    step, epoch, phase, trainer, model = 0, 0, "inference", None, None

    def request_stop(self, reason: str, by: str) -> None:
        """There is nothing to stop."""


class Tap:
    """Keeps a model's torch hooks in step with the forward hooks of a registry."""

    def __init__(self, registry: HookRegistry, model: torch.nn.Module, enable_intervention: bool = False) -> None:
        self.registry = registry
        self.model = model
        self.enable_intervention = enable_intervention
        self.run: Any = NoRun()
        self.muted = False
        self._modules = {name: module for name, module in model.named_modules() if name}
        self._attached: dict[str, RemovableHandle] = {}
        self._selected: dict[str, tuple[Entry, set[str]]] = {}
        stop_checking = registry.admit_with(self._check)  # before anything is attached
        stop_syncing = registry.watch_changes(self.sync)
        self._let_go = (stop_checking, stop_syncing)
        registry.tables.compile_with("on_forward", self.compile)
        self.sync()

    def _check(self, entry: Entry) -> None:
        """Refuse a pattern that matches nothing when the hook is registered, not when it should fire."""
        if "on_forward" in entry.listeners:
            self.selected(entry)

    def selected(self, entry: Entry) -> set[str]:
        """The names of the modules that a forward hook selects; an error if there are none."""
        known = self._selected.get(entry.name)
        if known is None or known[0] is not entry:
            known = entry, set(select(getattr(entry.hook, "modules", "*"), self._modules, "module"))
            self._selected[entry.name] = known
        return known[1]

    def sync(self) -> None:
        """Attach to the modules that are watched now, detach from the others."""
        entries = self.registry.entries("forward")
        self._selected = {name: known for name, known in self._selected.items() if name in {e.name for e in entries}}
        wanted = {name for entry in entries for name in self.selected(entry)}
        for name in set(self._attached) - wanted:
            self._attached.pop(name).remove()
        for name in self._modules:
            if name in wanted and name not in self._attached:
                self._attached[name] = self._modules[name].register_forward_hook(self._torch_hook(name))

    def detach(self) -> None:
        """Leave the model as it was, for good."""
        for stop in self._let_go:
            stop()
        for handle in self._attached.values():
            handle.remove()
        self._attached.clear()

    def _torch_hook(self, name: str) -> Callable[[torch.nn.Module, Any, Any], Any]:
        fire = self.registry.fire

        def hookline_tap(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            heard = fire.on_forward
            return None if heard is None else heard(name, module, inputs, output)

        return hookline_tap

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The callable of `on_forward` for the hooks that are due now."""
        if not bound:
            return None
        listening: dict[str, list[Bound]] = {}
        for item in bound:
            for name in self.selected(self.registry.entry(item.hook)):
                listening.setdefault(name, []).append(item)

        def on_forward(name: str, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            hearing = listening.get(name)
            if hearing is None or self.muted:
                return None
            raised: Exception | None = None
            for item in hearing:
                began = perf_counter_ns() if timed else 0
                try:
                    output = self._call(item, ForwardMoment(self.run, name, module, inputs, output))
                except Exception as error:  # the others still hear the event
                    raised = first_raised(raised, error)
                if timed:
                    item.cost.add(perf_counter_ns() - began)
            if raised is not None:
                raise raised
            return output

        return on_forward

    def _call(self, item: Bound, moment: ForwardMoment) -> Any:
        """Call one hook; returns the output that goes on, which only an intervention may change."""
        live = bool(getattr(item.owner, "intervene", False)) and self.enable_intervention
        values = self._values(item, moment, live)
        raised: Exception | None = None
        returned = None
        try:
            with torch.set_grad_enabled(live and torch.is_grad_enabled()):
                returned = item.listener.with_values(values)
        except Exception as error:
            raised = self.registry.desk.failed(ON_FORWARD, item, error, moment)
        else:
            if item.recovering:
                self.registry.desk.recovered(ON_FORWARD, item)
        if moment.copies.written():
            message = f"wrote into its copy of the activations of {moment.name!r}; the model's own are unchanged"
            self.registry.desk.overruled(item.hook, "on_forward", known_step(moment), message)
        if raised is not None:
            raise raised
        return returned if live and returned is not None else moment.live_output

    def _values(self, item: Bound, moment: ForwardMoment, live: bool) -> dict[str, Any]:
        """What the hook names. An intervention gets the live tensors: gradients flow through what it returns."""
        wanted = item.listener.wanted
        if not live:
            return {name: getattr(moment, name) for name in wanted}
        return {name: getattr(moment, f"live_{name}" if name in ("inputs", "output") else name) for name in wanted}

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """No forward hook hears anything inside the block."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before
