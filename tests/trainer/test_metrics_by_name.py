"""Test metrics that a config or a list names: their values, in training and validation, and clear errors."""

import math
import random
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
import torchmetrics.classification as tm
from builders import Batch, make_model
from torch import nn

from hookline import SimpleTrainer, load_config, read_metrics, register_metric, trainer_from_config
from hookline.core import plugins
from hookline.errors import ConfigError, HooklineError, TrainingError

CLASSES = 4
PARTS = {
    "model": {"name": "char_gpt", "context": 8, "width": 8, "heads": 2, "layers": 1},
    "data": {"name": "stdlib_text", "context": 8, "batch_size": 4, "max_bytes": 20000},
    "optimizer": "sgd",
    "trainer": {"max_steps": 3, "validate_every": 3, "console": False, "limit_train_batches": 4},
}


@pytest.fixture(autouse=True)
def forget_registered() -> Iterator[None]:
    """Forget what the test registers."""
    added = dict(plugins.METRICS._added)
    yield
    plugins.METRICS._added = added


def labeled(*sizes: int) -> list[Batch]:
    """Make batches of these sizes; the first target of each is one that the loss ignores."""
    stream = torch.Generator().manual_seed(3)
    batches = [(torch.randn(n, 3, generator=stream), torch.randint(0, CLASSES, (n,), generator=stream)) for n in sizes]
    for _, target in batches:
        target[0] = -100
    return batches


