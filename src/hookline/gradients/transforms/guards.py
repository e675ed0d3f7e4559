"""Skip optimizer steps whose gradients are non-finite or far too large.

AdamW moves even on zero gradients, so only the host can skip a step, and it has to wait for the device.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from hookline._parameters import INFINITE, PositiveInt
from hookline.core.costs import Cost
from hookline.errors import HooklineError, TrainingError
from hookline.gradients.view import Gradients, Transform

if TYPE_CHECKING:
    from hookline.core.registry import Registry
    from hookline.run.control import RunControl

NON_FINITE = "non-finite gradients"


class Guard(Transform):
    """A transform that reads the gradients' norm and may skip the step."""

    inplace = False
    needs: tuple[str, ...] = ("can_skip_steps",)
    same_on_all_ranks = True  # gradients are reduced over the ranks, and norms are of all shards

    def __init__(self, give_up_after: int | None, params: Any) -> None:
        super().__init__(params)
        self.give_up_after = give_up_after
        self.wait_cost = Cost()
        """The time spent waiting for the device."""

    def init(self, params: Any) -> dict[str, Any]:
        """Make the counts of skipped steps: in a row, and in total."""
        return {"in_a_row": 0, "total": 0}

    def setup(self, registry: Registry, name: str) -> None:
        """Add a row for the waiting time to the cost table."""
        self.wait_cost = registry.dispatch_table.argument_costs[f"the verdict of {name}"]

    def read(self, verdict: Tensor) -> bool:
        """Read a bool from the device; waits for it."""
        began = perf_counter_ns()
        answer = bool(verdict.item())
        self.wait_cost.add(perf_counter_ns() - began)
        return answer

    def skip(self, reason: str, state: dict[str, Any], trainer: RunControl) -> None:
        """Skip the step; `give_up_after` skipped steps in a row end the run.

        Raises:
            TrainingError: If too many steps in a row were skipped, because the run no longer trains.
        """
        state["in_a_row"] += 1
        state["total"] += 1
        trainer.skip_step(reason)
        if self.give_up_after is not None and state["in_a_row"] >= self.give_up_after:
            raise TrainingError(f"skipped {state['in_a_row']} steps in a row, the last because {reason}")


class SkipNonfinite(Guard):
    """Skip a step whose gradient norm is not finite. Waits for the device once a step.

    Args:
        give_up_after: End the run after this number of skipped steps in a row; None never ends it.
        params: The parameters whose gradients it reads; all of them by default.
    """

    built_in = True
    name = "skip_nonfinite"

    def __init__(self, give_up_after: PositiveInt | None = None, params: Any = None) -> None:
        super().__init__(give_up_after, params)

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: RunControl) -> Gradients:
        if self.read(grads.norm().isfinite()):
            state["in_a_row"] = 0
        else:
            self.skip(NON_FINITE, state, trainer)
        return grads


class SpikeGuard(Guard):
    """Skip a step whose norm is more than `factor` times the median of the norms of the last `window` steps.

    While the median is 0, it only observes. A spike enters the window as the limit, so the median follows a level that
    has risen permanently. A non-finite norm is a spike too, and does not enter the window.

    Args:
        factor: The multiple of the median above which a norm counts as a spike; above 1.
        window: The number of recent steps whose median it uses.
        warmup: The number of first steps that it only observes.
        action: `"skip"` skips the step, and waits for the device once a step. `"clip"` scales the gradients down to the
            limit on the device and does not wait; non-finite gradients stay unchanged, because no factor makes them
            finite.
        give_up_after: End the run after this number of skipped steps in a row; None never ends it. Only with `"skip"`.
        params: The parameters whose gradients count; all of them by default.
    """

    built_in = True
    name = "spike_guard"

    def __init__(
        self,
        factor: Annotated[float, Gt(1), INFINITE] = 5.0,
        window: PositiveInt = 100,
        warmup: PositiveInt = 20,
        action: Literal["skip", "clip"] = "skip",
        give_up_after: PositiveInt | None = None,
        params: Any = None,
    ) -> None:
        super().__init__(give_up_after, params)
        self.factor, self.window, self.warmup, self.action = factor, window, warmup, action
        if give_up_after is not None and action == "clip":
            raise HooklineError("spike_guard: give_up_after counts skipped steps, but action='clip' skips none")
        self.inplace = self.clips = action == "clip"
        if action == "clip":
            self.needs = ()

    def init(self, params: Any) -> dict[str, Any]:
        """Make the window of norms, on the device, and the counts of observed and skipped steps."""
        return {**super().init(params), "seen": 0, "norms": torch.full((self.window,), torch.nan)}

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: RunControl) -> Gradients:
        self.clipped_norm = grads.norm()
        norm = self.clipped_norm.float()
        finite = norm.isfinite()
        norms = state["norms"] = _resized(state["norms"], self.window, state["seen"]).to(norm.device)
        median = norms.nanmedian()
        limit = torch.where(median > 0, self.factor * median, torch.inf)  # next to 0, everything would be a spike
        ready = state["seen"] >= self.warmup
        entered = torch.where(norm > limit, limit, norm) if ready else norm
        norms[state["seen"] % self.window] = torch.where(finite, entered, torch.nan)
        state["seen"] += 1
        if ready and self.action == "clip":
            grads.writable().multiply_(torch.where(finite & (norm > limit), limit / norm, 1.0))
        elif ready and not self.read(~finite | (norm > limit)):
            state["in_a_row"] = 0
        elif ready:
            spike = f"the gradient norm is more than {self.factor:g} x its running median"
            self.skip(spike if self.read(finite) else NON_FINITE, state, trainer)
        return grads


def _resized(norms: Tensor, window: int, seen: int) -> Tensor:
    """Return the last norms as a ring buffer of another length, which a resumed run may want; NaN if there is none."""
    if len(norms) == window:
        return norms
    oldest_first = norms.roll(-(seen % len(norms)))
    kept = torch.cat([oldest_first.new_full((window,), torch.nan), oldest_first])[-window:]
    return kept.roll(seen % window)
