"""What users hold in their hands: the trainer's methods, its state, and what it refuses."""

import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches, make_model
from idle_hook import Idle
from torch import nn

from hookline import (
    BaseTrainer,
    GenericTrainer,
    HooklineError,
    HookManager,
    HookRegistry,
    SimpleTrainer,
    Trainer,
    TrainingHook,
    read_metrics,
)
from hookline.errors import TrainingError

COMPILERS = [os.environ.get("CXX", "g++"), "clang++"]  # one of which inductor calls


OPTIONS = {"model": partial(make_model, between=partial(nn.Dropout, 0.5)), "data": make_batches(3)}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


# ---- making one --------------------------------------------------------------------------------------------


def test_the_names_are_imported_from_hookline() -> None:
    """get_trainer gives a SimpleTrainer, which is a Trainer, which is the BaseTrainer."""
    assert isinstance(make_trainer(), SimpleTrainer)
    assert BaseTrainer is Trainer


def test_what_is_there_from_the_start() -> None:
    """Attributes that hooks may rely on before anybody has set them."""
    trainer = make_trainer()
    assert (trainer.best_accuracy, trainer.hook_data, trainer.config.debug) == (-math.inf, {}, False)
    assert trainer.hook_manager is trainer.hooks
    assert trainer.run_id is None and trainer.run_dir is None
    trainer.anything = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "model: expected a torch.nn.Module, got int"),
        ({"model": nn.ReLU()}, r"the model \(ReLU\) has no parameters"),
        ({"optimizer": None}, "expected an optimizer or a list of them"),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"precison": "bf16"}, "did you mean 'precision'"),
    ],
    ids=str,
)
def test_what_cannot_be_a_trainer(change: dict[str, Any], words: str) -> None:
    """Each wrong part is refused when the trainer is made, by name."""
    model = nn.Linear(3, 1)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "device": "cpu"}
    with pytest.raises(HooklineError, match=words):
        SimpleTrainer(**{"dataloader": make_batches(3), "record": False, **parts, **change})


def test_a_custom_optimizer() -> None:
    """Whatever steps and has groups is an optimizer; torch's defaults are not asked for."""
    model = nn.Linear(3, 1)

    class Own:
        def __init__(self) -> None:
            self.param_groups = [{"params": list(model.parameters()), "lr": 0.5}]

        def step(self) -> None:
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.5 * param.grad)

        def zero_grad(self, set_to_none: bool = True) -> None:
            for param in model.parameters():
                param.grad = None

    before = model.weight.detach().clone()
    train(model=model, optimizer=Own())
    assert not torch.equal(before, model.weight)


