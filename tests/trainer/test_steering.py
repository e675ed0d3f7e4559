"""Hooks may steer a run, and the record says who wrote what."""

import logging
from typing import Any

import pytest
import torch

from hookline import SimpleTrainer, TrainingHook


class Steers(TrainingHook):
    """Does something at one step or at all."""

    def __init__(self, meddle: Any, at: int | None = None) -> None:
        self.meddle, self.at = meddle, at

    def on_train_batch_end(self, trainer: Any, batch: Any, step: int) -> None:
        if self.at in (None, step):
            self.meddle(trainer, batch)


def written(hook: Any, steps: int = 40, tensor_lr: bool = False) -> list[dict[str, Any]]:
    """What the record says about writing hooks."""
    model = torch.nn.Linear(2, 1)
    lr: Any = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = [(torch.ones(1, 2), torch.ones(1, 1)) for _ in range(40)]
    trainer: Any = SimpleTrainer(
        model, batches, optimizer, "cpu",
        loss_fn=torch.nn.MSELoss(), max_steps=steps, record=False, console=False,
    )  # fmt: skip
    trainer.add_hook(hook)
    trainer.train()
    return [event for event in trainer.record.events if event["kind"] in ("hook_wrote", "lr_changed")]


def halve(trainer: Any, batch: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] /= 2


def test_a_rate_written_into_a_group_is_recorded() -> None:
    """With the hook, the event, the step and both values, whenever it happens."""
    (event,) = written(Steers(halve, at=11))
    told = {key: event[key] for key in ("kind", "hook", "on", "what", "step", "old", "new")}
    assert told == {
        "kind": "hook_wrote", "hook": "steers", "on": "on_train_batch_end", "what": "learning rate",
        "step": 11, "old": [0.1], "new": [0.05],
    }  # fmt: skip


def test_one_that_writes_at_every_step_does_not_fill_the_record() -> None:
    """It is noted at the first, second, fourth, eighth … time, with the count."""
    assert [event["times"] for event in written(Steers(halve))] == [1, 2, 4, 8, 16, 32]


def test_a_rate_set_through_the_trainer_is_told_once() -> None:
    """`trainer.lr = …` says so itself."""

    def assign(trainer: Any, batch: Any) -> None:
        trainer.lr = 0.05

    assert [event["kind"] for event in written(Steers(assign, at=3))] == ["lr_changed"]


def test_rates_that_are_tensors_are_watched_without_reading_them() -> None:
    """By what was done to them."""

    def fill(trainer: Any, batch: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"].fill_(0.01)

    (event,) = written(Steers(fill, at=5), tensor_lr=True)
    assert event["what"] == "learning rate"


@pytest.mark.parametrize(
    ("what", "meddle"),
    [
        ("parameters", lambda trainer, batch: trainer.model.weight.detach().add_(1)),
        ("batch", lambda trainer, batch: batch[0].add_(1)),
    ],
)
def test_writes_to_parameters_and_batches_are_named(what: str, meddle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One write is enough, and is said aloud."""
    with caplog.at_level(logging.WARNING):
        (event,) = written(Steers(meddle, at=11))
    assert (event["what"], event["step"]) == (what, 11)
    assert sum(f"hook 'steers' wrote to the {what}" in message for message in caplog.messages) == 1


def test_events_outside_steps_are_always_watched() -> None:
    """One write at the end of an epoch is enough."""

    class AtTheEnd(TrainingHook):
        def on_epoch_end(self, model: Any) -> None:
            with torch.no_grad():
                model.weight.zero_()

    (event,) = written(AtTheEnd())
    assert (event["hook"], event["on"], event["what"]) == ("at_the_end", "on_epoch_end", "parameters")


def test_hooks_that_only_read_are_not_mentioned() -> None:
    """Having the trainer in hand is no crime."""
    assert written(Steers(lambda trainer, batch: trainer.lr + batch[0].sum())) == []
