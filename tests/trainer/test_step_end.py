"""At the end of a step hooks get the rate it used and the batches in it, and no memory is held for nothing."""

from typing import Any
from weakref import ref

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


def test_gradients_kept_for_a_hook_that_was_removed_are_released() -> None:
    """It was removed within the step, and no other hook listens to the step's end."""
    trainer = make_trainer(6, max_steps=6)
    kept: list[ref[torch.Tensor]] = []
    held: list[int] = []
    reader = trainer.on("step_end", name="reader")
    reader(lambda grad_norm: None)

    @trainer.on("after_optimizer_step", at=6, name="remove")
    def remove(trainer: Trainer) -> None:
        trainer.hooks.remove("reader")
        kept.extend(ref(parameter.grad) for parameter in trainer.model.parameters() if parameter.grad is not None)

    trainer.on("train_batch_end", at=6, name="before")(lambda: held.append(sum(one() is not None for one in kept)))
    trainer.on("epoch_end", name="after")(lambda: held.append(sum(one() is not None for one in kept)))
    trainer.train()
    assert held == [2, 0]


class CountedParameter(torch.nn.Parameter):
    """A parameter that counts how often its gradient is read."""

    reads = 0

    @property
    def grad(self) -> torch.Tensor | None:
        CountedParameter.reads += 1
        return super().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def gradient_reads(function: Any = None) -> int:
    """Train a few steps, with the function as a hook of on_step_end, and count the reads of gradients."""
    trainer = make_trainer(5)
    for name in ("weight", "bias"):
        setattr(trainer.model, name, CountedParameter(getattr(trainer.model, name).detach()))
    trainer.optimizers[0].param_groups[0]["params"][:] = trainer.model.parameters()
    trainer.find_parameters()
    if function is not None:
        trainer.on("step_end", name="hook")(function)
    CountedParameter.reads = 0
    trainer.train()
    return CountedParameter.reads


def test_naming_ctx_costs_no_walk_over_the_gradients() -> None:
    """Collecting 600 gradients takes 40 µs a step, so only a hook that reads the norm may cause it."""
    norms: list[float] = []
    plain = gradient_reads()
    assert gradient_reads(lambda ctx: None) == plain
    assert gradient_reads(lambda ctx: ctx.step) == plain
    assert gradient_reads(lambda ctx: norms.append(ctx.grad_norm)) == plain
    assert plain > 0
    assert len(norms) == 5
    assert all(norm > 0 for norm in norms)


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
