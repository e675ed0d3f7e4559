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
from hookline.gradients.link import Link
from hookline.gradients.norms import Norms
from hookline.gradients.selection import choose
from hookline.gradients.view import Gradients
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry

ON_UPDATE = CATALOG["on_update"]


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and keeps their state.

    With the model, links may select parameters by the class of their module.
    """

    def __init__(
        self,
        registry: HookRegistry,
        params: Callable[[], Mapping[str, torch.nn.Parameter]],
        model: torch.nn.Module | None = None,
    ) -> None:
        self.registry = registry
        self._params, self._model = params, model
        self.states: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}  # whose state it is: another hook of the same name gets its own
        self.known = Norms()  # what one link has read, the next need not read again
        registry.admit_with(self._check)
        registry.tables.compile_with("on_update", self.compile)

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The chain for the hooks that are due now; None when there is none."""
        if not timed and all(_passes_through(item) for item in bound):
            return None  # the default link alone has nothing to do: it is called where its cost is measured
        links = [self._link(item) for item in bound]
        reporter = next((link for link in links if getattr(link.bound.owner, "reports_norms", False)), None)

        def on_update(moment: Any) -> None:
            try:
                for link in links:
                    if reporter is None or _passes_through(link.bound):
                        self._run(link, moment, timed)
                    else:
                        self._report(reporter, link, "before", moment)
                        self._run(link, moment, timed)
                        self._report(reporter, link, "after", moment)
                    if link.may_skip and getattr(moment, "skip_asked_at", None) == moment.step:
                        break  # nobody will use these gradients, and links with a memory should not see them
            finally:
                self.known.clear()  # it holds on to gradients

        return on_update

    def _run(self, link: Link, moment: Any, timed: bool) -> None:
        """One link, its failure treated by its policy, its time noted, its clipping told."""
        began = perf_counter_ns() if timed else 0
        values = link.values(moment) if link.named else {}
        try:
            link.run(values)
        except Exception as error:
            if self.registry.desk.failed(ON_UPDATE, link.bound, error, moment) is not None:
                raise
            return
        if link.bound.recovering:
            self.registry.desk.recovered(ON_UPDATE, link.bound)
        if timed:
            link.bound.cost.add(perf_counter_ns() - began)
        if link.clips:
            moment.clipped(link.bound.owner.clipped_norm, link.spans_all and link.bound.owner.norm_type == 2.0)
            if heard := self.registry.fire.on_gradient_clip:
                heard(moment)

    def _report(self, reporter: Link, link: Link, when: str, moment: Any) -> None:
        """Log the norm of what a link selects, for the hook that asked for it."""
        try:
            moment.trainer.log(f"update/{link.bound.hook}/norm_{when}", link.grads.norm())
        except Exception as error:
            if self.registry.desk.failed(ON_UPDATE, reporter.bound, error, moment) is not None:
                raise

    def _check(self, entry: Entry) -> None:
        """Choose its parameters and make its state when a hook is registered: what fails, fails there."""
        if "on_update" in entry.listeners:
            self._state_of(entry.name, entry.hook, self._chosen(entry.hook))

    def choose_again(self) -> None:
        """The parameters are others: links select among them anew, and states get what the new ones need."""
        for name, hook in self._owners.items():
            init, state = getattr(hook, "init", None), self.states.get(name)
            if callable(init) and isinstance(state, dict):
                self.states[name] = {**init(self._chosen(hook)), **state}
        self.registry.tables.reset()

    def _chosen(self, hook: Any) -> Mapping[str, torch.nn.Parameter]:
        return choose(getattr(hook, "params", None), self._params(), self._model)

    def _state_of(self, name: str, hook: Any, chosen: Mapping[str, torch.nn.Parameter]) -> None:
        """Made once per hook; another hook of the same name gets its own."""
        if name not in self.states or self._owners.get(name, hook) is not hook:
            init = getattr(hook, "init", None)
            self.states[name] = init(chosen) if callable(init) else {}
        self._owners[name] = hook

    def _link(self, bound: Bound) -> Link:
        chosen = self._chosen(bound.owner)
        self._state_of(bound.hook, bound.owner, chosen)
        desk, policy = self.registry.desk, self.registry.entry(bound.hook).policy
        link = Link(bound, Gradients(chosen, self.known), self.states, may_fail=policy != "raise")
        if (desk.debug or getattr(bound.owner, "check_finite", False)) and not _passes_through(bound):
            link.finite_check = desk.argument_cost(f"whether {bound.hook} left finite gradients")
        return link


def _passes_through(item: Bound) -> bool:
    return bool(getattr(item.listener.call, "__hookline_passes_through__", False))