def test_nothing_to_train_on() -> None:
    """A trainer without a loader says what is missing; fit may bring it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = SimpleTrainer(model, None, optimizer, record=False, console=False, loss_fn=nn.functional.mse_loss)
    with pytest.raises(TrainingError, match="there is nothing to train on"):
        trainer.train()
    assert trainer.fit(make_batches(3), max_epochs=2)["status"] == "completed"
    assert trainer.step == 6


# ---- events ------------------------------------------------------------------------------------------------


@pytest.mark.req("001-12", "001-13", "001-15", "001-16")
def test_the_five_events_with_state() -> None:
    """train_begin, epoch_begin, batch_end, epoch_end and train_end, with what a hook names of them."""
    received: list[Any] = []

    class Five(TrainingHook):
        def on_train_begin(self, state: dict[str, Any]) -> None:
            received.append(("train_begin", state["status"]))

        def on_epoch_begin(self, epoch: int, state: dict[str, Any]) -> None:
            received.append(("epoch_begin", epoch, state["current_epoch"]))

        def on_batch_end(self, batch_idx: int, loss: float, state: dict[str, Any]) -> None:
            received.append(("batch_end", batch_idx, state["latest_loss"] == loss))

        def on_epoch_end(self, epoch: int, state: dict[str, Any]) -> None:
            received.append(("epoch_end", epoch, state["current_epoch"]))

        def on_train_end(self, state: dict[str, Any]) -> None:
            received.append(("train_end", state["status"]))

    train(Five(), data=make_batches(1), max_epochs=2)
    epochs = [[("epoch_begin", n, n), ("batch_end", 0, True), ("epoch_end", n, n)] for n in range(2)]
    assert received == [("train_begin", "training"), *epochs[0], *epochs[1], ("train_end", "completed")]


@pytest.mark.req("001-14", "002-42", "002-56", "002-57")
def test_a_batch_hook_gets_what_it_names() -> None:
    """batch or batch_idx first, loader_idx or dataloader_idx, in any order and number."""
    received: list[Any] = []

    class Short(TrainingHook):
        def on_train_batch_start(
            self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
        ) -> None:
            received.append((len(batch), batch_idx, dataloader_idx, dataloader_name))

        def on_train_batch_end(
            self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: dict[str, Any]
        ) -> None:
            received.append((len(batch), loader_idx, loader_name, f"{metrics['loss']:.1f}" != ""))

    class First(TrainingHook):
        def on_batch_end(self, batch: Any, loss: float, state: Any) -> None:
            received.append((len(batch), isinstance(loss, float)))

    train(Short(), First(), data={"a": make_batches(1), "b": make_batches(1)})
    assert received == [
        (2, 0, 0, "a"), (2, 0, "a", True), (2, True), (2, 1, 1, "b"), (2, 1, "b", True), (2, True),
    ]  # fmt: skip


@pytest.mark.req("002-40", "002-41", "002-47", "002-53")
def test_run_and_epoch_events_with_the_trainer() -> None:
    """on_train_start, on_epoch_start and on_training_end get the trainer itself."""
    received: list[Any] = []

    class Three(TrainingHook):
        def on_train_start(self, trainer: Any) -> None:
            received.append(trainer)

        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            received.append((trainer, epoch))

        def on_training_end(self, trainer: Any) -> None:
            received.append(trainer)

    trainer = train(Three())
    assert received == [trainer, (trainer, 0), trainer]


@pytest.mark.req("002-52", "002-54", "002-55")
def test_aliases_reach_the_same_event() -> None:
    """Both spellings of an event fire together, in registration order."""
    trainer = make_trainer(data=make_batches(1))
    received: list[str] = []
    spellings = ["train_start", "train_begin", "epoch_start", "epoch_begin", "epoch_end", "train_end", "training_end"]
    for spelling in spellings:
        trainer.on(spelling, name=spelling)(lambda trainer, spelling=spelling: received.append(spelling))
    trainer.train()
    assert received == spellings


@pytest.mark.req("002-62", "002-63", "004-31", "004-36")
def test_a_hook_sees_gradients_before_and_after_clipping() -> None:
    """Norms per parameter, gathered when the gradients are complete and logged at the step's end, are populated."""

    class Histogram(TrainingHook):
        def __init__(self) -> None:
            self.norms: dict[str, float] = {}
            self.clipped: dict[str, float] = {}
            self.live: list[bool] = []
            self.after_backward: list[int] = []

        def on_before_backward(self, trainer: Any, loss: torch.Tensor) -> None:
            self.live.append(loss.requires_grad)

        def on_after_backward(self, trainer: Any) -> None:
            self.after_backward.append(sum(param.grad is not None for param in trainer.model.parameters()))

        def on_gradients_ready(self, grads: Any) -> None:
            self.norms = {name: grad.norm().item() for name, grad in grads.items()}

        def on_pre_optimizer_step(self, grads: Any) -> None:
            self.clipped = {name: grad.norm().item() for name, grad in grads.items()}

        def on_step_end(self, ctx: Any, trainer: Any) -> None:
            assert all(param.grad is None for param in ctx.model.parameters())
            for name, norm in self.norms.items():
                trainer.log(f"grad_norm/{name}", norm)

    trainer = train(hook := Histogram(), data=make_batches(2), max_grad_norm=1e-3)
    assert set(hook.norms) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(hook.clipped[name] < hook.norms[name] for name in hook.norms if hook.norms[name] > 0)
    assert hook.live == [True, True] and hook.after_backward == [4, 4]
    lines = [line for line in trainer.record.metrics if "grad_norm/2.weight" in line]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.req("002-62", "002-63", "002-64", "002-65")
