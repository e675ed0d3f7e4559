"""A run that is stopped in the middle of an epoch goes on to the same weights, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import SimpleTrainer, TrainingHook


def loaders(kind: str) -> Any:
    """Shuffling loaders: one on the global stream, one with its own generator, two of them."""

    def loader(seed: int, own: bool) -> DataLoader[Any]:
        made = torch.Generator().manual_seed(seed)
        data = TensorDataset(torch.randn(24, 3, generator=made), torch.randn(24, 1, generator=made))
        generator = torch.Generator().manual_seed(seed) if own else None
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator)

    if kind == "two":
        return {"a": loader(1, own=False), "b": loader(2, own=True)}
    return loader(1, own=kind == "own generator")


def make_trainer(kind: str, root: Path) -> SimpleTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return SimpleTrainer(
        model, loaders(kind), optimizer, "cpu", loss_fn=nn.functional.mse_loss, max_epochs=3, seed=5,
        console=False, output_dir=str(root),
    )  # fmt: skip


class SaveAndStop(TrainingHook):
    """Saves at a step and ends the run there."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.at:
            trainer.save()
            trainer.request_stop("tested")


@pytest.mark.parametrize("at", [4, 6, 9, 15])
@pytest.mark.parametrize("kind", ["global stream", "own generator", "two"])
def test_a_stopped_run_ends_where_an_uninterrupted_one_does(kind: str, at: int, tmp_path: Path) -> None:
    """Shuffling, dropout and the optimizer go on as if nothing had been, inside an epoch and between two."""
    whole = make_trainer(kind, tmp_path / "whole")
    whole.train()
    first = make_trainer(kind, tmp_path / "parts")
    first.add_hook(SaveAndStop(at))
    first.train()
    second = make_trainer(kind, tmp_path / "parts")
    second.fit(resume=first.run_dir)
    assert second.step == whole.step and second.run_id == first.run_id
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    )
