"""A model may write into the batch that it is given: an examination must not do it once more."""

import torch
from torch import nn

from hookline import NanForensics, SimpleTrainer


class Counting(nn.Module):
    """Adds 1 to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.add_(1.0))
        return out


def test_the_run_s_batches_are_written_to_once() -> None:
    """Two epochs add 2 to every batch, also to the one that was run again because its loss was NaN."""
    model, batches = Counting(), [(torch.zeros(4, 2), torch.zeros(4, 1)) for _ in range(3)]
    batches[1][0][0, 0] = float("nan")
    trainer = SimpleTrainer(
        model, batches, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=nn.functional.mse_loss, record=False, console=False, max_epochs=2,
    )  # fmt: skip
    trainer.add_hook(NanForensics(stop_run=False))
    trainer.train()
    assert trainer.hooks.get("nan_forensics").autopsy.batch == ("batch[0]",)
    assert all(torch.equal(x[1:], torch.full((3, 2), 2.0)) for x, _ in batches)
