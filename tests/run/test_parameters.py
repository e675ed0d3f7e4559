"""The chain, the norm and the rescaling of windows span what the optimizers own: no more, no less."""

from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn

from hookline import UpdateHook
from hookline.errors import TrainingError


def test_names_inside_and_outside_the_model() -> None:
    """The model's own names in its order; a parameter outside it goes by its place in the optimizer."""
    model, outside = make_model(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model[2].parameters(), outside], lr=0.1)
    trainer, names = make_trainer(model=model, optimizer=optimizer), list[list[str]]()
    trainer.step_fn = lambda model, batch: model(batch[0]).sum() * outside
    trainer.on("gradients_ready")(lambda grads: names.append(list(grads)))
    trainer.train()
    assert names == [["2.weight", "2.bias", "optimizers.0.0.2"]] * 4
    assert all(param.grad is None for param in model.parameters())  # those of no optimizer are cleared, too


def test_an_optimizer_of_another_model_is_rejected() -> None:
    """It would train nothing."""
    with pytest.raises(TrainingError, match="no optimizer has a parameter of the model"):
        make_trainer(optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parameters_without_an_optimizer_do_not_count_in_the_norm(precision: str) -> None:
    """Nor does a loss scale that nothing removes: only the head's gradients are in the norm and are clipped."""
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)
    trainer = make_trainer(
        model=model, optimizer=optimizer, data=make_batches(1), precision=precision, max_grad_norm=100.0
    )
    norms: list[float] = []
    trainer.on("gradient_clip", name="norms")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    inputs, targets = make_batches(1)[0]
    nn.functional.mse_loss(model(inputs), targets).backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in model[2].parameters()])
    assert norms == [pytest.approx(float(expected), rel=2e-2 if precision == "fp16" else 1e-5)]


@pytest.mark.parametrize("options", [{"accumulate": 4}, {"loss_weight": "samples"}])
def test_a_parameter_outside_the_model_is_rescaled_with_its_window(options: dict[str, Any]) -> None:
    """A learnable temperature gets the gradient of the mean loss, in a short or weighted window too."""
    model, temperature = make_model(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1.0)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]) * temperature, batch[1])

    seen: list[float] = []

    class Look(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            seen.append(grads["optimizers.0.0.4"].item())
            return grads

    trainer = make_trainer(
        Look(), model=model, optimizer=optimizer, data=make_batches(1), step_fn=step, loss_fn=None, **options
    )
    trainer.train()
    fresh, again = make_model(), nn.Parameter(torch.ones(()))
    inputs, targets = make_batches(1)[0]
    nn.functional.mse_loss(fresh(inputs) * again, targets).backward()
    assert again.grad is not None and seen == [pytest.approx(again.grad.item(), rel=1e-5)]
