"""Get at the memory behind gradients, plain tensors that can be read and written in place, and compute over it.

Of a DTensor that is the shard on this rank, of a sparse gradient its values, of a complex one pairs of real numbers.
A function of single elements that maps zero to zero, applied to them, is right for the whole gradient; sums over them
must also be taken over the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline._tensors import is_sharded, stored_values
from hookline.errors import GradientError
from hookline.stats.columns import wide_dtype
from hookline.stats.distributed import group_by_mesh
from hookline.stats.tensor_meta import DEVICE_AND_DTYPE, indices_by, tensor_meta


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the memory of one gradient; for an uncoalesced sparse one, a copy of what coalescing gives."""
    if is_sharded(tensor):
        placements = tensor.placements  # type: ignore[attr-defined]
        if any(place.is_partial() for place in placements):
            raise GradientError(
                f"a gradient of shape {tuple(tensor.shape)} is not reduced over its mesh yet ({placements}); "
                "redistribute it"
            )
        with torch.no_grad():  # otherwise every call would return a new view
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    tensor = stored_values(tensor)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def group_by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype: foreach operations are fused for one kind only."""
    return [[tensors[index] for index in indices] for indices in indices_by(DEVICE_AND_DTYPE, tensors)]


def multiply_(groups: list[list[Tensor]], factor: Tensor | float) -> None:
    """Multiply tensors, grouped by kind, in place by one number, which may be on a device."""
    for tensors in groups:
        like = tensors[0]
        if isinstance(factor, Tensor):
            exact: Tensor | float = factor.to(like.device)
        elif like.is_cpu:
            # On the CPU a foreach operation would round a Python number to bf16 or fp16 first.
            exact = torch.tensor(factor, dtype=wide_dtype(like.dtype))
        else:
            exact = factor
        torch._foreach_mul_(tensors, exact)


def norms_of(tensors: list[Tensor], memory: list[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient, of the whole one where it is sharded, on the first one's device.

    Half precision is added up in float32.

    Args:
        tensors: The gradients.
        memory: The `local_tensor` of each.
    """
    found: dict[int, Tensor] = {}
    for indices in indices_by(DEVICE_AND_DTYPE, memory):
        dtype = torch.float32 if memory[indices[0]].dtype.itemsize < 4 else None
        of_kind = torch.stack(torch._foreach_norm([memory[index] for index in indices], 2.0, dtype=dtype))
        found.update(zip(indices, of_kind.to(memory[0].device).unbind(), strict=True))  # one copy for all
    norms = torch.stack([found[index] for index in range(len(memory))])
    if any(map(is_sharded, tensors)):
        names = [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]
        for shards in group_by_mesh(tensors, names):  # one reduction for all gradients of a mesh
            norms = shards.sums(norms.square()).sqrt()
    return norms


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector, like torch's `get_total_norm`; also of sparse and sharded ones.

    Args:
        tensors: The gradients.
        norm_type: The p of the p-norm; infinity is allowed.

    Returns:
        A tensor of one element on the gradients' device.
    """
    if tensor_meta(tensors).uniform:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    memory = list(map(local_tensor, tensors))
    if norm_type == 2.0 and any(map(is_sharded, tensors)):
        norm: Tensor = torch.linalg.vector_norm(norms_of(tensors, memory))
        return norm
    meshes: dict[Any, list[Tensor]] = {}
    for tensor, values in zip(tensors, memory, strict=True):
        mesh = getattr(tensor, "device_mesh", None)
        meshes.setdefault(mesh, []).append(values if mesh is None and not tensor.is_complex() else tensor)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group, norm_type) for group in meshes.values()]
    # torch leaves the norm of DTensors to be reduced over their mesh.
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
