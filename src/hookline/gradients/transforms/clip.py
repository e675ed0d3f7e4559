"""Clip gradients: by their global norm, by value, and by the norm of each unit's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline import _checks
from hookline.gradients.local_storage import local_tensor, norms_of, total_norm
from hookline.gradients.transforms.base import Transform, dense_tensors
from hookline.gradients.view import Gradients
from hookline.stats.columns import wide_dtype


class Clip(Transform):
    """A transform that clips: `on_gradient_clip` follows it, with the norm before clipping."""

    clips = True


class ClipNorm(Clip):
    """Scale all gradients so that their global norm is at most `max_norm`, bit for bit as `clip_grad_norm_` does."""

    built_in = True
    name = "clip_norm"

    def __init__(self, max_norm: float, norm_type: float = 2.0, params: Any = None) -> None:
        super().__init__(params)
        self.max_norm = float(_checks.number(max_norm, "clip_norm.max_norm", above=0, finite=False))
        self.norm_type = float(_checks.number(norm_type, "clip_norm.norm_type", above=0, finite=False))

    def on_update(self, grads: Gradients) -> None:
        found, norms = grads.writable(), None
        if self.norm_type == 2.0 and len(found.groups) == 1:
            norms = found.norms(exact=True)
            # As torch does it: in the dtype of the gradients.
            self.clipped_norm = torch.linalg.vector_norm(norms.to(found.groups[0][0].dtype))
        else:
            self.clipped_norm = total_norm(found.tensors, self.norm_type)
        factor = torch.clamp(self.max_norm / (self.clipped_norm + 1e-6), max=1.0)
        for tensors in found.groups:
            torch._foreach_mul_(tensors, factor.to(tensors[0].device))
        if norms is not None:
            found.norms_after = norms * factor


class ClipValue(Clip):
    """Limit every element to ±`max_value`, bit for bit as `clip_grad_value_` does."""

    built_in = True
    name = "clip_value"

    def __init__(self, max_value: float, params: Any = None) -> None:
        super().__init__(params)
        self.max_value = float(_checks.number(max_value, "clip_value.max_value", above=0, finite=False))

    def on_update(self, grads: Gradients) -> None:
        self.clipped_norm = grads.norm()
        for tensors in grads.groups():
            torch._foreach_clamp_min_(tensors, -self.max_value)
            torch._foreach_clamp_max_(tensors, self.max_value)


class ClipAdaptive(Clip):
    """Limit each unit's gradient to `clipping` times the norm of its weights (AGC, Brock et al., 2021).

    A unit is a row: all weights that lead to one output. Vectors and scalars are one unit. `eps` is the smallest norm
    that weights count for, so that those which start at zero can leave it.
    """

    built_in = True
    name = "clip_adaptive"
    reads_weights = True

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3, params: Any = None) -> None:
        super().__init__(params)
        self.clipping = float(_checks.number(clipping, "clip_adaptive.clipping", above=0, finite=False))
        self.eps = float(_checks.number(eps, "clip_adaptive.eps", above=0, finite=False))

    def on_update(self, grads: Gradients) -> None:
        local = dense_tensors("clip_adaptive", grads, whole_rows=True)
        self.clipped_norm = grads.norm()
        weights = [grads.params[name].detach() for name in grads]
        weight_norms = _unit_norms(weights, list(map(local_tensor, weights)))
        norms = _unit_norms(grads.tensors(), local)
        for gradient, norm, weight_norm in zip(local, norms, weight_norms, strict=True):
            limit = self.clipping * weight_norm.clamp(min=self.eps)
            gradient.mul_(torch.where(norm < limit, 1.0, limit / norm.clamp(min=1e-6)))


def _unit_norms(tensors: list[Tensor], local: list[Tensor]) -> list[Tensor]:
    """Return the norm of each row; for vectors, the norm of the whole vector over all its shards."""
    vectors = [tensor for tensor in tensors if not _has_rows(tensor)]
    vector_norms = iter(norms_of(vectors, list(map(local_tensor, vectors))).unbind()) if vectors else iter(())
    found = []
    for tensor, memory in zip(tensors, local, strict=True):
        if _has_rows(tensor):
            dimensions, dtype = tuple(range(1, memory.dim())), wide_dtype(memory.dtype)
            found.append(torch.linalg.vector_norm(memory, dim=dimensions, keepdim=True, dtype=dtype))
        else:
            found.append(next(vector_norms))
    return found


def _has_rows(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1
