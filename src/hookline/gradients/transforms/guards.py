"""Guards: links that leave a step out. AdamW moves on a gradient of zeros, so the host must know, and waits."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import HooklineError, TrainingError, nearest
from hookline.events.dispatch import Cost
from hookline.gradients.numbers import multiply_groups_
from hookline.gradients.transforms.base import Transform, above_one, whole_from_one
from hookline.gradients.view import Gradients
from hookline.registry.registry import HookRegistry

NON_FINITE = "non-finite gradients"


class Guard(Transform):
    """A link that looks at the gradients' norm and may leave the step out."""

    inplace = False

    def __init__(self, give_up_after: int | None, params: Any) -> None:
        super().__init__(params)
        self.give_up_after = give_up_after
        self.waiting = Cost()
        """What its questions to the device cost."""

    def init(self, params: Any) -> dict[str, Any]:
        """How many steps were left out in a row, and in all."""
        return {"in_a_row": 0, "total": 0}

    def setup(self, registry: HookRegistry, name: str) -> None:
        """Its waiting gets a row of its own in the cost table."""
        self.waiting = registry.desk.argument_cost(f"the verdict of {name}")

    def ask(self, verdict: Tensor) -> bool:
        """Bring a verdict from the device; the host waits for it."""
        began = perf_counter_ns()
        answer = bool(verdict.item())
        self.waiting.add(perf_counter_ns() - began)
        return answer

    def leave_out(self, reason: str, state: dict[str, Any], trainer: Any) -> None:
        """Leave the step out; one too many in a row ends the run, for it trains nothing."""
        state["in_a_row"] += 1
        state["total"] += 1
        trainer.skip_step(reason)
        if self.give_up_after is not None and state["in_a_row"] >= self.give_up_after:
            raise TrainingError(f"left out {state['in_a_row']} steps in a row, the last one for this reason: {reason}")


class SkipNonfinite(Guard):
    """Leaves out a step whose gradient norm is not finite. Costs one wait for the device a step.

    `give_up_after` so many left-out steps in a row it ends the run; None trains on.
    """

    built_in = True
    name = "skip_nonfinite"

    def __init__(self, give_up_after: int | None = None, params: Any = None) -> None:
        if give_up_after is not None:
            whole_from_one("skip_nonfinite", give_up_after=give_up_after)
        super().__init__(give_up_after, params)

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: Any) -> Gradients:
        if self.ask(grads.norm().isfinite()):
            state["in_a_row"] = 0
        else:
            self.leave_out(NON_FINITE, state, trainer)
        return grads


class SpikeGuard(Guard):
    """Leaves out a step whose norm is more than `factor` times the median of the last `window` steps' norms.

    The first `warmup` steps are only watched, and so is every step while the median is 0. A spike counts as large as
    the limit, so the median follows a level that has risen for good. A norm that is not finite is a spike, too, and
    does not count. `give_up_after` so many left-out steps in a row it ends the run; None trains on.

    With `action: clip` the gradients are scaled down to the limit instead, which is done on the device and waits for
    nothing; gradients that are not finite stay as they are, for no factor makes them so.
    """

    built_in = True
    name = "spike_guard"

    def __init__(
        self,
        factor: float = 5.0,
        window: int = 100,
        warmup: int = 20,
        action: Literal["skip", "clip"] = "skip",
        give_up_after: int | None = None,
        params: Any = None,
    ) -> None:
        above_one("spike_guard", factor=factor)
        whole_from_one("spike_guard", window=window, warmup=warmup)
        if action not in ("skip", "clip"):
            choices = nearest(str(action), ("skip", "clip"))
            raise HooklineError(f"spike_guard: action={action!r} is no choice; {choices}")
        if give_up_after is not None:
            _check_giving_up(give_up_after, action)
        super().__init__(give_up_after, params)
        self.factor = float(factor)
        self.window = int(window)
        self.warmup = int(warmup)
        self.action = action
        self.inplace = self.clips = action == "clip"

    def init(self, params: Any) -> dict[str, Any]:
        """The last norms, on the device, how many steps were seen, and how many were left out."""
        return {**super().init(params), "seen": 0, "norms": torch.full((self.window,), torch.nan)}

    def on_update(self, grads: Gradients, state: dict[str, Any], trainer: Any) -> Gradients:
        self.clipped_norm = grads.norm()
        norm = self.clipped_norm.float()
        norms = state["norms"] = _of_length(self.window, state["norms"], state["seen"]).to(norm.device)
        median = norms.nanmedian()
        limit = torch.where(median > 0, self.factor * median, torch.inf)  # beside nothing, everything is a spike
        ready = state["seen"] >= self.warmup
        norms[state["seen"] % self.window] = _counted(norm, limit if ready else norm)
        state["seen"] += 1
        if ready and self.action == "clip":
            multiply_groups_(grads.groups(), torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0))
        elif ready:
            self._judge(norm, limit, state, trainer)
        return grads

    def _judge(self, norm: Tensor, limit: Tensor, state: dict[str, Any], trainer: Any) -> None:
        finite = norm.isfinite()
        if not self.ask(~finite | (norm > limit)):
            state["in_a_row"] = 0
        elif self.ask(finite):
            self.leave_out(f"the gradient norm is more than {self.factor:g} x its running median", state, trainer)
        else:
            self.leave_out(NON_FINITE, state, trainer)


def _check_giving_up(after: int, action: str) -> None:
    whole_from_one("spike_guard", give_up_after=after)
    if action != "skip":
        raise HooklineError("spike_guard: give_up_after counts left-out steps, and with action='clip' there are none")


def _of_length(window: int, norms: Tensor, seen: int) -> Tensor:
    """The last norms in a ring of that length, where the next one replaces the oldest: a run may resume with another.

    What has not been seen, or is not known any more, is NaN.
    """
    if len(norms) == window:
        return norms
    oldest_first = norms.roll(-(seen % len(norms)))
    kept = torch.cat([oldest_first.new_full((window,), torch.nan), oldest_first])[-window:]
    return kept.roll(seen % window)


def _counted(norm: Tensor, limit: Tensor) -> Tensor:
    """A norm as the median shall see it: at most the limit, and not at all when it is not finite."""
    return torch.where(norm.isfinite(), torch.where(norm > limit, limit, norm), torch.nan)
