"""One link of the chain: an update hook with the gradients it selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.errors import GradientError
from hookline.events.dispatch import Bound
from hookline.gradients.finite_check import FiniteCheck
from hookline.gradients.numbers import is_sharded
from hookline.gradients.view import Gradients

Marks = list[tuple[int, int]]


class Link:
    """Calls the hook and takes over what it returns as a whole, or leaves everything as it was.

    Its state is looked up by name at each call, as a checkpoint may replace it.
    """

    def __init__(
        self, bound: Bound, grads: Gradients, states: Mapping[str, Any], may_fail: bool, spans_all: bool
    ) -> None:
        self.bound, self.grads, self.states = bound, grads, states
        owner = bound.owner
        self.in_place = bool(getattr(owner, "inplace", False))
        # What writes in place and may fail without ending the run needs copies to fall back to.
        self.backup = self.in_place and may_fail
        # A user's link may write in place without saying so, or stop the run half-way: that must be noticed.
        self.watched = not bound.built_in and not self.backup
        self.half_written = False  # what it had written when it last failed could not be taken back
        self.only_grads = bound.listener.positional == ("grads",) and not bound.listener.keywords
        self.may_write = not bound.built_in or getattr(owner, "intervenes", True)
        self.tells_norms = not self.may_write or bool(getattr(owner, "tells_norms", False))
        self.clips = bool(getattr(owner, "clips", False))
        self.clips_globally = self.clips and spans_all and getattr(owner, "norm_type", 2.0) == 2.0
        self.named = tuple(name for name in bound.listener.wanted if name not in ("grads", "own_state"))
        self.may_skip = "trainer" in self.named  # only a link that has the trainer can leave a step out
        self.finite_check: FiniteCheck | None = None
        self.reporter: Link | None = None  # who wants its norms before and after
        self.everything: Gradients | None = None  # what has the step's norm, where this link clips and finds another

    def values(self, moment: Any) -> dict[str, Any]:
        """What the hook names beside the gradients and its state."""
        return {name: getattr(moment, name) for name in self.named}

    def run(self, values: Mapping[str, Any]) -> None:
        """Call the hook once."""
        were_finite = self.finite_check.begin() if self.finite_check else None
        before, marks = self._before(were_finite is not None), self._marks() if self.watched else None
        try:
            returned = self.bound.listener.call(self.grads) if self.only_grads else self._call(values)
            self._take(returned, marks)
            if self.finite_check and were_finite is not None:
                self.finite_check.end(were_finite, before)
        except Exception as error:
            self._put_back(before)
            self.half_written = marks is not None and marks != self._marks()
            if self.half_written:
                remedy = "" if self.in_place or DECLARE in str(error) else f"; {DECLARE}"
                error.add_note(f"it had written into the gradients by then, which cannot be taken back{remedy}")
            raise

    def _call(self, values: Mapping[str, Any]) -> Any:
        own = {"grads": self.grads, "own_state": self.states[self.bound.hook]}
        return self.bound.listener.with_values({**values, **own})

    def _take(self, returned: Any, marks: Marks | None) -> None:
        """Check what the hook returned, and take it over."""
        if self.clips:
            _refuse_untold(getattr(self.bound.owner, "clipped_norm", None))
        if returned is None and self.in_place:
            returned = self.grads
        elif returned is None and marks is not None and marks != self._marks():
            raise GradientError(f"wrote into the gradients in place and returned None; {DECLARE}")
        if returned is not self.grads or self.grads.aside:
            self.grads.commit(returned)

    def _marks(self) -> Marks:
        """Which gradients there are and how often each was written to; holds on to none of them."""
        return [(id(grad), _memory(grad)._version) for grad in self.grads.tensors()]

    def _before(self, checked: bool) -> dict[str, torch.Tensor | None]:
        """What to put back if the hook fails: the gradients themselves, or copies where it writes into them."""
        if not self.backup and not checked:
            return {}
        now = {name: param.grad for name, param in self.grads.params.items()}
        return {name: grad if grad is None else grad.clone() for name, grad in now.items()} if self.backup else now

    def _put_back(self, before: Mapping[str, torch.Tensor | None]) -> None:
        for name, gradient in before.items():
            self.grads.params[name].grad = gradient
        self.grads.forget()


DECLARE = "a link that writes in place says inplace = True (in its class, or as an attribute of the function)"


def _refuse_untold(norm: Any) -> None:
    """A link that says that it clips must say what it found."""
    if not isinstance(norm, (int, float)) and not (isinstance(norm, torch.Tensor) and norm.numel() == 1):
        raise GradientError(
            f"says clips = True and left {type(norm).__name__} as its clipped_norm; set self.clipped_norm to the norm "
            "before clipping, a number or a tensor of one element, at every call"
        )


def _memory(gradient: Any) -> torch.Tensor:
    """What counts the writes to a gradient: of a DTensor the shard here, for its own count misses some."""
    memory: torch.Tensor = gradient.to_local() if is_sharded(gradient) else gradient
    return memory
