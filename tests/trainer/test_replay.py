"""A batch that is run again gives the loss it gave, and the run does not notice."""

from typing import Any

import builders
import torch
from builders import make_batches
from torch import nn

from hookline import SimpleTrainer, Trainer


def make_trainer(*hooks: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer whose model draws for dropout and keeps running means for batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return builders.make_trainer(*hooks, model=model, **options)


class Again:
    """Runs every batch again before the optimizer changes the weights."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Trainer) -> None:
        self.state = trainer.random_state()

    def on_gradients_ready(self, trainer: Trainer, batch: Any, loss: float) -> None:
        with trainer.rerunning(self.state) as forward:
            again = forward(batch)
        assert again.requires_grad
        self.losses.append((loss, again.item()))


def test_the_loss_is_the_same_bit_for_bit() -> None:
    """At every step of a run with dropout, in any precision."""
    for precision in ("fp32", "bf16"):
        make_trainer(hook := Again(), precision=precision).train()
        assert len(hook.losses) == 4
        assert all(first == second for first, second in hook.losses)


def test_the_run_continues_as_if_nothing_had_happened() -> None:
    """Weights, running means and random streams are those of a run without it."""
    results = []
    for hooks in ([], [Again()]):
        trainer = make_trainer(*hooks)
        torch.manual_seed(5)
        trainer.train()
        results.append([*trainer.model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_hooks_of_the_run_do_not_fire() -> None:
    """Forward hooks count each batch once."""
    trainer = make_trainer(Again())
    received: list[str] = []
    trainer.hooks.register(lambda name: received.append(name), "ear", event="on_forward")
    trainer.train()
    assert received.count("0") == 4


def test_a_step_fn_is_run_again_too() -> None:
    """With the loss that it returned among metrics."""
    options = {"loss_fn": None, "step_fn": lambda model, batch: {"loss": model(batch[0]).mean()}}
    make_trainer(hook := Again(), **options).train()
    assert [first for first, _ in hook.losses] == [second for _, second in hook.losses]


def test_a_distributed_wrapper_is_not_called() -> None:
    """Its forward would wait for the other ranks, which do not run the batch again."""

    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, model: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module, self.calls = model, 0

        def forward(self, *inputs: Any) -> Any:
            self.calls += 1
            return self.module(*inputs)

    model = Wrapper(nn.Linear(3, 1))
    builders.train(hook := Again(), model=model, data=make_batches(1))
    assert model.calls == 1 and hook.losses[0][0] == hook.losses[0][1]
