"""Amplifying the slow part of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.gradients.numbers import multiply_, numbers_of
from hookline.gradients.transforms.base import Transform, at_least_zero, below_one, dense
from hookline.gradients.view import Gradients


class Grokfast(Transform):
    """Adds `lamb` times a moving average of the gradients to them (Grokfast-EMA, Lee and others, 2024).

    The average begins with the first gradient and keeps the share `alpha` of itself at each step; it needs as much
    memory as the gradients, and is saved with the run. Gradients that are not finite, as a scaler leaves them out now
    and then, do not enter it. (The paper's window of past gradients needs that memory a hundred times over: left out.)
    """

    built_in = True
    name = "grokfast"

    def __init__(self, alpha: float = 0.98, lamb: float = 2.0, params: Any = None) -> None:
        below_one("grokfast", alpha=alpha)
        at_least_zero("grokfast", lamb=lamb)
        super().__init__(params)
        self.alpha = float(alpha)
        self.lamb = float(lamb)

    def init(self, params: Any) -> dict[str, Any]:
        """The averages, by parameter."""
        return {"averages": {}}

    def on_update(self, grads: Gradients, state: dict[str, Any]) -> None:
        gradients, averages = dense("grokfast", grads), state["averages"]
        if not gradients:
            return
        finite = _everywhere(grads.norm().isfinite(), gradients)
        for name, tensor in grads.items():
            if name not in averages:
                averages[name] = torch.where(finite[tensor.device], tensor, 0.0)
        slow = numbers_of([averages[name] for name in grads])
        seen = [torch.where(finite[new.device], new, old) for new, old in zip(gradients, slow, strict=True)]
        multiply_(slow, self.alpha)
        torch._foreach_add_(slow, seen, alpha=1 - self.alpha)
        torch._foreach_add_(gradients, slow, alpha=self.lamb)


def _everywhere(flag: Tensor, tensors: list[Tensor]) -> dict[torch.device, Tensor]:
    """The flag on each of the tensors' devices."""
    return {device: flag.to(device) for device in {tensor.device for tensor in tensors}}
