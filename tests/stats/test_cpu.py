"""On the CPU tensors of one shape are read together and large ones in blocks, and each gets its own row."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.stats import STATISTICS, summarize
from hookline.stats.distributed import LocalTensors
from hookline.stats.rows import BLOCK

MAX = STATISTICS.index("max")

AssertRows = Callable[..., None]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool]


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each tensor, computed without its other statistics."""
    return LocalTensors(tensors).norms()


def test_more_small_tensors_than_fit_into_one_block(assert_rows: AssertRows) -> None:
    """Rows and norms of two dtypes are in the order of the tensors."""
    tensors = [
        torch.randn(BLOCK // 8 - place % 2, dtype=[torch.float32, torch.float64][place % 3 == 0]) for place in range(46)
    ]
    assert_rows(summarize(tensors), tensors)
    expected = [tensor.double().square().sum().sqrt().item() for tensor in tensors]
    assert norms(tensors).tolist() == pytest.approx(expected, rel=1e-6)


def test_tensors_of_one_shape_among_others(assert_rows: AssertRows) -> None:
    """Stacked, single, empty and large tensors each get the row of their own index."""
    tensors = [torch.randn(7) + index if index % 3 else torch.randn(5, index + 1) for index in range(40)]
    tensors.insert(9, torch.randn(2 * BLOCK + 3))
    tensors.insert(20, torch.empty(0))
    assert_rows(summarize(tensors), tensors)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 8192), many=st.integers(2, 60), dtype=st.sampled_from(DTYPES))
def test_stacked_tensors_of_any_dtype(size: int, many: int, dtype: torch.dtype, assert_rows: AssertRows) -> None:
    """Every tensor gets its own row, however many fit into one block."""
    generator = torch.Generator().manual_seed(size)
    tensors = [(torch.randn(size, generator=generator).relu() * (1 + index)).to(dtype) for index in range(many)]
    assert_rows(summarize(tensors), tensors)


@pytest.mark.parametrize("many", [1, 6, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_counted(dtype: torch.dtype, many: int, assert_rows: AssertRows) -> None:
    """Zeros are counted in groups without a zero, with some, and with values whose squares vanish."""
    for tensors in (
        [(torch.rand(3, 40) + 1).to(dtype) for _ in range(many)],
        [torch.randn(3, 40).relu().to(dtype) for _ in range(many)],
        [(torch.randn(3, 40) * 1e-30).to(dtype) for _ in range(many)],
    ):
        assert_rows(summarize(tensors), tensors)


@pytest.mark.parametrize("many", [2, 6, 20])
@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30, 1e6, 1e-25, 0.0])
def test_one_unusual_tensor_among_many(odd: float, size: int, many: int, assert_rows: AssertRows) -> None:
    """A NaN, an overflow, a far mean, faint values and zeros only spoil no row."""
    tensors = [torch.randn(size) for _ in range(many)]
    tensors[1] = torch.randn(size) * odd if abs(odd) < 1 else torch.randn(size) + odd
    tensors[0][7] = odd
    assert_rows(summarize(tensors), tensors)


@pytest.mark.parametrize("size", [1, 2, BLOCK // 2, BLOCK // 2 + 1])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_every_size_and_dtype(size: int, dtype: torch.dtype, assert_rows: AssertRows) -> None:
    """A tensor is measured alone, among others of any kind, and among many of its own."""
    tensor = torch.randn(size).mul(3).relu().to(dtype)
    others = [torch.randn(5), torch.randn(3000)]
    for some in ([tensor], [others[0], tensor, others[1], tensor], [tensor, *others] * 4):
        assert_rows(summarize(some), some)


def test_dtypes_may_be_mixed(assert_rows: AssertRows) -> None:
    """Large integers keep their digits, as they would not in a common dtype."""
    whole = torch.tensor([2**24 + 1, 5]), torch.tensor([30001, 2]).short()
    tensors = [whole[0], torch.randn(7).bfloat16(), torch.randn(3), whole[1]] * 4
    rows = summarize(tensors)
    assert_rows(rows, tensors)
    assert rows[0, MAX] == 2**24 + 1 and rows[3, MAX] == 30001


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_extremes_and_counts_are_exact(values: list[list[float]]) -> None:
    """For any numbers, the row has the smallest and the largest one, and counts the zeros."""
    tensors = [torch.tensor(some) for some in values]
    for row, some in zip(summarize(tensors).tolist(), tensors, strict=True):
        assert (row[0], row[3], row[4]) == (len(some), some.min().item(), some.max().item())
        assert row[7:] == [(some == 0).sum().item(), 0, 0]


@pytest.mark.parametrize("many", [1, 2, 20])
def test_strides_and_graphs_do_not_matter(many: int, assert_rows: AssertRows) -> None:
    """Views with gaps, scalars and tensors with a graph are measured as they are."""
    base = torch.randn(60, 80, requires_grad=True)
    tensors = [base.t(), base[:, ::2], base[3:5].exp(), base.sum()] * many
    assert_rows(summarize(tensors), tensors)
    torch.testing.assert_close(norms(tensors).float(), torch.stack([tensor.detach().norm() for tensor in tensors]))


def test_tensors_are_not_written_to() -> None:
    """One alone is read in place, several are copied."""
    tensors = [torch.randn(9) for _ in range(4)]
    before = [tensor.clone() for tensor in tensors]
    summarize(tensors[:1]), summarize(tensors)
    assert all(map(torch.equal, tensors, before))


# ---- large tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_end_where_they_should(size: int, dtype: torch.dtype, assert_rows: AssertRows) -> None:
    """No element is missed or counted twice at the edge of a block."""
    tensor = torch.randn(size).relu().to(dtype)
    assert_rows(summarize([tensor]), [tensor])


@pytest.mark.parametrize("threads", [1, 40])
def test_large_tensors_in_one_block_and_in_several(
    threads: int,
    awkward_tensors: Callable[[], list[torch.Tensor]],
    assert_rows: AssertRows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of every kind of tensor, with many threads as with few; a far mean, zeros, a NaN in one block."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    base = torch.randn(300_001)
    broken = base.clone()
    broken[200_000] = math.nan
    wide = [base.double(), base.double() * 1e200]
    tensors = [*awkward_tensors(), base + 1e4, base.relu(), broken, base.bfloat16(), base.half() * 100, *wide]
    assert_rows(summarize(tensors), tensors)


def test_the_default_device_does_not_matter(assert_rows: AssertRows) -> None:
    """Tensors on the CPU are measured there, whatever device new tensors have in the user's program."""
    tensors = [torch.randn(5), torch.randn(3), torch.randn(5) + 1e6]
    with torch.device("meta"):
        rows, lengths = summarize(tensors), norms(tensors)
    assert_rows(rows, tensors)
    assert lengths.tolist() == pytest.approx([tensor.double().norm().item() for tensor in tensors], rel=1e-6)


def test_threads_do_not_disturb_each_other() -> None:
    """Threads that measure tensors of the same shapes at the same time, over and over, see their own values."""
    tensors = {thread: [torch.full((900,), float(thread + 1)) for _ in range(40)] for thread in range(3)}

    def wrong(thread: int) -> int:
        found = [summarize(tensors[thread])[:, MAX] for _ in range(50)]
        return sum(int((highest != thread + 1).any()) for highest in found)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(wrong, tensors)) == [0, 0, 0]
