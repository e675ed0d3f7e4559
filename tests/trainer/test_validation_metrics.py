"""Metrics of the user's own: by function and by object, over one validation loader and several."""

from collections.abc import Callable
from functools import partial
from typing import Any

import builders
import pytest
import torch
from builders import Batch, batches_of, make_model
from torch import nn

from hookline import SimpleTrainer, TrainingHook
from hookline.errors import TrainingError


def labeled(*sizes: int) -> list[Batch]:
    """Make batches of these sizes, of two classes."""
    return [(inputs, (target > 0).long()[:, 0]) for inputs, target in batches_of(*sizes)]


def make_trainer(metrics: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer of a classifier with dropout that measures the metrics."""
    model = make_model(3, 4, 2, between=partial(nn.Dropout, 0.5))
    options = {"data": labeled(4, 4), "loss_fn": nn.functional.cross_entropy, **options}
    return builders.make_trainer(model=model, metrics=metrics, **options)


def right(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The share of right answers."""
    return (output.argmax(-1) == batch[1]).float().mean()


def accuracy_of(trainer: SimpleTrainer, batches: list[Batch]) -> float:
    """The same over all samples, by hand."""
    trainer.model.eval()
    with torch.no_grad():
        hits = sum(int((trainer.model(x).argmax(-1) == y).sum()) for x, y in batches)
    trainer.model.train()
    return hits / sum(len(x) for x, _ in batches)


class Accuracy(nn.Module):
    """A stand-in with the protocol of torchmetrics: a module with states, callable, update, compute and reset."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hits", torch.tensor(0))
        self.register_buffer("total", torch.tensor(0))
        self.resets = 0

    def forward(self, predictions: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an object is updated, not called")

    def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
        assert not torch.is_grad_enabled() and predictions.dim() == 2 and target.dim() == 1
        self.hits = self.hits + (predictions.argmax(-1) == target).sum()
        self.total = self.total + len(target)

    def compute(self) -> torch.Tensor:
        return self.hits.float() / self.total

    def reset(self) -> None:
        self.hits, self.total = torch.zeros_like(self.hits), torch.zeros_like(self.total)
        self.resets += 1


@pytest.mark.parametrize(
    "metric", [right, lambda output, batch: right(output, batch).item(), Accuracy()], ids=["tensor", "number", "object"]
)
def test_functions_and_objects_over_all_samples(metric: Any) -> None:
    """A short last batch counts by its samples, every validation starts at zero, and both spellings have the values."""
    trainer, batches = make_trainer({"accuracy": metric}), labeled(8, 8, 1)
    told: list[dict[str, float]] = []
    trainer.on("eval_end")(lambda metrics: told.append(dict(metrics)))
    expected = accuracy_of(trainer, batches)
    for _ in range(2):
        assert trainer.validate(batches)["val/accuracy"] == pytest.approx(expected)
    assert told[1]["eval/accuracy"] == pytest.approx(expected) and set(told[1]) == {"eval/loss", "eval/accuracy"}


@pytest.mark.parametrize("metric", [right, Accuracy()], ids=["function", "object"])
def test_several_loaders(metric: Any) -> None:
    """Each loader has its own number, and there is that of all samples; the user's object holds the latter."""
    trainer, near, far = make_trainer({"accuracy": metric}), labeled(8, 3), labeled(5)
    metrics = trainer.validate({"near": near, "far": far})
    for name, batches in (("near/", near), ("far/", far), ("", near + far)):
        assert metrics[f"val/{name}accuracy"] == pytest.approx(accuracy_of(trainer, batches))
    if isinstance(metric, Accuracy):
        assert metric.compute().item() == pytest.approx(metrics["val/accuracy"])


def test_they_are_recorded_and_can_be_monitored() -> None:
    """In a run they are in the record, and hooks see a function's value at every batch."""
    trainer = make_trainer({"accuracy": right, "again": Accuracy()}, val_loaders=labeled(4, 2), max_epochs=2)
    seen: list[float] = []

    class Watch(TrainingHook):
        def on_validation_batch_end(self, metrics: dict[str, float]) -> None:
            seen.append(metrics["accuracy"])

    trainer.add_hook(Watch())
    trainer.add_hook("early_stopping", monitor="val/again", mode="max", patience=5)
    trainer.train()
    lines = [line for line in trainer.record.metrics if "val/loss" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line["val/accuracy"] == pytest.approx(line["val/again"]) for line in lines)
    assert len(seen) == 4 and all(0 <= value <= 1 for value in seen)


def hidden(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A step that keeps the model's output to itself."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def explicit(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """A step that says what is measured, and on what."""
    output = model[2](model[0](batch[0]))
    return {"loss": nn.functional.cross_entropy(output, batch[1]), "output": output, "target": batch[1]}


@pytest.mark.parametrize("step", [hidden, explicit])
def test_where_the_output_comes_from(step: Callable[..., Any]) -> None:
    """What the model returned when it was called, also inside a step_fn; or what step_fn returns as 'output'."""
    batches = labeled(6, 2)
    trainer = make_trainer({"function": right, "object": Accuracy()}, step_fn=step, loss_fn=None)
    metrics = trainer.validate(batches)
    expected = accuracy_of(trainer, batches)
    assert metrics["val/function"] == pytest.approx(expected) and metrics["val/object"] == pytest.approx(expected)
    assert set(metrics) == {"val/loss", "val/function", "val/object"}
    trainer.train()


def test_a_model_that_is_never_called() -> None:
    """Said before the first step, with the remedy; and the last batch's output is not taken for this one's."""

    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        output = model(batch[0]) if len(batch[0]) == 4 else model[2](model[0](batch[0]))
        return nn.functional.cross_entropy(output, batch[1])

    trainer = make_trainer({"accuracy": right}, step_fn=step, loss_fn=None, val_loaders=labeled(4, 2))
    said = r"did not call the model itself, or .*torch.compile.*: let it return .*'output': output"
    with pytest.raises(TrainingError, match=said):
        trainer.train()
    assert trainer.step == 0


class Labelled(nn.Module):
    """Returns what models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_logits_and_labels() -> None:
    """Of a model that returns its loss, objects get the logits and the batch's labels; functions what it returned."""
    batches = [{"x": x, "labels": y} for x, y in labeled(4, 3)]
    metrics = {
        "object": Accuracy(),
        "function": lambda output, batch: right(output["logits"], (batch["x"], batch["labels"])),
    }
    trainer = builders.make_trainer(model=Labelled(), data=batches, loss_fn=None, metrics=metrics)
    measured = trainer.validate(batches)
    assert measured["val/object"] == pytest.approx(measured["val/function"])


def test_an_object_may_compute_several_numbers() -> None:
    """A dict of numbers, as collections of metrics give, each under its own name."""

    class Both(Accuracy):
        def compute(self) -> dict[str, Any]:
            return {"hits": self.hits, "rate": float(super().compute())}

    metrics = make_trainer({"both": Both()}).validate(labeled(4))
    assert metrics["val/both/hits"] == 4 * metrics["val/both/rate"]


def test_the_model_carries_nothing_afterwards() -> None:
    """What watches its output is gone after a validation, also after one that failed."""
    trainer = make_trainer({"accuracy": right})
    trainer.validate(labeled(2))
    with pytest.raises(RuntimeError):
        trainer.validate([(torch.randn(2, 7), torch.zeros(2))])
    assert not trainer.model._forward_hooks


def test_training_is_untouched() -> None:
    """A metric that draws random numbers changes no bit of the training."""

    def drawing(output: torch.Tensor, batch: Batch) -> float:
        return torch.rand(1).item()

    weights = []
    for metrics in (None, {"noise": drawing}):
        torch.manual_seed(1)
        trainer = make_trainer(metrics, val_loaders=labeled(2), validate_every=1, seed=1)
        trainer.train()
        weights.append([parameter.tolist() for parameter in trainer.model.parameters()])
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (3, "a dict of metrics by name, got an int"),
        ({"loss": right}, "'loss' cannot be a name; loss and perplexity are always measured"),
        ({3: right}, "3 cannot be a name"),
        ({"accuracy": 0.5}, "'accuracy' is 0.5; pass a function of"),
        ({"accuracy": Accuracy}, "an object with update, compute and reset"),
    ],
    ids=["int", "taken", "number", "constant", "class"],
)
def test_what_is_not_a_metric_is_rejected(metrics: Any, said: str) -> None:
    """When the trainer is made, with what would be right."""
    with pytest.raises(TrainingError, match=said):
        make_trainer(metrics)


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.zeros(3), r"'odd' gave a tensor of shape \(3,\)"), ("high", "'odd' gave 'high'; a metric is one number")],
    ids=["several numbers", "text"],
)
def test_what_is_not_a_number_is_rejected(value: Any, said: str) -> None:
    """By name, at the first batch."""
    with pytest.raises(TrainingError, match=said):
        make_trainer({"odd": lambda output, batch: value}).validate(labeled(2))


