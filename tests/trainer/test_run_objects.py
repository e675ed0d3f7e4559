"""A run makes one record, its state has three owners, and it ends in order even at interpreter exit."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer

from hookline import TrainingHook, UpdateHook


def test_a_run_makes_one_record() -> None:
    """It is not made by the constructor, and a second run gets its own."""
    trainer = make_trainer(record=True)
    assert (trainer.run_id, trainer.run_dir, trainer.checkpoint_dir) == (None, None, None)
    assert "record" not in vars(trainer)  # making one draws an id and reads the environment
    records = set()
    trainer.on("train_start", name="start")(lambda trainer: records.add(trainer.record))
    trainer.on("step_end", name="step")(lambda trainer: records.add(trainer.record))
    trainer.train()
    assert len(records) == len(list(Path("runs").iterdir())) == 1
    trainer.fit(max_epochs=2)
    assert len(records) == len(list(Path("runs").iterdir())) == 2


def test_the_state_of_a_run_is_read_from_the_trainer_and_not_written() -> None:
    """Counters and status are properties; a hook's own attributes are welcome."""
    trainer = make_trainer()
    trainer.mine = 1
    for name in ("step", "epoch", "status", "running", "stop_reason", "stopped_by", "skipped_steps", "hook_failures"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, None)


def test_a_stepper_that_is_unfinished_at_exit_is_closed_quietly(tmp_path: Path) -> None:
    """The record says that the run was interrupted, and nothing is printed to stderr."""
    code = f"""
import torch
from hookline import SimpleTrainer
model = torch.nn.Linear(3, 1)
data = [(torch.randn(4, 3), torch.randn(4, 1))] * 9
options = dict(loss_fn=torch.nn.functional.mse_loss, console=False, output_dir={str(tmp_path)!r})
trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)
steps = trainer.stepper()
next(steps), next(steps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (run,) = tmp_path.iterdir()
    assert done.stderr == ""
    described = json.loads((run / "run.json").read_text())
    assert (described["outcome"], described["counters"]["step"]) == ("interrupted", 2)


class Clears(TrainingHook):
    """Removes the gradients after the optimizer has used them."""

    def on_after_optimizer_step(self, model: torch.nn.Module) -> None:
        model.zero_grad(set_to_none=True)


class Plain(torch.optim.SGD):
    """An optimizer that is not torch's own: it may do anything to gradients."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


@pytest.mark.parametrize("how", ["alone", "a hook clears", "the optimizer clears", "a function clears", "accumulate"])
def test_the_norm_is_known_at_the_end_of_a_step_whatever_clears_the_gradients(how: str) -> None:
    """The gradients are collected when they are cleared, or before anything else can clear them."""
    options: dict[str, Any] = {"accumulate": 2} if how == "accumulate" else {}
    if how == "a function clears":
        options["optimizer_step"] = lambda optimizer: (optimizer.step(), optimizer.zero_grad())
    if how == "the optimizer clears":
        options["optimizer"] = partial(Plain, lr=0.1)
    trainer = make_trainer(*([Clears()] if how == "a hook clears" else []), **options)
    expected, norms = list[float](), list[float]()

    @trainer.on("gradients_ready")
    def compute(grads: Any) -> None:
        expected.append(float(torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))))

    @trainer.on("step_end")
    def read(ctx: Any, model: torch.nn.Module) -> None:
        assert all(param.grad is None for param in model.parameters())
        norms.append(ctx.grad_norm)

    trainer.train()
    assert norms == pytest.approx(expected) and all(norm > 0 for norm in norms)


def test_parameters_that_are_added_later_are_cleared_too() -> None:
    """Collecting gradients while clearing them covers the groups that an optimizer got in the meantime."""
    trainer = make_trainer()
    extra = torch.nn.Parameter(torch.ones(1))
    trainer.step_fn = lambda model, batch: model(batch[0]).pow(2).mean() + extra.sum()
    trainer.hooks.disable("identity")

    @trainer.on("train_batch_start", at=2)
    def add(optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [extra]})

    grads: list[Any] = []
    trainer.on("step_end")(lambda ctx, step: grads.append((step, extra.grad is None)))
    trainer.train()
    assert grads[1:] == [(2, True), (3, True), (4, True)]


def test_parameters_that_no_optimizer_owns_any_more_are_cleared_too() -> None:
    """A hook may freeze a layer by removing its group."""
    trainer = make_trainer(max_grad_norm=1.0)
    first, _, second = trainer.model
    trainer.optimizers[0].param_groups.clear()
    for layer in (first, second):
        trainer.optimizers[0].add_param_group({"params": list(layer.parameters())})

    @trainer.on("train_batch_start", at=2)
    def remove(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups.pop()

    cleared: list[bool] = []
    trainer.on("step_end")(lambda: cleared.append(second.weight.grad is None))
    trainer.train()
    assert cleared == [True] * 4


class Watches(UpdateHook):
    """Sees the gradients of every step that is not skipped before the chain."""

    def __init__(self) -> None:
        self.calls = 0

    def on_update(self, grads: Any) -> Any:
        self.calls += 1
        return grads


def test_an_overflow_is_a_value_that_hooks_can_read() -> None:
    """It is true for the step that the GradScaler skips, and for no step that something else skips."""
    trainer = make_trainer(watches := Watches(), data=make_batches(seed=1), precision="fp16")
    skipped: list[tuple[bool, bool]] = []
    trainer.train_loaders["train"][1][0].fill_(torch.inf)
    trainer.on("gradients_ready", name="guard", at=4)(lambda trainer: trainer.skip_step("a guard"))

    @trainer.on("step_skipped")
    def note(trainer: Any, reason: str) -> None:
        skipped.append((trainer.gradients_overflowed, reason == "non-finite gradients under GradScaler"))

    trainer.train()
    assert (True, True) in skipped and skipped[-1] == (False, False)
    assert all(overflowed == by_scaler for overflowed, by_scaler in skipped)
    assert watches.calls == 4 - len(skipped) and not trainer.gradients_overflowed
