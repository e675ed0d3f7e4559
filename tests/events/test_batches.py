"""What is in a batch, as far as counting it goes."""

from typing import Any

import pytest
import torch

from hookline.events.batches import count_samples, tensors_of

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(ONE, 2), ((ONE, 1), 2), ({"a": "x", "b": [ONE]}, 2), (torch.tensor(1.0), 1), ("text", 1)],
    ids=str,
)
def test_counting_samples(batch: Any, samples: int) -> None:
    """The first dimension of the first tensor found, however deep."""
    assert count_samples(batch) == samples
    assert list(tensors_of("text")) == []
