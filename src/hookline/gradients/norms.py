"""Compute norms of gradients on their device, over all shards of sharded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline._device import cached_table
from hookline.gradients.local_storage import indices_by_kind, is_sharded, local_tensors
from hookline.stats.columns import wide_dtype
from hookline.stats.distributed import group_by_mesh


def norms_of(tensors: list[Tensor], local: list[Tensor] | None = None) -> Tensor:
    """Return the L2 norm of each gradient, of the whole one where it is sharded; float32 for half precision.

    Args:
        tensors: The gradients.
        local: Their memory, if it is known already.

    Returns:
        One norm per gradient, on the first one's device.
    """
    memory = local_tensors(tensors) if local is None else local
    groups = indices_by_kind(memory)
    if len(groups) == 1:
        norms = norms_of_one_kind(memory)
    else:
        home = memory[0].device
        parts = [norms_of_one_kind([memory[index] for index in indices]).to(home) for indices in groups]
        order = sorted(range(len(memory)), key=[index for indices in groups for index in indices].__getitem__)
        norms = torch.cat(parts)[cached_table(home, tuple(order))]
    if any(map(is_sharded, tensors)):
        names = [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]
        for shards in group_by_mesh(tensors, names):  # one reduction for all gradients of a mesh
            norms = shards.sums(norms.square()).sqrt()
    return norms


def norms_of_one_kind(memory: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of some plain tensors of one dtype and device."""
    # The operation that torch clips by. `hookline.stats` computes norms more exactly, and would clip differently in
    # the last bit.
    dtype, wide = memory[0].dtype, wide_dtype(memory[0].dtype)
    return torch.stack(torch._foreach_norm(memory, 2.0, dtype=None if wide is dtype else wide))


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector, like torch's `get_total_norm`; also of sparse and sharded ones.

    Args:
        tensors: The gradients.
        norm_type: The p of the p-norm; infinity is allowed.

    Returns:
        A tensor of one element on the gradients' device.
    """
    if norm_type == 2.0 and any(map(is_sharded, tensors)):
        norm: Tensor = torch.linalg.vector_norm(norms_of(tensors))
        return norm
    meshes: dict[Any, list[Tensor]] = {}
    for tensor, memory in zip(tensors, local_tensors(tensors), strict=True):
        mesh = getattr(tensor, "device_mesh", None)
        meshes.setdefault(mesh, []).append(memory if mesh is None and not tensor.is_complex() else tensor)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group, norm_type) for group in meshes.values()]
    # torch leaves the norm of DTensors to be reduced over their mesh.
    norms = [one.full_tensor() if is_sharded(one) else one for one in norms]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
