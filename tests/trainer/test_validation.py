"""Validation: eval mode, no grad, random streams untouched, metrics averaged by samples, both spellings."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import Batch, batches_of, make_batches, make_model
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline import EarlyStopping, Trainer, TrainingHook
from hookline.errors import ConfigError, TrainingError

OPTIONS = {"model": partial(make_model, between=partial(nn.Dropout, 0.5)), "data": make_batches(2)}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


def loss_of(trainer: Trainer, batches: list[Batch]) -> float:
    """The mean loss over all samples, by hand."""
    trainer.model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(trainer.model(x), y, reduction="sum").item() for x, y in batches)
    return total / sum(len(x) for x, _ in batches)


def test_metrics_are_weighted_by_samples() -> None:
    """A short last batch counts as much as its samples."""
    trainer, batches = make_trainer(), batches_of(8, 8, 1)
    assert trainer.validate(batches)["val/loss"] == pytest.approx(loss_of(trainer, batches), rel=1e-5)


def test_metrics_are_recorded_if_a_hook_fails_at_the_end() -> None:
    """A misspelt metric of a checkpoint hook ends the run, and the record still has what was measured."""
    trainer = make_trainer(val_dataloader=batches_of(2))

    @trainer.on("validation_end", on_error="raise")
    def broken() -> None:
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        trainer.train()
    assert "val/loss" in trainer.record.metrics[-1]


def test_several_loaders() -> None:
    """Each has its own loss, and val/loss is that of all samples."""
    trainer = make_trainer()
    first, second = batches_of(8, 2), batches_of(3)
    metrics = trainer.validate({"near": first, "far": second})
    assert metrics["val/near/loss"] == pytest.approx(loss_of(trainer, first), rel=1e-5)
    assert metrics["val/far/loss"] == pytest.approx(loss_of(trainer, second), rel=1e-5)
    assert metrics["val/loss"] == pytest.approx(loss_of(trainer, first + second), rel=1e-5)


@pytest.mark.req("002-45", "002-59", "004-05", "004-18")
def test_the_spelling_of_the_method_decides() -> None:
    """on_validation_end gets val/… keys, on_eval_end eval/… keys, and both see what the other added."""

    class Val(TrainingHook):
        def on_validation_end(self, trainer: Any, epoch: int, metrics: dict[str, float]) -> None:
            metrics["val/accuracy"] = 0.25
            self.seen = dict(metrics)

    class Eval(TrainingHook):
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            self.seen = dict(metrics)
            metrics["eval/mine"] = 0.5

    trainer = make_trainer(val := Val(), evaluator := Eval())
    returned = trainer.validate(batches_of(2))
    assert set(val.seen) == {"val/loss", "val/accuracy"}
    assert set(evaluator.seen) == {"eval/loss", "eval/accuracy"}
    assert val.seen["val/loss"] == evaluator.seen["eval/loss"]
    assert returned["val/mine"] == 0.5


@pytest.mark.req("004-18")
def test_a_language_model_has_a_perplexity() -> None:
    """Where tokens are counted, eval/perplexity is the exponential of the loss."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    tokens = torch.randint(5, (2, 6))

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    metrics = builders.train(model=model, data=[tokens], loss_fn=None, step_fn=step).validate([tokens])
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))


@pytest.mark.req("002-58", "002-60", "002-61")
def test_what_is_true_inside() -> None:
    """Eval mode without grad inside; afterwards every module is in the mode it was in, a frozen one too."""
    trainer = make_trainer()
    trainer.model.get_submodule("2").eval()
    seen: list[Any] = []

    class Watch(TrainingHook):
        def on_validation_start(self, trainer: Any, epoch: int) -> None:
            seen.append((trainer.model.training, torch.is_grad_enabled(), epoch))

        def on_validation_batch_start(
            self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
        ) -> None:
            seen.append((len(batch[0]), batch_idx, dataloader_idx, dataloader_name))

        def on_validation_batch_end(
            self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str,
            metrics: dict[str, float],
        ) -> None:  # fmt: skip
            seen.append(metrics["loss"] > 0)

    trainer.add_hook(Watch())
    trainer.validate({"a": batches_of(2), "b": batches_of(3)})
    assert seen == [(False, False, 0), (2, 0, 0, "a"), True, (3, 0, 1, "b"), True]
    assert [module.training for module in trainer.model.children()] == [True, True, False]
    assert trainer.model.training


