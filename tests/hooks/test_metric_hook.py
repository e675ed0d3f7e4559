"""Checkpoints and early stopping follow any metric, and a value is evaluated once, at the step that measured it."""

import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Batch, make_batches, make_trainer, train
from torch import nn

from hookline import (
    CheckpointHook,
    EarlyStopping,
    HooklineError,
    ModelCheckpoint,
    SimpleTrainer,
    Trainer,
    TrainingHook,
    read_metrics,
)
from hookline.errors import ConfigError, MetricMissing, TrainingError
from hookline.hooks.notify import NotifyHook


def step_fn(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """A loss, and a number beside it that still has its graph."""
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return {"loss": loss, "acc": loss * 2}


class StoresValues(EarlyStopping):
    """Stores the values it is given."""

    def __init__(self, monitor: str, **options: Any) -> None:
        super().__init__(monitor=monitor, patience=99, **options)
        self.shown: list[tuple[int, float]] = []

    def evaluate(self, trainer: Any, measurement: Any) -> None:
        """Store what a check would see."""
        if (value := self.monitored_value(measurement)) is not None:
            self.shown.append((measurement.step, value))


def fit(*hooks: TrainingHook, resume: Path | None = None, **options: Any) -> Trainer:
    """Four batches of books and three of the web, in each of two epochs."""
    data = {"books": make_batches(4, seed=4), "web": make_batches(3, seed=3)}
    options = {"max_epochs": 2, "sanity_batches": 0, "step_fn": step_fn, "loss_fn": None, **options}
    trainer = make_trainer(*hooks, data=data, lr=0.01, record=True, **options)
    trainer.fit(resume=resume)
    return trainer


def recorded(trainer: Trainer, name: str) -> list[tuple[int, float]]:
    """Where the record has the metric."""
    return [(line["step"], line[name]) for line in read_metrics(trainer.run_dir) if name in line]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_means_of_an_epoch_are_over_its_micro_batches(accumulate: int) -> None:
    """A loader's mean is over its micro-batches, that of a metric of step_fn over all that had it."""
    losses: dict[str, list[float]] = {"books": [], "web": []}

    class Listens(TrainingHook):
        def on_train_batch_end(self, loss: float, loader_name: str) -> None:
            losses[loader_name].append(loss)

    trainer = fit(Listens(), max_epochs=1, accumulate=accumulate)
    everything = [*losses["books"], *losses["web"]]
    last = len(recorded(trainer, "train/loss"))
    for name, values in {"train/books": losses["books"], "train/web": losses["web"], "train": everything}.items():
        assert recorded(trainer, f"{name}/epoch_loss") == [(last, pytest.approx(sum(values) / len(values)))]
    assert recorded(trainer, "train/epoch_acc") == [(last, pytest.approx(2 * sum(everything) / len(everything)))]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["sequential", "round_robin"])
@pytest.mark.parametrize("monitor", ["train/loss", "train/acc", "train/books/loss", "train/web/loss"])
def test_at_the_end_of_an_epoch_the_newest_step_counts(monitor: str, schedule: str, accumulate: int) -> None:
    """The newest that had the number: the last steps may be another loader's."""
    hook = StoresValues(monitor)
    trainer = fit(hook, loader_schedule=schedule, accumulate=accumulate)
    values, ends = recorded(trainer, monitor), [step for step, _ in recorded(trainer, "train/epoch_loss")]
    assert hook.shown == [(end, [value for step, value in values if step <= end][-1]) for end in ends]


@pytest.mark.parametrize("monitor", ["train/epoch_loss", "train/epoch_acc", "train/books/epoch_loss"])
def test_the_means_of_an_epoch_are_evaluated_at_its_end(monitor: str) -> None:
    """They are not measured at steps: train/epoch_loss is rejected there, and other names are missing."""
    hook = StoresValues(monitor)
    trainer = fit(hook)
    assert hook.shown == recorded(trainer, monitor) and len(hook.shown) == 2
    message = f"{monitor} comes with the end of an epoch|'{monitor}' was not measured at step 2"
    with pytest.raises((ConfigError, MetricMissing), match=message):
        fit(EarlyStopping(monitor=monitor, check_every_n_steps=2))


