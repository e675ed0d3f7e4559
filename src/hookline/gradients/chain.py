"""The update chain: what makes the callable of `on_update`.

Links run in registration order. Each gets the gradients as the links before it left them and returns what the optimizer
shall use; that is checked and taken over as a whole, so a link that fails leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch

from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Fired
from hookline.gradients.view import Gradients
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry
from hookline.registry.select import select

ON_UPDATE = CATALOG["on_update"]


class Link:
    """One update hook with the gradients it selects; its state is looked up by name, as a checkpoint may replace it."""

    def __init__(self, bound: Bound, grads: Gradients, states: Mapping[str, Any], may_fail: bool) -> None:
        self.bound, self.grads, self.states = bound, grads, states
        self.in_place = bool(getattr(bound.owner, "inplace", False))
        # What writes in place and may fail without ending the run needs copies to fall back to.
        self.backup = self.in_place and may_fail
        self.only_grads = bound.listener.positional == ("grads",) and not bound.listener.keywords
        self.clips = bool(getattr(bound.owner, "clips", False))
        self.spans_all = getattr(bound.owner, "params", None) is None
        self.named = tuple(name for name in bound.listener.wanted if name not in ("grads", "own_state"))

    def values(self, moment: Any) -> dict[str, Any]:
        """What the hook names beside the gradients and its state."""
        return {name: getattr(moment, name) for name in self.named}

    def run(self, values: Mapping[str, Any]) -> None:
        """Call the hook and take over what it returns, or leave everything as it was."""
        grads = self.grads
        copies = {name: grad.clone() for name, grad in grads.items()} if self.backup else None
        try:
            returned = self.bound.listener.call(grads) if self.only_grads else self._call(values)
            if returned is None and self.in_place:
                returned = grads
            if returned is not grads or grads.aside:
                grads.commit(returned)
        except Exception:
            grads.forget()
            for name, copy in (copies or {}).items():
                grads.params[name].grad = copy
            raise

    def _call(self, values: Mapping[str, Any]) -> Any:
        own = {"grads": self.grads, "own_state": self.states[self.bound.hook]}
        return self.bound.listener.with_values({**values, **own})


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and keeps their state."""

    def __init__(self, registry: HookRegistry, params: Callable[[], Mapping[str, torch.nn.Parameter]]) -> None:
        self.registry = registry
        self._params = params
        self.states: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}  # whose state it is: another hook of the same name gets its own
        registry.admit_with(self._check)
        registry.tables.compile_with("on_update", self.compile)

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The chain for the hooks that are due now; None when there is none."""
        if not timed and all(_passes_through(item) for item in bound):
            return None  # the default link alone has nothing to do: it is called where its cost is measured
        links = [self._link(item) for item in bound]
        desk, fire = self.registry.desk, self.registry.fire

        def on_update(moment: Any) -> None:
            for link in links:
                began = perf_counter_ns() if timed else 0
                values = link.values(moment) if link.named else {}
                try:
                    link.run(values)
                except Exception as error:
                    if desk.failed(ON_UPDATE, link.bound, error, moment) is not None:
                        raise
                    continue
                if link.bound.recovering:
                    desk.recovered(ON_UPDATE, link.bound)
                if timed:
                    link.bound.cost.add(perf_counter_ns() - began)
                if link.clips:
                    moment.clipped(link.bound.owner.clipped_norm, link.spans_all and link.bound.owner.norm_type == 2.0)
                    if heard := fire.on_gradient_clip:
                        heard(moment)

        return on_update

    def _check(self, entry: Entry) -> None:
        """Choose its parameters and make its state when a hook is registered: what fails, fails there."""
        if "on_update" in entry.listeners:
            self._state_of(entry.name, entry.hook, self._chosen(entry.hook))

    def _chosen(self, hook: Any) -> Mapping[str, torch.nn.Parameter]:
        pattern = getattr(hook, "params", None)
        return self._params() if pattern is None else select(pattern, self._params(), "parameter")

    def _state_of(self, name: str, hook: Any, chosen: Mapping[str, torch.nn.Parameter]) -> None:
        """Made once per hook; another hook of the same name gets its own."""
        if name not in self.states or self._owners.get(name, hook) is not hook:
            init = getattr(hook, "init", None)
            self.states[name] = init(chosen) if callable(init) else {}
        self._owners[name] = hook

    def _link(self, bound: Bound) -> Link:
        chosen = self._chosen(bound.owner)
        self._state_of(bound.hook, bound.owner, chosen)
        may_fail = self.registry.entry(bound.hook).policy != "raise"
        return Link(bound, Gradients(chosen), self.states, may_fail)


def _passes_through(item: Bound) -> bool:
    return bool(getattr(item.listener.call, "__hookline_passes_through__", False))
