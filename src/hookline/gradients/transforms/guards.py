"""Guards: links that leave a step out. AdamW moves on a gradient of zeros, so the host must know, and waits."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import HooklineError, TrainingError, nearest
from hookline.events.dispatch import Cost
from hookline.gradients.numbers import multiply_
from hookline.gradients.transforms.base import Transform, above_zero
from hookline.gradients.view import Gradients
from hookline.registry.registry import HookRegistry


class Guard(Transform):
    """A link that looks at the gradients' norm and may leave the step out."""

    inplace = False

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self.waiting = Cost()
        """What its questions to the device cost."""

    def setup(self, registry: HookRegistry, name: str) -> None:
        """Its waiting gets a row of its own in the cost table."""
        self.waiting = registry.desk.argument_cost(f"the verdict of {name}")

    def ask(self, verdict: Tensor) -> bool:
        """Bring a verdict from the device; the host waits for it."""
        began = perf_counter_ns()
        answer = bool(verdict.item())
        self.waiting.add(perf_counter_ns() - began)
        return answer


class SkipNonfinite(Guard):
    """Leaves out a step whose gradient norm is not finite. Costs one wait for the device a step.

    `give_up_after` so many left-out steps in a row it ends the run; None trains on.
    """

    built_in = True
    name = "skip_nonfinite"

    def __init__(self, give_up_after: int | None = None, params: Any = None) -> None:
        if give_up_after is not None:
            above_zero("skip_nonfinite", give_up_after=give_up_after)
        super().__init__(params)
        self.give_up_after = give_up_after

    def init(self, params: Any) -> dict[str, Any]:
        """How many steps were left out in a row, and in all."""
        return {"in_a_row": 0, "total": 0}

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: Any) -> Gradients:
        if self.ask(grads.norm().isfinite()):
            state["in_a_row"] = 0
        else:
            self._leave_out(state, trainer)
        return grads

    def _leave_out(self, state: dict[str, Any], trainer: Any) -> None:
        state["in_a_row"] += 1
        state["total"] += 1
        trainer.skip_step("non-finite gradients")
        if self.give_up_after is not None and state["in_a_row"] >= self.give_up_after:
            raise TrainingError(f"the gradients were not finite for {state['in_a_row']} steps in a row")


class SpikeGuard(Guard):
    """Leaves out a step whose norm is more than `factor` times the median of the last `window` steps' norms.

    With `action: clip` the gradients are scaled down to that limit instead, which is done on the device and waits for
    nothing. The first `warmup` steps are only watched. A spike counts as large as the limit, so the median follows a
    level that has risen for good.
    """

    built_in = True
    name = "spike_guard"

    def __init__(
        self,
        factor: float = 5.0,
        window: int = 100,
        warmup: int = 20,
        action: Literal["skip", "clip"] = "skip",
        params: Any = None,
    ) -> None:
        above_zero("spike_guard", factor=factor, window=window, warmup=warmup)
        if action not in ("skip", "clip"):
            choices = nearest(str(action), ("skip", "clip"))
            raise HooklineError(f"spike_guard: action={action!r} is no choice; {choices}")
        super().__init__(params)
        self.factor = float(factor)
        self.window = int(window)
        self.warmup = int(warmup)
        self.action = action
        self.inplace = action == "clip"

    def init(self, params: Any) -> dict[str, Any]:
        """The last norms, on the device, and how many steps were seen."""
        return {"seen": 0, "norms": torch.full((self.window,), torch.nan)}

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: Any) -> Gradients:
        norm = grads.norm().float()
        norms = state["norms"] = state["norms"].to(norm.device)
        limit = self.factor * norms.nanmedian()
        ready = state["seen"] >= self.warmup
        norms[state["seen"] % self.window] = _counted(norm, limit if ready else norm)
        state["seen"] += 1
        if ready:
            self._act(grads, norm, limit, trainer)
        return grads

    def _act(self, grads: Gradients, norm: Tensor, limit: Tensor, trainer: Any) -> None:
        if self.action == "clip":
            multiply_(grads.numbers(), torch.where(norm > limit, limit / norm, 1.0))
        elif self.ask((norm > limit) | ~norm.isfinite()):
            trainer.skip_step(f"the gradient norm is more than {self.factor:g} x its running median")


def _counted(norm: Tensor, limit: Tensor) -> Tensor:
    """A norm as the median shall see it: at most the limit, and not at all when it is not finite."""
    return torch.where(norm.isfinite(), torch.where(norm > limit, limit, norm), torch.nan)