def test_what_is_true_around_backward_and_each_optimizers_step() -> None:
    """Backward's events get the batch's loss, without and with gradients; an optimizer's events surround its update."""
    model, data = make_model(3, 2, 1, between=None), make_batches(2)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    start = [layer.weight.detach().clone() for layer in model]
    calls: list[Any] = []

    class Watch(TrainingHook):
        def on_before_backward(self, trainer: Any, loss: torch.Tensor) -> None:
            calls.append(("before", loss.item(), [param.grad is None for param in model.parameters()]))

        def on_after_backward(self, trainer: Any) -> None:
            calls.append(("after", [param.grad is None for param in model.parameters()]))

        def on_before_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
            calls.append(("step", optimizer_idx, self.moved()))

        def on_after_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
            calls.append(("stepped", optimizer_idx, self.moved()))

        def moved(self) -> list[bool]:
            return [not torch.equal(layer.weight, old) for layer, old in zip(model, start, strict=True)]

    first = nn.functional.mse_loss(model(data[0][0]), data[0][1]).item()
    train(Watch(), model=model, data=data, optimizer=optimizers)
    assert calls[:6] == [
        ("before", first, [True] * 4),
        ("after", [False] * 4),
        ("step", 0, [False, False]),
        ("stepped", 0, [True, False]),
        ("step", 1, [True, False]),
        ("stepped", 1, [True, True]),
    ]
    assert calls[6][2] == [True] * 4 and [call[0] for call in calls[6:]] == [call[0] for call in calls[:6]]


@pytest.mark.req("004-03", "004-04", "004-16")
def test_the_events_of_a_bare_loop() -> None:
    """on_train_begin(config) comes once before the loop, on_step_end(ctx) with every step."""
    received: list[Any] = []

    class Runner(TrainingHook):
        def on_train_begin(self, config: Any) -> None:
            received.append(config)

        def on_step_end(self, ctx: Any) -> None:
            received.append((ctx.step, len(ctx.optimizer.param_groups)))

    trainer = train(Runner(), data=make_batches(2))
    assert received == [{**asdict(trainer.config), "checkpoint": {"dir": None}}, (1, 1), (2, 1)]


# ---- the state ---------------------------------------------------------------------------------------------


@pytest.mark.req("001-34", "001-35", "001-36", "001-41")
def test_the_live_things_in_the_state() -> None:
    """The model, the optimizer, the device and the parameter count."""
    trainer = make_trainer()
    seen: list[dict[str, Any]] = []
    trainer.on("train_start")(lambda state: seen.append(state))
    trainer.train()
    (state,) = seen
    assert state["model"] is trainer.model
    assert state["optimizer"] is trainer.optimizers[0]
    assert state["device"] == torch.device("cpu")
    assert state["model_params"] == 3 * 4 + 4 + 4 + 1


@pytest.mark.req("001-41")
@pytest.mark.parametrize("owned", [True, False])
def test_frozen_parameters_are_in_the_parameter_count(owned: bool) -> None:
    """Whether an optimizer owns them or not."""
    model = make_model()
    model[0].requires_grad_(False)
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD((model if owned else model[2]).parameters(), 0.1))
    assert trainer.train()["model_params"] == 3 * 4 + 4 + 4 + 1


@pytest.mark.req("001-37", "001-38", "001-39", "001-40")
def test_the_numbers_in_the_state() -> None:
    """Epoch and batch count from 0, the latest loss is the batch's, the average is this epoch's so far."""
    trainer = make_trainer(max_epochs=2)
    seen: list[tuple[Any, ...]] = []
    starts: list[tuple[float, float]] = []
    trainer.on("train_start", name="start")(lambda state: starts.append((state["latest_loss"], state["avg_loss"])))

    @trainer.on("train_batch_end")
    def look(state: dict[str, Any], loss: float) -> None:
        seen.append((state["current_epoch"], state["current_batch_idx"], state["latest_loss"], state["avg_loss"], loss))

    trainer.train()
    assert [row[:2] for row in seen] == [(epoch, batch) for epoch in range(2) for batch in range(3)]
    assert all(row[2] == row[4] and isinstance(row[2], float) for row in seen)
    for index, row in enumerate(seen):
        losses = [other[4] for other in seen[index - index % 3 : index + 1]]
        assert row[3] == pytest.approx(sum(losses) / len(losses))
    assert all(map(math.isnan, starts[0]))


