"""Devices and precisions: where models and batches go, autocast, loss scaling, and the user's optimizer step."""

from collections import namedtuple
from typing import Any

import builders
import pytest
import torch

from hookline import SimpleTrainer
from hookline.errors import TrainingError


def make_trainer(device: Any = "cpu", **options: Any) -> SimpleTrainer:
    """Make a trainer for one weight of one; a step lowers it by one. Half of the first loss scale fits into fp16."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    options = {"data": [(torch.ones(1, 1), torch.zeros(1, 1))], "lr": 2.0, **options}
    loss_fn = lambda output, target: output.float().sum() / 2  # noqa: E731
    return builders.make_trainer(model=model, device=device, loss_fn=loss_fn, **options)


def test_devices() -> None:
    """A name, a device, or nothing, which means the best there is."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert make_trainer("cpu").device == make_trainer(torch.device("cpu")).device == torch.device("cpu")
    assert make_trainer(None).device.type == best
    with pytest.raises(TrainingError, match=r"'cuda:99' cannot be used here: .*; use another device, such as 'cpu'$"):
        make_trainer("cuda:99")
    with pytest.raises(TrainingError, match="'gpu' is not a device"):
        make_trainer("gpu")


class Receives(torch.nn.Module):
    """Returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, **batch: Any) -> dict[str, Any]:
        return batch


def test_models_and_batches_are_moved_as_a_whole() -> None:
    """Tensors in any nest go to the device, other things stay, and types are kept."""
    Pair = namedtuple("Pair", "x y")
    model = Receives()
    trainer = SimpleTrainer(model, None, torch.optim.SGD(model.parameters(), lr=1.0), "meta", console=False)
    tensor = torch.ones(2)
    batch: Any = {"a": tensor, "b": [tensor, "text"], "c": (tensor, 3), "d": Pair(tensor, None)}
    (moved,) = trainer.predict([batch])
    assert trainer.model is model and trainer.engine.prepare(torch.nn.Linear(2, 2)).weight.is_meta
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["c"][0].is_meta and moved["d"].x.is_meta
    assert (moved["b"][1], moved["c"][1], moved["d"].y) == ("text", 3, None)
    assert isinstance(moved["d"], Pair) and isinstance(moved["b"], list)
    assert not tensor.is_meta


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_forward_pass_runs_in_the_precision_and_the_step_uses_the_true_gradient(precision: str) -> None:
    """Autocast is on inside the forward pass only; a scaled gradient is unscaled before hooks and optimizers see it."""
    trainer, seen = make_trainer(precision=precision), list[Any]()
    trainer.model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.on("after_backward")(lambda model: seen.append(model.weight.grad.item()))
    trainer.on("gradients_ready", name="unscaled")(lambda grads: seen.append(grads["weight"].item()))
    trainer.train()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen == [dtype, 32768.0 if precision == "fp16" else 0.5, 0.5]
    assert trainer.uses_grad_scaler == (precision == "fp16")
    assert trainer.model.weight.item() == 0.0
    assert trainer.model(torch.ones(1, 1)).dtype is torch.float32


def test_an_overflow_is_skipped_and_lowers_the_scale() -> None:
    """The next step is scaled by half as much, and is made."""
    data = [(torch.full((1, 1), value), torch.zeros(1, 1)) for value in (1.0, torch.inf, 1.0)]
    trainer, scaled = make_trainer(data=data, precision="fp16"), list[float]()
    trainer.on("after_backward")(lambda model: scaled.append(model.weight.grad.item()))
    trainer.train()
    assert scaled == [32768.0, torch.inf, 16384.0]
    assert trainer.skipped_steps == 1 and trainer.model.weight.item() == -1.0


def test_training_can_continue_after_a_failure_between_unscaling_and_the_step() -> None:
    """The scaler would refuse to unscale the gradients of the same optimizer twice."""
    trainer = make_trainer(data=[(torch.ones(1, 1), torch.zeros(1, 1))] * 3, precision="fp16", max_epochs=2)
    trainer.on("before_optimizer_step", name="fails", on_error="raise", at=2)(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.remove_hook("fails")
    trainer.train()
    assert trainer.skipped_steps == 0 and trainer.step == 5


@pytest.mark.req("004-32")
def test_a_custom_step() -> None:
    """A custom optimizer step takes the place of the optimizer's; with a GradScaler, which owns it, that is refused."""
    stepped: list[Any] = []
    trainer = make_trainer(optimizer_step=stepped.append)
    trainer.train()
    assert stepped == trainer.optimizers and trainer.model.weight.item() == 1.0
    with pytest.raises(TrainingError, match="optimizer_step cannot be combined with precision='fp16'"):
        make_trainer(optimizer_step=stepped.append, precision="fp16").train()
