"""What cannot be summarised is refused before anything is computed."""

import pytest
import torch

from hookline.errors import HooklineError
from hookline.stats.checks import check


class Sharded(torch.Tensor):
    """A tensor that holds only a part of the values, as a DTensor does."""

    def to_local(self) -> torch.Tensor:
        """The part."""
        return self


def test_ordinary_tensors_pass() -> None:
    """Dtypes and shapes may differ; parameters are tensors too."""
    check([torch.ones(2), torch.ones(3, 4).bool(), torch.nn.Parameter(torch.ones(1))])


def test_a_distributed_tensor_is_refused_with_the_remedy() -> None:
    """Its local values alone would pass for the whole."""
    with pytest.raises(HooklineError, match=r"weight: it is a DTensor; hookline\.stats\.pieces\.Pieces"):
        check([torch.ones(2).as_subclass(Sharded)], names=["weight"])


def test_the_first_culprit_is_named() -> None:
    """Of several wrong tensors the first is in the message."""
    with pytest.raises(HooklineError, match="no statistics of b"):
        check([torch.ones(1), torch.ones(1).cfloat(), torch.eye(2).to_sparse()], names=["a", "b", "c"])
