"""Accumulators give the reference's rows over any number of calls, in Triton's interpreter and on a CUDA device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.stats import STATISTICS

COUNT = STATISTICS.index("count")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ACCUMULATE = """
from hookline.stats import cuda_accumulators as accumulators
accumulators.SHARES, accumulators.SHARE_BYTES, accumulators.SLOTS = 8, 8192, 4  # programs run one after the other
accumulators.ACCUMULATOR_BYTES = 8 * (2 + 8 * accumulators.SHARES)
device = torch.device("cpu")
calls, due = given
table, rows = accumulators.make_accumulators(len(calls[0]), device)
counts = accumulators.make_counts(len(rows), device)
for tensors in calls:
    accumulators.add(tensors, [table], range(len(tensors)), torch.tensor(due, dtype=torch.int32))
taken = accumulators.take(accumulators.addresses_of(rows), counts)
result = taken, counts, bool(table[:, : 2 + accumulators.SHARES].any())
"""


def floating(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a compiled graph would add."""
    return [tensor.detach() for tensor in tensors if tensor.dtype in FLOATING]


@pytest.mark.parametrize(("factors", "due"), [([1], 1), ([1, 2], 1), ([1, 2], 0)], ids=["once", "twice", "not due"])
def test_the_kernels_in_the_interpreter(
    interpret: Callable[..., Any],
    awkward_tensors: Callable[[], list[Tensor]],
    assert_rows: Callable[..., None],
    factors: list[int],
    due: int,
) -> None:
    """The arithmetic of the kernels is right for all dtypes in one call, and accumulators are empty afterwards."""
    some = 40_000  # the interpreter is slow
    tensors = [tensor.reshape(-1)[:some] for tensor in floating(awkward_tensors())]
    tensors += [torch.randn(some) + 1e4, torch.randn(30, 40).t(), torch.randn(30, 40)[:, ::2]]
    rows, counts, left = interpret(ACCUMULATE, ([[tensor * factor for tensor in tensors] for factor in factors], due))
    assert counts.tolist() == [[len(factors), len(factors) * due]] * len(tensors) and not left
    if due:
        added = [torch.cat([tensor.reshape(-1) * factor for factor in factors]) for tensor in tensors]
        assert_rows(rows, added, std_error=1e-4)
    else:
        assert rows[:, COUNT].isnan().all()


@pytest.fixture
def accumulators() -> Any:
    """Return the module, which imports Triton."""
    from hookline.stats import cuda_accumulators as accumulators

    return accumulators


def added(accumulators: Any, *calls: list[Tensor], due: int = 1) -> tuple[Tensor, Tensor]:
    """Return the rows and counts of accumulators after each call has added its tensors, all at once."""
    device = torch.device("cuda", 0)
    flag = accumulators.make_flag(device).fill_(due)
    table, rows_of_table = accumulators.make_accumulators(len(calls[0]), device)
    counts = accumulators.make_counts(len(rows_of_table), device)
    for tensors in calls:
        accumulators.add(tensors, [table], range(len(tensors)), flag)
    rows = accumulators.take(accumulators.addresses_of(rows_of_table), counts)
    assert not table[:, : 2 + accumulators.SHARES].any()
    return rows, counts


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(
    accumulators: Any, awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """Rows are the reference's after one call and after two; strided tensors and channels at the end, too."""
    tensors = [tensor.cuda() for tensor in floating(awkward_tensors())]
    tensors.append(torch.randn(4, 6, 5, 7, device="cuda").to(memory_format=torch.channels_last))
    rows, counts = added(accumulators, tensors)
    assert_rows(rows, tensors)
    assert counts.tolist() == [[1, 1]] * len(tensors)
    rows, _ = added(accumulators, tensors, [tensor * 2 for tensor in tensors])
    assert_rows(rows, [torch.cat([tensor.reshape(-1), tensor.reshape(-1) * 2]) for tensor in tensors])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_on_cuda(
    accumulators: Any, dtype: torch.dtype, large_tensors: Callable[..., list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """A far mean, a NaN somewhere, views that start at any element; the same bits every time, alone or together."""
    tensors = large_tensors(dtype)
    first, _ = added(accumulators, tensors)
    assert_rows(first, tensors, std_error=1e-4)
    again = [added(accumulators, tensors)[0] for _ in range(5)]
    again.append(torch.cat([added(accumulators, [tensor])[0] for tensor in tensors]))
    assert all(torch.equal(rows.nan_to_num(7.0), first.nan_to_num(7.0)) for rows in again)


@pytest.mark.gpu
@needs_cuda
def test_a_call_that_is_not_due_is_counted_and_adds_nothing(accumulators: Any) -> None:
    """Its row has NaN as its count."""
    rows, counts = added(accumulators, *[[torch.ones(5, device="cuda")]] * 3, due=0)
    assert rows[0, COUNT].isnan() and counts.tolist() == [[3, 0]] and rows.shape == (1, len(STATISTICS))


@pytest.mark.gpu
@needs_cuda
def test_counts_add_up_over_many_takes(accumulators: Any) -> None:
    """They need not be read in between."""
    device = torch.device("cuda", 0)
    flag, counts = accumulators.make_flag(device).fill_(1), accumulators.make_counts(1, device)
    _, (one,) = accumulators.make_accumulators(1, device)
    for _ in range(3):
        accumulators.add([torch.ones(5, device="cuda")], [one], [0], flag)
        rows = accumulators.take(accumulators.addresses_of([one]), counts)
    assert counts.tolist() == [[3, 3]] and rows[0, COUNT] == 5


@pytest.mark.gpu
@needs_cuda
def test_a_replayed_graph_adds_as_well(accumulators: Any, assert_rows: Callable[..., None]) -> None:
    """A launch needs only what it was given by value."""
    device = torch.device("cuda", 0)
    flag, counts = accumulators.make_flag(device).fill_(1), accumulators.make_counts(1, device)
    _, (one,) = accumulators.make_accumulators(1, device)
    tensor = torch.randn(3_000_000, device="cuda")
    accumulators.add([tensor], [one], [0], flag)
    accumulators.take(accumulators.addresses_of([one]), counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulators.add([tensor], [one], [0], flag)
    graph.replay()
    tensor *= 3
    graph.replay()
    rows = accumulators.take(accumulators.addresses_of([one]), counts)
    assert_rows(rows, [torch.cat([tensor / 3, tensor])], std_error=1e-4)


@pytest.mark.gpu
@needs_cuda
def test_accumulators_of_several_tables_in_one_call(accumulators: Any, assert_rows: Callable[..., None]) -> None:
    """A monitor may be added later, and an address may come back for fewer elements or another dtype."""
    device = torch.device("cuda", 0)
    flag, counts = accumulators.make_flag(device).fill_(1), accumulators.make_counts(3, device)
    (early, first), (late, others) = (
        accumulators.make_accumulators(1, device),
        accumulators.make_accumulators(2, device),
    )
    addresses = accumulators.addresses_of([*first, *others])
    whole = [torch.randn(10_000, device="cuda").bfloat16().view(torch.float32) for _ in range(3)]
    for tensors in (whole, [tensor[:70] for tensor in whole], [tensor.view(torch.bfloat16) for tensor in whole]):
        accumulators.add(tensors, [early, late, late], [0, 0, 1], flag)
        assert_rows(accumulators.take(addresses, counts), tensors)
