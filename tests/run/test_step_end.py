"""At the end of a step hooks get the rate it used and the batches in it, and no memory is held for nothing."""

import pytest
import torch
from builders import make_batches, make_model, make_trainer

from hookline import Trainer


@pytest.mark.parametrize(("every", "steps"), [("3 batches", [1, 2, 3]), ("6 batches", [2, 3]), ("9 batches", [3])])
def test_a_batch_in_the_middle_of_a_window_is_received_at_its_step(every: str, steps: list[int]) -> None:
    """Whether its own events are received or the step's; each step once, all its events."""
    trainer = make_trainer(data=make_batches(12), accumulate=4)
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
    trainer = make_trainer(data=make_batches(12), accumulate=2, loader_schedule="round_robin")
    data = trainer.train_loaders["train"]
    received: list[int] = []
    trainer.on("step_end", every="2 batches of a", name="h")(lambda step: received.append(step))
    trainer.fit({"a": data, "b": data})
    assert received == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("event", "accumulate"), [("after_optimizer_step", 1), ("after_optimizer_step", 2), ("train_batch_end", 1)]
)
def test_the_rate_of_a_step_is_the_one_it_was_made_with(event: str, accumulate: int) -> None:
    """A hook that moves it after the optimizer's step moves the next one's."""
    trainer = make_trainer(data=make_batches(4 * accumulate), accumulate=accumulate)
    told: list[float] = []
    used: list[float] = []

    @trainer.on(event, name="halve")
    def halve(trainer: Trainer) -> None:
        trainer.lr /= 2

    trainer.on("before_optimizer_step", name="used")(lambda lr: used.append(lr))
    trainer.on("step_end", name="told")(lambda lr, ctx: told.append(lr if lr == ctx.lr else -1.0))
    trainer.train()
    assert told == used == [0.1, 0.05, 0.025, 0.0125]


def test_the_norm_is_right_if_a_hook_clears_the_gradients_early() -> None:
    trainer, norms = make_trainer(data=make_batches(3)), []
    trainer.on("step_end", name="norm")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    expected, norms[:] = list(norms), []
    trainer = make_trainer(data=make_batches(3))
    trainer.on("after_optimizer_step", name="clear")(lambda optimizer: optimizer.zero_grad())
    trainer.on("step_end", name="norm")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    assert norms == expected
    assert all(norm > 0 for norm in norms)


def test_the_norm_covers_parameters_that_an_optimizer_got_during_the_run() -> None:
    """Also if no update hook looks for them."""
    model = make_model(3, 4, 1, between=None)
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model[1].parameters(), 0.0))
    norms: list[float] = []
    expected: list[float] = []

    @trainer.on("train_batch_start", name="unfreeze", at=2)
    def unfreeze(trainer: Trainer) -> None:
        trainer.optimizers[0].add_param_group({"params": list(model[0].parameters())})

    @trainer.on("gradients_ready", name="all", start=2)
    def measure(model: torch.nn.Module) -> None:
        gradients = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        expected.append(float(torch.cat(gradients).norm()))

    trainer.on("step_end", name="reads", start=2)(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    assert norms == pytest.approx(expected) and list(trainer.params) == [name for name, _ in model.named_parameters()]


def test_the_rate_may_change_until_the_step_uses_it() -> None:
    """A hook that sets it in the middle of a window sets that of the step."""
    trainer, rates = make_trainer(data=make_batches(4), accumulate=4), []
    trainer.on("train_batch_end", name="sets", at="1 batches")(lambda trainer: setattr(trainer, "lr", 0.5))
    trainer.on("step_end", name="reads")(lambda lr: rates.append(lr))
    trainer.train()
    assert rates == [0.5]


def test_a_step_by_hand_after_a_failed_one_is_another_step() -> None:
    """What was asked for in the failed step does not count for it."""
    trainer, ended, batch = make_trainer(), [], make_batches(1)[0]

    @trainer.on("after_backward", name="fails", at=1, on_error="raise")
    def fail(trainer: Trainer) -> None:
        trainer.skip_step("not this one")
        raise ValueError("boom")

    trainer.on("step_end", name="ends")(lambda step: ended.append(step))
    with pytest.raises(ValueError, match="boom"):
        trainer.training_step(batch)
    trainer.training_step(batch)
    assert ended == [2] and trainer.skipped_steps == 0


def test_steps_by_hand_belong_to_no_loader() -> None:
    """With several loaders no loss of one is recorded for them."""
    trainer = make_trainer()
    loader = trainer.train_loaders["train"]
    trainer.fit({"a": loader, "b": loader}, max_steps=2)
    trainer.training_step(make_batches(1)[0])
    trainer.record.flush(wait=True)
    names = {name for row in trainer.record.metrics for name in row}
    assert not [name for name in names if name.endswith("/loss") and name.count("/") > 1]


def test_a_module_that_was_added_before_the_first_step_by_hand_is_cleared_too() -> None:
    """No optimizer owns its parameters."""
    trainer = make_trainer(model=torch.nn.Linear(3, 1))
    trainer.model.extra = torch.nn.Linear(1, 1)
    trainer.step_fn = lambda model, batch: model.extra(model(batch[0])).mean()
    trainer.training_step(make_batches(1)[0])
    assert trainer.model.extra.weight.grad is None
