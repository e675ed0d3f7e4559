"""Clip gradients: by their global norm, by value, and by the norm of each unit's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline._parameters import PositiveFloat
from hookline.gradients.view import GradientList, Gradients, Transform
from hookline.stats.rows import wide_dtype


class ClipNorm(Transform):
    """Scale all gradients so that their global norm is at most `max_norm`, bit for bit as `clip_grad_norm_` does.

    Args:
        max_norm: The largest global norm that the gradients may have.
        norm_type: The order of the norm; 2 is the Euclidean norm, `float("inf")` the largest absolute value.
        params: The parameters whose gradients count and are scaled; all of them by default.
    """

    built_in = True
    name = "clip_norm"
    clips = True

    def __init__(self, max_norm: PositiveFloat, norm_type: PositiveFloat = 2.0, params: Any = None) -> None:
        super().__init__(params)
        self.max_norm, self.norm_type = max_norm, norm_type

    def on_update(self, grads: Gradients) -> None:
        gradients = grads.writable()
        if self.norm_type == 2.0 and len(gradients.groups) == 1:
            # As in torch, this is computed in the dtype of the gradients.
            self.clipped_norm = torch.linalg.vector_norm(gradients.norms.to(gradients.groups[0][0].dtype))
        else:
            self.clipped_norm = gradients.total_norm(self.norm_type)
        gradients.multiply_(torch.clamp(self.max_norm / (self.clipped_norm + 1e-6), max=1.0))


class ClipValue(Transform):
    """Limit every element to ±`max_value`, bit for bit as `clip_grad_value_` does.

    Args:
        max_value: The largest absolute value that an element may have.
        params: The parameters whose gradients are limited; all of them by default.
    """

    built_in = True
    name = "clip_value"
    clips = True

    def __init__(self, max_value: PositiveFloat, params: Any = None) -> None:
        super().__init__(params)
        self.max_value = max_value

    def on_update(self, grads: Gradients) -> None:
        self.clipped_norm = grads.norm()
        for tensors in grads.writable().groups:
            torch._foreach_clamp_min_(tensors, -self.max_value)
            torch._foreach_clamp_max_(tensors, self.max_value)


class ClipAdaptive(Transform):
    """Limit each unit's gradient to `clipping` times the norm of its weights (AGC, Brock et al., 2021).

    A unit is a row: all weights that lead to one output. Vectors and scalars are one unit.

    Args:
        clipping: The largest norm of a unit's gradient, as a share of the norm of its weights.
        eps: The minimum norm assumed for weights, so weights that start at zero can leave it.
        params: The parameters whose gradients are limited; all of them by default.
    """

    built_in = True
    name = "clip_adaptive"
    clips = True
    reads_weights = True

    def __init__(self, clipping: PositiveFloat = 0.01, eps: PositiveFloat = 1e-3, params: Any = None) -> None:
        super().__init__(params)
        self.clipping, self.eps = clipping, eps

    def on_update(self, grads: Gradients) -> None:
        local = grads.dense("clip_adaptive", whole_rows=True)
        self.clipped_norm = grads.norm()
        weight_norms = _unit_norms(GradientList([grads.params[name].detach() for name in grads]))
        norms = _unit_norms(grads.as_list())
        for gradient, norm, weight_norm in zip(local, norms, weight_norms, strict=True):
            limit = self.clipping * weight_norm.clamp(min=self.eps)
            gradient.mul_(torch.where(norm < limit, 1.0, limit / norm.clamp(min=1e-6)))


def _unit_norms(tensors: GradientList) -> list[Tensor]:
    """Return the norm of each row; for vectors, the norm of the whole vector over all its shards."""
    vectors = GradientList([tensor for tensor in tensors.tensors if not _has_rows(tensor)])
    vector_norms = iter(vectors.norms.unbind())
    norms = []
    for tensor, memory in zip(tensors.tensors, tensors.local, strict=True):
        if _has_rows(tensor):
            dimensions, dtype = tuple(range(1, memory.dim())), wide_dtype(memory.dtype)
            norms.append(torch.linalg.vector_norm(memory, dim=dimensions, keepdim=True, dtype=dtype))
        else:
            norms.append(next(vector_norms))
    return norms


def _has_rows(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1