def test_the_state_is_one_dict() -> None:
    """A key that a hook adds stays, and train() returns that very dict."""
    trainer = make_trainer()
    trainer.on("train_start", name="adds")(lambda state: state.update(mine=1))
    seen: list[int] = []
    trainer.on("epoch_end", name="reads")(lambda state: seen.append(state["mine"]))
    assert trainer.train()["mine"] == 1
    assert seen == [1]


# ---- one step, validation, inference -----------------------------------------------------------------------


@pytest.mark.req("000-38", "000-39", "000-42")
def test_training_steps_outside_of_a_run() -> None:
    """training_step outside of train moves the weights once per window and returns the detached loss."""
    trainer = make_trainer(accumulate=2)
    trainer.on("train_batch_end", name="lifecycle")(lambda loss: None)
    trainer.on("forward", name="forward")(lambda output: None)
    trainer.on("update", name="update")(lambda grads: grads)
    before = trainer.model[0].weight.detach().clone()
    first = trainer.training_step(make_batches(3)[0])
    assert torch.equal(before, trainer.model[0].weight) and trainer.step == 1
    trainer.training_step(make_batches(3)[1])
    assert not torch.equal(before, trainer.model[0].weight) and trainer.step == 1
    assert first.shape == () and not first.requires_grad


def test_a_run_that_continues_inside_an_epoch_records_the_mean_of_the_whole_epoch() -> None:
    """As the unbroken run does, even if the trainer validates in between."""
    means = []
    for lengths in ([4], [1, 3, 4]):
        trainer = make_trainer(model=make_model, data=make_batches(4), val_dataloader=make_batches(1), record=True)
        for length in lengths:
            trainer.fit(max_steps=length)
            trainer.validate()
        means.append(read_metrics(trainer.run_dir)[-1]["train/epoch_loss"])
    assert means[0] == means[1]


def test_the_length_of_a_run_counts_steps_outside_of_its_epochs() -> None:
    """Steps by hand, and epochs of another length, which an earlier run has made."""
    totals = []
    for begin in (lambda trainer: trainer.training_step(make_batches(1)[0]), lambda trainer: trainer.fit()):
        trainer = make_trainer()
        trainer.on("step_end", name="ask")(lambda trainer: totals.append(trainer.total_steps))
        begin(trainer)
        totals.clear()
        trainer.fit(make_batches(2), max_epochs=trainer.progress.epochs_done + 2)
        assert set(totals) == {trainer.step, trainer.total_steps}
    assert trainer.step == 7


def test_a_checkpoint_that_is_loaded_after_the_run_loses_no_data(recwarn: pytest.WarningsRecorder) -> None:
    """The run had a default console, which the trainer has no more: no event of that comes after the record's end."""
    trainer = make_trainer(val_dataloader=make_batches(1), record=True, console=True, max_epochs=2)
    trainer.add_checkpointing(monitor="val/loss")
    trainer.train()
    trainer.load_checkpoint(trainer.checkpoint_dir / "best")
    assert not [str(warning.message) for warning in recwarn if "losing data" in str(warning.message)]


def test_the_metrics_of_an_epoch_are_those_that_are_recorded() -> None:
    """Losses, means, what step_fn returned, the validation at its end, and the keys that hooks before it added."""
    seen: list[dict[str, Any]] = []

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "size": batch[0].abs().mean()}

    trainer = make_trainer(
        step_fn=step, loss_fn=None, val_dataloader=make_batches(1), record=True, max_epochs=3, accumulate=2,
        validate_every="2 epochs",
    )  # fmt: skip
    trainer.on("epoch_end", name="adds")(lambda metrics: metrics.update(mine=len(seen)))
    trainer.on("epoch_end", name="reads")(lambda metrics: seen.append(dict(metrics)))
    trainer.train()
    rows = [row for row in read_metrics(trainer.run_dir) if "train/epoch_loss" in row]
    recorded = [{key: row[key] for key in row if key not in ("step", "epoch", "time")} for row in rows]
    assert list(map(pytest.approx, seen)) == recorded
    assert [("val/loss" in metrics, metrics["mine"]) for metrics in seen] == [(False, 0), (True, 1), (False, 2)]


