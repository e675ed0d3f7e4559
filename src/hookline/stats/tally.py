# mypy: disable-error-code="import-not-found, import-untyped"
"""Tallies: statistics that compiled code adds up on the device by itself, with no Python between its kernels.

A graph that `torch.compile` makes cannot hand its tensors out cheaply: it uses their memory again at once, and calling
Python costs it more than reading them. So a kernel becomes part of the graph that adds each tensor to a tally, and the
tallies of all modules are read together when the graph has run. They hold what the other kernels hold between their two
launches, and are merged by the same code: what comes out are the rows of `hookline.stats.statistics.summarize`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from hookline.stats.columns import STATISTICS
from hookline.stats.cuda_path import MERGE_TILE, UNROLL
from hookline.stats.kernels import PARTIAL_COLUMNS
from hookline.stats.layout import kept_table
from hookline.stats.tally_kernels import HEAD, add_to_tally, take_tallies

SHARES = 1056  # eight for each multiprocessor of the device this was tuned on
THREADS = 128  # of a program, as Triton has it by default
READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make_tally(device: torch.device) -> Tensor:
    """An empty tally. CUDA graphs may rely on its address."""
    with torch.inference_mode(False):
        tally = torch.zeros(HEAD.value + PARTIAL_COLUMNS * SHARES, dtype=torch.float64, device=device)
    torch._dynamo.mark_static_address(tally, guard=False)
    return tally


def make_flag(device: torch.device) -> Tensor:
    """What says on the device whether tallies are added to: not yet."""
    with torch.inference_mode(False):
        flag = torch.zeros((), dtype=torch.int32, device=device)
    torch._dynamo.mark_static_address(flag, guard=False)
    return flag


@triton_op("hookline::add_to_tally", mutates_args={"tally"})
def add(tensor: Tensor, tally: Tensor, due: Tensor) -> None:
    """Add a tensor to a tally if `due`, one int32 on the device, is 1; if it is 0, count the call and read nothing."""
    flat = _in_memory_order(tensor).contiguous()
    wrap_triton(add_to_tally)[(SHARES,)](
        flat, tally, due, flat.numel(), SHARES=SHARES, VECTOR_LANES=THREADS, UNROLL=UNROLL
    )


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Order does not matter, and an image whose channels come last need not be copied to be read from end to end."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)
    return tensor


def take(tallies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What tallies of one device have seen, which begin anew: rows of statistics, and [calls, calls that were due].

    A tally that added nothing has NaN in place of the count of its elements.
    """
    device = tallies[0].device
    rows = torch.empty((len(tallies), len(STATISTICS)), dtype=torch.float64, device=device)
    counts = torch.empty((len(tallies), 2), dtype=torch.float64, device=device)
    pointers = kept_table(device, tuple(tally.data_ptr() for tally in tallies))
    take_tallies[(len(tallies),)](pointers, rows, counts, COLUMNS=len(STATISTICS), SHARES=SHARES, TILE=MERGE_TILE)
    return rows, counts
