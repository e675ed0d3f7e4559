"""Small tensors on the CPU, whatever their shapes: all statistics by NumPy, norms alone by torch.

Of a few thousand elements, calling an operation costs more than what it does. In the midst of training, where the
caches hold other code, a call of torch's takes 3 to 9 µs and one of NumPy's 1 to 3. So several are laid end to end and
read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.stats import torch_path
from hookline.stats.columns import wide_dtype
from hookline.stats.end_to_end import Chunk
from hookline.stats.from_sums import Numbers, rows_from_sums
from hookline.stats.kinds import Kinds
from hookline.stats.scratch import ones_of, scratch

SMALL = 32768  # elements; beyond, calls no longer matter, and torch uses its threads
COPIED = 16384  # elements; beyond, a copy costs more than the calls it saves
FEW = 4  # tensors; fewer are read where they lie
READ_AT_ONCE = 65536  # elements that `read` takes at most: more than stay in the cache
_WITH_NORMS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_not_zero, _count = np.not_equal, np.count_nonzero


@dataclass(frozen=True, eq=False)
class Small:
    """Which of some tensors are small, and how they are read."""

    places: list[int]
    chunks: list[Chunk]
    """Those that are laid end to end."""
    lone: list[int]
    """The places of those that are too few or too large for that."""
    read: list[int]
    """All places as they are read: the chunks' and then the lone ones."""
    sizes: Numbers
    """Of the tensors there."""
    order: Numbers | None
    """Where the first of the places stands among these, the second, and so on; None where it is the same order."""
    widest: torch.dtype
    """A precision that is enough for norms of all of them."""
    converted: bool
    """Whether some are of a kind that torch takes no norms of: whole numbers, or of eight bits."""

    @classmethod
    def among(cls, places: Sequence[int], kinds: Kinds) -> Small:
        """The small ones at these places; an empty tensor is not."""
        small = [place for place in places if 0 < kinds.shapes[place].numel() <= SMALL]
        by_width: dict[torch.dtype, list[int]] = {}
        for place in small:
            if kinds.shapes[place].numel() <= COPIED:
                by_width.setdefault(wide_dtype(kinds.dtypes[place]), []).append(place)
        many = {wide: some for wide, some in by_width.items() if len(some) >= FEW}
        chunks = [chunk for wide, some in many.items() for chunk in Chunk.cut(some, wide, kinds)]
        laid = list(chain.from_iterable(chunk.places for chunk in chunks))
        lone = sorted(set(small).difference(laid))
        read = [*laid, *lone]
        sizes = np.array([kinds.shapes[place].numel() for place in read], np.float64)
        order = None if read == small else np.argsort(read)
        dtypes = {kinds.dtypes[place] for place in small}
        # What does not lie in one piece is added up one by one, where float32 loses digits.
        exact = torch.float64 in map(wide_dtype, dtypes) or not kinds.contiguous
        widest = torch.float64 if exact else torch.float32
        return cls(small, chunks, lone, read, sizes, order, widest, not dtypes <= _WITH_NORMS)

    def in_order(self, found: Numbers) -> Numbers:
        """What was found of each, as the places are."""
        return found if self.order is None else found[self.order]


def rows_of_small(tensors: Sequence[Tensor], small: Small) -> Numbers:
    """The statistics of each small tensor, in their order."""
    with np.errstate(over="ignore", invalid="ignore"):  # where that happens, it is measured again
        sums = [chunk.lay(tensors).sums() for chunk in small.chunks]
        if small.lone:
            sums.append(np.array([read(_flat(tensors[place])) for place in small.lone]).T)
        rows, unsound = rows_from_sums(sums[0] if len(sums) == 1 else np.concatenate(sums, axis=1), small.sizes)
    for row in unsound:
        rows[row] = _row_with_care(tensors[small.read[row]])
    return small.in_order(rows)


def norms_of_small(tensors: Sequence[Tensor], small: Small) -> list[float]:
    """The norm of each small tensor, in their order.

    By torch, which reads each where it lies: in the midst of training that takes half the time of copies and NumPy's
    products, while all statistics would take longer so.
    """
    some = [tensors[place] for place in small.places]
    if small.converted:
        some = [tensor.to(wide_dtype(tensor.dtype)) for tensor in some]
    return list(map(Tensor.item, torch._foreach_norm(some, 2, small.widest)))


def _flat(tensor: Tensor) -> Numbers:
    wide = tensor if tensor.dtype is torch.float32 else tensor.to(wide_dtype(tensor.dtype))
    return wide.numpy(force=True).ravel()  # a microsecond less than with detach()


def read(flat: Numbers) -> tuple[Any, ...]:
    """Sum, sum of squares, minimum, maximum and what is not zero. Nobody may mind if NumPy finds something invalid."""
    size = len(flat)
    others = _count(_not_zero(flat, 0, out=scratch.mask[:size]))
    # Where a minimum lies is found twice as fast as what it is.
    return flat.dot(ones_of(flat.dtype)[:size]), flat.dot(flat), flat[flat.argmin()], flat[flat.argmax()], others


def _row_with_care(tensor: Tensor) -> Numbers:
    """Of one that is far from zero, faint or not finite."""
    wide = tensor.detach().double().reshape(1, -1)
    return torch_path.statistics_of_rows(wide)[0].numpy()
