"""A checkpoint may lie between a validation and the end of its epoch: whoever goes on from there looks at it, too."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import GenericTrainer, TrainingHook

BATCH = (torch.ones(2, 3), torch.zeros(2, 1))


class FourBatches:
    """A loader without a length: that a batch was the last is known when there is no other."""

    def __iter__(self) -> Iterator[Any]:
        yield from [BATCH] * 4


class Scores(TrainingHook):
    """Values for `val/score`, one a validation."""

    saves = ("made",)

    def __init__(self, scores: list[float]) -> None:
        self.scores, self.made = scores, 0

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        metrics["val/score"] = self.scores[self.made]
        self.made += 1


def make_trainer(scores: list[float], *entries: dict[str, Any]) -> GenericTrainer:
    """Validates at the last step of each epoch of four; every step is saved."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    every_step = {"name": "checkpoint", "as": "steps", "save_every_n_epochs": None, "save_every_n_steps": 1}
    hooks = {"lifecycle": [every_step, *entries]}
    config = {"max_epochs": len(scores), "validate_every": 4, "console": False, "hooks": hooks}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = GenericTrainer(config, model, optimizer, device="cpu", loss_fn=nn.functional.mse_loss)
    trainer.train_loaders["train"] = FourBatches()
    trainer.val_loaders["val"] = [BATCH]
    trainer.add_hook(Scores(scores))
    return trainer


def gone_on(trainer: GenericTrainer, made: GenericTrainer, step: int, place: Path) -> GenericTrainer:
    """A trainer that goes on from the checkpoint of a step, lying elsewhere, as in a run of its own."""
    assert made.checkpoint_dir is not None
    shutil.copytree(made.checkpoint_dir / f"step-{step:08d}", place / f"step-{step}")
    trainer.fit(resume=place / f"step-{step}")
    return trainer


@pytest.mark.parametrize("step", [3, 4, 5, 8])
def test_early_stopping_counts_the_check_that_was_left(step: int, tmp_path: Path) -> None:
    """It ends the run at the step at which the unbroken one ended, for the same reason."""
    entry = {"name": "early_stopping", "monitor": "val/score", "patience": 2, "check_on_train_epoch_end": True}
    scores = [3.0, 4.0, 5.0, 6.0]
    whole = make_trainer(scores, entry)
    whole.fit()
    assert (whole.step, whole.stop_reason) == (12, "val/score has not improved on 3 for 2 checks")
    other = gone_on(make_trainer(scores, entry), whole, step, tmp_path)
    assert (other.step, other.stop_reason) == (whole.step, whole.stop_reason)


def test_the_weights_that_were_validated_are_the_ones_restored(tmp_path: Path) -> None:
    """Under `ema` these are the averaged ones, which training's own weights must not take the place of."""
    stopping = {"name": "early_stopping", "monitor": "val/score", "patience": 1, "check_on_train_epoch_end": True}
    entries = [{**stopping, "restore_best_weights": True}, {"name": "ema", "decay": 0.5, "warmup": False}]
    whole = make_trainer([3.0, 4.0], *entries)
    whole.fit()
    other = gone_on(make_trainer([3.0, 4.0], *entries), whole, 4, tmp_path)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name


def test_a_checkpoint_at_the_end_of_the_epoch_has_its_score(tmp_path: Path) -> None:
    """The metric of that validation ranks the checkpoint of the epoch's end, over the resume as without."""
    entry = {"name": "checkpoint", "as": "best_ones", "monitor": "val/score", "save_on_train_epoch_end": True}
    whole = make_trainer([3.0, 4.0], entry)
    whole.fit()
    other = gone_on(make_trainer([3.0, 4.0], entry), whole, 4, tmp_path)
    assert whole.hooks.get("best_ones").best_score == 3
    assert other.hooks.get("best_ones").best_score == 3
