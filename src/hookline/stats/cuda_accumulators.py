# mypy: disable-error-code="import-not-found, import-untyped"
"""Accumulate statistics on the device inside compiled code, in a few launches, and read them after it has run.

A graph of `torch.compile` cannot return its tensors cheaply, because it reuses their memory at once. So it adds each
tensor to an accumulator, several tensors in one launch, and the accumulators of all modules are read together
afterwards. They hold what the other kernels hold between their two launches and are merged by the same code: the
results are the rows of `hookline.stats.summarize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

from hookline import _device
from hookline.stats.cuda import ELEMENTS, MERGE_TILE, WARPS, all_readable
from hookline.stats.kernels import HEAD, PARTIAL_COLUMNS, add_to_accumulators, read_accumulators
from hookline.stats.layout import VECTOR_BYTES, Launch
from hookline.stats.rows import STATISTICS

SHARES = 1056  # The shares of an accumulator.
ACCUMULATOR_BYTES = (HEAD.value + PARTIAL_COLUMNS * SHARES) * 8
SHARE_BYTES = 128 * 1024  # the minimum that a program reads; it reads more if there would be too many shares otherwise
UNROLL = 8  # loads in flight at once, per thread
SLOTS = 32  # tensors in one launch
_DTYPE = attrgetter("dtype")


def make_accumulators(count: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Make empty accumulators: a table and its rows."""
    with torch.inference_mode(False):
        table = torch.zeros((count, ACCUMULATOR_BYTES // 8), dtype=torch.float64, device=device)
        return table, [table[row : row + 1] for row in range(count)]


def make_flag(device: torch.device) -> Tensor:
    """Create the device flag that says whether to add to the accumulators; it starts as 0."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int32, device=device)


def make_counts(count: int, device: torch.device) -> Tensor:
    """Make [calls, calls that were due] for the accumulators; `take` adds to them."""
    with torch.inference_mode(False):
        return torch.zeros((count, HEAD.value), dtype=torch.float64, device=device)


# ---- adding ----------------------------------------------------------------------------------------------------------


def add(tensors: Sequence[Tensor], tables: Sequence[Tensor], rows: Sequence[int], due: Tensor) -> None:
    """Add each tensor to an accumulator if `due` is 1; if it is 0, only count the calls.

    Args:
        tensors: The tensors.
        tables: The table of each tensor's accumulator, or one table for all.
        rows: The row of each accumulator in its table. No accumulator may appear twice: programs that run at the same
            time would write to the same share of it.
        due: One int32 on the device.
    """
    device, readable = due.device, all_readable(tensors)
    launches = _prepare(
        device,
        tuple(map(Tensor.data_ptr, tables)),
        tuple(rows),
        tuple(map(Tensor.data_ptr, readable)),
        tuple(map(Tensor.numel, readable)),
        tuple(map(_DTYPE, readable)),
    )
    stream = _device.stream_handle(device)
    with _device.use(device):
        for launch, read, written in launches:
            launch(stream, due, read, written)


@lru_cache(maxsize=256)
def _prepare(
    device: torch.device,
    tables: tuple[int, ...],
    rows: tuple[int, ...],
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> list[tuple[Launch, tuple[int, ...], tuple[int, ...]]]:
    """Return launches with the addresses of their tensors and accumulators.

    They are cached, because a step usually reuses the memory that the last one freed.
    """
    table_of_row = tables * len(rows) if len(tables) == 1 else tables
    written = [table + row * ACCUMULATOR_BYTES for table, row in zip(table_of_row, rows, strict=True)]
    # An empty tensor's address is 0.
    read = [address or fallback for address, fallback in zip(addresses, written, strict=True)]
    return [
        (launch, _slots([read[index] for index in some]), _slots([written[index] for index in some]))
        for some, launch in _launches(device, sizes, dtypes)
    ]


@lru_cache(maxsize=256)
def _launches(
    device: torch.device, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[tuple[tuple[int, ...], Launch]]:
    """Return launches with the indices of their tensors, all of one dtype, because a kernel is compiled for one."""
    alike = [[index for index, other in enumerate(dtypes) if other is dtype] for dtype in dict.fromkeys(dtypes)]
    groups = [tuple(indices[start : start + SLOTS]) for indices in alike for start in range(0, len(indices), SLOTS)]
    return [(group, _launch_for([sizes[index] for index in group], dtypes[group[0]])) for group in groups]


def _launch_for(sizes: list[int], dtype: torch.dtype) -> Launch:
    tile, item_bytes = WARPS * 32 * VECTOR_BYTES // dtype.itemsize, dtype.itemsize
    tiles, programs = [], []
    for size in sizes:
        # A program reads enough tiles that there are not more programs than shares, wherever the tensor begins.
        rounds = -(-(size + VECTOR_BYTES // item_bytes) // (SHARES * tile * UNROLL))
        tiles.append(max(rounds * UNROLL, SHARE_BYTES // (tile * item_bytes)))
        # Even an empty tensor has one program, which counts the call.
        programs.append(max(-(-(size + VECTOR_BYTES // item_bytes - 1) // (tile * tiles[-1])), 1))
    firsts = [*accumulate(programs, initial=0)]
    return Launch(
        add_to_accumulators,
        firsts[-1],
        _slots(sizes),
        _slots(tiles),
        _slots(firsts[:-1], firsts[-1]),  # No program comes at or after an empty slot.
        num_warps=WARPS,
        ELEMENT=ELEMENTS[dtype],
        ITEM_BYTES=item_bytes,
        SLOTS=SLOTS,
        SHARES=SHARES,
        TILE=tile,
        UNROLL=UNROLL,
    )


def _slots(numbers: list[int], empty: int | None = None) -> tuple[int, ...]:
    """Return a number for every slot; unused slots get the first one's, which has the same type as the others."""
    return (*numbers, *[numbers[0] if empty is None else empty] * (SLOTS - len(numbers)))


# ---- reading ---------------------------------------------------------------------------------------------------------


def addresses_of(accumulators: Sequence[Tensor]) -> Tensor:
    """Return the addresses for `take`: once for all steps, since asking each tensor costs more than the launch."""
    return _device.upload([table.data_ptr() for table in accumulators], torch.int64, accumulators[0].device)


def take(addresses: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of accumulators and reset them; how often they were called is added to `counts`.

    An accumulator that added nothing has NaN in place of the count of its elements.
    """
    device, count = counts.device, len(counts)
    rows = torch.empty((count, len(STATISTICS)), dtype=torch.float64, device=device)
    with _device.use(device):
        _take_launch(device, count)(_device.stream_handle(device), addresses, rows, counts)
    return rows


@lru_cache(maxsize=64)
def _take_launch(device: torch.device, count: int) -> Launch:
    return Launch(read_accumulators, count, COLUMNS=len(STATISTICS), SHARES=SHARES, TILE=MERGE_TILE)
