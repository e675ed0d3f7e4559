"""The run as a dictionary: one object, always up to date, readable also after the device has failed."""

import math
from typing import Any

import pytest
import torch

from hookline import SimpleTrainer


def make_trainer() -> SimpleTrainer:
    """Two steps of a tiny model."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]
    loss_fn, optimizer = torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
    return SimpleTrainer(model, data, optimizer, "cpu", loss_fn=loss_fn, record=False, console=False)


def test_one_dictionary_that_hooks_may_write_to() -> None:
    """A hook's own keys stay; ours are those of the moment, and what train() returns is the same object."""
    trainer = make_trainer()
    seen: list[Any] = []

    @trainer.on("train_batch_end", name="writer")
    def write(state: dict[str, Any], loss: float) -> None:
        state["mine"] = state.get("mine", 0) + 1
        seen.append((state["current_batch_idx"], state["latest_loss"] == loss, state["status"]))

    final = trainer.train()
    assert seen == [(0, True, "training"), (1, True, "training")]
    assert final is trainer.refresh_state() and final["mine"] == 2
    assert (final["status"], final["model_params"], final["model"]) == ("completed", 4, trainer.model)


def test_losses_that_cannot_be_read_any_more() -> None:
    """After a device error closing events get nan in their place; while training goes on it is an error."""
    trainer = make_trainer()

    def broken() -> float:
        raise RuntimeError("the device is gone")

    trainer.loop.stats.mean_loss = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        trainer.refresh_state()
    trainer.run_status.fail()
    assert math.isnan(trainer.refresh_state()["avg_loss"])
