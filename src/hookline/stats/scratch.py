"""Memory for numbers on their way through the CPU: new pages would cost as much as the work on them."""

from __future__ import annotations

from functools import lru_cache
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOGETHER = 131072  # elements that are worked on at a time; twice as many leave the cache


class _Scratch(local):
    """What is kept for each thread, with anything in it. Whoever takes some must be done before the next one asks."""

    def __init__(self) -> None:
        self.mask = np.empty(TOGETHER, np.bool_)
        self._kept: dict[torch.dtype, Tensor] = {}

    def blocks(self, dtype: torch.dtype, size: int = TOGETHER) -> Tensor:
        """Two rows of so many elements, or more."""
        kept = self._kept.get(dtype)
        if kept is None or kept.shape[1] < size:
            with torch.inference_mode(False):  # made in there, it could not be written to later outside
                kept = self._kept[dtype] = torch.empty((2, size), dtype=dtype)
        return kept


scratch = _Scratch()


@lru_cache
def ones_of(dtype: Any) -> Any:
    """As many ones as are worked on at a time: a product with them is a sum at four times the speed of NumPy's own."""
    return np.ones(TOGETHER, dtype)
