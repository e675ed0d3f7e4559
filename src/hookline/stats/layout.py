"""Plan kernel launches: cut tensors into chunks for one launch, and repeat launches without Triton's checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hookline import _device

VECTOR_BYTES = 16  # bytes that one thread loads at once; chunks start at multiples of it
CHUNK_BYTES = 128 * 1024  # bytes that one program reads


@dataclass(frozen=True)
class DtypeChunks:
    """The chunks of one dtype. They are adjacent, because a kernel is compiled for one dtype."""

    dtype: torch.dtype
    skipped: int
    chunks: int


@dataclass(frozen=True)
class ChunkLayout:
    """The data that each program of a launch reads: everything about a launch except the tensors' addresses."""

    groups: tuple[DtypeChunks, ...]
    chunks: int
    sizes: Tensor  # int64, elements per tensor
    first_chunks: Tensor  # int32, per tensor
    chunk_counts: Tensor  # int32, per tensor
    owners: Tensor  # int32, the tensor of each chunk


@lru_cache(maxsize=64)
def layout_of(
    device: torch.device, stream: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> ChunkLayout:
    """Return the layout for tensors of some sizes and dtypes.

    Args:
        device: Where the tables are needed.
        stream: The current stream. It is part of the cache's key because the tables are filled in its order: another
            stream might read them too early.
        sizes: The number of elements of each tensor.
        dtypes: The dtype of each tensor.

    Returns:
        A layout that repeated calls share.
    """
    # Enough chunks for any alignment: the first one may begin up to one vector before the tensor.
    nbytes = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    counts = [-(-(size + VECTOR_BYTES - 1) // CHUNK_BYTES) if size else 0 for size in nbytes]
    order = sorted(range(len(counts)), key=lambda index: str(dtypes[index]))  # dtypes have no order, their names do
    first_chunks, groups, done = [0] * len(counts), dict[torch.dtype, tuple[int, int]](), 0
    for index in order:
        first_chunks[index] = done
        begin, chunks = groups.get(dtypes[index], (done, 0))
        groups[dtypes[index]] = begin, chunks + counts[index]
        done += counts[index]
    repeats = torch.tensor([counts[index] for index in order])
    owners = torch.repeat_interleave(torch.tensor(order, dtype=torch.int32), repeats)
    return ChunkLayout(
        groups=tuple(DtypeChunks(dtype, *place) for dtype, place in groups.items() if place[1]),
        chunks=done,
        sizes=_device.upload(sizes, torch.int64, device),
        first_chunks=_device.upload(first_chunks, torch.int32, device),
        chunk_counts=_device.upload(counts, torch.int32, device),
        owners=_device.to_device(owners, device),
    )


class Launch:
    """A Triton kernel that is launched repeatedly with the same number of programs.

    The first call goes through Triton, which compiles the kernel for the arguments it gets. Later calls go to the
    compiled kernel directly, because inspecting the kinds of arguments again takes as long as the launch.
    So at each call integers must be the same, and tensors must have the same dtype and begin at a multiple of 16 bytes,
    as every allocation of torch does.

    Args:
        kernel: The function under `triton.jit`.
        programs: The number of programs.
        fixed: The first arguments of every call.
        num_warps: As in Triton.
        constants: The kernel's constexpr arguments, in its order.
    """

    def __init__(self, kernel: Any, programs: int, *fixed: Any, num_warps: int = 4, **constants: Any) -> None:
        self._first = partial(kernel[(programs,)], *fixed, **constants, num_warps=num_warps)
        self._fixed, self._constants, self._grid = fixed, tuple(constants.values()), (programs, 1, 1)
        self._compiled: Any = None

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Launch the kernel on `stream`, which must be the current stream of the current device."""
        if self._compiled is not None:
            self._compiled(*self._fixed, *arguments, *self._constants, stream=stream)
        elif (compiled := self._first(*arguments)) is not None:  # Triton's interpreter returns nothing.
            self._compiled = compiled[self._grid]
