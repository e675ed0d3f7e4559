"""At the end of a step hooks get the rate it used and the batches in it, and no memory is held for nothing."""

from typing import Any

import pytest
import torch

from hookline import Trainer, get_trainer


def make_trainer(batches: int = 12, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    data = [(torch.ones(2, 2), torch.ones(2, 1)) for _ in range(batches)]
    options = {"loss_fn": torch.nn.functional.mse_loss, "console": False, "record": False, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


@pytest.mark.parametrize(("every", "steps"), [("3 batches", [1, 2, 3]), ("6 batches", [2, 3]), ("9 batches", [3])])
def test_a_batch_in_the_middle_of_a_window_is_received_at_its_step(every: str, steps: list[int]) -> None:
    """Whether its own events are received or the step's; each step once, all its events."""
    trainer = make_trainer(accumulate=4)
    ready: list[int] = []
    ended: list[int] = []
    batches: list[int] = []
    trainer.on("gradients_ready", every=every, name="ready")(lambda step: ready.append(step))
    trainer.on("step_end", every=every, name="ended")(lambda step: ended.append(step))
    trainer.on("train_batch_end", every=every, name="batch")(lambda batch_idx: batches.append(batch_idx + 1))
    trainer.train()
    assert ready == ended == steps
    assert batches == [number for number in range(1, 13) if number % int(every[0]) == 0]


def test_batches_of_one_loader_are_received_at_their_step() -> None:
    """Two loaders take turns, two batches a step: the second batch of the first is never a step's last."""
    trainer = make_trainer(accumulate=2, loader_schedule="round_robin")
    data = trainer.train_loaders["train"]
    received: list[int] = []
    trainer.on("step_end", every="2 batches of a", name="h")(lambda step: received.append(step))
    trainer.fit({"a": data, "b": data})
    assert received == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_of_a_step_is_the_one_it_was_made_with(accumulate: int) -> None:
    """A hook that moves it after the optimizer's step moves the next one's."""
    trainer = make_trainer(4 * accumulate, accumulate=accumulate)
    told: list[float] = []
    used: list[float] = []

    @trainer.on("after_optimizer_step", name="halve")
    def halve(trainer: Trainer) -> None:
        trainer.lr /= 2

    trainer.on("before_optimizer_step", name="used")(lambda lr: used.append(lr))
    trainer.on("step_end", name="told")(lambda lr, ctx: told.append(lr if lr == ctx.lr else -1.0))
    trainer.train()
    assert told == used == [0.1, 0.05, 0.025, 0.0125]


def test_the_norm_is_right_if_a_hook_clears_the_gradients_early() -> None:
    trainer, norms = make_trainer(3), []
    trainer.on("step_end", name="norm")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    expected, norms[:] = list(norms), []
    trainer = make_trainer(3)
    trainer.on("after_optimizer_step", name="clear")(lambda optimizer: optimizer.zero_grad())
    trainer.on("step_end", name="norm")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    assert norms == expected
    assert all(norm > 0 for norm in norms)
