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
import contextlib, sys, torch
from hookline.stats import cuda_tally as tally
tally.SHARES, tally.SHARE_BYTES, tally.SLOTS = 8, 8192, 4  # the interpreter runs one program after the other
tally.TALLY_BYTES = 8 * (2 + 8 * tally.SHARES)
tally._current = lambda device: contextlib.nullcontext()
device = torch.device("cpu")
calls, due = torch.load(sys.argv[1])
table, tallies = tally.make_tallies(len(calls[0]), device)
counts = tally.make_counts(len(tallies), device)
for tensors in calls:
    tally.add(tensors, [table], range(len(tensors)), torch.tensor(due, dtype=torch.int32))
rows = tally.take(tally.addresses_of(tallies), counts)
left = bool(table[:, : 2 + tally.SHARES].any())
torch.save((rows, counts, left), sys.argv[2])
"""


def floating(tensors: list[Tensor]) -> list[Tensor]:
    """Those that a graph adds up."""
    return [tensor.detach() for tensor in tensors if tensor.dtype in FLOATING]


@needs_interpreter
@pytest.mark.parametrize(("factors", "due"), [([1], 1), ([1, 2], 1), ([1, 2], 0)], ids=["once", "twice", "not due"])
def test_the_kernels_in_the_interpreter(
    tmp_path: Path,
    awkward_tensors: Callable[[], list[Tensor]],
    assert_rows: Callable[..., None],
    factors: list[int],
    due: int,
) -> None:
    """The kernels' own arithmetic, for tensors of all dtypes in one call, and an empty tally afterwards."""
    some = 40_000  # the interpreter is slow
    tensors = [tensor.reshape(-1)[:some] for tensor in floating(awkward_tensors())]
    tensors += [torch.randn(some) + 1e4, torch.randn(30, 40).t(), torch.randn(30, 40)[:, ::2]]
    calls = [[tensor * factor for tensor in tensors] for factor in factors]
    torch.save((calls, due), tmp_path / "calls")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "calls", "rows"], env=environment, cwd=tmp_path, check=True)
    rows, counts, left = torch.load(tmp_path / "rows")
    assert counts.tolist() == [[len(factors), len(factors) * due]] * len(tensors) and not left
    if due:
        seen = [torch.cat([tensor.reshape(-1) * factor for factor in factors]) for tensor in tensors]
        assert_rows(rows, seen, std_error=1e-4)
    else:
        assert rows[:, COUNT].isnan().all()


@pytest.fixture
def tally() -> Any:
    """The module, which imports Triton."""
    from hookline.stats import cuda_tally

    return cuda_tally


def added(tally: Any, *calls: list[Tensor], due: int = 1) -> tuple[Tensor, Tensor]:
    """What tallies give to which each call adds its tensors, all at once."""
    device = torch.device("cuda", 0)
    flag = tally.make_flag(device).fill_(due)
    table, tallies = tally.make_tallies(len(calls[0]), device)
    counts = tally.make_counts(len(tallies), device)
    for tensors in calls:
        tally.add(tensors, [table], range(len(tensors)), flag)
    rows = tally.take(tally.addresses_of(tallies), counts)
    assert not table[:, : 2 + tally.SHARES].any()
    return rows, counts


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(
    tally: Any, awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """Rows are the reference's after one call and after two; strided tensors and channels at the end, too."""
    tensors = [tensor.cuda() for tensor in floating(awkward_tensors())]
    tensors.append(torch.randn(4, 6, 5, 7, device="cuda").to(memory_format=torch.channels_last))
    rows, counts = added(tally, tensors)
    assert_rows(rows, tensors)
    assert counts.tolist() == [[1, 1]] * len(tensors)
    rows, _ = added(tally, tensors, [tensor * 2 for tensor in tensors])
    assert_rows(rows, [torch.cat([tensor.reshape(-1), tensor.reshape(-1) * 2]) for tensor in tensors])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_on_cuda(
    tally: Any, dtype: torch.dtype, large_tensors: Callable[..., list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """A far mean, a NaN somewhere, views that start at any element; the same bits every time, alone or together."""
    tensors = large_tensors(dtype)
    first, _ = added(tally, tensors)
    assert_rows(first, tensors, std_error=1e-4)
    again = [added(tally, tensors)[0] for _ in range(5)]
    again.append(torch.cat([added(tally, [tensor])[0] for tensor in tensors]))
    assert all(torch.equal(rows.nan_to_num(7.0), first.nan_to_num(7.0)) for rows in again)


@pytest.mark.gpu
@needs_cuda
def test_a_call_that_is_not_due_is_counted_and_adds_nothing(tally: Any) -> None:
    """Its row says that there is none."""
    rows, counts = added(tally, *[[torch.ones(5, device="cuda")]] * 3, due=0)
    assert rows[0, COUNT].isnan() and counts.tolist() == [[3, 0]] and rows.shape == (1, len(STATISTICS))


@pytest.mark.gpu
@needs_cuda
def test_counts_add_up_over_many_takes(tally: Any) -> None:
    """Nobody needs to fetch them between."""
    device = torch.device("cuda", 0)
    flag, counts = tally.make_flag(device).fill_(1), tally.make_counts(1, device)
    _, (one,) = tally.make_tallies(1, device)
    for _ in range(3):
        tally.add([torch.ones(5, device="cuda")], [one], [0], flag)
        rows = tally.take(tally.addresses_of([one]), counts)
    assert counts.tolist() == [[3, 3]] and rows[0, COUNT] == 5


@pytest.mark.gpu
@needs_cuda
def test_a_replayed_graph_adds_as_well(tally: Any, assert_rows: Callable[..., None]) -> None:
    """A launch needs nothing but what it was given by value."""
    device = torch.device("cuda", 0)
    flag, counts = tally.make_flag(device).fill_(1), tally.make_counts(1, device)
    _, (one,) = tally.make_tallies(1, device)
    tensor = torch.randn(3_000_000, device="cuda")
    tally.add([tensor], [one], [0], flag)
    tally.take(tally.addresses_of([one]), counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tally.add([tensor], [one], [0], flag)
    graph.replay()
    tensor *= 3
    graph.replay()
    rows = tally.take(tally.addresses_of([one]), counts)
    assert_rows(rows, [torch.cat([tensor / 3, tensor])], std_error=1e-4)


@pytest.mark.gpu
@needs_cuda
def test_tallies_of_several_tables_in_one_call(tally: Any, assert_rows: Callable[..., None]) -> None:
    """As where a monitor came later. An address that comes again may be that of fewer numbers, or of others."""
    device = torch.device("cuda", 0)
    flag, counts = tally.make_flag(device).fill_(1), tally.make_counts(3, device)
    (early, first), (late, others) = tally.make_tallies(1, device), tally.make_tallies(2, device)
    addresses = tally.addresses_of([*first, *others])
    whole = [torch.randn(10_000, device="cuda").bfloat16().view(torch.float32) for _ in range(3)]
    for tensors in (whole, [tensor[:70] for tensor in whole], [tensor.view(torch.bfloat16) for tensor in whole]):
        tally.add(tensors, [early, late, late], [0, 0, 1], flag)
        assert_rows(tally.take(addresses, counts), tensors)
