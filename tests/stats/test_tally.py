"""Tallies give the reference's rows over any number of calls: in Triton's interpreter, and on a CUDA device."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.stats.columns import COUNT, STATISTICS

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and is for where there is no device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

INTERPRETED = """
import sys, torch
from hookline.stats import tally_kernels
SHARES = 8  # the interpreter runs one program after the other
calls = torch.load(sys.argv[1])
tallies = [torch.zeros(2 + 8 * SHARES, dtype=torch.float64) for _ in calls]
for tensors, tally in zip(calls, tallies):
    for due, tensor in tensors:
        flag = torch.tensor(due, dtype=torch.int32)
        tally_kernels.add_to_tally[(SHARES,)](
            tensor, tally, flag, tensor.numel(), SHARES=SHARES, VECTOR_LANES=128, UNROLL=4
        )
pointers = torch.tensor([tally.data_ptr() for tally in tallies])
rows, counts = torch.empty(len(calls), 10, dtype=torch.float64), torch.empty(len(calls), 2, dtype=torch.float64)
tally_kernels.take_tallies[(len(calls),)](pointers, rows, counts, COLUMNS=10, SHARES=SHARES, TILE=256)
torch.save((rows, counts, [bool(tally[: 2 + SHARES].any()) for tally in tallies]), sys.argv[2])
"""


def floating(tensors: list[Tensor]) -> list[Tensor]:
    """Those that a graph adds up."""
    return [tensor.detach() for tensor in tensors if tensor.dtype in FLOATING]


@needs_interpreter
def test_the_kernels_in_the_interpreter(
    tmp_path: Path, awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """The kernels' own arithmetic: one call, two calls, a call that is not due, and an empty tally afterwards."""
    some = 40_000  # the interpreter is slow
    tensors = [tensor.reshape(-1)[:some].contiguous() for tensor in floating(awkward_tensors())]
    tensors.append(torch.randn(some) + 1e4)
    once, twice = [[(1, tensor)] for tensor in tensors], [[(1, tensor), (1, tensor * 2)] for tensor in tensors]
    torch.save([*once, *twice, [(0, tensors[0]), (0, tensors[0])]], tmp_path / "calls")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "calls", "rows"], env=environment, cwd=tmp_path, check=True)
    rows, counts, left = torch.load(tmp_path / "rows")
    many = len(tensors)
    assert_rows(rows[:many], tensors, std_error=1e-4)
    assert_rows(rows[many:-1], [torch.cat([tensor, tensor * 2]) for tensor in tensors], std_error=1e-4)
    assert rows[-1, COUNT].isnan() and counts.tolist() == [[1, 1]] * many + [[2, 2]] * many + [[2, 0]]
    assert not any(left)


@pytest.fixture
def tally() -> Any:
    """The module, which imports Triton."""
    from hookline.stats import tally

    return tally


def added(tally: Any, calls: list[list[Tensor]], due: int = 1) -> tuple[Tensor, Tensor]:
    """What tallies give that were each added some tensors to."""
    device = torch.device("cuda", 0)
    flag = tally.make_flag(device).fill_(due)
    tallies = [tally.make_tally(device) for _ in calls]
    for tensors, one in zip(calls, tallies, strict=True):
        for tensor in tensors:
            tally.add(tensor, one, flag)
    rows, counts = tally.take(tallies)
    assert not any(one[: 2 + tally.SHARES].any() for one in tallies)
    return rows, counts


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(
    tally: Any, awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """Rows are the reference's after one call and after two; strided tensors and channels at the end, too."""
    tensors = [tensor.cuda() for tensor in floating(awkward_tensors())]
    tensors.append(torch.randn(4, 6, 5, 7, device="cuda").to(memory_format=torch.channels_last))
    rows, counts = added(tally, [[tensor] for tensor in tensors])
    assert_rows(rows, tensors)
    assert counts.tolist() == [[1, 1]] * len(tensors)
    rows, _ = added(tally, [[tensor, tensor * 2] for tensor in tensors])
    assert_rows(rows, [torch.cat([tensor.reshape(-1), tensor.reshape(-1) * 2]) for tensor in tensors])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_on_cuda(tally: Any, dtype: torch.dtype, assert_rows: Callable[..., None]) -> None:
    """A far mean, a NaN somewhere, views that start at any element; the same bits every time."""
    generator = torch.Generator("cuda").manual_seed(0)
    base = torch.randn(5_000_000, device="cuda", generator=generator)
    broken = base.clone()
    broken[3_333_333] = float("nan")
    tensors = [(base + 1e4 if dtype is torch.float32 else base * 3 + 7).to(dtype), broken.to(dtype)]
    tensors += [base.to(dtype)[start:] for start in range(1, 9)]
    first, _ = added(tally, [[tensor] for tensor in tensors])
    assert_rows(first, tensors, std_error=1e-4)
    again = [added(tally, [[tensor] for tensor in tensors])[0] for _ in range(5)]
    assert all(torch.equal(rows.nan_to_num(7.0), first.nan_to_num(7.0)) for rows in again)


@pytest.mark.gpu
@needs_cuda
def test_a_call_that_is_not_due_is_counted_and_adds_nothing(tally: Any) -> None:
    """Its row says that there is none."""
    rows, counts = added(tally, [[torch.ones(5, device="cuda")] * 3], due=0)
    assert rows[0, COUNT].isnan() and counts.tolist() == [[3, 0]] and rows.shape == (1, len(STATISTICS))
