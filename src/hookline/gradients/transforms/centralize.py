"""Gradient centralization."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.gradients.transforms.base import Transform, dense_tensors
from hookline.gradients.view import Gradients
from hookline.stats.rows import has_kernels


class Centralize(Transform):
    """Subtract from each row of a gradient its mean (gradient centralization, Yong et al., 2020).

    A row is what leads to one output: all dimensions but the first. Vectors and scalars are left as they are.
    """

    built_in = True
    name = "centralize"

    def on_update(self, grads: Gradients) -> None:
        found = grads.as_list()
        if found.is_uniform:
            norms = _centralize(found.tensors)
            if norms is not None:
                grads.norms_after = norms, True
            return
        devices: dict[torch.device, list[Tensor]] = {}
        for tensor in dense_tensors("centralize", grads, whole_rows=True):
            devices.setdefault(tensor.device, []).append(tensor)
        for tensors in devices.values():
            _centralize(tensors)


def _centralize(tensors: list[Tensor]) -> Tensor | None:
    """Centralize gradients of one device; return their norms if the kernels found those of all of them."""
    norms = None
    if has_kernels(tensors[0].device):
        from hookline.gradients import centralize_cuda  # imports Triton, so only where it is used

        norms, tensors = centralize_cuda.centralize(tensors)
    for tensor in tensors:
        if tensor.dim() > 1:
            tensor.sub_(torch.mean(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True))
    return None if tensors else norms
