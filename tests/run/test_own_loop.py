"""The run of a loop that fires its events by hand: what it counts, what it knows, and what hooks can do in it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_trainer

from hookline import HooklineError, HookManager, HookRunner, TrainingHook
from hookline.errors import MissingArgument, RegistrationError, StopTraining
from hookline.hooks import BUILT_IN
from hookline.record import Record

NEEDED: dict[str, dict[str, Any]] = {
    "throughput": {"log_every_n_steps": 2},
    "console_log": {"log_every_n_batches": 1, "costs": False},
    "notify": {"webhook_url": "https://hooks.example.org/x", "notify_on": []},
}
REFUSED = {"checkpoint", "nan_forensics", "debug_training"}  # they save, or run a batch again
LIFECYCLE = [
    "checkpoint", "confusion_matrix", "console_log", "debug_training", "early_stopping", "ema", "gradient_flow",
    "gradient_monitor", "json_log", "loss_spike", "lr_monitor", "nan_forensics", "notify", "profiler",
    "sample_predictions", "stall_watchdog", "throughput",
]  # fmt: skip


def train(manager: HookManager, epochs: int = 2) -> torch.nn.Module:
    """Train a small model in a loop of four steps an epoch that fires every event and carries no number."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.on_train_start({"model": model, "optimizer": optimizer})
    for _ in range(epochs):
        manager.on_epoch_start()
        for _ in range(4):
            inputs, target = torch.randn(4, 3), torch.randint(2, (4,))
            manager.on_train_batch_start(batch=(inputs, target))
            loss = torch.nn.functional.cross_entropy(model(inputs), target)
            manager.on_before_backward(loss=loss)
            loss.backward()
            manager.on_after_backward()
            manager.on_gradients_ready()
            manager.on_before_optimizer_step()
            optimizer.step()
            manager.on_after_optimizer_step()
            optimizer.zero_grad()
            manager.on_train_batch_end()
            manager.on_step_end()
        manager.on_validation_start()
        manager.on_validation_batch_end(batch_idx=0, output=model(inputs), target=target, metrics={})
        manager.on_validation_end(metrics={"val/loss": 1.0})
        manager.on_epoch_end()
    manager.on_train_end()
    manager.close()
    return model


@pytest.mark.parametrize("name", LIFECYCLE)
def test_built_in_hooks_work_in_a_loop_of_ones_own(name: str) -> None:
    """Each of them, with nothing but the model and the optimizer passed once; what cannot work is refused by name."""
    assert name in BUILT_IN
    manager = HookManager()
    manager.register(name, on_error="raise", **NEEDED.get(name, {}))
    try:
        train(manager)
    except RegistrationError as refused:
        assert name in REFUSED and f"{name!r} needs a run that" in str(refused)
    else:
        assert name not in REFUSED and manager.run.step == 8 and manager.run.status == "completed"


def test_what_a_loop_reports_is_in_its_record() -> None:
    """The losses of its steps and what hooks log, in memory, with the steps that were counted."""
    manager = HookManager(["lr_monitor"])
    train(manager)
    rows = manager.run.record.metrics
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 9))
    assert [row["lr"] for row in rows if "lr" in row] == [0.1] * 8
    assert {row["epoch"] for row in rows} == {0, 1} and manager.run.record.path is None


def test_the_loss_of_a_step_is_the_one_that_its_end_carries() -> None:
    """The last micro-batch may end after its step, with its own loss."""
    manager = HookManager([SimpleNamespace(name="idle", on_step_end=lambda: None)])
    manager.on_train_start()
    for mean, last in ((2.0, 5.0), (3.0, 6.0)):
        manager.on_step_end(loss=mean)
        manager.on_train_batch_end(loss=last)
    manager.on_train_end()
    assert [row["train/loss"] for row in manager.run.record.metrics] == [2.0, 3.0]


def test_a_loop_may_give_its_record(tmp_path: Path) -> None:
    """Then hooks write into its directory, and the loop closes it."""
    manager = HookManager()
    manager.register("json_log", log_every_n_batches=1)
    manager.run.record = record = Record.on_disk(tmp_path, config={}, seed=None)
    record.start([])
    train(manager, epochs=1)
    record.close("completed", None, [], [], {})
    assert len((record.path / "log.jsonl").read_text().splitlines()) == 8  # start, four batches, validation, ends


