"""Somebody tidies the disk in mid-run: a checkpoint that is gone is neither ranked nor linked to."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import GenericTrainer, Trainer
from hookline.hooks.checkpoint import _is_deleted

BATCH = (torch.ones(2, 3), torch.zeros(2, 1))


def run(scores: list[float], deleted_after: int, **checkpoint: Any) -> Trainer:
    """An epoch of two steps for each score; what the first one saved is deleted at the end of a later one."""
    model = nn.Linear(3, 1)
    entry = {"name": "checkpoint", "monitor": "val/score", **checkpoint}
    config = {"max_epochs": len(scores), "console": False, "hooks": {"lifecycle": [entry]}}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = GenericTrainer(config, model, optimizer, device="cpu", loss_fn=nn.functional.mse_loss)

    @trainer.on("validation_end")
    def score(metrics: dict[str, float], epoch: int) -> None:
        metrics["val/score"] = scores[epoch]

    @trainer.on("epoch_end")
    def tidy(trainer: Trainer, epoch: int) -> None:
        if epoch == deleted_after and trainer.checkpoint_dir is not None:
            shutil.rmtree(trainer.checkpoint_dir / "step-00000002")

    trainer.fit([BATCH, BATCH], [BATCH])
    return trainer


@pytest.mark.parametrize("options", [{"save_top_k": 1}, {"save_top_k": 2, "save_last": True}])
def test_the_best_that_was_deleted_makes_way(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The best of those that are left is linked and returned, and the loss of the other is told once."""
    with caplog.at_level(logging.WARNING, logger="hookline"):
        trainer = run([0.1, 3, 2, 5], deleted_after=1, **options)
    hook, directory = trainer.hooks.get("checkpoint"), trainer.checkpoint_dir
    assert directory is not None
    assert hook.best_path == (directory / "best").resolve() == directory / "step-00000006"
    assert hook.best_score == 2
    assert [line for line in caplog.messages if "step-00000002 was deleted" in line] == [
        "hook 'checkpoint': step-00000002 was deleted from disk; no longer ranked"
    ]


def test_one_that_was_too_many_anyway_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """Of three, the newest two stay on the disk though one is wanted; that an unwanted one goes is nobody's loss."""
    with caplog.at_level(logging.WARNING, logger="hookline"):
        trainer = run([3, 2, 1], deleted_after=1, save_top_k=1)
    assert trainer.hooks.get("checkpoint").best_score == 1
    assert not caplog.messages


def test_a_disk_that_does_not_answer_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is surely gone is forgotten: a stale mount must not cost the ranking, nor the run."""
    monkeypatch.setattr("hookline.hooks.checkpoint.Path.stat", _stale)
    assert not _is_deleted(Path("runs/x/checkpoints/step-00000002"))


def _stale(path: Path) -> None:
    raise OSError(116, "Stale file handle", str(path))
