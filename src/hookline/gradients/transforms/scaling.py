"""Changing the size of gradients: by a factor, to norm one, to signs."""

from __future__ import annotations

from typing import Any, Literal

import torch

from hookline.errors import HooklineError, nearest
from hookline.gradients.numbers import multiply_groups_
from hookline.gradients.transforms.base import Transform, above_zero, finite
from hookline.gradients.view import Gradients


class Scale(Transform):
    """Multiplies gradients by `factor`; with `params`, a learning rate of their own for some layers under SGD."""

    built_in = True
    name = "scale"
    tells_norms = True

    def __init__(self, factor: float, params: Any = None) -> None:
        finite("scale", factor=factor)
        super().__init__(params)
        self.factor = float(factor)

    def on_update(self, grads: Gradients) -> None:
        look = grads.look()
        if not grads.known.were_found(look):
            grads.known.settle()
            multiply_groups_(grads.groups(), self.factor)
            return
        from hookline.gradients import cuda_multiply  # only now: it imports Triton, as who found the norms did

        grads.known.keep(look.tensors, cuda_multiply.multiply_(look, self.factor))


class Normalize(Transform):
    """Divides the gradients by their norm: all by the global one, or each parameter's by its own.

    `eps` is added to the norm, so that a gradient of zeros stays one.
    """

    built_in = True
    name = "normalize"

    def __init__(self, by: Literal["all", "parameter"] = "all", eps: float = 1e-6, params: Any = None) -> None:
        if by not in ("all", "parameter"):
            raise HooklineError(f"normalize: by={by!r} is no choice; {nearest(str(by), ('all', 'parameter'))}")
        above_zero("normalize", eps=eps)
        super().__init__(params)
        self.by = by
        self.eps = float(eps)

    def on_update(self, grads: Gradients) -> None:
        if self.by == "all":
            multiply_groups_(grads.groups(), 1.0 / (grads.norm() + self.eps))
            return
        for gradient, norm in zip(grads.numbers(), grads.norms().unbind(), strict=True):
            gradient.div_(norm.to(gradient.device) + self.eps)


class Sign(Transform):
    """Keeps the sign of every element and nothing else: -1, 0 or 1."""

    built_in = True
    name = "sign"

    def on_update(self, grads: Gradients) -> None:
        for alike in grads.groups():
            torch._foreach_sign_(alike)
