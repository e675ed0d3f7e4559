"""Small tensors end to end in memory that stays in the cache, where a few calls read all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from threading import local
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.stats.from_sums import Numbers
from hookline.stats.kinds import Kinds
from hookline.stats.scratch import TOGETHER, ones_of, scratch

CUTS_KEPT = 64  # of so many chunks


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some small tensors that fit into the scratch memory together."""

    places: list[int]
    shapes: list[torch.Size]
    wide: torch.dtype
    """The precision to compute in."""
    in_graph: bool
    """Whether autograd would follow what becomes of them."""

    @staticmethod
    def cut(places: Sequence[int], wide: torch.dtype, kinds: Kinds) -> Iterator[Chunk]:
        """Chunks of the tensors at these places, in their order."""
        sizes = {place: kinds.shapes[place].numel() for place in places}
        left = list(places)
        while left:
            ends = accumulate(sizes[place] for place in left)
            many = sum(1 for _ in takewhile(lambda end: end <= TOGETHER, ends))
            yield Chunk(left[:many], [kinds.shapes[place] for place in left[:many]], wide, kinds.in_graph)
            left = left[many:]

    def lay(self, tensors: Sequence[Tensor]) -> Cut:
        """Copy its tensors, which stand at its places, into the scratch memory of this thread."""
        cut = _cuts.known.get(self) or _cut(self)
        some = [tensors[place] for place in self.places]
        torch._foreach_copy_(cut.targets, [tensor.detach() for tensor in some] if self.in_graph else some)
        return cut


class Cut(NamedTuple):
    """Scratch memory as the tensors of a chunk lie in it. What is in it holds until something else is laid there."""

    targets: list[Tensor]
    values: Numbers
    starts: Numbers
    parts: list[Numbers]
    ones: list[Numbers]
    mask: Numbers
    masks: list[Numbers]

    def sums(self) -> Numbers:
        """Sum, sum of squares, minimum, maximum and how many are not zero: a row each, one column per tensor.

        Nobody may mind if NumPy finds something invalid.
        """
        found = np.empty((5, len(self.parts)))
        found[0] = [part.dot(ones) for part, ones in zip(self.parts, self.ones, strict=True)]
        found[1] = self.squares()
        found[2] = np.minimum.reduceat(self.values, self.starts)
        found[3] = np.maximum.reduceat(self.values, self.starts)
        np.not_equal(self.values, 0, out=self.mask)
        found[4] = list(map(np.count_nonzero, self.masks))
        return found

    def squares(self) -> list[float]:
        """The sum of squares of each."""
        return [part.dot(part) for part in self.parts]


class _Cuts(local):
    """Those of each thread, by chunk: to cut anew would take as long as to read."""

    def __init__(self) -> None:
        self.known: dict[Chunk, Cut] = {}


_cuts = _Cuts()


def _cut(chunk: Chunk) -> Cut:
    ends = list(accumulate(shape.numel() for shape in chunk.shapes))
    bounds = list(zip([0, *ends], ends, strict=False))
    memory, mask = scratch.blocks(chunk.wide)[0, : ends[-1]], scratch.mask[: ends[-1]]
    targets = [memory[start:end].view(shape) for (start, end), shape in zip(bounds, chunk.shapes, strict=True)]
    values = memory.numpy()
    ones = ones_of(values.dtype)
    cut = Cut(
        targets,
        values,
        np.array([start for start, _ in bounds]),
        [values[start:end] for start, end in bounds],
        [ones[: end - start] for start, end in bounds],
        mask,
        [mask[start:end] for start, end in bounds],
    )
    if len(_cuts.known) >= CUTS_KEPT:
        _cuts.known.clear()
    _cuts.known[chunk] = cut
    return cut
