"""The columns stand where their names say, and each dtype has a precision that holds it."""

import pytest
import torch

from hookline.stats import columns


def test_positions_are_those_of_the_names() -> None:
    """COUNT, MEAN and the others are the places of their names."""
    places = [getattr(columns, name.upper()) for name in columns.STATISTICS]
    assert places == list(range(len(columns.STATISTICS)))


def test_rows_are_float64_except_where_there_is_none() -> None:
    """MPS has no float64; everything else does."""
    assert columns.row_dtype(torch.device("cpu")) is torch.float64
    assert columns.row_dtype(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float32])
def test_what_float32_holds_is_computed_in_it(dtype: torch.dtype) -> None:
    """Narrow dtypes need no float64."""
    assert columns.wide_dtype(dtype) is torch.float32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_what_float32_does_not_hold_is_computed_in_float64(dtype: torch.dtype) -> None:
    """Wide integers keep their last digit."""
    assert columns.wide_dtype(dtype) is torch.float64
