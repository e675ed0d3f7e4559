"""Gradient centralization."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.gradients.numbers import any_sharded
from hookline.gradients.transforms.base import Transform, whole_rows
from hookline.gradients.view import Gradients
from hookline.stats.statistics import has_kernels


class Centralize(Transform):
    """Takes from each row of a gradient its mean (gradient centralization, Yong and others, 2020).

    A row is what leads to one output: all dimensions but the first. Vectors and scalars stay as they are.
    """

    built_in = True
    name = "centralize"

    def on_update(self, grads: Gradients) -> None:
        matrices = [matrix for matrix in whole_rows("centralize", grads) if matrix.dim() > 1]
        for device, together in by_device(matrices).items():
            if has_kernels(device):
                _with_kernels(together, grads)
            else:
                _with_torch(together)


def _with_torch(matrices: list[Tensor]) -> None:
    for matrix in matrices:
        matrix.sub_(torch.mean(matrix, dim=tuple(range(1, matrix.dim())), keepdim=True))


def _with_kernels(matrices: list[Tensor], grads: Gradients) -> None:
    """In one launch for all rows of a length; it finds the norms, too, so that nobody must read for them."""
    from hookline.gradients import cuda_rows  # only now: it imports Triton

    fitting = [matrix for matrix in matrices if cuda_rows.fits(matrix)]
    _with_torch([matrix for matrix in matrices if not cuda_rows.fits(matrix)])
    norms = cuda_rows.centralize(fitting) if fitting else None
    if norms is not None and not any_sharded(grads.tensors()):  # else they are those of the shards here
        grads.known.keep(fitting, norms)


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The tensors of each device by themselves."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return devices
