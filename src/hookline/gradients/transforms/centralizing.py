"""Gradient centralization."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.gradients.look import Look
from hookline.gradients.norms import Norms
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
        look = grads.look()
        known = grads.known if look.plain else None  # of shards, the norms are not the whole ones'
        for together in [look] if look.plain and look.alike else by_device(whole_rows("centralize", grads)):
            if together.tensors and has_kernels(together.tensors[0].device):
                _with_kernels(together, known)
            else:
                _with_torch(together.tensors)


def _with_torch(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dim() > 1:
            tensor.sub_(torch.mean(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True))


def _with_kernels(look: Look, known: Norms | None) -> None:
    """In one launch for all rows of a length; it finds every norm, too, so that nobody must read for them."""
    from hookline.gradients import cuda_rows  # only now: it imports Triton

    fitting, others = cuda_rows.which_fit(look)
    _with_torch(others)
    if fitting.tensors:
        norms = cuda_rows.centralize(fitting)
        if known is not None:
            known.keep(fitting.tensors, norms)
    if others and known is not None:
        known.distrust()


def by_device(tensors: list[Tensor]) -> list[Look]:
    """The tensors of each device by themselves."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return [Look(together) for together in devices.values()]
