"""The update chain: what makes the callable of `on_update`.

Links run in registration order. Each gets the gradients as the links before it left them and returns what the optimizer
shall use; that is checked and taken over as a whole, so a link that fails leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Fired
from hookline.gradients.view import Gradients
from hookline.registry.registry import HookRegistry
from hookline.registry.select import select

ON_UPDATE = CATALOG["on_update"]


@dataclass
class Link:
    """One update hook with the gradients it selects and its own state."""

    bound: Bound
    grads: Gradients
    state: Any
    backup: bool  # it writes in place and may fail: keep copies to fall back to

    def run(self, moment: Any) -> None:
        values = {name: getattr(moment, name) for name in self.bound.listener.wanted if name not in ("grads", "own_state")}
        copies = {name: grad.clone() for name, grad in self.grads.items()} if self.backup else None
        try:
            returned = self.bound.listener.with_values({**values, "grads": self.grads, "own_state": self.state})
            in_place = returned is None and getattr(self.bound.owner, "inplace", False)
            self.grads.commit(self.grads if in_place else returned)
        except Exception:
            self.grads.forget()
            for name, copy in (copies or {}).items():
                self.grads.params[name].grad = copy
            raise


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and keeps their state."""

    def __init__(self, registry: HookRegistry, params: Callable[[], Mapping[str, torch.nn.Parameter]]) -> None:
        self.registry = registry
        self._params = params
        self.states: dict[str, Any] = {}
        registry.compile_with("on_update", self.compile)

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The chain for the hooks that are due now; None when there is none."""
        if not bound:
            return None
        links = [self._link(item) for item in bound]
        failed, fire = self.registry.failed, self.registry.fire

        def on_update(moment: Any) -> None:
            for link in links:
                began = perf_counter_ns() if timed else 0
                try:
                    link.run(moment)
                except Exception as error:
                    if (raised := failed(ON_UPDATE, link.bound, error, moment)) is not None:
                        raise raised from None
                else:
                    if link.bound.recovering:
                        self.registry.recovered(ON_UPDATE, link.bound)
                if timed:
                    link.bound.cost.add(perf_counter_ns() - began)
                norm = getattr(link.bound.owner, "clipped_norm", None)
                if norm is not None:
                    moment.clipped(norm)
                    if heard := fire.on_gradient_clip:
                        heard(moment)

        return on_update

    def _link(self, bound: Bound) -> Link:
        params = self._params()
        pattern = getattr(bound.owner, "params", None)
        chosen = params if pattern is None else select(pattern, params, "parameter")
        if bound.hook not in self.states:
            init = getattr(bound.owner, "init", None)
            self.states[bound.hook] = init(chosen) if callable(init) else {}
        in_place = getattr(bound.owner, "inplace", False) and getattr(bound.owner, "on_error", "warn") != "raise"
        return Link(bound, Gradients(chosen), self.states[bound.hook], backup=in_place)
