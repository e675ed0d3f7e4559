"""Change the size of gradients: by a factor, to unit norm, to signs."""

from __future__ import annotations

from typing import Any, Literal

import torch

from hookline import _checks
from hookline.gradients.local_storage import multiply_
from hookline.gradients.transforms.base import Transform
from hookline.gradients.view import Gradients


class Scale(Transform):
    """Multiply gradients by `factor`; with `params`, this gives some layers another learning rate under SGD."""

    built_in = True
    name = "scale"

    def __init__(self, factor: float, params: Any = None) -> None:
        super().__init__(params)
        self.factor = float(_checks.number(factor, "scale.factor"))

    def on_update(self, grads: Gradients) -> None:
        multiply_(grads.groups(), self.factor)


class Normalize(Transform):
    """Divide the gradients by their norm: all by the global norm, or each parameter's by its own.

    `eps` is added to the norm, so that a zero gradient stays zero.
    """

    built_in = True
    name = "normalize"

    def __init__(self, by: Literal["all", "parameter"] = "all", eps: float = 1e-6, params: Any = None) -> None:
        super().__init__(params)
        self.by = _checks.one_of(by, ("all", "parameter"), "normalize.by")
        self.eps = float(_checks.number(eps, "normalize.eps", above=0, finite=False))

    def on_update(self, grads: Gradients) -> None:
        if self.by == "all":
            multiply_(grads.groups(), 1.0 / (grads.norm() + self.eps))
            return
        for gradient, norm in zip(grads.local_tensors(), grads.norms().unbind(), strict=True):
            gradient.div_(norm.to(gradient.device) + self.eps)


class Sign(Transform):
    """Replace every element by its sign: -1, 0 or 1."""

    built_in = True
    name = "sign"

    def on_update(self, grads: Gradients) -> None:
        for tensors in grads.groups():
            torch._foreach_sign_(tensors)