def test_training_step_after_a_run() -> None:
    """A finished run leaves a trainer that can be stepped by hand, with windows of the right size."""
    trainer = train(accumulate=2)
    steps = trainer.step
    for batch in make_batches(2):
        trainer.training_step(batch)
    assert trainer.step == steps + 1


def test_a_run_after_training_steps() -> None:
    """Steps made by hand are counted, and the run that follows begins its epoch with all its batches."""
    trainer = make_trainer()
    for batch in make_batches(2):
        trainer.training_step(batch)
    seen: list[Any] = []
    trainer.on("epoch_start", name="epochs")(lambda epoch: seen.append(f"epoch {epoch}"))
    trainer.on("train_batch_end", name="batches")(lambda batch_idx: seen.append(batch_idx))
    trainer.train()
    assert seen == ["epoch 0", 0, 1, 2]
    assert (trainer.step, trainer.progress.batches) == (5, 5)


# ---- a run after another -----------------------------------------------------------------------------------


def fails_at(trainer: Trainer, event: str, step: int, first: Callable[[], object] = lambda: None) -> None:
    """Train until a hook raises at an event of a step, after it has called a function, and remove the hook."""

    @trainer.on(event, name="fails", at=step, on_error="raise")
    def fails() -> None:
        first()
        raise ValueError("too early")

    with pytest.raises(ValueError, match="too early"):
        trainer.train()
    trainer.remove_hook("fails")


def test_a_second_run_ends_at_its_own_last_step() -> None:
    """It does not wait for the step after which the first run would have looked for something to do."""
    trainer = train(max_epochs=1)
    trainer.fit(max_epochs=9, max_steps=5)
    assert trainer.step == 5


def test_the_losses_of_loaders_that_only_the_second_run_has() -> None:
    """The trainer was made with a single loader, whose loss is the step's."""
    trainer = train(max_epochs=1)
    trainer.fit({"a": make_batches(3), "b": make_batches(3)}, max_epochs=2)
    names = {name for line in trainer.record.metrics for name in line}
    assert {"train/a/loss", "train/b/loss"} <= names


def test_a_skip_that_a_failed_step_asked_for_is_not_the_next_runs() -> None:
    """The next run makes the step with the same number."""
    trainer = make_trainer()
    fails_at(trainer, "train_batch_start", 2, lambda: trainer.skip_step("a bad batch"))
    trainer.train()
    assert (trainer.step, trainer.skipped_steps) == (2, 0)


def test_a_run_after_one_that_failed_inside_a_step_can_save() -> None:
    """The optimizer had stepped; no step is in progress when the next run begins."""
    trainer = make_trainer(record=True)
    fails_at(trainer, "after_optimizer_step", 2)
    saved: list[Path] = []
    trainer.on("train_start")(lambda trainer: saved.append(trainer.save_checkpoint()))
    trainer.train()
    assert [path.name for path in saved] == ["step-00000002"]


def test_the_schedulers_step_after_a_step_that_failed_in_two_runs() -> None:
    """In the first run it was skipped; in the second its optimizer has stepped."""
    trainer = make_trainer()
    trainer.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5))
    trainer.on("train_batch_start", name="skips", at=2)(lambda trainer: trainer.skip_step("a bad batch"))
    fails_at(trainer, "train_batch_end", 2)
    assert trainer.lr == 0.05
    trainer.remove_hook("skips")
    fails_at(trainer, "after_optimizer_step", 2)
    assert trainer.lr == 0.025


