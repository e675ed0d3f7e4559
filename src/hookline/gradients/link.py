"""One link of the chain: an update hook with the gradients it selects."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

import torch

from hookline.errors import GradientError
from hookline.events.dispatch import Bound, Cost
from hookline.gradients.view import Gradients


class Link:
    """Calls the hook and takes over what it returns as a whole, or leaves everything as it was.

    Its state is looked up by name at each call, as a checkpoint may replace it.
    """

    def __init__(self, bound: Bound, grads: Gradients, states: Mapping[str, Any], may_fail: bool) -> None:
        self.bound, self.grads, self.states = bound, grads, states
        owner = bound.owner
        self.in_place = bool(getattr(owner, "inplace", False))
        # What writes in place and may fail without ending the run needs copies to fall back to.
        self.backup = self.in_place and may_fail
        self.only_grads = bound.listener.positional == ("grads",) and not bound.listener.keywords
        self.clips = bool(getattr(owner, "clips", False))
        self.spans_all = getattr(owner, "params", None) is None
        self.named = tuple(name for name in bound.listener.wanted if name not in ("grads", "own_state"))
        self.may_skip = "trainer" in self.named  # only a link that has the trainer can leave a step out
        self.finite_check: Cost | None = None  # the account of its wait for the device, where it is checked at all

    def values(self, moment: Any) -> dict[str, Any]:
        """What the hook names beside the gradients and its state."""
        return {name: getattr(moment, name) for name in self.named}

    def run(self, values: Mapping[str, Any]) -> None:
        """Call the hook once."""
        grads = self.grads
        before = self._before()
        norm = grads.norm() if self.finite_check else None
        try:
            returned = self.bound.listener.call(grads) if self.only_grads else self._call(values)
            if returned is None and self.in_place:
                returned = grads
            if returned is not grads or grads.aside:
                grads.commit(returned)
            if norm is not None:
                self._refuse_non_finite(norm)
        except Exception:
            grads.forget()
            for name, gradient in before.items():
                grads.params[name].grad = gradient
            raise

    def _call(self, values: Mapping[str, Any]) -> Any:
        own = {"grads": self.grads, "own_state": self.states[self.bound.hook]}
        return self.bound.listener.with_values({**values, **own})

    def _before(self) -> dict[str, torch.Tensor | None]:
        """What to put back if the hook fails: the gradients themselves, or copies where it writes into them."""
        if self.backup:
            return {name: grad.clone() for name, grad in self.grads.items()}
        return {name: param.grad for name, param in self.grads.params.items()} if self.finite_check else {}

    def _refuse_non_finite(self, before: torch.Tensor) -> None:
        """Raise if the gradients were finite before this link and are not now; the host waits for that."""
        began = perf_counter_ns()
        broken = bool(before.isfinite() & ~self.grads.norm().isfinite())
        assert self.finite_check is not None
        self.finite_check.add(perf_counter_ns() - began)
        if broken:
            finite = self.grads.norms().isfinite().tolist()
            culprits = [name for name, fine in zip(self.grads, finite, strict=True) if not fine]
            where = repr(culprits[0]) + (f" ({len(culprits)} parameters in all)" if len(culprits) > 1 else "")
            raise GradientError(f"made the gradient of {where} non-finite, which was finite before")
