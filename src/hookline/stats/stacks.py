"""Small tensors alike on the CPU: stacked in memory that stays in the cache, and read together, row by row.

Stacking hundreds of them is one call, and so is each reading of all rows; calls for each tensor would take longer than
what they do. NumPy's reductions along rows take half as long as torch's, and its products a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hookline.stats.columns import wide_dtype
from hookline.stats.from_sums import Numbers
from hookline.stats.scratch import TOGETHER, scratch


def sums_of_rows(alike: Sequence[Tensor]) -> Numbers:
    """Sum, sum of squares, minimum, maximum and how many are not zero: a row each, one column per tensor."""
    found = np.empty((5, len(alike)))
    with np.errstate(over="ignore", invalid="ignore"):  # whoever asks sees it in the numbers
        for start, rows in _stacks(alike):
            _read(rows, found[:, start : start + len(rows)])
    return found


def squares_of_rows(alike: Sequence[Tensor]) -> Numbers:
    """The sum of squares of each tensor."""
    found = np.empty(len(alike))
    with np.errstate(over="ignore", invalid="ignore"):
        for start, rows in _stacks(alike):
            found[start : start + len(rows)] = _squares(rows)
    return found


def _stacks(alike: Sequence[Tensor]) -> Iterator[tuple[int, Numbers]]:
    """Tensors of one shape and dtype as rows of matrices, some at a time, each with the place of its first.

    They are in the precision to compute in. A matrix holds until the next one comes.
    """
    first, size = alike[0], alike[0].numel()
    many = min(max(TOGETHER // size, 1), len(alike))
    memory = scratch.blocks(wide_dtype(first.dtype), many * size)[0, : many * size].view(many, *first.shape)
    rows = memory.view(many, size).numpy()
    for start in range(0, len(alike), many):
        some = tuple(alike[start : start + many])
        _stack(some, memory if len(some) == many else memory[: len(some)])
        yield start, rows[: len(some)]


def _stack(some: tuple[Tensor, ...], memory: Tensor) -> None:
    if some[0].dtype is memory.dtype:
        torch.stack(some, out=memory)
    else:
        memory.copy_(torch.stack(some))


def _read(rows: Numbers, found: Numbers) -> None:
    size = rows.shape[1]
    others = np.not_equal(rows, 0, out=scratch.mask[: rows.size].reshape(rows.shape))
    found[0] = np.matmul(rows, np.ones(size, rows.dtype))  # a sum, at twice the speed of one
    found[1] = _squares(rows)
    found[2] = np.minimum.reduce(rows, axis=1)
    found[3] = np.maximum.reduce(rows, axis=1)
    found[4] = size if others.all() else np.add.reduce(others.view(np.uint8), axis=1, dtype=np.uint32)


def _squares(rows: Numbers) -> Numbers:
    """Each row by itself, as a product of matrices of one row and one column."""
    return np.matmul(rows[:, None, :], rows[:, :, None]).reshape(-1)