def test_a_scheduler_does_not_step_for_an_optimizer_that_a_failure_left_out() -> None:
    """The step fails between two optimizers: only the rate of the first one belongs to new weights."""
    model = make_model()
    optimizers = [torch.optim.SGD([weight], 0.1) for weight in model.parameters()]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    options = {"train_loaders": make_batches(3), "loss_fn": nn.functional.mse_loss, "max_epochs": 1}
    trainer = GenericTrainer({}, model, optimizers, schedulers, device="cpu", record=False, console=False, **options)

    def fail(step: int, optimizer_idx: int) -> None:
        if (step, optimizer_idx) == (2, 1):
            raise RuntimeError("between two optimizers")

    trainer.on("before_optimizer_step", on_error="raise")(fail)
    with pytest.raises(RuntimeError, match="between two"):
        trainer.train()
    assert [scheduler.last_epoch for scheduler in schedulers] == [2, 1, 1, 1]


def test_a_hook_that_fails_the_end_of_a_run_after_a_failed_one() -> None:
    """Its exception is not a note of the one that ended the first run."""
    trainer = make_trainer()
    fails_at(trainer, "step_end", 1)
    trainer.on("train_end", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.status == "error"


@pytest.mark.parametrize("call", ["training_step", "train"])
def test_training_inside_an_event_is_rejected(call: str) -> None:
    """A hook cannot step or start the trainer that is calling it, in a run or in a single step."""
    trainer = make_trainer()
    argument = [make_batches(3)[0]] if call == "training_step" else []
    trainer.on("train_batch_end", on_error="raise")(lambda trainer: getattr(trainer, call)(*argument))
    with pytest.raises(TrainingError, match=r"inside an event|running already"):
        trainer.train()
    with pytest.raises(TrainingError, match=r"inside an event|running already"):
        trainer.training_step(make_batches(3)[0])
    assert not trainer.running


def test_loading_inside_an_event_is_rejected() -> None:
    """Data and record would not go back with the weights; between two runs, and as the start of one, they do."""
    trainer = make_trainer(record=True, max_epochs=2)
    trainer.add_checkpointing()
    refused: list[int] = []

    @trainer.on("step_end", at="4 steps")
    @trainer.on("train_start", name="start")
    @trainer.on("train_end", name="end")
    def go_back(trainer: Trainer, step: int) -> None:
        with pytest.raises(TrainingError, match=r"load_checkpoint\(\) cannot be called inside an event.*fit\(resume=…"):
            trainer.load_checkpoint(trainer.run_dir)
        refused.append(step)

    trainer.train()
    assert (refused, trainer.step) == ([0, 4, 6], 6)
    assert trainer.load_checkpoint(trainer.checkpoint_dir / "step-00000003").name == "step-00000003"
    assert trainer.step == 3
    trainer.fit(resume=trainer.run_dir)
    assert (refused, trainer.step) == ([0, 4, 6, 6, 6], 6)


def test_a_refused_fit_changes_nothing_of_the_run_in_progress() -> None:
    """Neither its length nor its data."""
    trainer = make_trainer(max_epochs=1)
    seen: list[str] = []

    @trainer.on("step_end")
    def start_another(trainer: Any) -> None:
        with pytest.raises(TrainingError, match="running already"):
            trainer.fit(make_batches(9), make_batches(9), max_epochs=9, max_steps=99)
        seen.append("refused")

    trainer.train()
    assert trainer.step == 3 == len(seen)
    assert (trainer.options.max_epochs, trainer.options.max_steps) == (1, None)
    assert len(trainer.train_loaders["train"]) == 3 and not trainer.val_loaders


def test_a_second_stepper_does_not_begin_while_the_first_runs() -> None:
    """Both may be made before; the run in progress continues as if the other had not been."""
    trainer = make_trainer(max_epochs=1)
    first, second = trainer.stepper(), trainer.stepper()
    next(first)
    with pytest.raises(TrainingError, match="running already"):
        next(second)
    assert trainer.running and len(list(first)) == 2
    assert (trainer.step, trainer.record.run["outcome"]) == (3, "completed")


@pytest.mark.parametrize("wrong", [{"resume": "nowhere"}, {"resume": "damaged"}, {"val_loaders": 3}], ids=str)
def test_a_refused_fit_changes_nothing_of_the_next_run(wrong: dict[str, Any]) -> None:
    """Neither the length nor the data, when the run ends before its first step."""
    first = train(record=True)
    first.save_checkpoint("only").joinpath("manifest.json").write_text("torn")
    if wrong.get("resume") == "damaged":
        wrong = {"resume": first.run_dir}
    trainer = make_trainer(max_epochs=2)
    given = {"train_loaders": [make_batches(9)] * 2, "val_loaders": make_batches(9), "max_epochs": 9, "max_steps": 99}
    with pytest.raises((HooklineError, TypeError)):
        trainer.fit(**given | wrong)
    assert list(trainer.loader_batches) == ["train"] and not trainer.val_loaders
    trainer.train()
    assert trainer.step == 6


def test_inference_inside_a_hook() -> None:
    """Eval mode, no grad, forward hooks silent; afterwards mode, gradients and random streams are as before."""
    trainer = make_trainer()
    received: list[str] = []
    seen: list[Any] = []
    trainer.on("forward", name="ear")(lambda name, phase: received.append(phase))

    @trainer.on("after_backward")
    def sample(trainer: Trainer) -> None:
        streams, count = (torch.get_rng_state(), random.getstate()), len(received)
        gradient = trainer.model[0].weight.grad.clone()
        with trainer.inference() as model:
            output = model(torch.randn(2, 3))
            random.random()
            seen.append((model.training, output.requires_grad, trainer.event_args.phase))
        assert trainer.model.training and trainer.event_args.phase == "train"
        assert torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
        assert torch.equal(gradient, trainer.model[0].weight.grad.clone()) and len(received) == count

    trainer.train()
    assert trainer.hooks.list_hooks() and all(record.failures == 0 for record in trainer.hooks.list_hooks())
    assert seen == [(False, False, "inference")] * 3
    assert received == ["train"] * 9


def test_predict() -> None:
    """The outputs of every batch in eval mode, twice the same although the model has dropout."""
    trainer = make_trainer()
    first, second = (trainer.predict(make_batches(2)) for _ in range(2))
    assert [output.shape for output in first] == [(4, 1), (4, 1)]
    assert all(map(torch.equal, first, second))
    assert trainer.model.training and not first[0].requires_grad


# ---- steering ----------------------------------------------------------------------------------------------


def test_assigning_the_learning_rate_scales_every_group() -> None:
    """Groups keep their ratios; from zero all get the value."""
    trainer = make_trainer()
    trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.2})
    trainer.lr = 0.05
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.05, 0.1])
    trainer.lr = 0.0
    trainer.lr = 0.3
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.3, 0.3]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 3),
        ({"max_epochs": 4}, 12),
        ({"accumulate": 2, "max_epochs": 2}, 4),
        ({"max_steps": 5}, 5),
        ({"max_steps": 50, "max_epochs": 2}, 6),
    ],
    ids=str,
)
def test_total_steps(options: dict[str, Any], steps: int) -> None:
    """What is known before the run is what the run does."""
    trainer = make_trainer(**options)
    assert trainer.total_steps == steps
    trainer.train()
    assert trainer.step == steps


