"""Checkpoints and early stopping look at any number that training records: of a loader, of step_fn, of an epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import EarlyStopping, GenericTrainer, ModelCheckpoint, Trainer, read_metrics
from hookline.errors import ConfigError, MetricMissing, TrainingError
from hookline.hooks.monitored import Measurement
from hookline.registry.base import TrainingHook

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int) -> list[Batch]:
    """The same every time."""
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(4, 2, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def step_fn(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """A loss, and a number beside it that still has its graph."""
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return {"loss": loss, "acc": loss * 2}


class Looks(EarlyStopping):
    """Keeps the values it was shown."""

    def __init__(self, monitor: str, **options: Any) -> None:
        super().__init__(monitor=monitor, patience=99, **options)
        self.shown: list[tuple[int, float]] = []

    def evaluate(self, trainer: Any, measurement: Measurement) -> None:
        """Store what a check would see."""
        if (value := self.monitored_value(measurement)) is not None:
            self.shown.append((measurement.step, value))


def fit(*hooks: TrainingHook, resume: Path | None = None, **options: Any) -> Trainer:
    """Four batches of books and three of the web, in each of two epochs."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    options = {"max_epochs": 2, "console": False, "sanity_batches": 0, **options}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = GenericTrainer({}, model, optimizer, device="cpu", **{"step_fn": step_fn, **options})
    for hook in hooks:
        trainer.add_hook(hook)
    trainer.fit({"books": batches(4), "web": batches(3)}, resume=resume)
    return trainer


def recorded(trainer: Trainer, name: str) -> list[tuple[int, float]]:
    """Where the record has the metric."""
    assert trainer.run_dir is not None
    return [(line["step"], line[name]) for line in read_metrics(trainer.run_dir) if name in line]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_means_of_an_epoch_are_over_its_micro_batches(accumulate: int) -> None:
    """Those of a loader are of its own, those of step_fn's numbers of all that had them."""
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
    hook = Looks(monitor)
    trainer = fit(hook, loader_schedule=schedule, accumulate=accumulate)
    values, ends = recorded(trainer, monitor), [step for step, _ in recorded(trainer, "train/epoch_loss")]
    assert hook.shown == [(end, [value for step, value in values if step <= end][-1]) for end in ends]


@pytest.mark.parametrize("monitor", ["train/epoch_loss", "train/epoch_acc", "train/books/epoch_loss"])
def test_the_means_of_an_epoch_are_looked_at_there(monitor: str) -> None:
    """And nowhere else: to check them by steps is refused; what may be a name of step_fn's own is missed there."""
    hook = Looks(monitor)
    trainer = fit(hook)
    assert hook.shown == recorded(trainer, monitor) and len(hook.shown) == 2
    with pytest.raises(
        (ConfigError, MetricMissing), match=f"{monitor} comes with the end of an epoch|'{monitor}' at step 2"
    ):
        fit(EarlyStopping(monitor=monitor, check_every_n_steps=2))


def test_a_checkpoint_is_ranked_by_any_of_them() -> None:
    """Steps that are saved beside the epochs have no score by an epoch's mean."""
    hook = ModelCheckpoint(monitor="train/books/epoch_loss", save_every_n_steps=3)
    trainer = fit(hook)
    assert hook.best_score == min(value for _, value in recorded(trainer, "train/books/epoch_loss"))
    by_steps = ModelCheckpoint(monitor="train/books/loss", save_every_n_steps=1)
    assert fit(by_steps) and by_steps.best_score == min(value for _, value in recorded(trainer, "train/books/loss"))


def test_at_steps_the_newest_loss_of_a_loader_since_the_last_look_counts() -> None:
    """Turns and checks may never meet; where it had no part in between there is nothing to check."""
    turns = Looks("train/books/loss", check_every_n_steps=2)
    values = dict(recorded(fit(turns, loader_schedule="round_robin", max_epochs=1), "train/books/loss"))
    assert turns.shown == [(2, values[1]), (4, values[3]), (6, values[5])]
    one_by_one = Looks("train/books/loss", check_every_n_steps=3)
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
)
def test_a_run_that_goes_on_knows_what_was_measured(monitor: str, options: dict[str, Any]) -> None:
    """Inside an epoch, behind the last batch of the loader."""
    whole = Looks(monitor, **options)
    fit(whole, max_epochs=1)
    first, second = Looks(monitor, **options), Looks(monitor, **options)
    trainer = fit(first, ModelCheckpoint(save_every_n_steps=5), max_steps=5)
    fit(second, ModelCheckpoint(), max_epochs=1, max_steps=None, resume=trainer.run_dir)
    assert [*first.shown, *second.shown] == whole.shown


@pytest.mark.parametrize("options", [{}, {"check_every_n_steps": 2}], ids=["epochs", "steps"])
def test_a_slip_in_a_loaders_name_is_told_with_those_there_are(options: dict[str, Any]) -> None:
    """Also those that had no part in the step."""
    with pytest.raises(MetricMissing, match=r"'train/boks/loss'.*did you mean 'train/books/loss'.*train/web/"):
        fit(EarlyStopping(monitor="train/boks/loss", **options))


def test_at_steps_a_loaders_newest_loss_may_be_of_the_epoch_before() -> None:
    """At step 9 it is that of step 7, the last of the web's in the first epoch."""
    looks = Looks("train/web/loss", check_every_n_steps=9)
    of_web = dict(recorded(fit(looks), "train/web/loss"))
    assert looks.shown == [(9, pytest.approx(of_web[7]))]


def test_step_fn_may_call_a_number_as_the_means_of_epochs_are_called() -> None:
    """It is looked at where it is measured."""
    looks = Looks("train/epoch_share", check_every_n_steps=3)

    def with_share(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"loss": step_fn(model, batch)["loss"], "epoch_share": 0.5}

    fit(looks, step_fn=with_share)
    assert looks.shown == [(3, 0.5), (6, 0.5), (9, 0.5), (12, 0.5)]


def test_a_complex_number_is_refused_by_its_name() -> None:
    """It has no mean and no place in the record."""

    def with_phase(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"loss": step_fn(model, batch)["loss"], "phase": torch.tensor(1 + 2j)}

    with pytest.raises(TrainingError, match="'phase', beside the loss, is a complex number"):
        fit(step_fn=with_phase)


def test_a_name_of_a_file_may_have_a_loaders_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Where the loader had no part yet, 'none' is written and no other loader is proposed."""
    fit(ModelCheckpoint(save_every_n_steps=3, filename="{step}_{train/web/loss:.3f}"), max_epochs=1)
    assert "did you mean" not in caplog.text