def returns_the_batch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the batch as output and target, with a loss that has nothing to do with it."""
    return {"loss": model(torch.ones(1, 3)).sum(), "output": batch[0], "target": batch[1]}


def recorded(trainer: SimpleTrainer, name: str) -> list[float]:
    """Return the values of a metric in the record."""
    return [row[name] for row in trainer.record.metrics if name in row]


OPTIONS = {
    "model": partial(make_model, 3, CLASSES), "data": labeled(8, 8), "loss_fn": nn.functional.cross_entropy,
}  # fmt: skip
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_metrics_of_classes_are_those_of_torchmetrics() -> None:
    """Over batches of different sizes and ignored targets, each is the number that torchmetrics computes."""
    theirs = {
        "accuracy": tm.MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100),
        "top2_accuracy": tm.MulticlassAccuracy(CLASSES, average="micro", top_k=2, ignore_index=-100),
        "precision": tm.MulticlassPrecision(CLASSES, ignore_index=-100),
        "recall": tm.MulticlassRecall(CLASSES, ignore_index=-100),
        "f1": tm.MulticlassF1Score(CLASSES, ignore_index=-100),
    }
    own = ["accuracy", {"name": "accuracy", "k": 2}, "precision", "recall", "f1"]
    for batches in (labeled(9, 5, 2), labeled(3)):  # in the second, some classes do not occur
        expected = make_trainer(metrics=theirs).validate(batches)
        measured = make_trainer(metrics=own).validate(batches)
        assert measured == pytest.approx(expected)


def test_targets_that_are_not_classes_are_misses() -> None:
    """As in accuracy: the prediction for them is wrong, and they are not samples of a class."""
    trainer = make_trainer(metrics=["accuracy", "precision", "recall", "f1"], loss_fn=None, step_fn=returns_the_batch)
    names = ("accuracy", "precision", "recall", "f1")
    for chosen, wrong in ((0, -1), (2, 7)):  # one of four predictions of a class is right
        logits = torch.eye(3)[[chosen] * 4]
        measured = trainer.validate([(logits, torch.tensor([chosen, wrong, wrong, wrong]))])
        assert [measured[f"val/{name}"] for name in names] == pytest.approx([1 / 4, 1 / 4, 1.0, 2 / 5])
    measured = trainer.validate([(torch.tensor([2.0, 2.0, -2.0]), torch.tensor([1, 5, -1]))])
    assert [measured[f"val/{name}"] for name in names] == pytest.approx([1 / 3, 1 / 2, 1.0, 2 / 3])


def test_errors_of_numbers() -> None:
    """[batch, 1] against [batch] is not broadcast, and every element counts once."""
    batches = [(torch.randn(size, 3), torch.randn(size)) for size in (5, 2)]
    loss_fn = lambda output, target: output.mean()  # noqa: E731
    trainer = make_trainer(metrics=["mse", "mae"], model=nn.Linear(3, 1), data=batches, loss_fn=loss_fn)
    differences = torch.cat([trainer.model(x).flatten() - y for x, y in batches]).detach()
    measured = trainer.validate(batches)
    assert measured["val/mse"] == pytest.approx(differences.square().mean().item())
    assert measured["val/mae"] == pytest.approx(differences.abs().mean().item())


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_output_per_sample_is_positive_above_a_threshold(shape: tuple[int, ...]) -> None:
    """Logits are positive above 0; precision and recall are those of the positive class."""
    x = torch.tensor([2.0, -1.0, 3.0, -4.0, 5.0]).reshape(5, 1)
    target = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]).reshape(5, *shape)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity() if shape else nn.Flatten(0))
    nn.init.ones_(model[0].weight)
    metrics = ["accuracy", "precision", "recall", {"name": "accuracy", "threshold": 4, "as": "strict"}]
    loss_fn = nn.functional.binary_cross_entropy_with_logits
    trainer = make_trainer(metrics=metrics, model=model, data=[(x, target)], loss_fn=loss_fn)
    measured = trainer.validate([(x, target)])
    numbers = [measured[f"val/{name}"] for name in ("accuracy", "precision", "recall", "strict")]
    assert numbers == pytest.approx([3 / 5, 2 / 3, 2 / 3, 3 / 5])


@pytest.mark.parametrize("place", ["last", "second"])
def test_language_models_and_images(place: str) -> None:
    """Logits [B, T, V] and targets [B, T], or classes in the second dimension as torch's losses have them."""
    target = torch.tensor([[0, 2, -100], [1, 1, 3]])
    right = torch.tensor([[True, False, True], [True, True, False]])
    chosen = torch.where(right, target.clamp(min=0), (target.clamp(min=0) + 1) % CLASSES)
    logits = nn.functional.one_hot(chosen, CLASSES).float()
    logits = logits.movedim(-1, 1) if place == "second" else logits

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(torch.ones(1, 3)).sum(), "output": logits, "target": batch[1]}

    trainer = make_trainer(metrics=["accuracy"], loss_fn=None, step_fn=step)
    assert trainer.validate([(torch.ones(2, 1), target)])["val/accuracy"] == pytest.approx(3 / 5)


def test_labels_that_the_model_shifts() -> None:
    """With `shift`, the prediction at a position is compared with the next label, as Hugging Face's models do."""
    ids = torch.tensor([[1, 2, 3, 0]])
    logits = nn.functional.one_hot(torch.tensor([[2, 3, 1, 1]]), CLASSES).float()

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(torch.ones(1, 3)).sum(), "output": {"logits": logits}}

    trainer = make_trainer(metrics=[{"name": "accuracy", "shift": True}], loss_fn=None, step_fn=step)
    assert trainer.validate([{"input_ids": ids, "labels": ids}])["val/accuracy"] == pytest.approx(2 / 3)


def test_a_large_vocabulary_makes_no_python_objects_of_its_classes() -> None:
    """Each of 50,000 classes has three sums, which stay one tensor."""
    count = 50_000
    trainer = make_trainer(metrics=["f1"], loss_fn=None, step_fn=returns_the_batch)
    batch = torch.eye(2, count), torch.tensor([0, 5])
    trainer.validate([batch])
    tracemalloc.start()
    measured = trainer.validate([batch])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert measured["val/f1"] == pytest.approx(1 / 3) and peak < 1e6  # bytes


