"""Small tensors get the rows that large ones would."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.stats.columns import MAX, MEAN
from hookline.stats.kinds import kinds_of
from hookline.stats.scratch import TOGETHER
from hookline.stats.small_tensors import COPIED, FEW, SMALL, Small, norms_of_small, rows_of_small


def rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As a table."""
    return torch.from_numpy(rows_of_small(tensors, Small.among(range(len(tensors)), kinds_of(tensors))))


@pytest.mark.parametrize("size", [1, 2, COPIED, COPIED + 1, SMALL])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_size_and_dtype(size: int, dtype: torch.dtype, assert_rows: Callable[..., None]) -> None:
    """Alone, among others of any kind, and so many of a kind that they are laid end to end."""
    tensor = torch.randn(size).mul(3).relu().to(dtype)
    others = [torch.randn(5), torch.randn(3000)]
    for some in ([tensor], [others[0], tensor, others[1], tensor], [tensor, *others] * FEW):
        assert_rows(rows(some), some)


@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30, 1e6, 1e-25, 0.0])
def test_odd_values_are_measured_with_care(odd: float, size: int, assert_rows: Callable[..., None]) -> None:
    """A NaN, an overflow, a far mean, faint values and nothing but zeros; no warning of NumPy's gets out."""
    tensor = torch.randn(size) * odd if abs(odd) < 1 else torch.randn(size) + odd
    single = torch.randn(size)
    single[7] = odd
    for some in ([tensor, single], [single[:-3], tensor, single, tensor[:-2]]):
        assert_rows(rows(some), some)


def test_strides_and_graphs_do_not_matter(assert_rows: Callable[..., None]) -> None:
    """Views that do not lie one behind the other, and tensors with a graph, are read as they are."""
    base = torch.randn(60, 80, requires_grad=True)
    tensors = [base.t(), base[:, ::2], base[3:5].exp(), base.sum()]
    assert_rows(rows(tensors), tensors)


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_extremes_and_counts_are_exact(values: list[list[float]]) -> None:
    """Of any numbers, the row has the very smallest and largest, and counts the zeros."""
    tensors = [torch.tensor(some) for some in values]
    for row, some in zip(rows(tensors).tolist(), tensors, strict=True):
        assert (row[0], row[3], row[4]) == (len(some), some.min().item(), some.max().item())
        assert row[7:] == [(some == 0).sum().item(), 0, 0]


def test_dtypes_may_be_mixed(assert_rows: Callable[..., None]) -> None:
    """End to end they would take on a common dtype, in which large whole numbers lose digits."""
    whole = torch.tensor([2**24 + 1, 5]), torch.tensor([30001, 2]).short()
    tensors = [whole[0], torch.randn(7).bfloat16(), torch.randn(3), whole[1]]
    assert_rows(rows(tensors), tensors)
    assert rows(tensors)[0, 4] == 2**24 + 1 and rows(tensors)[3, 4] == 30001


def test_tensors_are_left_as_they_are() -> None:
    """One alone is read where it lies, several are copied: they must not be written to."""
    tensors = [torch.randn(9) for _ in range(FEW)]
    before = [tensor.clone() for tensor in tensors]
    rows(tensors[:1]), rows(tensors)
    assert all(map(torch.equal, tensors, before))


def test_what_is_small() -> None:
    """Neither nothing nor too much, and only among the places that are asked for."""
    tensors = [torch.empty(size) for size in (0, 5, 9, SMALL, SMALL + 1, 7)]
    assert Small.among([0, 1, 2, 3, 4], kinds_of(tensors)).places == [1, 2, 3]


def test_more_than_the_memory_holds_are_laid_there_in_turns(assert_rows: Callable[..., None]) -> None:
    """In chunks, each of one precision; the rows stand in the order of the tensors."""
    tensors = [torch.randn(COPIED - place).to([torch.float32, torch.float64][place % 3 == 0]) for place in range(46)]
    small = Small.among(range(len(tensors)), kinds_of(tensors))
    assert len(small.chunks) > 5 and max(sum(shape.numel() for shape in one.shapes) for one in small.chunks) <= TOGETHER
    assert_rows(rows(tensors), tensors)
    norms = [tensor.double().square().sum().sqrt().item() for tensor in tensors]
    assert norms_of_small(tensors, small) == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize(
    "dtypes",
    [
        ["float8_e4m3fn", "float8_e5m2"],
        ["int8", "bool", "float16"],
        ["bfloat16"],
        ["int64", "float32"],
        ["float64", "float16"],
    ],
)
def test_norms_of_every_dtype(dtypes: list[str]) -> None:
    """None is rounded to what its tensor holds, nor to what its neighbour does."""
    tensors = [(torch.randn(999) * 5).to(getattr(torch, dtypes[place % len(dtypes)])) for place in range(9)]
    small = Small.among(range(9), kinds_of(tensors))
    expected = [tensor.double().square().sum().sqrt().item() for tensor in tensors]
    assert norms_of_small(tensors, small) == pytest.approx(expected, rel=1e-6)


def test_norms_of_what_does_not_lie_in_one_piece() -> None:
    """Added up one by one, a large value first, float32 would lose three digits more."""
    column = torch.full((SMALL, 2), 0.7)[:, 0]
    column[0] = 4000.0
    small = Small.among([0, 1], kinds_of(tensors := [column, torch.ones(3)]))
    assert norms_of_small(tensors, small)[0] == pytest.approx(column.double().norm().item(), rel=1e-7)


def test_threads_do_not_share_the_memory() -> None:
    """Two that read tensors of the same kinds at the same time, over and over, see their own."""
    tensors = {thread: [torch.full((900 + place,), float(thread + 1)) for place in range(40)] for thread in range(3)}
    small = Small.among(range(40), kinds_of(tensors[0]))

    def wrong(thread: int) -> int:
        found = [rows_of_small(tensors[thread], small)[:, [MEAN, MAX]] for _ in range(200)]
        return sum((one != thread + 1).any() for one in found)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(wrong, tensors)) == [0, 0, 0]