def test_checkpoints_are_ranked_by_any_training_metric() -> None:
    """Steps that are saved beside the epochs have no score by an epoch's mean."""
    hook = ModelCheckpoint(monitor="train/books/epoch_loss", save_every_n_steps=3)
    trainer = fit(hook)
    assert hook.best_score == min(value for _, value in recorded(trainer, "train/books/epoch_loss"))
    by_steps = ModelCheckpoint(monitor="train/books/loss", save_every_n_steps=1)
    assert fit(by_steps) and by_steps.best_score == min(value for _, value in recorded(trainer, "train/books/loss"))


def test_at_steps_the_newest_loss_of_a_loader_counts() -> None:
    """A loader may have no batch at the steps that are checked; without a new loss nothing is checked."""
    alternating = StoresValues("train/books/loss", check_every_n_steps=2)
    values = dict(recorded(fit(alternating, loader_schedule="round_robin", max_epochs=1), "train/books/loss"))
    assert alternating.shown == [(2, values[1]), (4, values[3]), (6, values[5])]
    one_by_one = StoresValues("train/books/loss", check_every_n_steps=3)
    values = dict(recorded(fit(one_by_one, max_epochs=1), "train/books/loss"))
    assert one_by_one.shown == [(3, values[3]), (6, values[4])]


@pytest.mark.parametrize(
    ("monitor", "options"),
    [
        ("train/books/loss", {}),
        ("train/books/loss", {"check_every_n_steps": 3}),
        ("train/books/epoch_loss", {}),
        ("train/epoch_acc", {}),
    ],
    ids=str,
)
def test_a_resumed_run_evaluates_what_the_uninterrupted_run_does(monitor: str, options: dict[str, Any]) -> None:
    """Resumed inside an epoch, after the last batch of the loader."""
    whole = StoresValues(monitor, **options)
    fit(whole, max_epochs=1)
    first, second = StoresValues(monitor, **options), StoresValues(monitor, **options)
    trainer = fit(first, ModelCheckpoint(save_every_n_steps=5), max_steps=5)
    fit(second, ModelCheckpoint(), max_epochs=1, max_steps=None, resume=trainer.run_dir)
    assert [*first.shown, *second.shown] == whole.shown


@pytest.mark.parametrize("options", [{}, {"check_every_n_steps": 2}], ids=["epochs", "steps"])
def test_a_misspelt_loader_is_an_error_that_names_the_nearest(options: dict[str, Any]) -> None:
    """Also a loader that had no batch in the step."""
    with pytest.raises(MetricMissing, match=r"'train/boks/loss'.*did you mean 'train/books/loss'"):
        fit(EarlyStopping(monitor="train/boks/loss", **options))


def test_at_steps_a_loaders_newest_loss_may_be_of_the_epoch_before() -> None:
    """At step 9 it is that of step 7, the last of the web's in the first epoch."""
    hook = StoresValues("train/web/loss", check_every_n_steps=9)
    of_web = dict(recorded(fit(hook), "train/web/loss"))
    assert hook.shown == [(9, pytest.approx(of_web[7]))]


def test_step_fn_may_name_a_metric_like_the_means_of_epochs() -> None:
    """It is evaluated at the steps that measure it."""
    hook = StoresValues("train/epoch_share", mode="min", check_every_n_steps=3)

    def with_share(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"loss": step_fn(model, batch)["loss"], "epoch_share": 0.5}

    fit(hook, step_fn=with_share)
    assert hook.shown == [(3, 0.5), (6, 0.5), (9, 0.5), (12, 0.5)]


def test_a_complex_metric_is_rejected() -> None:
    """It has no mean and no place in the record."""

    def with_phase(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"loss": step_fn(model, batch)["loss"], "phase": torch.tensor(1 + 2j)}

    with pytest.raises(TrainingError, match="'phase', besides the loss, is a complex number"):
        fit(step_fn=with_phase)


