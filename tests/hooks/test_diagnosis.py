"""Running a batch again names the module, tensor or operation that went wrong first."""

from typing import Any

import pytest
import torch
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


def make_trainer(middle: nn.Module, loss_fn: Any = nn.functional.mse_loss, batch: Any = None) -> hl.Trainer:
    """A layer, something in the middle, a layer; one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), middle, nn.Linear(3, 1))
    batches = [batch or (torch.ones(2, 3), torch.ones(2, 1))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hl.get_trainer("simple", model, batches, optimizer, "cpu", loss_fn=loss_fn, record=False, console=False)


def diagnosis_of(trainer: hl.Trainer, **options: Any) -> Any:
    """Train on the batch, and return what the hook found when it ran it again."""
    trainer.add_hook("nan_forensics", on_error="raise", **options)
    trainer.train()
    return trainer.hooks.get("nan_forensics").autopsy


def test_the_first_bad_output_is_named() -> None:
    """Of all modules that gave NaN, the one where it began; the Inf that it came from is named beside it."""
    trainer = make_trainer(nn.Sequential(Nested(Log()), nn.Softmax(-1)))
    found = diagnosis_of(trainer)
    assert found.module == "1.1"
    assert found.first_inf == "1.0.inner"
    assert found.outputs == ("float32 (2, 3) on cpu",)
    assert found.statistics["nan"] > 0
    assert (found.batch, found.parameters, found.gradients) == ((), (), ())
    assert str(found) == (
        "the first bad output is that of module '1.1' (float32 (2, 3) on cpu);"
        " the first Inf came out of module '1.0.inner'"
    )


def test_a_bad_batch_is_named() -> None:
    """The tensors of the batch that were bad already; integers never are."""
    batch = (torch.tensor([[1.0, float("nan"), 1.0]]), torch.ones(1, 1), torch.ones(1, dtype=torch.int64))
    found = diagnosis_of(make_trainer(nn.ReLU(), batch=batch))
    assert found.batch == ("batch[0]",)
    assert found.module == "0"
    assert str(found).startswith("the batch itself is not finite in batch[0]; ")


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
        return SpoilsItsWeight.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def test_a_module_with_bad_gradients_of_its_own_parameters_is_named() -> None:
    """The gradients of its inputs are finite, those of its weight are not."""
    found = diagnosis_of(make_trainer(Nested(Spoils())))
    assert (found.gradients, found.backward_module) == (("1.inner.weight",), "1.inner")


def test_bad_parameters_are_named() -> None:
    """A weight that became NaN in an earlier step."""
    trainer = make_trainer(nn.ReLU())
    with torch.no_grad():
        trainer.model[2].bias.fill_(float("inf"))  # type: ignore[index, union-attr, operator]
    found = diagnosis_of(trainer)
    assert (found.parameters, found.module, found.first_inf) == (("2.bias",), "2", "2")
    assert "parameters were not finite already: 2.bias" in str(found)


def test_a_loss_that_is_bad_although_outputs_are_finite() -> None:
    """When every output is finite, the loss function is to blame."""
    found = diagnosis_of(make_trainer(nn.ReLU(), lambda out, target: (out - target).sum() / 0 * 0))
    assert found.module is None
    assert str(found) == "every module's output is finite, the loss made of them is nan"


def test_a_backward_that_goes_bad_is_named() -> None:
    """With a finite loss: the module whose backward made NaN, innermost first, and torch's name for the operation."""
    found = diagnosis_of(make_trainer(Nested(Root())))
    assert found.backward_module == "1.inner"
    assert found.gradients == ("0.weight", "0.bias")
    assert found.operation == "MulBackward0"
    assert "the first bad one was given by the backward of module '1.inner';" in str(found)
    assert str(found).endswith("the first NaN by MulBackward0")


class BadOnce(nn.Module):
    """Gives NaN the first time."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / 0 * 0 if self.calls == 1 else x


def test_a_healthy_batch_is_reported_as_such() -> None:
    """What cannot be reproduced is reported as such."""
    found = diagnosis_of(make_trainer(BadOnce()))
    assert found.finite
    assert "it cannot be reproduced" in str(found)


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
