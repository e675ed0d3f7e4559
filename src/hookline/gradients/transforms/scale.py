"""Change gradients by simple arithmetic: by a factor, to unit norm, to zero mean, to signs."""

from __future__ import annotations

from typing import Any, Literal

import torch

from hookline._parameters import PositiveFloat
from hookline.gradients.view import Gradients, Transform


class Scale(Transform):
    """Multiply gradients by `factor`; with `params`, this gives some layers a different learning rate under SGD.

    Args:
        factor: The number that multiplies the gradients.
        params: The parameters whose gradients are multiplied; all of them by default.
    """

    built_in = True
    name = "scale"

    def __init__(self, factor: float, params: Any = None) -> None:
        super().__init__(params)
        self.factor = factor

    def on_update(self, grads: Gradients) -> None:
        grads.writable().multiply_(self.factor)


class Normalize(Transform):
    """Divide the gradients by their norm: all by the global norm, or each parameter's by its own.

    Args:
        by: `"all"` divides by the norm of all selected gradients, `"parameter"` divides each by its own norm.
        eps: A number that is added to the norm, so that a zero gradient stays zero.
        params: The parameters whose gradients are divided; all of them by default.
    """

    built_in = True
    name = "normalize"

    def __init__(self, by: Literal["all", "parameter"] = "all", eps: PositiveFloat = 1e-6, params: Any = None) -> None:
        super().__init__(params)
        self.by, self.eps = by, eps

    def on_update(self, grads: Gradients) -> None:
        if self.by == "all":
            grads.writable().multiply_(1.0 / (grads.norm() + self.eps))
            return
        for gradient, norm in zip(grads.writable().local, grads.norms().unbind(), strict=True):
            gradient.div_(norm.to(gradient.device) + self.eps)


class Centralize(Transform):
    """Subtract from each row of a gradient its mean (gradient centralization, Yong et al., 2020).

    A row holds the weights that lead to one output: all dimensions but the first. Vectors and scalars do not change.

    Args:
        params: The parameters whose gradients are centralized; all of them by default.
    """

    built_in = True
    name = "centralize"

    def on_update(self, grads: Gradients) -> None:
        matrices = [tensor for tensor in grads.dense("centralize", whole_rows=True) if tensor.dim() > 1]
        means = [torch.mean(matrix, dim=tuple(range(1, matrix.dim())), keepdim=True) for matrix in matrices]
        if matrices:
            torch._foreach_sub_(matrices, means)


class Sign(Transform):
    """Replace every element with its sign: -1, 0 or 1.

    Args:
        params: The parameters whose gradients are replaced; all of them by default.
    """

    built_in = True
    name = "sign"

    def on_update(self, grads: Gradients) -> None:
        for tensors in grads.writable().groups:
            torch._foreach_sign_(tensors)
