"""Gradient centralization."""

from __future__ import annotations

import torch

from hookline.gradients.transforms.base import Transform, dense_tensors
from hookline.gradients.view import Gradients


class Centralize(Transform):
    """Subtract from each row of a gradient its mean (gradient centralization, Yong et al., 2020).

    A row is what leads to one output: all dimensions but the first. Vectors and scalars are left as they are.
    """

    built_in = True
    name = "centralize"

    def on_update(self, grads: Gradients) -> None:
        matrices = [tensor for tensor in dense_tensors("centralize", grads, whole_rows=True) if tensor.dim() > 1]
        means = [torch.mean(matrix, dim=tuple(range(1, matrix.dim())), keepdim=True) for matrix in matrices]
        if matrices:
            torch._foreach_sub_(matrices, means)