def test_metrics_keep_the_order_of_the_list() -> None:
    """Functions and objects alike, for each loader."""
    register_metric("margin")(lambda output, batch: output.mean())
    register_metric("parts")(lambda output, batch: {"high": output.max(), "low": output.min()})
    trainer = make_trainer(metrics=["f1", "margin", "accuracy", "parts"])
    expected = ["loss", "f1", "margin", "accuracy", "parts/high", "parts/low"]
    assert list(trainer.validate(labeled(4))) == [f"val/{name}" for name in expected]
    measured = trainer.validate({"a": labeled(4), "b": labeled(5)})
    for place in ("val", "val/a", "val/b"):
        listed = [name for name in measured if place in (name.rpartition("/parts")[0], name.rpartition("/")[0])]
        assert listed == [f"{place}/{name}" for name in expected]


# ---- training --------------------------------------------------------------------------------------------------------


def test_training_measures_means_on_every_step() -> None:
    """`train/<name>` is that of the step's batch, `train/epoch_<name>` the mean; the curve of the loss is the same."""
    batches = labeled(8, 8)
    expected = []
    plain = make_trainer(data=batches)
    for inputs, target in batches:
        counted = target != -100
        expected.append(((plain.model(inputs).argmax(-1) == target) & counted).sum().item() / counted.sum().item())
        plain.training_step((inputs, target))
    trainer = train(metrics=["accuracy", "f1"], data=batches, val_dataloader=batches)
    measured = recorded(trainer, "train/accuracy")
    assert measured == pytest.approx(expected)
    assert recorded(trainer, "train/epoch_accuracy")[-1] == pytest.approx(sum(expected) / 2)
    assert recorded(trainer, "train/loss") == recorded(train(data=batches), "train/loss")
    names = {name for row in trainer.record.metrics for name in row}
    assert {"val/accuracy", "val/f1"} <= names and "train/f1" not in names


def test_a_batch_whose_targets_are_all_ignored_has_no_part_in_the_mean() -> None:
    """The epoch's accuracy is that of the other batches; without any it is not a number."""
    (first, ignored, last) = labeled(8, 8, 8)
    ignored[1].fill_(-100)
    options: dict[str, Any] = {"loss_fn": lambda output, target: output.sum() * 1e-9}
    trainer = train(metrics=["accuracy"], data=[first, ignored, last], **options)
    measured = recorded(trainer, "train/accuracy")
    assert math.isnan(measured[1])
    assert recorded(trainer, "train/epoch_accuracy")[-1] == pytest.approx((measured[0] + measured[2]) / 2)
    trainer = train(metrics=["accuracy"], data=[ignored], **options)
    assert math.isnan(recorded(trainer, "train/epoch_accuracy")[-1])


def test_a_micro_batch_whose_targets_are_all_ignored_has_no_part_in_the_step() -> None:
    """The step's accuracy is that of the other micro-batch; without any it is not a number."""
    ignored, counted = labeled(8, 8)
    ignored[1].fill_(-100)
    options: dict[str, Any] = {"loss_fn": lambda output, target: output.sum() * 1e-9}
    alone = train(metrics=["accuracy"], data=[counted], **options)
    trainer = train(metrics=["accuracy"], data=[ignored, counted, ignored, ignored], accumulate=2, **options)
    measured = recorded(trainer, "train/accuracy")
    assert measured[0] == recorded(alone, "train/accuracy")[0] and math.isnan(measured[1])


def test_an_error_that_is_not_a_number_makes_the_epoch_one() -> None:
    """Every sample of an error counts, so a diverged epoch cannot look better than it is."""
    batches = [(torch.full((2, 1), value), torch.zeros(2, 1)) for value in (1.0, math.nan)]
    trainer = train(metrics=["mse", "mae"], model=nn.Linear(1, 1), data=batches, loss_fn=nn.functional.mse_loss)
    last = trainer.record.metrics[-1]
    assert math.isnan(last["train/epoch_mse"]) and math.isnan(last["train/epoch_mae"])


