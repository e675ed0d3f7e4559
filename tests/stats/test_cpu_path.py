"""The CPU path takes short ways where it can and notices where it cannot."""

from collections.abc import Callable

import pytest
import torch

from hookline.stats import cpu_path


def test_small_tensors_alike_are_measured_together(
    assert_rows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parameters of one shape are measured in few groups, each row in its place."""
    groups: list[int] = []
    together = cpu_path._rows
    monkeypatch.setattr(cpu_path, "_rows", lambda alike: groups.append(len(alike)) or together(alike))
    tensors = [torch.randn(4096) + index for index in range(100)]
    assert_rows(cpu_path.summarize(tensors), tensors)
    assert groups == [64, 36]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30, 1e6, 1e-25])
def test_one_odd_tensor_among_many(odd: float, assert_rows: Callable[..., None]) -> None:
    """A NaN, an overflow or a far mean in one tensor spoils neither it nor its neighbours."""
    tensors = [torch.randn(50) for _ in range(6)]
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