def test_a_failing_metric_is_named() -> None:
    """The exception is the metric's own, with a note."""
    with pytest.raises(ZeroDivisionError) as caught:
        make_trainer({"broken": lambda output, batch: 1 / 0}).validate({"a": labeled(2), "b": labeled(2)})
    assert caught.value.__notes__ == ["in the metric 'broken', on the validation loader 'a'"]


def test_a_name_that_the_step_uses_too() -> None:
    """One of the two would hide the other."""

    def step(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"loss": hidden(model, batch), "accuracy": 1.0}

    with pytest.raises(TrainingError, match="'accuracy' is also returned by the step besides the loss; rename one"):
        make_trainer({"accuracy": right}, step_fn=step, loss_fn=None).validate(labeled(2))


def test_an_object_that_cannot_be_copied() -> None:
    """Several loaders need copies of it; the error says for what."""

    class Stuck(Accuracy):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy a socket")

    metrics = {"stuck": Stuck()}
    make_trainer(metrics).validate(labeled(2))
    with pytest.raises(TypeError, match="socket") as caught:
        make_trainer(metrics).validate({"a": labeled(2), "b": labeled(2)})
    assert "the metric 'stuck' is copied for each validation loader" in caught.value.__notes__[0]


@pytest.mark.parametrize("metric", [lambda output, batch: 123.0, Accuracy()], ids=["function", "object"])
def test_names_that_collide_are_rejected(metric: Any) -> None:
    """val/a/loss cannot be the loss of the loader 'a' and a metric 'a/loss'; with one loader there is no such loss."""
    trainer = make_trainer({"a/loss": metric})
    with pytest.raises(TrainingError, match="two validation metrics would both be 'val/a/loss'"):
        trainer.validate({"a": labeled(2), "b": labeled(2)})
    assert set(trainer.validate({"a": labeled(2)})) == {"val/loss", "val/a/loss"}