def test_accumulated_steps_have_the_mean_of_their_batches() -> None:
    """As for what step_fn returns beside the loss."""
    batches = labeled(8, 8)
    single = make_trainer(metrics=["accuracy"], data=batches)
    measure, model = single.forward.metrics.measure_batch, single.model
    values = [measure(batch, None, model(batch[0]))["accuracy"] for batch in batches]
    trainer = train(metrics=["accuracy"], data=batches, accumulate=2)
    assert recorded(trainer, "train/accuracy")[0] == pytest.approx(float(sum(values)) / 2)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [("train", {"train"}), (["validation"], {"val"}), (["train", "validation"], {"train", "val"})],
    ids=["train", "validation", "both"],
)
def test_phases_say_where_a_metric_is_measured(phases: Any, expected: set[str]) -> None:
    """In training, in validation, or in both; a function of the user's only where it is asked for."""

    @register_metric("largest")
    def largest(output: torch.Tensor, batch: Any, scale: float = 1.0) -> torch.Tensor:
        """The largest output."""
        return output.max() * scale

    entry = {"name": "largest", "scale": 0.0, "phases": phases, "as": "zero"}
    trainer = train(metrics=[entry], val_dataloader=labeled(4))
    measured = {name for row in trainer.record.metrics for name in row if name.endswith("/zero")}
    assert measured == {f"{phase}/zero" for phase in expected} and trainer.record.metrics[-1][measured.pop()] == 0.0


def test_a_function_that_is_measured_in_training_changes_nothing() -> None:
    """It may write to what it gets and draw random numbers: the curve is that of a run without it."""

    @register_metric("careless")
    def careless(output: torch.Tensor, batch: Any) -> float:
        """Overwrite everything."""
        output.zero_()
        batch[0].zero_()
        return torch.rand(3).sum().item()

    curves = []
    for metrics in (None, [{"name": "careless", "phases": "train"}]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, CLASSES), nn.Tanh())
        trainer = train(metrics=metrics, model=model, data=labeled(8, 8, 8), max_epochs=2)
        curves.append(recorded(trainer, "train/loss"))
    assert curves[0] == curves[1]


def test_a_function_that_draws_nothing_costs_no_copies_of_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches there are."""
    register_metric("constant")(lambda output, batch: 1.0)
    counts, copied = [], random.getstate
    for batches in (2, 9):
        calls: list[Any] = []
        monkeypatch.setattr(random, "getstate", lambda calls=calls: calls.append(None) or copied())
        train(metrics=[{"name": "constant", "phases": "train"}], data=labeled(*[4] * batches))
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_training_metrics_reach_hooks() -> None:
    """They are in `metrics` at the end of a batch, and can be monitored."""
    seen: list[float] = []
    trainer = make_trainer(metrics=["accuracy"])
    trainer.on("train_batch_end")(lambda metrics, output: seen.append(metrics["accuracy"]))
    trainer.train()
    assert len(seen) == 2 and trainer.epoch_metrics()["train/epoch_accuracy"] == pytest.approx(sum(seen) / 2)


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_a_config_file_names_metrics(tmp_path: Path) -> None:
    """Names, parameters and classes of torchmetrics in YAML; the run's record has the numbers and the config."""
    (tmp_path / "run.yaml").write_text(
        """
model: {name: char_gpt, context: 8, width: 8, heads: 2, layers: 1}
data: {name: stdlib_text, context: 8, batch_size: 4, max_bytes: 20000}
optimizer: sgd
metrics:
  - accuracy
  - {name: accuracy, k: 3}
  - {name: f1, phases: [validation]}
trainer: {max_steps: 3, validate_every: 3, limit_train_batches: 4, console: false}
"""
    )
    config, from_file = load_config(tmp_path / "run.yaml", [f"trainer.output_dir={tmp_path}"])
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.train()
    last = read_metrics(trainer.run_dir)[-1]
    assert 0 <= last["train/accuracy"] <= last["train/top3_accuracy"] <= 1
    assert 0 <= last["val/accuracy"] <= last["val/top3_accuracy"] <= 1 and "val/f1" in last


