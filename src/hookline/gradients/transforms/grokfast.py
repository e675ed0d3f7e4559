"""Grokfast: amplify the slow part of gradients."""

from __future__ import annotations

from typing import Any

import torch

from hookline import _checks
from hookline.gradients.local_storage import group_by_kind, local_tensor, multiply_
from hookline.gradients.transforms.base import Transform, dense_tensors
from hookline.gradients.view import Gradients


class Grokfast(Transform):
    """Add `lamb` times a moving average of the gradients to them (Grokfast-EMA, Lee et al., 2024).

    The average starts with the first gradient and keeps the share `alpha` of itself at each step; it needs as much
    memory as the gradients, and is saved with the run. Non-finite gradients, as a GradScaler skips them now and then,
    do not enter it. (The paper's window of past gradients would need a hundred times that memory.)
    """

    built_in = True
    name = "grokfast"

    def __init__(self, alpha: float = 0.98, lamb: float = 2.0, params: Any = None) -> None:
        super().__init__(params)
        self.alpha = float(_checks.number(alpha, "grokfast.alpha", at_least=0, below=1))
        self.lamb = float(_checks.number(lamb, "grokfast.lamb", at_least=0))

    def init(self, params: Any) -> dict[str, Any]:
        """Make the averages, by parameter; each starts with the first gradient."""
        return {"averages": {}}

    def on_update(self, grads: Gradients, state: dict[str, Any]) -> None:
        gradients, averages = dense_tensors("grokfast", grads), state["averages"]
        if not gradients:
            return
        flag = grads.norm().isfinite()
        finite = {device: flag.to(device) for device in {tensor.device for tensor in gradients}}
        for name, tensor in grads.items():
            if name not in averages:
                averages[name] = torch.where(finite[tensor.device], tensor, 0.0)
        slow = [local_tensor(averages[name]) for name in grads]
        new = [torch.where(finite[grad.device], grad, old) for grad, old in zip(gradients, slow, strict=True)]
        multiply_(group_by_kind(slow), self.alpha)
        torch._foreach_add_(slow, new, alpha=1 - self.alpha)
        torch._foreach_add_(gradients, slow, alpha=self.lamb)