def test_objects_that_collide_are_rejected() -> None:
    """The number of the loader 'a' and that of all loaders."""
    trainer = make_trainer({"right": Accuracy(), "a/right": Accuracy()})
    with pytest.raises(TrainingError, match="two validation metrics would both be 'val/a/right'"):
        trainer.validate({"a": labeled(2), "b": labeled(2)})


def test_a_numpy_string_is_not_a_number() -> None:
    """It has one element, too."""
    numpy = pytest.importorskip("numpy")
    trainer = make_trainer({"word": lambda output, batch: numpy.str_("good")})
    with pytest.raises(TrainingError, match=r"the metric 'word' gave .*; a metric is one number"):
        trainer.validate(labeled(2))


@pytest.mark.parametrize("event", ["validation_batch_start", "validation_batch_end", "validation_end"])
def test_a_validation_inside_another_has_separate_objects(event: str) -> None:
    """What the outer one has added up is not reset, and the inner one's batches are not in it."""

    class Batches:
        """Counts the batches."""

        def __init__(self) -> None:
            self.count = 0

        def reset(self) -> None:
            self.count = 0

        def update(self, predictions: Any, target: Any) -> None:
            self.count += 1

        def compute(self) -> float:
            return float(self.count)

    trainer = make_trainer({"batches": Batches()}, val_dataloader=labeled(4, 4, 4, 4, 4))
    inner: list[float] = []

    @trainer.on(event, name="again")
    def again(trainer: Any) -> None:
        if not inner:
            inner.append(0.0)
            inner[0] = trainer.validate()["val/batches"]

    assert trainer.validate()["val/batches"] == 5.0 and inner == [5.0]


class Fragile:
    """A metric that fails in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _at(self, method: str) -> None:
        if method == self.where:
            raise ZeroDivisionError("nothing to divide by")

    def reset(self) -> None:
        self._at("reset")

    def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
        self._at("update")

    def compute(self) -> float:
        self._at("compute")
        return 1.0


@pytest.mark.parametrize(
    ("where", "loaders", "note"),
    [
        ("reset", labeled(4), "in the metric 'fragile', in reset"),
        ("update", labeled(4), "in the metric 'fragile', on the validation loader 'val'"),
        ("compute", labeled(4), "in the metric 'fragile', computing val/fragile"),
        ("compute", {"a": labeled(4), "b": labeled(4)}, "in the metric 'fragile', computing val/a/fragile"),
    ],
    ids=["reset", "update", "compute", "compute of one loader"],
)
def test_the_failure_names_the_metric(where: str, loaders: Any, note: str) -> None:
    """The exception is its own, with a note."""
    with pytest.raises(ZeroDivisionError, match="nothing to divide by") as failure:
        make_trainer({"fragile": Fragile(where)}).validate(loaders)
    assert failure.value.__notes__ == [note]
