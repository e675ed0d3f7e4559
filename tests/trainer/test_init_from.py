"""`init_from`: a model begins with the weights of a checkpoint, wherever it is first used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch.utils.data import DataLoader

from hookline import SimpleTrainer, TrainingHook, read_metrics
from hookline.errors import ConfigError


def trained() -> SimpleTrainer:
    """Return a trainer whose run has a checkpoint."""
    trainer = make_trainer(record=True)
    trainer.add_checkpointing()
    trainer.train()
    return trainer


def weights_of(trainer: SimpleTrainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def test_every_first_use_has_the_weights() -> None:
    """`validate`, `predict` and `training_step` load them as `fit` does."""
    source, data = trained(), make_batches()
    expected = source.validate(data)
    other = make_trainer(model=make_model(seed=1), init_from=str(source.run_dir))
    assert other.validate(data) == expected
    other = make_trainer(model=make_model(seed=1), init_from=str(source.run_dir))
    assert all(map(torch.equal, other.predict(data), source.predict(data)))
    other = make_trainer(model=make_model(seed=1), init_from=str(source.run_dir), lr=0.0)
    other.training_step(data[0])
    assert all(map(torch.equal, weights_of(other), weights_of(source)))


def test_they_are_loaded_once() -> None:
    """A second `fit` continues from where the first one ended."""
    source = trained()
    trainer = make_trainer(model=make_model(seed=1), init_from=str(source.run_dir))
    trainer.train()
    after_first = weights_of(trainer)
    seen: list[list[torch.Tensor]] = []
    trainer.on("train_start")(lambda trainer: seen.append(weights_of(trainer)))
    trainer.fit(max_epochs=2)
    assert all(map(torch.equal, seen[0], after_first))


def test_a_path_that_does_not_exist() -> None:
    """The run does not begin, and has no directory."""
    with pytest.raises(ConfigError, match=r"trainer\.init_from: nowhere: no run is in runs/"):
        make_trainer(init_from="nowhere", record=True).train()
    assert not Path("runs").exists()


class Kill(Exception):
    """Stands for a kill."""


class KilledAt(TrainingHook):
    """Ends the run at a step as a kill would: nothing is saved."""

    on_error = "raise"

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int) -> None:
        if step == self.at:
            raise Kill


def test_a_run_without_a_checkpoint_begins_again_as_it_began() -> None:
    """With its sanity check, which moves a random order of validation, and with the weights of `init_from`."""
    source = trained()

    def make(*hooks: Any) -> SimpleTrainer:
        samples = list(zip(*make_batches(1, size=12)[0], strict=True))
        loader = DataLoader(samples, batch_size=5, shuffle=True, drop_last=True, generator=torch.Generator())
        return make_trainer(
            *hooks, model=make_model(seed=1), init_from=str(source.run_dir), record=True, val_dataloader=loader, seed=3
        )

    def curve(trainer: SimpleTrainer) -> list[tuple[int, Any]]:
        assert trainer.run_dir is not None
        return [(row["step"], row["val/loss"]) for row in read_metrics(trainer.run_dir) if "val/loss" in row]

    unbroken = make()
    unbroken.train()
    killed = make(KilledAt(2))
    with pytest.raises(Kill):
        killed.train()
    again = make()
    again.fit(resume=killed.run_dir)
    assert curve(again) == curve(unbroken) and again.run_dir == killed.run_dir
    assert all(map(torch.equal, weights_of(again), weights_of(unbroken)))
