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
    tells_norms = True

    def on_update(self, grads: Gradients) -> None:
        look = grads.look()
        for together in [look] if look.plain and look.alike else by_device(whole_rows("centralize", grads)):
            if together.tensors and has_kernels(together.tensors[0].device):
                _with_kernels(together, grads.known, look.plain)
            else:
                _with_torch(together.tensors, grads.known)


def _with_torch(tensors: list[Tensor], known: Norms) -> None:
    if tensors:
        known.settle()
    for tensor in tensors:
        if tensor.dim() > 1:
            tensor.sub_(torch.mean(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True))


def _with_kernels(look: Look, known: Norms, whole: bool) -> None:
    """In one launch for all rows of a length; it finds every norm, too, so that nobody must read for them.

    Of tensors that are not `whole`, but shards, these are not the gradients' norms.
    """
    from hookline.gradients import cuda_rows  # only now: it imports Triton

    fitting, others = cuda_rows.which_fit(look)
    _with_torch(others, known)
    if not whole:
        known.settle()
    if fitting.tensors:
        norms = cuda_rows.centralize(fitting)
        if whole:
            known.keep(fitting.tensors, norms)


def by_device(tensors: list[Tensor]) -> list[Look]:
    """The tensors of each device by themselves."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return [Look(together) for together in devices.values()]