def test_classes_of_torchmetrics_need_no_permission(tmp_path: Path) -> None:
    """A file may name those that only compute, with their own parameters; others only if the package is allowed."""
    name = "torchmetrics.classification.MulticlassAccuracy"
    entry = {"name": name, "num_classes": CLASSES, "average": "micro", "ignore_index": -100, "as": "theirs"}
    batches = labeled(9, 5)
    measured = make_trainer(metrics=["accuracy", entry]).validate(batches)
    assert measured["val/theirs"] == pytest.approx(measured["val/accuracy"])
    config = {**PARTS, "metrics": [{"name": name, "num_classes": 3}]}
    assert "MulticlassAccuracy" in trainer_from_config(config, from_file=True, device="cpu").validation_metrics
    for usual in ({"name": "torchmetrics.Accuracy", "task": "binary"}, "torchmetrics.MeanSquaredError"):
        trainer_from_config({**PARTS, "metrics": [usual]}, from_file=True, device="cpu")
    for wrong, words in (
        ("torchmetrics.classification.accuracy.nothing", "has no"),
        ("torchmetrics.classification.accuracy._accuracy_reduce", "not a metric class"),
        ("torchmetrics.functional.accuracy", "is not allowed.*--allow torchmetrics"),
        ("torchmetrics.text.BERTScore", "is not allowed"),  # its parameter is a model to download
        ("torchmetrics.text.bert.BERTScore", "is not allowed"),
        ("torchmetrics.BLEUScore", "is not allowed"),  # of torchmetrics.text
        ("torchmetrics.MetricCollection", "is not allowed"),  # it takes other objects
        ("torchmetrics.functional", "is not a class or function"),
        ("torchmetrics.Nothing", "has no"),
        ("os.system", "is not allowed"),
    ):
        with pytest.raises(ConfigError, match=rf"metrics\.0\.name: .*{words}"):
            trainer_from_config({**PARTS, "metrics": [wrong]}, from_file=True, device="cpu")


def test_torchmetrics_that_is_allowed() -> None:
    """All its classes may be named then."""
    config = {**PARTS, "metrics": ["torchmetrics.text.Perplexity"]}
    trainer = trainer_from_config(config, from_file=True, allow=["torchmetrics"], device="cpu")
    assert "Perplexity" in trainer.validation_metrics


def test_any_error_of_a_constructor_names_the_metric() -> None:
    """Also one that says that a package is missing."""

    @register_metric("needs")
    class Needs:
        def __init__(self) -> None:
            raise ModuleNotFoundError("No module named 'transformers'")

    with pytest.raises(ConfigError, match=r"metrics\.0: needs cannot be created: ModuleNotFoundError: No module named"):
        make_trainer(metrics=["needs"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("acuracy", r"metrics\.0\.name: there is no metric named 'acuracy'; did you mean 'accuracy'"),
        ({"name": "accuracy", "kk": 3}, r"metrics\.0\.kk: accuracy has no parameter 'kk'; did you mean 'k'"),
        ({"name": "accuracy", "k": 0}, r"metrics\.0: .*k: expected an integer of at least 1"),
        ({"name": "accuracy", "phases": "training"}, r"metrics\.0\.phases: invalid value 'training'; did you mean"),
        ({"name": "accuracy", "phases": []}, r"metrics\.0\.phases: expected train or validation"),
        ({"name": "accuracy", "as": "loss"}, r"metrics\.0: 'loss' cannot be a name.*; rename it with `as"),
        ({"name": "accuracy", "as": "lr"}, r"metrics\.0: 'lr' cannot be the name of a metric in training"),
        ({"name": "accuracy", "as": "grad_norm"}, r"metrics\.0: 'grad_norm' cannot be the name"),
        ({"name": "accuracy", "as": "epoch_loss"}, r"metrics\.0: 'epoch_loss' cannot be the name"),
        ({"name": "accuracy", "as": 3}, r"metrics\.0\.as: expected a name"),
        ({"k": 3}, r"metrics\.0.*name"),
        (3, r"metrics\.0"),
        (print, r"metrics\.0: expected the name of a metric, or a mapping with `name`.*; a dict takes functions"),
    ],
    ids=str,
)
def test_wrong_entries(entry: Any, words: str) -> None:
    """One clear error with the place, and the nearest name."""
    with pytest.raises(ConfigError, match=words):
        make_trainer(metrics=[entry])
    with pytest.raises(ConfigError, match=r"metrics\.0"):
        trainer_from_config({**PARTS, "metrics": [entry]}, device="cpu")


