"""Running a batch again names the module, tensor or operation that went wrong first."""

from typing import Any

import builders
import pytest
import torch
from builders import make_model
from torch import nn

import hookline as hl


class Log(nn.Module):
    """Minus infinity everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * 0)


class Root(nn.Module):
    """Finite where its input is zero, but for the slope."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * 0)


class Nested(nn.Module):
    """A module inside a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def make_trainer(middle: nn.Module, batch: Any = None, **options: Any) -> hl.SimpleTrainer:
    """Make a trainer for one batch, with a module in the middle of the model."""
    data = [batch or (torch.ones(2, 3), torch.ones(2, 1))]
    return builders.make_trainer(model=make_model(3, 3, 1, between=lambda: middle), data=data, **options)


def diagnosis_of(trainer: hl.Trainer, **options: Any) -> Any:
    """Train on the batch, and return what the hook found when it ran it again."""
    trainer.add_hook("nan_forensics", on_error="raise", **options)
    trainer.train()
    return trainer.hooks.get("nan_forensics").autopsy


def test_the_first_bad_output_is_named() -> None:
    """Of all modules that gave NaN, the one where it began; the Inf that it came from is named beside it."""
    trainer = make_trainer(nn.Sequential(Nested(Log()), nn.Softmax(-1)))
    diagnosis = diagnosis_of(trainer)
    assert diagnosis.module == "1.1"
    assert diagnosis.first_inf == "1.0.inner"
    assert diagnosis.outputs == ("float32 (2, 3) on cpu",)
    assert diagnosis.statistics["nan"] > 0
    assert (diagnosis.batch, diagnosis.parameters, diagnosis.gradients) == ((), (), ())
    assert str(diagnosis) == (
        "the first NaN came out of module '1.1' (float32 (2, 3) on cpu); the first Inf came out of module '1.0.inner'"
    )


def test_a_bad_batch_is_named() -> None:
    """The tensors of the batch that were bad already; integers never are."""
    batch = (torch.tensor([[1.0, float("nan"), 1.0]]), torch.ones(1, 1), torch.ones(1, dtype=torch.int64))
    diagnosis = diagnosis_of(make_trainer(nn.ReLU(), batch=batch))
    assert diagnosis.batch == ("batch[0]",)
    assert diagnosis.module == "0"
    assert str(diagnosis).startswith("the batch itself is not finite in batch[0]; ")


class SpoilsItsWeight(torch.autograd.Function):
    """A product whose backward gives NaN for its weight and the right gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad * float("nan")


class Spoils(nn.Module):
    """A layer that computes this product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SpoilsItsWeight.apply(x, self.weight)


def test_a_module_with_bad_gradients_of_its_own_parameters_is_named() -> None:
    """The gradients of its inputs are finite, those of its weight are not."""
    diagnosis = diagnosis_of(make_trainer(Nested(Spoils())))
    assert (diagnosis.gradients, diagnosis.backward_module) == (("1.inner.weight",), "1.inner")


def test_bad_parameters_are_named() -> None:
    """A weight that became NaN in an earlier step."""
    trainer = make_trainer(nn.ReLU())
    with torch.no_grad():
        trainer.model[2].bias.fill_(float("inf"))
    diagnosis = diagnosis_of(trainer)
    assert (diagnosis.parameters, diagnosis.module, diagnosis.first_inf) == (("2.bias",), "2", "2")
    assert "parameters were already not finite: 2.bias" in str(diagnosis)


def test_a_loss_that_is_bad_although_outputs_are_finite() -> None:
    """When every output is finite, the loss function is to blame."""
    diagnosis = diagnosis_of(make_trainer(nn.ReLU(), loss_fn=lambda out, target: (out - target).sum() / 0 * 0))
    assert diagnosis.module is None
    assert str(diagnosis) == "every module's output is finite, but the loss computed from them is nan"


def test_a_backward_that_goes_bad_is_named() -> None:
    """With a finite loss: the module whose backward made NaN, innermost first, and torch's name for the operation."""
    diagnosis = diagnosis_of(make_trainer(Nested(Root())))
    assert diagnosis.backward_module == "1.inner"
    assert diagnosis.gradients == ("0.weight", "0.bias")
    assert diagnosis.operation == "MulBackward0"
    assert "the first bad gradient came from the backward pass of module '1.inner';" in str(diagnosis)
    assert str(diagnosis).endswith("the first NaN came from MulBackward0")


class BadOnce(nn.Module):
    """Gives NaN the first time."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / 0 * 0 if self.calls == 1 else x


def test_a_healthy_batch_is_reported_as_such() -> None:
    """What cannot be reproduced is reported as such."""
    diagnosis = diagnosis_of(make_trainer(BadOnce()))
    assert diagnosis.finite
    assert "the problem cannot be reproduced" in str(diagnosis)


@pytest.mark.parametrize("middle", [Nested(Root()), BadOnce()], ids=["bad", "healthy"])
def test_the_diagnosis_changes_nothing(middle: nn.Module) -> None:
    """Gradients, random streams, buffers, modes and the model's hooks are as they were."""
    trainer = make_trainer(nn.Sequential(nn.BatchNorm1d(3), middle, nn.Dropout(0.5)))
    states: list[list[Any]] = []

    def state(model: nn.Module) -> None:
        tensors = [*model.state_dict().values(), *(param.grad for param in model.parameters()), torch.get_rng_state()]
        torch_hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        states.append([[tensor.clone() for tensor in tensors], torch_hooks, modes])

    trainer.on("train_batch_start", name="modes")(lambda model: model[1].eval() and model[1][0].train())
    trainer.on("gradients_ready", name="before")(state)
    trainer.on("before_optimizer_step", name="after")(state)
    assert diagnosis_of(trainer, stop_run=False) is not None
    before, after = states
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0, equal_nan=True)
    assert before[1:] == after[1:]
