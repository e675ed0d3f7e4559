"""A user's metric that fails says which one it is, whatever it was doing."""

from typing import Any

import pytest
import torch
from torch import nn

from hookline import SimpleTrainer

BATCH = (torch.ones(4, 3), torch.zeros(4, 1))


class Fragile:
    """A metric that fails in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _at(self, method: str) -> None:
        if method == self.where:
            raise ZeroDivisionError("nothing to divide by")

    def reset(self) -> None:
        self._at("reset")

    def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
        self._at("update")

    def compute(self) -> float:
        self._at("compute")
        return 1.0


@pytest.mark.parametrize(
    ("where", "loaders", "note"),
    [
        ("reset", [BATCH], "in the metric 'fragile', in reset"),
        ("update", [BATCH], "in the metric 'fragile', on the validation loader 'val'"),
        ("compute", [BATCH], "in the metric 'fragile', computing val/fragile"),
        ("compute", {"a": [BATCH], "b": [BATCH]}, "in the metric 'fragile', computing val/a/fragile"),
    ],
)
def test_the_failure_names_the_metric(where: str, loaders: Any, note: str) -> None:
    """The exception is its own, with a note."""
    model = nn.Linear(3, 1)
    trainer = SimpleTrainer(
        model, [BATCH], torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=nn.functional.mse_loss, metrics={"fragile": Fragile(where)}, record=False, console=False,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError, match="nothing to divide by") as failure:
        trainer.validate(loaders)
    assert failure.value.__notes__ == [note]