def test_validate_inside_an_event_changes_nothing_around_it() -> None:
    """The training batch, its loss and the random streams are as before."""
    trainer = make_trainer()
    seen: list[bool] = []

    @trainer.on("after_backward")
    def validate(trainer: Trainer) -> None:
        args = trainer.event_args
        before = args.batch, args.batch_idx, args.dataloader_name, args.loss, args.phase
        stream = torch.get_rng_state()
        trainer.validate(batches_of(2, 2))
        after = args.batch, args.batch_idx, args.dataloader_name, args.loss, args.phase
        seen.append(before == after and torch.equal(stream, torch.get_rng_state()))

    trainer.train()
    assert seen == [True, True]


def test_the_sanity_check_is_silent_and_early() -> None:
    """A broken validation set ends the run before the first step; a good one leaves no trace in events or metrics."""
    received: list[str] = []
    trainer = make_trainer(val_dataloader=batches_of(2, 2, 2), validate_every=None)
    trainer.on("validation_batch_end")(lambda: received.append("batch"))
    trainer.train()
    assert received == []
    broken = make_trainer(val_dataloader=[(torch.randn(2, 7), torch.randn(2, 1))])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        broken.train()
    assert broken.step == 0
    assert broken.record.run["outcome"] == "failed"


def test_the_sanity_check_can_be_left_out() -> None:
    """With sanity_batches=0 a broken validation set is found when it is first used."""
    trainer = make_trainer(val_dataloader=[(torch.randn(2, 7), torch.randn(2, 1))], sanity_batches=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.train()
    assert trainer.step == 2


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [1, 2, 3, 4]), (3, [3]), ("1 epoch", [2, 4]), ("2 epochs", [4]), (None, [])], ids=str
)
def test_when_validation_is_due(every: Any, steps: list[int]) -> None:
    """A validation runs every few steps or epochs, or never."""
    trainer = make_trainer(val_dataloader=batches_of(2), validate_every=every, max_epochs=2)
    seen: list[int] = []
    trainer.on("validation_end")(lambda step: seen.append(step))
    trainer.train()
    assert seen == steps


def test_validation_metrics_are_recorded_at_their_step() -> None:
    """The record has them beside the step's loss."""
    trainer = train(val_dataloader=batches_of(2), validate_every=2)
    lines = [line for line in trainer.record.metrics if "val/loss" in line]
    assert [line["step"] for line in lines] == [2]


def test_nothing_to_validate_on() -> None:
    """Said in words, also for a loader that gives nothing."""
    trainer = make_trainer()
    with pytest.raises(TrainingError, match="there is nothing to validate on: pass val_loaders"):
        trainer.validate()
    with pytest.raises(TrainingError, match="the validation loaders yielded no batches"):
        trainer.validate(iter([]))


def test_a_plateau_scheduler_waits_for_the_validation() -> None:
    """ReduceLROnPlateau is stepped with val/loss, once per validation, and not with the steps."""
    trainer = train(val_dataloader=batches_of(2), max_epochs=3, scheduler=ReduceLROnPlateau)
    assert trainer.schedulers[0].last_epoch == 3


FAR = [(torch.zeros(4, 3), torch.full((4, 1), 100.0))]


class AlsoFar(TrainingHook):
    """Validates on another set inside the event, once."""

    def __init__(self) -> None:
        self.busy = False
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        if not self.busy:
            self.busy = True
            self.seen.append(trainer.validate(FAR)["val/loss"])
            self.busy = False
            metrics["val/mine"] = 0.5


