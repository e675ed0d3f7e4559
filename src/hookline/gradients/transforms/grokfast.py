"""Grokfast: amplify the slow part of gradients."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt

from hookline._parameters import NonNegativeFloat
from hookline.gradients.view import GradientList, Gradients, Transform


class Grokfast(Transform):
    """Add `lamb` times a moving average of the gradients to them (Grokfast-EMA, Lee et al., 2024).

    The average starts with the first gradient. It needs as much memory as the gradients and is saved with the run.
    Non-finite gradients, which a GradScaler occasionally skips, do not enter it. (The paper's window of past gradients
    would need a hundred times that memory.)

    Args:
        alpha: The share of the old average that is kept at each step, from 0 to below 1.
        lamb: The number that multiplies the average before it is added to the gradients.
        params: The parameters whose gradients it changes; all of them by default.
    """

    built_in = True
    name = "grokfast"

    def __init__(
        self, alpha: Annotated[float, Ge(0), Lt(1)] = 0.98, lamb: NonNegativeFloat = 2.0, params: Any = None
    ) -> None:
        super().__init__(params)
        self.alpha, self.lamb = alpha, lamb

    def init(self, params: Any) -> dict[str, Any]:
        """Make the averages, by parameter; each starts with the first gradient."""
        return {"averages": {}}

    def on_update(self, grads: Gradients, state: dict[str, Any]) -> None:
        gradients, averages = grads.dense("grokfast"), state["averages"]
        if not gradients:
            return
        flag = grads.norm().isfinite()
        finite = {device: flag.to(device) for device in {tensor.device for tensor in gradients}}
        for name, tensor in grads.items():
            if name not in averages:
                averages[name] = torch.where(finite[tensor.device], tensor, 0.0)
        slow = GradientList([averages[name] for name in grads])
        new = [torch.where(finite[grad.device], grad, old) for grad, old in zip(gradients, slow.local, strict=True)]
        slow.multiply_(self.alpha)
        torch._foreach_add_(slow.local, new, alpha=1 - self.alpha)
        torch._foreach_add_(gradients, slow.local, alpha=self.lamb)