def test_a_file_name_may_contain_a_loaders_loss(caplog: pytest.LogCaptureFixture) -> None:
    """If the loader had no batch yet, 'none' is written, without a warning."""
    fit(ModelCheckpoint(save_every_n_steps=3, filename="{step}_{train/web/loss:.3f}"), max_epochs=1)
    assert "did you mean" not in caplog.text


# ---- metrics that cannot be measured ---------------------------------------------------------------------------------


BATCHES = make_batches(1)


def fit_two_epochs(hook: Any, validate_every: str | None) -> None:
    """Train two epochs of one batch."""
    options = {"data": BATCHES, "val_loaders": BATCHES, "max_epochs": 2, "sanity_batches": 0}
    train(hook, validate_every=validate_every, **options)


@pytest.mark.parametrize(
    "hook",
    [EarlyStopping(), EarlyStopping("eval/loss", check_on_train_epoch_end=True), CheckpointHook(monitor="val/loss")],
    ids=["early_stopping", "at the end of epochs", "checkpoint"],
)
def test_a_metric_that_nothing_measures_is_warned_of_at_the_start(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With val_loaders and without a schedule for validations, one warning says how to measure the metric."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit_two_epochs(hook, None)
    (warning,) = [line for line in caplog.messages if "validate_every" in line]
    assert f"{hook.monitor!r} is measured by validations" in warning and "call trainer.validate()" in warning


@pytest.mark.parametrize(
    ("hook", "validate_every"),
    [(EarlyStopping("val/loss"), "1 epochs"), (EarlyStopping("train/loss", check_on_train_epoch_end=True), None)],
    ids=["by validations", "by training"],
)
def test_a_metric_that_can_be_measured_is_not_warned_of(
    hook: Any, validate_every: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Validations are scheduled, or training itself measures the metric."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit_two_epochs(hook, validate_every)
    assert "validate_every" not in caplog.text


def test_the_loss_at_the_end_of_an_epoch_is_that_of_the_last_step() -> None:
    """Of all its micro-batches, as the record has it, and not of the last one."""
    hook = EarlyStopping("train/loss", check_on_train_epoch_end=True, verbose=False)
    trainer = train(hook, accumulate=2, record=True)
    assert hook.best == pytest.approx(recorded(trainer, "train/loss")[-1][1], rel=1e-6)


# ---- resumed runs, links and runs without an evaluation --------------------------------------------------------------


class Script(TrainingHook):
    """Gives each validation the next value of a list, as val/score."""

    saves = ("used",)

    def __init__(self, *values: float) -> None:
        self.values, self.used = values, 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["val/score"] = self.values[self.used]
        self.used += 1


def recording(*hooks: Any, batches: int = 2, **options: Any) -> SimpleTrainer:
    """Make a trainer that writes to disk, with two steps per epoch by default."""
    return make_trainer(*hooks, data=make_batches(batches), lr=0.01, sanity_batches=0, record=True, **options)


def fit_with(*hooks: Any, resume: Path | None = None, **options: Any) -> SimpleTrainer:
    """Train with a validation per epoch, by default."""
    trainer = recording(*hooks, val_loaders=make_batches(1), **options)
    trainer.fit(resume=resume)
    return trainer


def names(trainer: Trainer) -> list[str]:
    """Return the names in the checkpoints' directory."""
    return sorted(path.name for path in trainer.checkpoint_dir.iterdir())


def test_early_stopping_on_another_metric_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    """The best value of one metric means nothing for another."""
    stopping = EarlyStopping(monitor="val/score", mode="min")
    first = fit_with(Script(0.001, 0.001), stopping, ModelCheckpoint(), max_epochs=2)
    stopping = EarlyStopping(monitor="val/loss", patience=8)
    fit_with(Script(*[9.0] * 9), stopping, ModelCheckpoint(), max_epochs=4, resume=first.run_dir)
    assert stopping.best is not None and stopping.best > 0.01
    assert "the checkpoint's state is for val/score (min); starting over with val/loss (min)" in caplog.text


def test_checkpoints_of_another_metric_are_not_ranked() -> None:
    """They are not deleted either: they were the best by the metric of that time."""
    first = fit_with(Script(3, 1, 2), ModelCheckpoint(monitor="val/score", mode="min", save_top_k=3), max_epochs=3)
    hook = ModelCheckpoint(monitor="val/score", mode="max", save_top_k=1)
    second = fit_with(Script(3, 1, 2, 5, 7), hook, max_epochs=5, resume=first.run_dir)
    assert hook.best_score == 7 and hook.best_path.name == "step-00000010"
    assert set(names(second)) >= {"step-00000002", "step-00000004", "step-00000006", "step-00000010"}


def test_links_are_valid_after_a_resume_from_an_earlier_step() -> None:
    """The best one was set aside with all that came later; what is left has a best one, too."""
    first = fit_with(Script(5, 4, 3, 1), ModelCheckpoint(monitor="val/score", mode="min"), max_epochs=4)
    hook = ModelCheckpoint(monitor="val/score", mode="min")
    earlier = first.checkpoint_dir / "step-00000006"
    second = fit_with(Script(5, 4, 3, 7, 8), hook, max_epochs=5, resume=earlier)
    assert (second.checkpoint_dir / "best").resolve() == hook.best_path.resolve() == earlier.resolve()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_is_requested_twice_is_saved_once(asynchronous: bool) -> None:
    """By a hook and by `save`; hooks do not delete what `save` requested."""
    trainer = recording(ModelCheckpoint(save_top_k=1), max_epochs=4, async_save=asynchronous)
    trainer.on("epoch_end")(lambda trainer, epoch: trainer.save() if epoch == 0 else None)
    trainer.train()
    assert names(trainer) == ["step-00000002", "step-00000006", "step-00000008"]


def test_a_file_name_has_what_was_measured_at_its_step() -> None:
    """Also where the validation's value was not good enough to be ranked."""
    name = "s{step}_{val/score:.1f}"
    hook = ModelCheckpoint(
        monitor="val/score", mode="min", save_every_n_steps=2, filename=name, auto_insert_metric_name=False
    )
    trainer = fit_with(Script(1, 5, 4), hook, batches=7, max_epochs=1, validate_every=2)
    assert {name for name in names(trainer) if name != "best"} == {"s2_1.0", "s4_5.0", "s6_4.0"}


def test_batches_that_no_step_ends_with_are_saved_with_their_step() -> None:
    """The third and the sixth batch are inside of steps 2 and 3."""
    trainer = recording(ModelCheckpoint(save_every="3 batches", save_every_n_epochs=None), batches=8, accumulate=2)
    trainer.train()
    assert [name for name in names(trainer) if name.startswith("step")] == ["step-00000002", "step-00000003"]


def test_a_metric_of_training_is_checked_at_the_end_of_epochs() -> None:
    """By default, because no validation measures it."""
    stopping = EarlyStopping(monitor="train/loss", patience=50)
    recording(stopping, max_epochs=3).train()
    with pytest.raises(ConfigError, match="comes with the end of an epoch"):
        EarlyStopping(monitor="train/epoch_loss", check_every_n_steps=2)


def test_steps_are_saved_beside_the_loss_of_the_epoch() -> None:
    """It does not come with steps."""
    hook = ModelCheckpoint(monitor="train/epoch_loss", save_every_n_steps=3)
    fit_with(hook, batches=4, max_epochs=2)
    assert hook.best_score is not None and hook.best_path.name == "step-00000008"


def test_metrics_that_hooks_add_to_batches_are_measured_at_steps() -> None:
    """It is not measured at the end of an epoch; the error names the metrics that are."""
    trainer = recording(ModelCheckpoint(monitor="train/extra", mode="min"))
    trainer.on("train_batch_end")(lambda metrics: metrics.update(extra=0.5))
    with pytest.raises(MetricMissing, match=r"are evaluated only at steps; .*train/epoch_loss, train/loss"):
        trainer.train()


@pytest.mark.parametrize("hook", [ModelCheckpoint(monitor="val/loss"), EarlyStopping()], ids=["checkpoint", "stopping"])
def test_a_metric_that_was_never_evaluated_is_warned_of_at_the_end(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is too short for a validation would otherwise look healthy."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit_with(hook, batches=9, max_steps=3)
    assert "'val/loss' was never evaluated: no validation happened in 3 steps" in caplog.text
    caplog.clear()
    fit_with(hook, batches=3, max_epochs=1)
    assert "never evaluated" not in caplog.text


def test_requested_checkpoints_of_one_run_protect_nothing_in_the_next() -> None:
    """Another run has another directory, in which hooks delete what is surplus."""
    trainer = recording(ModelCheckpoint(save_top_k=1), max_epochs=4)
    trainer.on("epoch_end", name="by hand")(lambda trainer, epoch: trainer.save() if epoch == 0 else None)
    trainer.train()
    assert trainer.requested_checkpoints == {"step-00000002"}
    trainer.hooks.remove("by hand")
    trainer.fit(max_epochs=6)
    assert trainer.requested_checkpoints == set()


# ---- checkpoints between a validation and the end of its epoch -------------------------------------------------------


class FourBatches:
    """A loader without a length: the last batch is known to be the last only when it ends."""

    def __iter__(self) -> Iterator[Any]:
        yield from make_batches(4)


def make_scored_trainer(scores: list[float], *entries: dict[str, Any]) -> SimpleTrainer:
    """Make a trainer that validates at the last of four steps of an epoch and saves every step."""
    every_step = {"name": "checkpoint", "as": "steps", "save_every_n_epochs": None, "save_every_n_steps": 1}
    options = {"max_epochs": len(scores), "validate_every": 4, "hooks": {"lifecycle": [every_step, *entries]}}
    return make_trainer(Script(*scores), data=FourBatches(), val_loaders=make_batches(1), record=True, **options)


def resumed_from(trainer: SimpleTrainer, made: SimpleTrainer, step: int, place: Path) -> SimpleTrainer:
    """Resume from a copy of the checkpoint of a step, as a new run."""
    shutil.copytree(made.checkpoint_dir / f"step-{step:08d}", place / f"step-{step}")
    trainer.fit(resume=place / f"step-{step}")
    return trainer


@pytest.mark.parametrize("step", [3, 4, 5, 8])
def test_a_resumed_run_makes_the_check_at_the_end_of_the_epoch(step: int, tmp_path: Path) -> None:
    """The run ends at the step at which the uninterrupted one ended, for the same reason."""
    entry = {
        "name": "early_stopping", "monitor": "val/score", "mode": "min", "patience": 2, "check_on_train_epoch_end": True
    }  # fmt: skip
    scores = [3.0, 4.0, 5.0, 6.0]
    whole = make_scored_trainer(scores, entry)
    whole.fit()
    assert (whole.step, whole.stop_reason) == (12, "val/score has not improved on 3 for 2 checks")
    other = resumed_from(make_scored_trainer(scores, entry), whole, step, tmp_path)
    assert (other.step, other.stop_reason) == (whole.step, whole.stop_reason)


def test_the_weights_that_were_validated_are_restored(tmp_path: Path) -> None:
    """With `ema` these are the averaged ones, not those of training."""
    stopping = {
        "name": "early_stopping", "monitor": "val/score", "mode": "min", "patience": 1, "check_on_train_epoch_end": True
    }  # fmt: skip
    entries = [{**stopping, "restore_best_weights": True}, {"name": "ema", "decay": 0.5, "warmup": False}]
    whole = make_scored_trainer([3.0, 4.0], *entries)
    whole.fit()
    other = resumed_from(make_scored_trainer([3.0, 4.0], *entries), whole, 4, tmp_path)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name


def test_a_checkpoint_at_the_end_of_the_epoch_has_its_score(tmp_path: Path) -> None:
    """The validation's metric ranks the checkpoint of the end of the epoch, also after a resume."""
    entry = {
        "name": "checkpoint", "as": "best_ones", "monitor": "val/score", "mode": "min", "save_on_train_epoch_end": True
    }  # fmt: skip
    whole = make_scored_trainer([3.0, 4.0], entry)
    whole.fit()
    other = resumed_from(make_scored_trainer([3.0, 4.0], entry), whole, 4, tmp_path)
    assert whole.hooks.get("best_ones").best_score == 3
    assert other.hooks.get("best_ones").best_score == 3


# ---- before the first step -------------------------------------------------------------------------------------------


def validated(*hooks: TrainingHook, **options: Any) -> SimpleTrainer:
    """Make a trainer with a validation loader and a sanity check."""
    options = {"val_dataloader": make_batches(2), "max_epochs": 2, **options}
    return make_trainer(*hooks, step_fn=step_fn, loss_fn=None, record=True, **options)


class AddsScore(TrainingHook):
    """Adds a metric to each validation."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["val/score"] = 1.0


class Validates(TrainingHook):
    """Validates on data that the trainer was not given."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        trainer.validate(make_batches(1))


@pytest.mark.parametrize("make", [EarlyStopping, CheckpointHook])
def test_a_wrong_monitor_is_refused_by_the_sanity_check(make: Any) -> None:
    """An epoch may take a day: the error comes before the first step."""
    trainer = validated(make(monitor="val/los", mode="min"))
    with pytest.raises(MetricMissing, match="'val/los' is not measured by validations; did you mean 'val/loss'"):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.parametrize("make", [EarlyStopping, CheckpointHook])
def test_what_only_the_first_epoch_can_show_is_not_refused(make: Any) -> None:
    """A hook may add the metric or validate itself, and a loader that can be read once is not tried."""
    trainer = validated(make(monitor="val/score", mode="min"), AddsScore())
    trainer.train()
    assert trainer.step == 8
    trainer = validated(Validates(), make(monitor="val/loss"), val_dataloader=None)
    trainer.train()
    assert trainer.step == 8
    trainer = validated(make(monitor="val/los", mode="min"), val_dataloader=iter(make_batches(9)))
    with pytest.raises(MetricMissing, match="'val/los' was not measured after the validation at step 4"):
        trainer.train()


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val/loss", "min"), ("val/accuracy", "max"), ("eval/f1", "max"), ("train/perplexity", "min"), ("val/mae", "min")],
)
@pytest.mark.parametrize("make", [EarlyStopping, ModelCheckpoint, partial(NotifyHook, "https://example.com/x")])
def test_the_name_of_a_metric_says_which_direction_is_better(make: Any, monitor: str, mode: str) -> None:
    """As `compare` and the report know it; `mode` overrides it."""
    assert make(monitor=monitor).mode == mode
    assert make(monitor=monitor, mode="min").mode == "min"


@pytest.mark.parametrize("monitor", ["val/reward2", "val/neg_log_loss"])
@pytest.mark.parametrize("make", [EarlyStopping, ModelCheckpoint, partial(NotifyHook, "https://example.com/x")])
def test_a_name_that_says_no_direction_needs_the_mode(make: Any, monitor: str) -> None:
    """The error names the metric, and is raised before the run; scikit-learn's neg_log_loss rises."""
    with pytest.raises(HooklineError, match=rf"'{monitor}' does not say whether lower or higher.*set mode to 'min'"):
        make(monitor=monitor)
    assert make(monitor=monitor, mode="max").mode == "max"


def test_the_best_checkpoint_by_accuracy_is_kept_without_a_mode() -> None:
    """`monitor: val/accuracy` alone kept the worst model."""
    values = iter([0.2, 0.9, 0.5])
    hook = ModelCheckpoint(monitor="val/accuracy")
    trainer = validated(hook, max_epochs=3, sanity_batches=0)
    trainer.on("validation_end")(lambda metrics: metrics.update({"val/accuracy": next(values)}))
    trainer.train()
    assert hook.best_score == 0.9