def test_a_validation_inside_a_validations_end_leaves_its_numbers() -> None:
    """The outer one returns, records and hands to plateau schedulers what it measured itself."""
    trainer = train(hook := AlsoFar(), val_dataloader=batches_of(4), scheduler=ReduceLROnPlateau)
    expected = pytest.approx(loss_of(trainer, batches_of(4)), rel=1e-5)
    assert hook.seen[0] > 1000 and trainer.schedulers[0].best == expected
    recorded = [line for line in trainer.record.metrics if "val/loss" in line]
    assert [line["val/loss"] for line in recorded] == [expected]
    assert trainer.validate(batches_of(4)) == {"val/loss": expected, "val/mine": 0.5}


@pytest.mark.parametrize("monitor", ["early_stopping", "checkpoint"])
def test_a_validation_inside_another_decides_nothing(monitor: str) -> None:
    """Hooks that monitor the run use its own validations, and none that a hook calls in between."""
    trainer = make_trainer(AlsoFar(), val_dataloader=batches_of(4), max_epochs=3, record=monitor == "checkpoint")
    trainer.add_hook(monitor, monitor="val/loss", mode="max")  # the other set's losses are larger by far
    trainer.train()
    hook = trainer.hooks.get(monitor)
    assert 0 < (hook.best if monitor == "early_stopping" else hook.best_score) < 1000


def test_the_weights_of_a_validation_inside_are_not_the_best() -> None:
    """Early stopping that restores the best weights keeps those of the run's own validation."""
    trainer = make_trainer(val_dataloader=batches_of(4), max_epochs=1)
    options = {"monitor": "val/loss", "check_on_train_epoch_end": True, "restore_best_weights": True}
    trainer.add_hook("early_stopping", **options)
    zeroed: list[bool] = []

    @trainer.on("validation_end", name="zeroes", after="early_stopping")
    def zeroes(trainer: Trainer) -> None:
        if not zeroed:
            zeroed.append(True)
            own = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
            for weight in trainer.model.parameters():
                nn.init.zeros_(weight)
            trainer.validate()
            trainer.model.load_state_dict(own)

    trainer.train()
    assert zeroed and all(weight.any() for weight in trainer.model.parameters())


def test_two_hooks_may_each_validate_inside() -> None:
    """One of them inside the other's, too."""
    trainer = make_trainer(debug=True)
    trainer.add_hook(AlsoFar(), "one")
    trainer.add_hook(AlsoFar(), "two")
    assert trainer.validate(batches_of(4))["val/loss"] == pytest.approx(loss_of(trainer, batches_of(4)), rel=1e-5)


def test_a_validation_that_would_call_itself_endlessly_is_rejected() -> None:
    """A hook that validates at every end of a validation fails at the second one; the next validation works again."""
    trainer = make_trainer(debug=True)
    received: list[float] = []

    @trainer.on("validation_end", name="again")
    def again(trainer: Trainer, metrics: dict[str, Any]) -> None:
        received.append(metrics["val/loss"])
        trainer.validate(FAR)

    for count in (2, 4):
        with pytest.raises(TrainingError, match="by hook 'again' inside the validation that it called"):
            trainer.validate(batches_of(2))
        assert len(received) == count


def test_a_metric_of_some_batches_is_averaged_over_their_samples() -> None:
    """In one loader as across several."""

    def step(model: Any, batch: Batch) -> dict[str, Any]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, **({"recall": len(batch[0]) / 4} if len(batch[0]) > 1 else {})}

    trainer = make_trainer(step_fn=step, loss_fn=None)
    assert trainer.validate(batches_of(1, 4, 1, 2))["val/recall"] == pytest.approx((4 * 1.0 + 2 * 0.5) / 6)
    metrics = trainer.validate({"a": batches_of(1, 4), "b": batches_of(2, 1), "c": batches_of(1)})
    assert (metrics["val/a/recall"], metrics["val/b/recall"]) == (1.0, 0.5) and "val/c/recall" not in metrics
    assert metrics["val/recall"] == pytest.approx((4 * 1.0 + 2 * 0.5) / 6)


