"""The number of samples in a batch."""

from typing import Any

import pytest
import torch

from hookline._tensors import count_samples

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(ONE, 2), ((ONE, 1), 2), ({"a": "x", "b": [ONE]}, 2), (torch.tensor(1.0), 1), ("text", 1)],
    ids=str,
)
def test_samples_are_counted_by_the_first_tensor(batch: Any, samples: int) -> None:
    """The first dimension of the first tensor found, however deep."""
    assert count_samples(batch) == samples
