"""What is in a batch, as far as counting it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def count_samples(batch: Any) -> int:
    """The batch's first dimension, of the first tensor found."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if type(first) is torch.Tensor:  # as mostly
        return first.size(0) if first.dim() else 1
    tensor = next(tensors_of(batch), None)
    return int(tensor.shape[0]) if tensor is not None and tensor.dim() else 1


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for item in items:
        yield from tensors_of(item)
