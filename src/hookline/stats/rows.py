"""Compute statistics of many tensors at once, on their device: one row per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from hookline import _device
from hookline._tensors import is_sharded
from hookline.errors import HooklineError
from hookline.stats import cpu, torch_ops
from hookline.stats.columns import L2, STATISTICS, row_dtype
from hookline.stats.tensor_meta import TensorMeta, tensor_meta

__all__ = ["STATISTICS", "has_kernels", "norms", "summarize"]

_CPU = torch.device("cpu")


def summarize(
    tensors: Sequence[Tensor], names: Sequence[object] | None = None, meta: TensorMeta | None = None
) -> Tensor:
    """Compute the statistics of each tensor; nothing waits for the device.

    Values follow torch: a NaN in a tensor makes its values NaN while the counts say how many there are, and std is
    unbiased. Two cases differ, because NaN is kept for NaN in the tensor and for what has no value: std of a single
    element is 0, and the extremes of an empty tensor are NaN instead of an error. Tensors may have any real dtype,
    shape and stride; fp16 and bf16 are summed in float32, int32, int64 and fp64 in float64.

    Args:
        tensors: Dense real tensors on one device.
        names: What an error calls each tensor; "tensor 3" and so on by default.
        meta: `tensor_meta(tensors)` if the caller has it already.

    Returns:
        One row per tensor and one column per name in `STATISTICS`, float64 on the tensors' device; the same call gives
        the same bits every time.

    Raises:
        HooklineError: If a tensor is sparse, complex, a DTensor or on another device than the first.

    >>> import torch
    >>> row = summarize([torch.tensor([0.0, 3.0, -4.0])])[0]
    >>> dict(zip(STATISTICS, row.tolist()))["l2"]
    5.0
    """
    if not tensors:
        return torch.empty((0, len(STATISTICS)), dtype=row_dtype(_CPU))
    meta = meta or tensor_meta(tensors)
    if not meta.plain or len(meta.devices) > 1:
        check(tensors, names)
    with torch.no_grad():
        if tensors[0].is_cpu:
            # Subclasses, such as fake tensors, may have no values that could be looked at.
            return cpu.summarize(tensors) if meta.plain else torch_ops.summarize(tensors, torch.float64)
        if not has_kernels(tensors[0].device):
            return torch_ops.summarize(tensors)
        from hookline.stats import cuda  # Only now, because it imports Triton.

        return cuda.summarize(tensors)


def norms(tensors: Sequence[Tensor], names: Sequence[object] | None = None, meta: TensorMeta | None = None) -> Tensor:
    """Compute the L2 norm of each tensor and nothing else; nothing waits for the device.

    On CUDA a launch that gives all statistics costs no more; on the CPU norms take about half the time.

    Args:
        tensors: Tensors as `summarize` takes them.
        names: What an error calls each tensor.
        meta: `tensor_meta(tensors)` if the caller has it already.

    Returns:
        The norms, float64 on the tensors' device.

    Raises:
        HooklineError: As `summarize`.

    >>> import torch
    >>> norms([torch.tensor([3.0, -4.0]), torch.zeros(2)]).tolist()
    [5.0, 0.0]
    """
    meta = meta or tensor_meta(tensors)
    if not meta.plain or meta.devices != {_CPU}:
        return summarize(tensors, names, meta)[:, L2]
    with torch.no_grad():
        return cpu.norms(tensors)


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels work on a device; torch operations are used elsewhere, or without Triton."""
    return _device.is_accelerator(device) and find_spec("triton") is not None


def check(tensors: Sequence[Tensor], names: Sequence[object] | None = None) -> None:
    """Raise for tensors that cannot be summarized together.

    Raises:
        HooklineError: For a sparse, complex or distributed tensor, and for tensors on several devices.
    """
    names = names or [f"tensor {index}" for index in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            problem = f"it has the layout {tensor.layout}; pass its values() or to_dense()"
        elif tensor.is_complex():
            problem = f"it is {tensor.dtype}; pass torch.view_as_real(tensor) or tensor.abs()"
        elif is_sharded(tensor):
            problem = "it is a DTensor; hookline.stats.distributed.LocalTensors measures it over all ranks"
        elif tensor.device != tensors[0].device:
            where = f"{name} is on {tensor.device}, but {names[0]} is on {tensors[0].device}"
            raise HooklineError(f"{where}: summarize the tensors of each device separately")
        else:
            continue
        raise HooklineError(f"no statistics of {name}: {problem}")
