"""Hooks that wait for a metric say so when it cannot come."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from hookline import CheckpointHook, EarlyStopping, GenericTrainer

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
