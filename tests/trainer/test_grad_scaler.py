"""Under a GradScaler a step that overflowed is left out whole, and the update chain never sees it."""

from functools import partial
from typing import Any

import builders
import pytest
import torch
from builders import Batch, make_batches, make_model

from hookline import TrainingHook, UpdateHook


def batches(count: int = 12, huge_at: int | None = None) -> list[Batch]:
    made = make_batches(count, targets=2)
    if huge_at is not None:
        made[huge_at][0].mul_(1e30)
    return made


def make_layers() -> Any:
    return make_model(3, 4, 2, between=None, seed=1)


OPTIONS = {"model": make_layers, "optimizer": partial(torch.optim.AdamW, lr=0.01), "precision": "fp16"}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


def with_two_optimizers(make: Any, **options: Any) -> Any:
    """Make a trainer with an optimizer for each layer."""
    model = make_layers()
    optimizers = [make(layer.parameters(), lr=0.01) for layer in model]
    return make_trainer(model=model, optimizer=optimizers, **options)


class Remembers(UpdateHook):
    """Adds up all gradients it has ever seen."""

    def init(self, params: Any) -> Any:
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def on_update(self, grads: Any, state: Any) -> Any:
        for name, grad in grads.items():
            state[name] = state[name] + grad
        return {name: state[name].clone() for name in grads}


def finite(model: torch.nn.Module) -> bool:
    return all(bool(param.isfinite().all()) for param in model.parameters())


def test_a_transform_with_state_never_sees_an_overflow() -> None:
    """Else what it remembers would be non-finite, and every later step, too."""
    trainer = train(Remembers(), data=batches(huge_at=5))
    assert trainer.skipped_steps >= 1 and finite(trainer.model)
    reasons = {event["reason"] for event in trainer.record.events if event["kind"] == "step_skipped"}
    assert reasons == {"non-finite gradients under GradScaler"}


def test_of_two_optimizers_none_steps_when_one_overflowed() -> None:
    """The norm spans both: the other's gradients would be scaled by it."""
    stepped: list[tuple[int, int]] = []

    class Notes(TrainingHook):
        def on_after_optimizer_step(self, step: int, optimizer_idx: int) -> None:
            stepped.append((step, optimizer_idx))

    trainer = with_two_optimizers(torch.optim.AdamW, data=batches(huge_at=5), max_grad_norm=1.0)
    trainer.add_hook(Notes())
    trainer.train()
    assert finite(trainer.model)
    assert 6 not in {step for step, _ in stepped}
    assert {(7, 0), (7, 1)} <= set(stepped)


def test_an_optimizer_without_gradients_is_not_an_overflow() -> None:
    """Freezing everything that one of them owns skips nothing."""
    trainer = with_two_optimizers(torch.optim.SGD, data=batches())
    trainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.add_hook("freeze", params="0.*")
    before = trainer.model[0].weight.clone()
    trainer.train()
    assert trainer.skipped_steps == 0
    assert torch.equal(trainer.model[0].weight, before)


def test_a_step_skipped_before_the_chain_does_not_run_it() -> None:
    """A hook at on_gradients_ready may decide so."""
    seen: list[int] = []

    class Guard(TrainingHook):
        def on_gradients_ready(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.skip_step("not this one")

    class Sees(UpdateHook):
        def on_update(self, grads: Any, step: int) -> Any:
            seen.append(step)
            return grads

    train(Guard(), Sees(), data=batches(5), precision="fp32")
    assert seen == [1, 2, 4, 5]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_are_added_later_belong_to_the_chain(accumulate: int) -> None:
    """Gradual unfreezing: the new ones are clipped with the others, and links with a memory make room."""
    model = make_layers()
    spans: dict[int, set[str]] = {}

    class Unfreezes(TrainingHook):
        def on_train_batch_start(self, step: int, trainer: Any) -> None:
            if step == 3 and len(trainer.optimizers[0].param_groups) == 1:
                trainer.optimizers[0].add_param_group({"params": list(model[0].parameters())})

    class Spans(UpdateHook):
        def on_update(self, grads: Any, step: int) -> Any:
            spans[step] = set(grads)
            return grads

    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    options = {"precision": "fp32", "accumulate": accumulate, "max_grad_norm": 1e-3}
    hooks = Unfreezes(), Spans(), Remembers()
    trainer = make_trainer(*hooks, model=model, data=batches(8), optimizer=optimizer, **options)
    before = model[0].weight.detach().clone()
    trainer.train()
    assert spans[2] == {"1.weight", "1.bias"}
    assert spans[3] == spans[4] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    moved = (model[0].weight - before).norm().item()
    assert 0 < moved < 1e-3
    (event,) = [event for event in trainer.record.events if event["kind"] == "parameters_changed"]
    assert event["added"] == ["0.bias", "0.weight"]
    assert trainer.hook_failures == 0
