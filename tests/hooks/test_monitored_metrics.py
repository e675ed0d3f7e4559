"""What checkpoints and early stopping say of a metric is true of that metric, over resumes, links and silent runs."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import EarlyStopping, GenericTrainer, ModelCheckpoint, Trainer, TrainingHook
from hookline.errors import ConfigError, MetricMissing

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int) -> list[Batch]:
    """The same every time."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 2, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


class Script(TrainingHook):
    """Gives each validation the next of some values."""

    saves = ("used",)

    def __init__(self, *values: float) -> None:
        self.values, self.used = values, 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["val/m"] = self.values[self.used]
        self.used += 1


def make_trainer(*hooks: Any, **options: Any) -> Trainer:
    """Made with these hooks."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    options = {"loss_fn": nn.functional.mse_loss, "console": False, "sanity_batches": 0, **options}
    trainer = GenericTrainer({}, model, torch.optim.SGD(model.parameters(), 0.01), device="cpu", **options)
    for hook in hooks:
        trainer.add_hook(hook)
    return trainer


def fit(*hooks: Any, train: Any = None, resume: Path | None = None, **options: Any) -> Trainer:
    """Two steps an epoch and one validation, unless told otherwise."""
    trainer = make_trainer(*hooks, **options)
    trainer.fit(train or batches(2), batches(1), resume=resume)
    return trainer


def names(trainer: Trainer) -> list[str]:
    """What lies among the checkpoints."""
    assert trainer.checkpoint_dir is not None
    return sorted(path.name for path in trainer.checkpoint_dir.iterdir())


def test_early_stopping_on_another_metric_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """The best value of the one says nothing of the other."""
    first = fit(Script(0.001, 0.001), EarlyStopping(monitor="val/m"), ModelCheckpoint(), max_epochs=2)
    stopping = EarlyStopping(monitor="val/loss", patience=8)
    fit(Script(*[9.0] * 9), stopping, ModelCheckpoint(), max_epochs=4, resume=first.run_dir)
    assert stopping.best is not None and stopping.best > 0.01
    assert "the checkpoint's state is about val/m (min); starting over with val/loss (min)" in caplog.text


def test_checkpoints_of_another_metric_are_not_ranked() -> None:
    """Nor are they deleted: they were the best by what was asked for then."""
    first = fit(Script(3, 1, 2), ModelCheckpoint(monitor="val/m", save_top_k=3), max_epochs=3)
    hook = ModelCheckpoint(monitor="val/m", mode="max", save_top_k=1)
    second = fit(Script(3, 1, 2, 5, 7), hook, max_epochs=5, resume=first.run_dir)
    assert hook.best_score == 7 and hook.best_path is not None and hook.best_path.name == "step-00000010"
    assert set(names(second)) >= {"step-00000002", "step-00000004", "step-00000006", "step-00000010"}


def test_links_lead_somewhere_after_a_resume_from_an_earlier_step() -> None:
    """The best one was set aside with all that came later; what is left has a best one, too."""
    first = fit(Script(5, 4, 3, 1), ModelCheckpoint(monitor="val/m"), max_epochs=4)
    assert first.checkpoint_dir is not None
    hook = ModelCheckpoint(monitor="val/m")
    earlier = first.checkpoint_dir / "step-00000006"
    second = fit(Script(5, 4, 3, 7, 8), hook, max_epochs=5, resume=earlier)
    assert second.checkpoint_dir is not None and hook.best_path is not None
    assert (second.checkpoint_dir / "best").resolve() == hook.best_path.resolve() == earlier.resolve()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_two_ask_for_is_saved_once(asynchronous: bool) -> None:
    """By a hook and by hand; and what was asked for by hand no hook deletes."""
    trainer = make_trainer(ModelCheckpoint(save_top_k=1), max_epochs=4, async_save=asynchronous)
    trainer.on("epoch_end")(lambda trainer, epoch: trainer.save() if epoch == 0 else None)
    trainer.fit(batches(2))
    assert names(trainer) == ["step-00000002", "step-00000006", "step-00000008"]


def test_a_file_name_has_what_was_measured_at_its_step() -> None:
    """Also where the validation's value was not good enough to be ranked."""
    name = "s{step}_{val/m:.1f}"
    hook = ModelCheckpoint(monitor="val/m", save_every_n_steps=2, filename=name, auto_insert_metric_name=False)
    trainer = fit(Script(1, 5, 4), hook, train=batches(7), max_epochs=1, validate_every=2)
    assert {name for name in names(trainer) if name != "best"} == {"s2_1.0", "s4_5.0", "s6_4.0"}


def test_batches_that_no_step_ends_with_are_saved_with_their_step() -> None:
    """The third and the sixth batch are inside of steps 2 and 3."""
    trainer = make_trainer(ModelCheckpoint(save_every="3 batches", save_every_n_epochs=None), accumulate=2)
    trainer.fit(batches(8))
    assert [name for name in names(trainer) if name.startswith("step")] == ["step-00000002", "step-00000003"]


def test_a_metric_of_training_is_checked_at_the_end_of_epochs() -> None:
    """Without being told to; there is no validation to wait for."""
    stopping = EarlyStopping(monitor="train/loss", patience=50)
    make_trainer(stopping, max_epochs=3).fit(batches(2))
    assert stopping.best is not None
    with pytest.raises(ConfigError, match="comes with the end of an epoch"):
        EarlyStopping(monitor="train/epoch_loss", check_every_n_steps=2)


def test_the_loss_of_the_epoch_is_looked_at_there_and_steps_are_saved_beside() -> None:
    """It does not come with steps."""
    hook = ModelCheckpoint(monitor="train/epoch_loss", save_every_n_steps=3)
    fit(hook, train=batches(4), max_epochs=2)
    assert hook.best_score is not None and hook.best_path is not None and hook.best_path.name == "step-00000008"


def test_what_hooks_add_to_batches_is_said_to_be_there_at_steps() -> None:
    """At the end of an epoch there is no such metric; the error names those that there are."""
    trainer = make_trainer(ModelCheckpoint(monitor="train/extra"))
    trainer.on("train_batch_end")(lambda metrics: metrics.update(extra=0.5))
    with pytest.raises(MetricMissing, match=r"are evaluated at steps only; .*train/epoch_loss, train/loss"):
        trainer.fit(batches(2))


@pytest.mark.parametrize("hook", [ModelCheckpoint(monitor="val/loss"), EarlyStopping()], ids=["checkpoint", "stopping"])
def test_a_metric_that_was_never_looked_at_is_told_at_the_end(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is too short for a validation would else look like a healthy one; one that validates is."""
    with caplog.at_level(logging.WARNING, "hookline"):
        fit(hook, train=batches(9), max_steps=3)
    assert "'val/loss' was never evaluated: no validation happened in 3 steps" in caplog.text
    caplog.clear()
    fit(hook, train=batches(3), max_epochs=1)
    assert "never evaluated" not in caplog.text


def test_what_was_saved_by_hand_in_one_run_protects_nothing_in_the_next() -> None:
    """Another run has another directory, and its hooks delete what is too many there."""
    trainer = make_trainer(ModelCheckpoint(save_top_k=1), max_epochs=4)
    trainer.on("epoch_end", name="by hand")(lambda trainer, epoch: trainer.save() if epoch == 0 else None)
    trainer.fit(batches(2))
    assert trainer.saved_by_hand == {"step-00000002"}
    trainer.hooks.remove("by hand")
    trainer.fit(batches(2), max_epochs=6)
    assert trainer.saved_by_hand == set()
