"""Statistics of many tensors at once, on their device: the one path for activations and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from hookline.stats import cpu_path, torch_path
from hookline.stats.checks import check
from hookline.stats.columns import STATISTICS, row_dtype
from hookline.stats.kinds import PLAIN, Kinds, kinds_of

__all__ = ["STATISTICS", "has_kernels", "summarize"]


def summarize(tensors: Sequence[Tensor], names: Sequence[object] | None = None, kinds: Kinds | None = None) -> Tensor:
    """One row per tensor, one column per name in `STATISTICS`; nothing waits for the device.

    Rows are float64 on the tensors' device, and the same bits every time. Values follow torch: a NaN inside makes every
    value NaN while the counts say how many; std is unbiased. Two cases differ, because NaN is kept for trouble inside
    the tensor and for what has no value at all: std of a single element is 0, and an empty tensor's extremes are NaN
    instead of an error. Any real dtype, shape and stride will do; fp16 and bf16 are summed in float32, int32, int64 and
    fp64 in float64. Tensors on several devices, sparse and complex ones are refused; `names` are what the
    message calls them. Who knows their `kinds` can say so, which saves finding out.

    >>> import torch
    >>> row = summarize([torch.tensor([0.0, 3.0, -4.0])])[0]
    >>> dict(zip(STATISTICS, row.tolist()))["l2"]
    5.0
    """
    if not tensors:
        return torch.empty((0, len(STATISTICS)), dtype=row_dtype(torch.device("cpu")))
    if kinds is None and tensors[0].is_cpu:
        kinds = kinds_of(tensors)
    if kinds is None or not (kinds.plain and kinds.alike):
        check(tensors, names)
    if kinds is not None and not kinds.in_graph:
        return _summarize(tensors, kinds)
    with torch.no_grad():  # which takes 20 µs in the midst of other work
        return _summarize(tensors, kinds)


def _summarize(tensors: Sequence[Tensor], kinds: Kinds | None) -> Tensor:
    if kinds is not None and kinds.on_cpu:  # a device would take 15 µs to tell its type
        try:
            return cpu_path.summarize(tensors, kinds)
        except (RuntimeError, AssertionError):  # the latter from fake tensors; rarely, so that it is not asked before
            if _hold_their_values(tensors):
                raise
    if not has_kernels(tensors[0].device):
        return torch_path.summarize(tensors)
    from hookline.stats import cuda_path  # only now: it imports Triton

    return cuda_path.summarize(tensors)


def _hold_their_values(tensors: Sequence[Tensor]) -> bool:
    """Whether their memory can be read as it is: not that of a subclass that wraps others, nor of a negated view."""
    return PLAIN.issuperset(map(type, tensors)) and not any(map(Tensor.is_neg, tensors))


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels serve this device; without Triton, torch operations do."""
    return device.type == "cuda" and _has_triton()


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