def test_names_that_only_training_has_are_free_in_validation() -> None:
    """`val/lr` is not recorded otherwise."""
    trainer = make_trainer(metrics=[{"name": "accuracy", "as": "lr", "phases": "validation"}])
    assert "val/lr" in trainer.validate(labeled(4))


@pytest.mark.parametrize(
    ("name", "words"),
    [("books/loss", "the loss of the loader 'books'"), ("books", "the loader"), ("a/epoch_b", "the means of epochs")],
)
def test_a_metric_in_training_does_not_take_the_name_of_another_number(name: str, words: str) -> None:
    """`train/<loader>/loss` is recorded for each of several loaders; a metric beside them needs another name."""
    loaders = {"books": labeled(4), "web": labeled(4)}
    entry = {"name": "accuracy", "as": name}
    with pytest.raises(HooklineError, match=f"{name!r} cannot be the name of a metric in training.*{words}"):
        make_trainer(metrics=[entry], data=loaders)
    make_trainer(metrics=[{**entry, "phases": "validation"}], data=loaders)
    trainer = train(metrics=[{**entry, "as": "aux/loss"}], data=loaders)
    assert {"train/aux/loss", "train/books/loss"} <= set(trainer.record.metrics[0])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["accuracy", "accuracy"], r"two metrics are recorded as 'accuracy'; rename one of them"),
        ([{"name": "f1", "phases": "train"}], "'f1' is computed over all samples"),
        ([{"name": "accuracy", "as": "loss"}], "'loss' cannot be a name"),
        ("accuracy", "metrics: expected a list of names, or a dict of metrics by name, got a str"),
    ],
    ids=str,
)
def test_wrong_lists(metrics: Any, words: str) -> None:
    """What does not fit together is an error when the trainer is made."""
    with pytest.raises(HooklineError, match=words):
        make_trainer(metrics=metrics)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ({"name": "accuracy", "k": 9}, "k=9 is more than the 4 classes"),
        ("mse", r"mse: predictions \[8, 4\] do not fit targets \[8\]"),
    ],
    ids=str,
)
def test_outputs_that_do_not_fit_are_an_error_at_the_first_batch(metric: Any, words: str) -> None:
    """With the metric's name as a note."""
    with pytest.raises(TrainingError, match=words) as failure:
        train(metrics=[metric])
    assert any("on a training batch" in note for note in failure.value.__notes__)


def test_errors_of_numbers_need_equal_shapes() -> None:
    """As many elements are not enough: a transposed target would be compared with other elements."""
    target = torch.arange(12.0).reshape(4, 3)
    trainer = make_trainer(metrics=["mae"], loss_fn=None, step_fn=returns_the_batch)
    with pytest.raises(TrainingError, match=r"mae: predictions \[3, 4\] do not fit targets \[4, 3\]"):
        trainer.validate([(target.T, target)])
    assert trainer.validate([(target.unsqueeze(1) + 2, target)])["val/mae"] == pytest.approx(2.0)


def test_a_batch_without_a_target_is_an_error() -> None:
    """The message says how to give one."""
    batches = [{"input": torch.ones(2, 3)}]
    trainer = make_trainer(metrics=["accuracy"], data=batches, loss_fn=lambda output, batch: output.sum())
    with pytest.raises(TrainingError, match="the target is a dict, not a tensor; let step_fn return"):
        trainer.train()