def test_logging_what_is_not_a_number() -> None:
    """A tensor with several elements is refused by name and shape."""
    with pytest.raises(HooklineError, match=r"log\('many'\): expected one number, got a tensor of shape \(2,\)"):
        make_trainer().log("many", torch.ones(2))


@pytest.mark.req("001-28", "001-31", "001-32", "001-33")
def test_managing_hooks_on_the_trainer() -> None:
    """Add, disable, enable, list with status, remove."""
    trainer = make_trainer()
    received: list[int] = []

    class Mine(TrainingHook):
        def on_step_end(self, step: int) -> None:
            received.append(step)

    trainer.add_hook(Mine())
    trainer.add_json_logging(path="log.jsonl")
    trainer.add_checkpointing()
    trainer.disable_hook("json_log")
    trainer.disable_hook("checkpoint")
    trainer.disable_hook("mine")
    status = {record.name: record.enabled for record in trainer.hooks.list_hooks()}
    assert status == {"identity": True, "mine": False, "json_log": False, "checkpoint": False}
    assert "json_log: disabled" in str(trainer.hooks.list_hooks())
    trainer.enable_hook("mine")
    trainer.enable_hook("json_log")
    trainer.train()
    assert received == [1, 2, 3]
    assert isinstance(trainer.remove_hook("mine"), Mine)
    assert "mine" not in trainer.hooks


