"""Clipping: by the global norm, by value, and by the size of each unit's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.gradients.norms import Norms, total_norm
from hookline.gradients.numbers import multiply_groups_, numbers_of
from hookline.gradients.transforms.base import Transform, above_zero, whole_rows
from hookline.gradients.view import Gradients
from hookline.stats.columns import wide_dtype
from hookline.stats.statistics import has_kernels


class Clip(Transform):
    """A link that clips: `on_gradient_clip` follows it, with the norm that it found."""

    clips = True


class ClipNorm(Clip):
    """Scales all gradients so that their global norm is at most `max_norm`: bit for bit what `clip_grad_norm_` does.

    (Behind `centralize` on CUDA the norms are those that its kernel found, which may differ in the last bit.) A run
    without its clipping would be another run, so a failure here ends it.
    """

    built_in = True
    name = "clip_norm"
    tells_norms = True

    def __init__(self, max_norm: float, norm_type: float = 2.0, params: Any = None) -> None:
        above_zero("clip_norm", max_norm=max_norm, norm_type=norm_type)
        super().__init__(params)
        self.max_norm = float(max_norm)
        self.norm_type = float(norm_type)

    def on_update(self, grads: Gradients) -> None:
        tensors, known = grads.writable(), grads.known
        groups = known.seen.groups(tensors)
        if self.norm_type != 2.0 or len(groups) != 1:
            self.clipped_norm = total_norm(tensors, self.norm_type)
            known.settle()
            _clip(grads, groups, self.clipped_norm, self.max_norm)
            return
        norms = known.read(tensors)
        in_their_precision = norms.to(groups[0][0].dtype)  # as torch has it
        self.clipped_norm = torch.linalg.vector_norm(in_their_precision)
        known.multiplied(tensors, norms, _clip(grads, groups, self.clipped_norm, self.max_norm))


def _clip(grads: Gradients, groups: list[list[Tensor]], norm: Tensor, limit: float) -> Tensor:
    """Scale the gradients down to the limit; returns the factor."""
    if has_kernels(norm.device):
        from hookline.gradients import cuda_multiply  # only now: it imports Triton

        if cuda_multiply.can_multiply((look := grads.look()).kinds):
            return cuda_multiply.clip_(look, norm, limit)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    multiply_groups_(groups, factor)
    return factor


class ClipValue(Clip):
    """Limits every element to ±`max_value`: bit for bit what `clip_grad_value_` does."""

    built_in = True
    name = "clip_value"

    def __init__(self, max_value: float, params: Any = None) -> None:
        above_zero("clip_value", max_value=max_value)
        super().__init__(params)
        self.max_value = float(max_value)

    def on_update(self, grads: Gradients) -> None:
        self.clipped_norm = grads.norm()
        for alike in grads.groups():
            torch._foreach_clamp_min_(alike, -self.max_value)
            torch._foreach_clamp_max_(alike, self.max_value)


class ClipAdaptive(Clip):
    """Limits each unit's gradient to `clipping` times the norm of its weights (AGC, Brock and others, 2021).

    A unit is a row: all weights that lead to one output. Vectors and scalars are one unit. `eps` is the least norm
    that weights count for, so that those which begin at zero can leave it.
    """

    built_in = True
    name = "clip_adaptive"

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3, params: Any = None) -> None:
        above_zero("clip_adaptive", clipping=clipping, eps=eps)
        super().__init__(params)
        self.clipping = float(clipping)
        self.eps = float(eps)

    def on_update(self, grads: Gradients) -> None:
        numbers = whole_rows("clip_adaptive", grads)
        self.clipped_norm = grads.norm()
        weights = [grads.params[name].detach() for name in grads]
        weight_norms = _unit_norms(weights, numbers_of(weights), Norms())
        norms = _unit_norms(grads.tensors(), numbers, grads.known)
        for gradient, norm, weight_norm in zip(numbers, norms, weight_norms, strict=True):
            limit = self.clipping * weight_norm.clamp(min=self.eps)
            gradient.mul_(torch.where(norm < limit, 1.0, limit / norm.clamp(min=1e-6)))


def _unit_norms(tensors: list[Tensor], memory: list[Tensor], known: Norms) -> list[Tensor]:
    """The norm of each row; of what is one vector, the norm of it all."""
    vectors = [tensor for tensor in tensors if not _has_rows(tensor)]
    found = iter(known.of(vectors).unbind()) if vectors else iter(())
    return [_row_norms(one) if _has_rows(whole) else next(found) for whole, one in zip(tensors, memory, strict=True)]


def _has_rows(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1


def _row_norms(matrix: Tensor) -> Tensor:
    dimensions, dtype = tuple(range(1, matrix.dim())), wide_dtype(matrix.dtype)
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=dimensions, keepdim=True, dtype=dtype)
    return norms