def test_numpy_numbers_are_metrics() -> None:
    """Of every type, from a step and from a hook, in a validation and in training."""
    numpy = pytest.importorskip("numpy")

    def step(model: Any, batch: Batch) -> dict[str, Any]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "f32": numpy.float32(1.5), "n": numpy.int64(3)}

    trainer = make_trainer(step_fn=step, loss_fn=None)
    metrics = trainer.validate(batches_of(2, 2))
    assert (metrics["val/f32"], metrics["val/n"]) == (1.5, 3.0)
    trainer.train()
    last = trainer.record.metrics[-1]
    assert (last["train/f32"], last["train/n"]) == (1.5, 3)


def test_an_iterator_is_left_for_the_first_validation() -> None:
    """The sanity check cannot give back what it reads; beside it, a list is tried as ever."""
    received: list[str] = []
    trainer = make_trainer(val_loaders={"once": iter(batches_of(2, 2, 2, 2)), "list": batches_of(2)})
    trainer.on("validation_batch_end")(lambda dataloader_name: received.append(dataloader_name))
    trainer.train()
    assert received == ["once"] * 4 + ["list"]
    broken = make_trainer(val_loaders={"once": iter(batches_of(2)), "list": [(torch.ones(2, 7), torch.ones(2, 1))]})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        broken.train()
    assert broken.step == 0


def test_a_hook_may_validate_inside_the_outermost_validation() -> None:
    """The outermost one is inside of none, even if the same hook called it."""
    depths: list[int] = []

    class Twice(TrainingHook):
        def on_step_end(self, trainer: Trainer, step: int) -> None:
            if step == 1:
                trainer.validate(make_batches(2))

        def on_validation_end(self, trainer: Trainer) -> None:
            depths.append(trainer.validations_in_progress)
            if trainer.validations_in_progress == 1:
                trainer.validate(make_batches(3))

    trainer = make_trainer()
    trainer.add_hook(Twice(), on_error="raise")
    trainer.train()
    assert depths == [1, 2]


def test_a_metric_of_a_loader_that_was_not_tried_is_not_missing() -> None:
    """The sanity check leaves an iterator alone, so it cannot say which metrics there are."""
    trainer = make_trainer(val_loaders={"once": iter(make_batches(2)), "list": make_batches(2)})
    trainer.add_hook(EarlyStopping(monitor="val/once/loss"))
    trainer.train()
    assert trainer.status == "completed"


def test_a_resumed_run_has_no_sanity_check(tmp_path: Path) -> None:
    """Its validation has worked before, and the loader is where the checkpoint says."""
    reads: list[str] = []

    class Counted(list[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            reads.append("read")
            return super().__iter__()

    options = {"val_loaders": Counted(make_batches(2)), "validate_every": None, "record": True}
    first = make_trainer(output_dir=str(tmp_path), **options)
    first.on("step_end", at=1)(lambda trainer: trainer.save())
    first.train()
    assert reads == ["read"]
    make_trainer(output_dir=str(tmp_path), **options).fit(resume=first.run_dir)
    assert reads == ["read"]


def test_a_limit_reads_no_batch_more() -> None:
    """What is left of an iterator begins right after the last batch that was used."""
    batches = iter(batches_of(1, 2, 3))
    make_trainer(overfit_batches=2).validate(batches)
    assert [len(x) for x, _ in batches] == [3]


@pytest.mark.parametrize("option", ["max_epochs", "max_steps"])
@pytest.mark.parametrize("value", [-1, 2.5, "3", True])
def test_fit_rejects_what_the_constructor_rejects(option: str, value: Any) -> None:
    """In the same words, and before anything is changed."""
    trainer = make_trainer()
    with pytest.raises(ConfigError) as constructed:
        make_trainer(**{option: value})
    with pytest.raises(ConfigError) as fitted:
        trainer.fit(**{option: value})
    assert str(fitted.value) == str(constructed.value)
    assert trainer.step == 0 and trainer.options.epochs == 1