# ---- options that change how a run is run ------------------------------------------------------------------


def test_a_trial_run(tmp_path: Any) -> None:
    """fast_dev_run takes a few batches of everything, writes nothing, and lets hooks raise."""
    options: dict[str, Any] = {"val_dataloader": make_batches(5), "max_epochs": 9, "record": True}
    trainer = make_trainer(data=make_batches(8), fast_dev_run=2, **options)
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.add_json_logging(log_every_n_batches=1)
    received: list[str] = []
    trainer.on("train_batch_end", name="batch")(lambda: received.append("batch"))
    trainer.on("validation_batch_end", name="val")(lambda: received.append("val"))
    trainer.train()
    assert received == ["batch", "batch", "val", "val"]
    assert list(tmp_path.iterdir()) == []
    strict = make_trainer(fast_dev_run=1)
    strict.on("train_batch_end")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        strict.train()


def test_compiled_training_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile=True runs the model through torch.compile; traced without a code generator it trains the same."""
    compiled: list[Any] = []
    real = torch.compile

    def traced(model: Any) -> Any:
        compiled.append(model)
        return real(model, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    trainer, eager = train(compile=True, seed=1), train(seed=1)
    assert compiled == [trainer.model]
    assert all(map(torch.equal, trainer.model.parameters(), eager.model.parameters()))


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # importing inductor
def test_code_that_inductor_generates_trains() -> None:
    """compile=True, as users have it, leads to the same weights up to rounding."""
    trainers = [make_trainer(compile=compiled, seed=1) for compiled in (True, False)]
    for trainer in trainers:
        trainer.model[1].p = 0.0  # inductor draws other random numbers
        trainer.train()
    torch.testing.assert_close(*[list(trainer.model.parameters()) for trainer in trainers])


def test_bf16_trains() -> None:
    """Autocast is on in the forward pass, and the weights stay in full precision."""
    trainer = make_trainer(precision="bf16")
    seen: list[Any] = []
    trainer.on("forward", name="see")(lambda output: seen.append(output.dtype))
    before = trainer.model[0].weight.detach().clone()
    trainer.train()
    assert torch.bfloat16 in seen
    assert trainer.model[0].weight.dtype is torch.float32
    assert not torch.equal(before, trainer.model[0].weight)


def test_loss_fn_under_autocast_can_be_changed() -> None:
    """A loss function assigned in a bf16 run takes effect, too."""
    trainer = make_trainer(precision="bf16")
    trainer.loss_fn = lambda output, target: output.sum() * 0.0
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    assert losses == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("schedule", ["sequential", "round_robin"])
def test_a_run_continues_inside_its_epoch_after_a_step_by_hand(schedule: str) -> None:
    """The step by hand counts as a batch of the epoch, and the next run reads on behind it."""
    data = {"a": make_batches(4), "b": make_batches(4)} if schedule == "round_robin" else make_batches(8)
    trainer = train(data=data, max_steps=3, max_epochs=2, loader_schedule=schedule)
    trainer.training_step(make_batches(1)[0])
    trainer.fit(max_steps=7)
    assert (trainer.step, trainer.epoch, trainer.progress.batch_idx) == (7, 0, 6)


def test_a_hook_is_removed_in_the_same_words_everywhere() -> None:
    """By position, as `name` and as `hook_id`, the word of the methods for captures."""
    trainer, manager, registry = make_trainer(), HookManager(), HookRegistry()
    for owner, hooks in ((trainer, trainer.hooks), (manager, manager), (registry, registry)):
        for arguments, options in ((["own"], {}), ([], {"name": "own"}), ([], {"hook_id": "own"})):
            hook = Idle()
            hooks.register(hook, "own")
            assert owner.remove_hook(*arguments, **options) is hook and "own" not in hooks
