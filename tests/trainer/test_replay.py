"""A batch that is run again gives the loss it gave, and the run does not notice."""

from typing import Any

import torch
from torch import nn

from hookline import Trainer, get_trainer


def make_trainer(**options: Any) -> Trainer:
    """Dropout draws, batch norm keeps running means."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
    options = {"loss_fn": nn.functional.mse_loss, "record": False, "console": False, **options}
    return get_trainer("simple", model, batches, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


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
        hook = Again()
        make_trainer(hooks=[hook], precision=precision).train()
        assert len(hook.losses) == 4
        assert all(first == second for first, second in hook.losses)


def test_the_run_continues_as_if_nothing_had_happened() -> None:
    """Weights, running means and random streams are those of a run without it."""
    results = []
    for hooks in (None, [Again()]):
        trainer = make_trainer(hooks=hooks)
        torch.manual_seed(5)
        trainer.train()
        results.append([*trainer.model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_hooks_of_the_run_do_not_fire() -> None:
    """Forward hooks count each batch once."""
    trainer = make_trainer(hooks=[Again()])
    received: list[str] = []
    trainer.hooks.register(lambda name: received.append(name), "ear", event="on_forward")
    trainer.train()
    assert received.count("0") == 4


def test_a_step_fn_is_run_again_too() -> None:
    """With the loss that it returned among metrics."""
    hook = Again()
    trainer = make_trainer(hooks=[hook], loss_fn=None, step_fn=lambda model, batch: {"loss": model(batch[0]).mean()})
    trainer.train()
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

    model, hook = Wrapper(nn.Linear(3, 1)), Again()
    options = {"loss_fn": nn.functional.mse_loss, "record": False, "console": False, "hooks": [hook]}
    batches = [(torch.randn(4, 3), torch.randn(4, 1))]
    get_trainer("simple", model, batches, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options).train()
    assert model.calls == 1 and hook.losses[0][0] == hook.losses[0][1]
