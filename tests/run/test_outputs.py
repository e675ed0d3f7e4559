"""Test the arguments `output` and `target` at the end of a batch: what they are, that they are views, and their end."""

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from builders import make_trainer
from torch import nn

from hookline import SimpleTrainer, TrainingHook

Batch = tuple[torch.Tensor, torch.Tensor]


def labelled_batches(count: int = 2) -> list[Batch]:
    stream = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 3, generator=stream), torch.randint(0, 2, (4,), generator=stream)) for _ in range(count)]


def classifier(batches: Any, *hooks: Any, **options: Any) -> SimpleTrainer:
    options = {"model": nn.Linear(3, 2), "loss_fn": nn.functional.cross_entropy, **options}
    return make_trainer(*hooks, data=batches, **options)


class Read(TrainingHook):
    """Keeps what it gets at the end of every batch."""

    def __init__(self) -> None:
        self.train: list[tuple[Any, Any]] = []
        self.validation: list[tuple[Any, Any]] = []

    def on_train_batch_end(self, output: Any, target: Any) -> None:
        self.train.append((output, target))

    def on_validation_batch_end(self, output: Any, target: Any) -> None:
        self.validation.append((output, target))


def test_with_a_loss_function() -> None:
    """They are the two arguments of the loss function, without the graph, in training and in validation."""
    batches, hook = labelled_batches(), Read()
    trainer = classifier(batches, hook, val_dataloader=batches)
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    expected = nn.functional.linear(batches[0][0], *weights)
    output, target = hook.train[0]
    assert torch.equal(output, expected) and torch.equal(target, batches[0][1]) and not output.requires_grad
    output, target = hook.validation[1]
    assert torch.equal(output, trainer.model(batches[1][0])) and torch.equal(target, batches[1][1])
    assert (len(hook.train), len(hook.validation)) == (2, 2)


def calls_the_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def names_them(model: nn.Module, batch: Batch) -> dict[str, Any]:
    output = nn.functional.linear(batch[0], model.weight, model.bias)
    return {"loss": nn.functional.cross_entropy(output, batch[1]), "output": output, "target": batch[1]}


def hides_the_output(model: nn.Module, batch: Batch) -> torch.Tensor:
    return names_them(model, batch)["loss"]


@pytest.mark.parametrize(("step_fn", "known"), [(calls_the_model, True), (names_them, True), (hides_the_output, False)])
def test_with_a_step_function(step_fn: Callable[..., Any], known: bool) -> None:
    """The output is the model's, or what step_fn returns as 'output'; None if nothing tells."""
    batches, hook = labelled_batches(), Read()
    trainer = classifier(batches, hook, step_fn=step_fn, loss_fn=None, val_dataloader=batches)
    trainer.train()
    for output, target in (*hook.train, *hook.validation):
        assert target.shape == (4,) and (output.shape == (4, 2) if known else output is None)


@pytest.mark.parametrize(
    ("batch", "has_target"),
    [
        ({"x": torch.ones(4, 3), "labels": torch.zeros(4)}, True),
        ({"x": torch.ones(4, 3)}, False),
        (torch.ones(4, 3), False),
        ((torch.ones(4, 3),), False),
    ],
)
def test_targets_of_batches(batch: Any, has_target: bool) -> None:
    """A dict has its target as 'labels'; a batch that is one tensor has none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Any, labels: Any = None) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"logits": logits, "loss": logits.mean()}

    hook = Read()
    classifier([batch], hook, model=Model(), loss_fn=None).train()
    ((output, target),) = hook.train
    assert set(output) == {"logits", "loss"} and not output["logits"].requires_grad
    assert (target is not None) is has_target


def test_a_hook_that_writes_to_them_changes_nothing() -> None:
    """They are copies once something is written: the batch, metrics and the curve stay as they are."""

    class Keeps:
        """A metric that refers to what it was given until the end, as some of torchmetrics do."""

        def reset(self) -> None:
            self.given: list[torch.Tensor] = []

        def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
            self.given += [predictions, target]

        def compute(self) -> torch.Tensor:
            return sum(output.double().sum() for output in self.given)

    class Write(TrainingHook):
        def on_train_batch_end(self, output: Any, target: Any) -> None:
            output.fill_(9)
            target.fill_(9)

        on_validation_batch_end = on_train_batch_end

    curves = []
    for hooks in ([], [Write()]):
        batches = labelled_batches()
        torch.manual_seed(0)
        trainer = classifier(batches, *hooks, val_dataloader=batches, metrics={"sum": Keeps()}, max_epochs=2)
        trainer.train()
        curves.append([{**row, "time": 0} for row in trainer.record.metrics])
        assert all(torch.equal(seen[1], given[1]) for seen, given in zip(batches, labelled_batches(), strict=True))
    assert curves[0] == curves[1]


def test_only_a_hook_of_training_keeps_the_output_for_the_backward_pass() -> None:
    """Its memory is then in use longer; metrics and hooks of validations do without."""
    outputs: list[Any] = []
    is_kept: list[bool] = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            outputs.append(ref(output))
            return output

    given: list[list[Any]] = [[], ["confusion_matrix", "sample_predictions"], [Read()]]
    for hooks in given:
        trainer = classifier(labelled_batches(1), *hooks, model=Model(3, 2), metrics=["accuracy"])
        trainer.on("before_backward", name="looks")(lambda: is_kept.append(outputs[-1]() is not None))
        trainer.train()
    assert is_kept == [False, False, True]


def test_nothing_is_read_unless_a_hook_names_them() -> None:
    """The model has no forward hook more, and the output is gone when the batch is over."""

    class Remember(nn.Linear):
        outputs: list[Any] = []  # noqa: RUF012
        hooks: list[int] = []  # noqa: RUF012

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            self.outputs.append(ref(output))
            self.hooks.append(len(self._forward_hooks))
            return output

    model = Remember(3, 2)
    trainer = classifier(labelled_batches(4), model=model)
    alive: list[bool] = []

    def look() -> None:
        gc.collect()
        alive.append(model.outputs[-1]() is not None)

    trainer.on("step_end", name="look")(look)
    steps = trainer.stepper()
    next(steps)
    trainer.on("train_batch_end", name="reads")(lambda output: None)
    next(steps)
    trainer.on("train_batch_end", name="removes")(lambda: trainer.hooks.remove("reads"))
    next(steps)
    trainer.hooks.remove("removes")
    for _ in steps:
        pass
    assert model.hooks == [0, 1, 1, 0] and not any(alive)
