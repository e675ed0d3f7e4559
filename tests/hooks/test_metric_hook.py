"""Hooks that wait for a metric say so when it cannot come."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import CheckpointHook, EarlyStopping, GenericTrainer, read_metrics

BATCHES = [(torch.ones(2, 3), torch.zeros(2, 1))]


def fit(hook: Any, validate_every: str | None, val_loaders: Any = BATCHES) -> None:
    """One epoch of one batch."""
    model = nn.Linear(3, 1)
    trainer = GenericTrainer(
        None, model, torch.optim.SGD(model.parameters(), 0.1), device="cpu", loss_fn=nn.functional.mse_loss,
        record=False, console=False, validate_every=validate_every, sanity_batches=0,
    )  # fmt: skip
    trainer.add_hook(hook)
    trainer.fit(BATCHES, val_loaders, max_epochs=2)


@pytest.mark.parametrize(
    "hook",
    [
        EarlyStopping("val/loss"),
        EarlyStopping("eval/loss", check_on_train_epoch_end=True),
        CheckpointHook(monitor="val/loss"),
    ],
)
def test_waiting_in_vain_is_said_at_the_start(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With loaders to validate on and no plan when, the metric never comes: one warning says what would bring it."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit(hook, None)
    told = [record.getMessage() for record in caplog.records if "validate_every" in record.getMessage()]
    assert len(told) == 1
    assert f"{hook.monitor!r} is measured by validations" in told[0]
    assert "call trainer.validate()" in told[0]


@pytest.mark.parametrize(
    ("hook", "validate_every"),
    [(EarlyStopping("val/loss"), "1 epochs"), (EarlyStopping("train/loss", check_on_train_epoch_end=True), None)],
)
def test_what_can_come_is_waited_for_in_silence(
    hook: Any, validate_every: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Validations are planned, or training itself measures the metric."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit(hook, validate_every)
    assert not [record for record in caplog.records if "validate_every" in record.getMessage()]


def test_the_loss_at_an_epoch_s_end_is_that_of_the_step(tmp_path: Path) -> None:
    """Of all its micro-batches, as the record has it, and not of the last one."""
    model = nn.Linear(3, 1)
    data = [(torch.full((2, 3), float(number)), torch.zeros(2, 1)) for number in range(4)]
    trainer = GenericTrainer(
        None, model, torch.optim.SGD(model.parameters(), 0.01), device="cpu", loss_fn=nn.functional.mse_loss,
        console=False, accumulate=2, output_dir=str(tmp_path),
    )  # fmt: skip
    hook = EarlyStopping("train/loss", check_on_train_epoch_end=True, verbose=False)
    trainer.add_hook(hook)
    trainer.fit(data, max_epochs=1)
    assert trainer.run_dir is not None
    recorded = [record["train/loss"] for record in read_metrics(trainer.run_dir) if "train/loss" in record]
    assert hook.best == pytest.approx(recorded[-1], rel=1e-6)