def test_a_hook_can_ask_a_loop_to_stop() -> None:
    """`request_stop` is noted in the manager's run, where the loop finds it; StopTraining reaches the loop itself."""
    manager = HookManager()
    manager.register("early_stopping", monitor="val/loss", patience=1)
    for _ in range(3):
        manager.on_step_end()
        assert manager.run.stop_reason is None
        manager.on_validation_end(metrics={"val/loss": 1.0})
        if manager.run.stop_reason:
            break
    assert manager.run.step == 2 and manager.run.stopped_by == "early_stopping"

    def stop() -> None:
        raise StopTraining("enough")

    manager.on("step_end", name="stops")(stop)
    with pytest.raises(StopTraining, match="enough"):
        manager.on_step_end()


def test_what_a_loop_has_not_passed_is_named() -> None:
    """A hook that reads it from the run gets the same advice as one that names it."""
    manager, read = HookManager(), []
    manager.on("step_end", name="reads", on_error="raise")(lambda trainer: read.append((trainer.model, trainer.lr)))
    with pytest.raises(MissingArgument, match=r"the model of this loop is not known; pass model=.* or watch\(model\)"):
        manager.on_step_end()
    model = torch.nn.Linear(1, 1)
    manager.watch(model)
    with pytest.raises(MissingArgument, match="the optimizer of this loop is not known; pass optimizer=…"):
        manager.on_step_end()
    manager.on_step_end(optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    manager.on_step_end()
    assert read == [(model, 0.5)] * 2
    with pytest.raises(HooklineError, match="cannot validate by itself"):
        manager.run.validate()


def test_a_batch_and_its_loss_are_known_until_the_next_one() -> None:
    """What the first event passed, the others of the same batch need not; the next batch has its own."""
    manager, seen = HookManager(), []
    for event in ("after_backward", "step_end"):
        manager.on(event, name=event)(lambda batch, loss: seen.append((batch, loss)))
    manager.on_before_backward(batch="the batch", loss=torch.tensor([0.5]))
    manager.on_after_backward()
    manager.on_step_end()
    assert seen == [("the batch", 0.5)] * 2
    manager.on_before_backward()
    with pytest.raises(MissingArgument, match="on_after_backward: 'after_backward' names 'batch'"):
        manager.on_after_backward()


# ---- counting --------------------------------------------------------------------------------------------------------


def whole(manager: HookManager) -> None:
    """Fire the first and the last events of a batch."""
    manager.on_train_batch_start()
    manager.on_train_batch_end()
    manager.on_step_end()


def reverse(manager: HookManager) -> None:
    """End the step before the batch."""
    manager.on_before_backward()
    manager.on_step_end()
    manager.on_train_batch_end()


LOOPS: list[Callable[[HookManager], Any]] = [
    whole,
    reverse,
    HookManager.on_step_end,
    HookManager.on_train_batch_end,
    HookManager.on_train_batch_start,
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("begins", [False, True])
def test_steps_are_counted(loop: Callable[[HookManager], Any], begins: bool) -> None:
    """Whatever the loop fires, each batch is one step, and all events of a batch have the same numbers."""
    manager, seen, due = HookManager(), [], set()
    for event in ("train_batch_start", "before_backward", "train_batch_end", "step_end"):
        manager.on(event, name=event)(lambda step, batch_idx: seen.append((step, batch_idx)))
        manager.on(event, name=f"{event}, every 2", every=2)(lambda step: due.add(step))
    if begins:
        manager.on_train_start()
    for _ in range(4):
        loop(manager)
    assert list(dict.fromkeys(seen)) == [(1, 0), (2, 1), (3, 2), (4, 3)] and due == {2, 4}


def test_the_end_of_a_step_ends_it() -> None:
    """With accumulation several batches are a step, once the loop has shown that it fires on_step_end."""
    manager, steps, ends = HookManager(), [], []
    manager.on("train_batch_end", name="batch")(lambda step, batch_idx: steps.append((step, batch_idx)))
    manager.on("step_end", name="step")(lambda step: ends.append(step))
    for index in range(9):
        manager.on_train_batch_start()
        manager.on_train_batch_end()
        if index % 3 == 2:
            manager.on_step_end()
    assert ends == [1, 2, 3]
    assert steps[3:] == [(2, 3), (2, 4), (2, 5), (3, 6), (3, 7), (3, 8)]


@pytest.mark.parametrize("fired", ["both", "start", "end"])
def test_epochs_are_counted(fired: str) -> None:
    """By on_epoch_start, by on_epoch_end, or by both; the batches of all epochs add up."""
    manager, seen = HookManager(), []
    manager.on("train_batch_end", name="it")(lambda epoch, batch_idx, step: seen.append((epoch, batch_idx, step)))
    for _ in range(2):
        if fired != "end":
            manager.on_epoch_start()
        for _ in range(2):
            manager.on_train_batch_end()
        if fired != "start":
            manager.on_epoch_end()
    assert seen == [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)]
    assert manager.run.progress.batches == 4


def test_numbers_of_batches_that_start_again_add_up() -> None:
    """Also where no event says that an epoch begins."""
    manager = HookManager([SimpleNamespace(name="idle", on_step_end=lambda: None)])
    for index in (0, 1, 2, 0, 1, 2):
        manager.on_train_batch_end(batch_idx=index)
    assert manager.run.progress.batches == 6


def test_epochs_of_one_batch_add_up() -> None:
    """A schedule counts the batches of all epochs, each of which has the number 0."""
    manager, due = HookManager(), list[int]()
    manager.on("train_batch_end", name="it", every="2 batches")(lambda step: due.append(step))
    for _ in range(5):
        manager.on_train_batch_start(batch_idx=0)
        manager.on_train_batch_end(batch_idx=0)
    assert due == [2, 4]


def test_numbers_that_a_loop_carries_are_taken_as_they_are() -> None:
    """Also if they jump or go back; the next ones are counted from there."""
    manager, seen = HookManager(), []
    manager.on("step_end", name="it")(lambda step, epoch, tokens_seen: seen.append((step, epoch, tokens_seen)))
    manager.on_step_end(step=10, epoch=3, tokens_seen=99)
    manager.on_step_end()
    manager.on_step_end(step=4)
    manager.on_step_end()
    assert seen == [(10, 3, 99), (11, 3, 99), (4, 3, 99), (5, 3, 99)]


def test_an_event_that_contradicts_the_last_one_is_about_another_batch() -> None:
    """In a loop that fires no event at the end of a batch."""
    manager, due = HookManager(), []
    manager.on("before_backward", name="it", every="2 batches")(lambda step: due.append(step))
    for step in (3, 3, 7, 8, 8, 9):
        manager.on_before_backward(step=step)
    assert due == [7, 9]


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_events_by_hand_on_a_trainers_hooks_have_the_trainers_values() -> None:
    """Its counters stay as they are."""
    model = torch.nn.Linear(1, 1)
    manager, seen = HookRunner(), []
    manager.on("step_end", name="it")(lambda trainer, step, epoch, model: seen.append((trainer, step, epoch, model)))
    manager.on_step_end(SimpleNamespace(step=3, model=model))
    own = manager.run
    trainer = make_trainer(model=model, hooks=manager)
    manager.on_step_end(epoch=5)
    assert seen == [(own, 3, 0, model), (trainer, 0, 5, model)] and trainer.epoch == 0 and manager.run is trainer


def test_a_trainer_takes_over_what_a_loop_could_not_have() -> None:
    """The loop refuses a hook that saves; once a trainer has the manager, nothing does."""
    manager = HookManager(["identity"])
    manager.on_step_end()
    with pytest.raises(RegistrationError, match="'checkpoint' needs a run that can save checkpoints"):
        manager.register("checkpoint")
    make_trainer(hooks=manager)
    assert manager.register("checkpoint") == "checkpoint"


def test_a_second_run_continues_the_first() -> None:
    """After on_train_end nothing runs; on_train_start begins again with the next step."""
    manager, running = HookManager(), []
    manager.on("step_end", name="it")(lambda trainer, step: running.append((step, trainer.running)))
    for _ in range(2):
        manager.on_train_start()
        manager.on_step_end()
        manager.on_train_end()
        running.append(manager.run.running)
    assert running == [(1, True), False, (2, True), False]


@pytest.mark.parametrize("event", ["on_checkpoint_save", "on_checkpoint_load", "on_validation_end"])
def test_a_loop_of_ones_own_fires_what_it_likes(event: str) -> None:
    """A hook that listens to one event only is registered and called, whatever a run could do by itself."""
    seen: list[str] = []
    hook = type("Only", (TrainingHook,), {event: lambda self: seen.append(event)})()
    manager = HookManager([hook])
    manager.on_train_start()
    getattr(manager, event)()
    assert seen == [event]


def test_throughput_needs_nothing_that_it_does_not_use() -> None:
    manager = HookManager()
    manager.register("throughput", log_every_n_steps=2)
    manager.on_train_start()
    manager.on_validation_start()
    manager.on_validation_end()
    manager.on_checkpoint_save()
    manager.on_train_end()
    assert manager.list_hooks()[0].failures == 0
