"""The CPU path takes short ways where it can and notices where it cannot."""

from collections.abc import Callable

import pytest
import torch

from hookline.stats import cpu_path


def test_small_tensors_alike_are_measured_together(
    assert_rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parameters of one shape are read in one go, each row in its place."""
    together: list[int] = []
    real = cpu_path.sums_of_rows
    monkeypatch.setattr(cpu_path, "sums_of_rows", lambda alike: together.append(len(alike)) or real(alike))
    tensors = [torch.randn(4096) + index for index in range(70)]
    tensors.insert(40, torch.randn(9))
    assert_rows(cpu_path.summarize(tensors), tensors, std_error=3e-5)  # as some are nearly far from zero
    assert together == [70]


@pytest.mark.parametrize("many", [6, cpu_path._MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_zeros_are_counted_where_there_are_any(dtype: torch.dtype, many: int, assert_rows: Callable[..., None]) -> None:
    """In groups without a zero, with some, and with values whose squares vanish; in any dtype and shape."""
    for tensors in (
        [(torch.rand(3, 40) + 1).to(dtype) for _ in range(many)],
        [torch.randn(3, 40).relu().to(dtype) for _ in range(many)],
        [(torch.randn(3, 40) * 1e-30).to(dtype) for _ in range(many)],
    ):
        assert_rows(cpu_path.summarize(tensors), tensors)


@pytest.mark.parametrize("many", [6, cpu_path._MANY])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30, 1e6, 1e-25])
def test_one_odd_tensor_among_many(odd: float, many: int, assert_rows: Callable[..., None]) -> None:
    """A NaN, an overflow or a far mean in one tensor spoils neither it nor its neighbours."""
    tensors = [torch.randn(50) for _ in range(many)]
    tensors[3] = torch.randn(50) * odd if abs(odd) < 1 else torch.randn(50) + odd
    assert_rows(cpu_path.summarize(tensors), tensors)


@pytest.mark.parametrize("size", [cpu_path.BLOCK - 1, cpu_path.BLOCK, cpu_path.BLOCK + 1, 2 * cpu_path.BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_end_where_they_should(size: int, dtype: torch.dtype, assert_rows: Callable[..., None]) -> None:
    """No element is missed or counted twice at a block's edge."""
    tensor = torch.randn(size).relu().to(dtype)
    assert_rows(cpu_path.summarize([tensor]), [tensor])


def test_an_odd_block_among_even_ones(assert_rows: Callable[..., None]) -> None:
    """Only one block holds a NaN, and the whole row shows it."""
    tensor = torch.randn(3 * cpu_path.BLOCK)
    tensor[cpu_path.BLOCK + 5] = float("nan")
    assert_rows(cpu_path.summarize([tensor]), [tensor])


def test_some_alike_among_others(assert_rows: Callable[..., None]) -> None:
    """What is stacked, what is small and what is large each get the row of their own place."""
    tensors = [torch.randn(7) + index if index % 3 else torch.randn(5, index + 1) for index in range(40)]
    tensors.insert(9, torch.randn(2 * cpu_path.BLOCK + 3))
    tensors.insert(20, torch.empty(0))
    assert_rows(cpu_path.summarize(tensors), tensors)


@pytest.mark.parametrize("few_threads", [0, 2])
def test_large_tensors_by_torch_and_by_numpy(
    few_threads: int,
    awkward_tensors: Callable[[], list[torch.Tensor]],
    assert_rows: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several blocks of every kind of tensor, with many threads as with few; a far mean, zeros, a NaN in one block."""
    monkeypatch.setattr(cpu_path, "_FEW_THREADS", few_threads)
    base = torch.randn(300_001)
    broken = base.clone()
    broken[200_000] = float("nan")
    tensors = [*awkward_tensors(), base + 1e4, base.relu(), broken, base.bfloat16(), base.half() * 100, base.double()]
    assert_rows(cpu_path.summarize(tensors), tensors)
