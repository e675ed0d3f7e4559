# mypy: disable-error-code="import-not-found, import-untyped"
"""Tallies: statistics that compiled code adds up on the device, in a few launches, and that nobody else need see.

A graph that `torch.compile` makes cannot hand its tensors out cheaply: it uses their memory again at once. So it adds
each tensor to a tally, several of them in one launch, and the tallies of all modules are read together when it has run.
They hold what the other kernels hold between their two launches, and are merged by the same code: what comes out are
the rows of `hookline.stats.statistics.summarize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.stats.columns import STATISTICS
from hookline.stats.cuda_path import ELEMENTS, MERGE_TILE, WARPS, all_readable
from hookline.stats.kernels import PARTIAL_COLUMNS
from hookline.stats.launching import Launch
from hookline.stats.layout import VECTOR_BYTES, current_stream, upload
from hookline.stats.tally_kernels import HEAD, add_to_tallies, take_tallies

SHARES = 1056  # of a tally
TALLY_BYTES = (HEAD.value + PARTIAL_COLUMNS * SHARES) * 8
SHARE_BYTES = 128 * 1024  # the least that a program reads; where that makes too many shares, it reads more
UNROLL = 8  # loads that are on their way at once, per thread
SLOTS = 32  # tensors in one launch
_DTYPE = attrgetter("dtype")
_ALREADY = nullcontext()


def make_tallies(many: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Empty tallies: a table, and its rows. CUDA graphs may rely on their addresses."""
    with torch.inference_mode(False):
        table = torch.zeros((many, TALLY_BYTES // 8), dtype=torch.float64, device=device)
        rows = [table[row : row + 1] for row in range(many)]
    for tensor in (table, *rows):
        torch._dynamo.mark_static_address(tensor, guard=False)
    return table, rows


def make_flag(device: torch.device) -> Tensor:
    """What says on the device whether tallies are added to: not yet."""
    with torch.inference_mode(False):
        flag = torch.zeros((), dtype=torch.int32, device=device)
    torch._dynamo.mark_static_address(flag, guard=False)
    return flag


def make_counts(many: int, device: torch.device) -> Tensor:
    """For so many tallies [calls, calls that were due], to which `take` adds."""
    with torch.inference_mode(False):
        return torch.zeros((many, HEAD.value), dtype=torch.float64, device=device)


# ---- adding ----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Tensors that one launch adds to their tallies: all of one dtype, as a kernel is compiled for one."""

    places: tuple[int, ...]  # of the tensors among those of the call
    launch: Launch


class Ready(NamedTuple):
    """A launch with the addresses of its tensors and of their tallies."""

    launch: Launch
    read: tuple[int, ...]
    written: tuple[int, ...]


def add(tensors: Sequence[Tensor], tables: Sequence[Tensor], rows: Sequence[int], due: Tensor) -> None:
    """Add each tensor to a row of a table if `due`, one int32 on the device, is 1; if it is 0, only count the calls.

    There is a table for each, or one for all. No row may stand there twice: programs that run at the same time would
    write to the same share of it.
    """
    device, readable = due.device, all_readable(tensors)
    launches = _launches(
        device,
        tuple(map(Tensor.data_ptr, tables)),
        tuple(rows),
        tuple(map(Tensor.data_ptr, readable)),
        tuple(map(Tensor.numel, readable)),
        tuple(map(_DTYPE, readable)),
    )
    stream = current_stream(device)
    with _current(device):
        for launch, read, written in launches:
            launch(stream, due, read, written)


@lru_cache(maxsize=256)
def _launches(
    device: torch.device,
    tables: tuple[int, ...],
    rows: tuple[int, ...],
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> list[Ready]:
    """The launches with all their arguments; kept, because what a step frees, the next one mostly gets again."""
    each = tables * len(rows) if len(tables) == 1 else tables
    homes = [table + row * TALLY_BYTES for table, row in zip(each, rows, strict=True)]
    begins = [address or home for address, home in zip(addresses, homes, strict=True)]  # 0 if it is empty
    return [
        Ready(launch, _slots([begins[place] for place in places]), _slots([homes[place] for place in places]))
        for places, launch in _parts(device, sizes, dtypes)
    ]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which nearly always is the right one already."""
    return _ALREADY if torch._C._cuda_getDevice() == device.index else torch.cuda.device(device)


@lru_cache(maxsize=256)
def _parts(device: torch.device, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> list[Part]:
    """The launches for tensors of these sizes and dtypes; kept, because the next step has the same."""
    alike = [[place for place, one in enumerate(dtypes) if one is dtype] for dtype in dict.fromkeys(dtypes)]
    pieces = [tuple(places[start : start + SLOTS]) for places in alike for start in range(0, len(places), SLOTS)]
    return [Part(places, _launch_for([sizes[place] for place in places], dtypes[places[0]])) for places in pieces]


def _launch_for(sizes: list[int], dtype: torch.dtype) -> Launch:
    tile = WARPS * 32 * VECTOR_BYTES // dtype.itemsize
    tiles = [_tiles(size, tile, dtype.itemsize) for size in sizes]
    programs = [_programs(size, tile * many, dtype.itemsize) for size, many in zip(sizes, tiles, strict=True)]
    firsts = [*accumulate(programs, initial=0)]
    return Launch(
        add_to_tallies,
        firsts[-1],
        _slots(sizes),
        _slots(tiles),
        _slots(firsts[:-1], firsts[-1]),  # no program is at or behind an empty slot
        num_warps=WARPS,
        ELEMENT=ELEMENTS[dtype],
        ITEM_BYTES=dtype.itemsize,
        SLOTS=SLOTS,
        SHARES=SHARES,
        TILE=tile,
        UNROLL=UNROLL,
    )


def _tiles(size: int, tile: int, item_bytes: int) -> int:
    """How many tiles a program reads, so that there are no more programs than shares, wherever the tensor begins."""
    rounds = -(-(size + VECTOR_BYTES // item_bytes) // (SHARES * tile * UNROLL))
    return max(rounds * UNROLL, SHARE_BYTES // (tile * item_bytes))


def _programs(size: int, elements: int, item_bytes: int) -> int:
    """How many programs read so many elements each; one at least, which counts the call."""
    return max(-(-(size + VECTOR_BYTES // item_bytes - 1) // elements), 1)


def _slots(numbers: list[int], empty: int | None = None) -> tuple[int, ...]:
    """A number for every slot; those that nobody needs have the first one's, of the same type as the others."""
    return (*numbers, *[numbers[0] if empty is None else empty] * (SLOTS - len(numbers)))


# ---- taking ----------------------------------------------------------------------------------------------------------


def addresses_of(tallies: Sequence[Tensor]) -> Tensor:
    """Where they are, as `take` wants it: once for all steps, as to look at each would cost more than the launch."""
    return upload([tally.data_ptr() for tally in tallies], torch.int64, tallies[0].device)


def take(addresses: Tensor, counts: Tensor) -> Tensor:
    """Rows of what tallies have seen, which begin anew; how often they were called goes to `counts`.

    A tally that added nothing has NaN in place of the count of its elements.
    """
    device, many = counts.device, len(counts)
    rows = torch.empty((many, len(STATISTICS)), dtype=torch.float64, device=device)
    with _current(device):
        _taking(device, many)(current_stream(device), addresses, rows, counts)
    return rows


@lru_cache(maxsize=64)
def _taking(device: torch.device, many: int) -> Launch:
    return Launch(take_tallies, many, COLUMNS=len(STATISTICS), SHARES=SHARES, TILE=MERGE_TILE)
