"""With async_save training continues while a checkpoint is written, and nothing else is different."""

import errno
import gc
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import builders
import numpy as np
import pytest
import torch
from builders import batches_of, make_batches
from fresh_process import start, status_of
from saved_checkpoints import list_checkpoints
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hookline import CheckpointHook, SimpleTrainer, Trainer, TrainingHook, UpdateHook, _fs
from hookline.checkpoints.format import encode_section
from hookline.checkpoints.saves import HostMemory
from hookline.errors import CheckpointError
from hookline.record import read_events, read_json

NEXT_STEP_S = 0.3  # how long a slow disk waits for the next step, which the last one of a run never gets


class LiveState(TrainingHook):
    """Hands out its live state, which every step changes in place."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tensor, self.array = torch.zeros(3), np.zeros(3)

    def on_step_end(self, loss: float) -> None:
        self.losses.append(loss)
        self.tensor += loss
        self.array += loss

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "tensor": self.tensor, "array": self.array}

    def load_state_dict(self, state: Any) -> None:
        self.losses, self.tensor, self.array = state["losses"], state["tensor"], state["array"]


class Sum(UpdateHook):
    """An update hook that keeps its state in place."""

    def init(self, params: Any) -> dict[str, Any]:
        return {"sum": {name: torch.zeros_like(param) for name, param in params.items()}}

    def on_update(self, grads: Any, state: Any) -> Any:
        return {name: state["sum"][name].add_(grad).clone() for name, grad in grads.items()}


class Tied(torch.nn.Module):
    """Two layers that share a weight, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm, self.drop = torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x)))).mean(1, keepdim=True)


def make_trainer(*hooks: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer with eight steps an epoch, and state of every kind."""
    torch.manual_seed(0)
    options = {
        "model": Tied(), "data": make_batches(8), "optimizer": partial(torch.optim.AdamW, lr=0.01), "async_save": True,
        "scheduler": partial(LambdaLR, lr_lambda=lambda step: 0.9**step), "seed": 1, "sanity_batches": 0,
        "record": True, **options,
    }  # fmt: skip
    return builders.make_trainer(*hooks, **options)


class Story(TrainingHook):
    """What is received, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step_end(self, step: int) -> None:
        self.told.append(f"step {step}")

    def on_checkpoint_save(self, step: int) -> None:
        self.told.append(f"saved {step}")

    def on_exception(self) -> None:
        self.told.append("exception")

    def on_train_end(self) -> None:
        self.told.append("end")


def writing_threads() -> list[threading.Thread]:
    """Return the threads that write a checkpoint; such a thread ends when the checkpoint is written."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("hookline-save")]


class Gate:
    """A disk that blocks until the test lets it continue, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.error, self.reached = threading.Event(), 0, threading.Event()
        self._real = os.write
        monkeypatch.setattr(_fs, "os", SimpleNamespace(**{**vars(os), "write": self.write}))

    def write(self, fd: int, data: Any) -> int:
        self.reached.set()
        assert self.opened.wait(timeout=300), "the test never opened the gate"  # a hang would outlive pytest-timeout
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self._real(fd, data)

    def open(self) -> None:
        """Let everything through, and wait until the pending save is done, so that the next boundary reports it."""
        self.opened.set()
        for thread in writing_threads():
            thread.join()

    def fail(self) -> None:
        """The same, but the disk is full."""
        self.error = errno.ENOSPC
        self.open()
        self.error = 0


def slow_disk(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A save in the background begins to write when training has made another step; returns how many wrote at once."""
    real, real_snapshot, begun, writers, seen = os.write, HostMemory.snapshot, set[threading.Thread](), [0], list[int]()
    saved_at = [0]

    def snapshot(self: HostMemory, sections: Any) -> Any:
        saved_at[0] = trainer.step
        return real_snapshot(self, sections)

    def write(fd: int, data: Any) -> int:
        writers[0] += 1
        seen.append(writers[0])
        me, deadline = threading.current_thread(), time.monotonic() + NEXT_STEP_S
        if me is not threading.main_thread() and me not in begun:
            begun.add(me)
            while trainer.step == saved_at[0] and time.monotonic() < deadline:
                time.sleep(0.001)
        writers[0] -= 1
        return real(fd, data)

    monkeypatch.setattr(HostMemory, "snapshot", snapshot)
    monkeypatch.setattr(_fs, "os", SimpleNamespace(**{**vars(os), "write": write}))
    return seen


def ask_at(trainer: Trainer, *steps: int) -> Story:
    """Save at these steps; returns what was received."""
    story = Story()
    trainer.add_hook(story)

    @trainer.on("step_end", name="ask")
    def ask(step: int, trainer: Trainer) -> None:
        if step in steps:
            trainer.save()

    return story


def contents(directory: Path) -> dict[str, Any]:
    """Every checkpoint's files as bytes, but for what no two runs share: the clock and the run's name."""
    checkpoints = {}
    for path in list_checkpoints(directory):
        state = json.loads((path / "state.json").read_text())
        assert state["sections"]["progress"].pop("seconds") > 0 and state["meta"].pop("run_id")
        tensors = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
        checkpoints[path.name] = (state, tensors)
    return checkpoints


def run_with_everything(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Trainer:
    """Two epochs with validation, an average, and state that is live; a checkpoint every other step, and per epoch."""
    hooks = (LiveState(), Sum(), "ema", CheckpointHook(save_every_n_steps=2))
    trainer = make_trainer(*hooks, max_epochs=2, val_dataloader=make_batches(1), validate_every=3, **options)
    slow_disk(trainer, monkeypatch)
    trainer.train()
    return trainer


def test_the_files_are_those_of_a_run_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checkpoints with the same bytes in every section, though training had gone on before the first write."""
    waiting = contents(run_with_everything(monkeypatch, async_save=False).checkpoint_dir)
    going_on = contents(run_with_everything(monkeypatch).checkpoint_dir)
    assert sorted(going_on) == [f"step-{step:08d}" for step in range(2, 17, 2)]
    assert len(going_on["step-00000004"][1]) >= 5  # model, optimizers, hooks, update_state, rng
    assert going_on == waiting


def test_the_last_line_names_the_step_that_was_saved(capfd: pytest.CaptureFixture[str]) -> None:
    """It is the step of the checkpoint, not the later one at which its file was complete."""
    trainer = make_trainer(console=True)
    ask_at(trainer, 3)
    trainer.train()
    assert capfd.readouterr().out.splitlines()[-2].endswith("5 steps after the last checkpoint (step 3)")


def test_without_copies_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: live tensors in the writer's hands are overwritten by the next step, and the comparison sees it."""
    waiting = contents(run_with_everything(monkeypatch, async_save=False).checkpoint_dir)

    def no_copies(self: HostMemory, sections: Any) -> dict[str, Any]:
        return {name: encode_section(name, tree) for name, tree in sections.items()}

    monkeypatch.setattr(HostMemory, "snapshot", no_copies)
    aliased = contents(run_with_everything(monkeypatch).checkpoint_dir)
    files = [(name, file, data) for name, (_, tensors) in aliased.items() for file, data in tensors.items()]
    different = {file for name, file, data in files if data != waiting[name][1][file]}
    assert {"model.safetensors", "optimizers.safetensors", "hooks.safetensors", "update_state.safetensors"} <= different


@pytest.mark.req("002-67", "004-06", "004-23")
def test_training_continues_and_hooks_are_called_at_a_later_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """on_checkpoint_save comes on the thread that trains, once the files are durable, with the step that was saved."""
    trainer, gate, received = make_trainer(max_epochs=2), Gate(monkeypatch), []
    story = ask_at(trainer, 2)

    @trainer.on("checkpoint_save")
    def saved(trainer: Trainer, step: int, epoch: int, tokens_seen: int, path: str, checkpoint_path: str) -> None:
        assert (Path(checkpoint_path) / "manifest.json").exists() and trainer.saving is None
        names = (path, checkpoint_path, trainer.event_args.checkpoint_path)
        received.append((step, epoch, tokens_seen, trainer.step, trainer.epoch, threading.current_thread(), *names))

    @trainer.on("step_end", at=12)
    def look(trainer: Trainer) -> None:
        assert trainer.saving == "step-00000002" and gate.reached.wait()
        assert list_checkpoints(trainer.checkpoint_dir) == []
        gate.open()

    trainer.train()
    steps = [f"step {step}" for step in range(1, 17)]
    assert story.told == [*steps[:12], "saved 2", *steps[12:], "end"]
    directory = str(trainer.checkpoint_dir)
    path = f"{directory}/step-00000002"
    assert received == [(2, 0, 0, 12, 1, threading.current_thread(), directory, path, path)]
    events = read_events(trainer.run_dir)
    assert [(event["step"], event["path"]) for event in events if event["kind"] == "checkpoint_saved"] == [(2, path)]


def test_it_is_reported_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not end before what was asked for is durable; then nothing of the state is held on to."""
    trainer, real, copies = make_trainer(), HostMemory.snapshot, WeakSet[torch.Tensor]()

    def snapshot(self: HostMemory, sections: Any) -> Any:
        copied = real(self, sections)
        copies.update(tensor for section in copied.values() for tensor in section.tensors.values())
        return copied

    monkeypatch.setattr(HostMemory, "snapshot", snapshot)
    trainer.on("checkpoint_save")(lambda: copies or pytest.fail("nothing was copied"))
    slow_disk(trainer, monkeypatch)
    story = ask_at(trainer, 8)
    trainer.train()
    assert story.told[-2:] == ["saved 8", "end"]
    assert not writing_threads()
    gc.collect()
    assert not copies


def test_the_next_save_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at every step, all of them are written, one after the other and in order."""
    trainer = make_trainer()
    writers = slow_disk(trainer, monkeypatch)
    story = ask_at(trainer, *range(1, 9))
    trainer.train()
    assert [line for line in story.told if "saved" in line] == [f"saved {step}" for step in range(1, 9)]
    assert story.told.index("saved 1") > story.told.index("step 2")
    assert set(writers) == {1}
    assert len(list_checkpoints(trainer.checkpoint_dir)) == 8


def test_several_names_at_one_boundary() -> None:
    """Each is a checkpoint of that step."""
    trainer = make_trainer()

    @trainer.on("step_end", at=3)
    def ask_for_three(trainer: Trainer) -> None:
        for name in ("one", "two", None, "one"):
            trainer.save(name)

    story = ask_at(trainer)
    trainer.train()
    assert [line for line in story.told if "saved" in line] == ["saved 3"] * 3
    first, second = (contents(trainer.checkpoint_dir)[name] for name in ("one", "two"))
    assert first[1] == second[1]


@pytest.mark.parametrize("when", ["on the way", "at the end"])
def test_a_failure_ends_the_run(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_save_error: stop. The next boundary raises what the disk said, on the thread that trains."""
    trainer, gate = make_trainer(), Gate(monkeypatch)
    story = ask_at(trainer, 2 if when == "on the way" else 8)
    if when == "on the way":
        trainer.on("step_end", at=5)(lambda: gate.fail())
    else:
        gate.error = errno.ENOSPC
        gate.opened.set()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 'step-0000000[28]'.*No space left on device"):
        trainer.train()
    assert story.told[-3:] == [f"step {5 if when == 'on the way' else 8}", "exception", "end"]
    run = read_json(trainer.run_dir / "run.json")
    assert (run["outcome"], run["counters"]["failed_saves"]) == ("failed", 1)
    assert list(trainer.checkpoint_dir.iterdir()) == []


def test_a_failure_may_be_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With on_save_error: warn, training continues, the step is named, and the next checkpoint is written."""
    trainer, gate = make_trainer(on_save_error="warn"), Gate(monkeypatch)
    story = ask_at(trainer, 2, 7)
    trainer.on("step_end", at=5)(lambda: gate.fail())
    trainer.train()
    assert [line for line in story.told if "saved" in line] == ["saved 7"]
    assert trainer.failed_saves == 1 and trainer.step == 8
    assert "step 2 has no checkpoint; training continues: cannot write checkpoint" in caplog.text
    assert [event["step"] for event in read_events(trainer.run_dir) if event["kind"] == "checkpoint_failed"] == [2]


@pytest.mark.hooks_fail(raises=CheckpointError)
def test_what_cannot_be_saved_fails_at_its_own_boundary(caplog: pytest.LogCaptureFixture) -> None:
    """State is taken apart when it is copied, so the hook that cannot be saved is named at once."""
    trainer = make_trainer(on_save_error="warn")
    trainer.add_hook(LiveState(), "mine")
    trainer.hooks.get("mine").state_dict = lambda: {"tensor": {1, 2}}
    ask_at(trainer, 2)
    trainer.on("train_batch_start", at=3)(lambda trainer: caplog.records or pytest.fail("nothing was said"))
    trainer.train()
    assert "step 2: failed: CheckpointError: cannot save mine.tensor: a set cannot be saved" in caplog.text


def test_an_exception_ends_with_the_save_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks get the failure first, then the checkpoint, which is whole, then the end."""
    trainer, gate = make_trainer(), Gate(monkeypatch)
    story = ask_at(trainer, 2)
    trainer.on("exception")(lambda: gate.opened.set())

    @trainer.on("before_backward", at=4, on_error="raise")
    def fail() -> None:
        raise ValueError("the batch is bad")

    with pytest.raises(ValueError, match="the batch is bad"):
        trainer.train()
    assert story.told == ["step 1", "step 2", "step 3", "exception", "saved 2", "end"]
    again = make_trainer(record=False)
    assert again.load_checkpoint(trainer.run_dir).name == "step-00000002"


def test_a_failed_save_replaces_no_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a note on the exception that ended the run, and counted."""
    trainer, gate = make_trainer(), Gate(monkeypatch)
    ask_at(trainer, 2)
    trainer.on("exception")(lambda: gate.fail())

    @trainer.on("before_backward", at=4, on_error="raise")
    def fail() -> None:
        raise ValueError("the batch is bad")

    with pytest.raises(ValueError, match="the batch is bad") as caught:
        trainer.train()
    assert any("No space left on device" in note for note in caught.value.__notes__)
    assert trainer.failed_saves == 1


def test_a_signal_waits_for_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SIGTERM the pending save is finished, then that of the last step; both are reported."""
    trainer, gate = make_trainer(), Gate(monkeypatch)
    story = ask_at(trainer, 2)

    @trainer.on("after_backward", at=4)
    def kill() -> None:
        threading.Timer(0.05, gate.opened.set).start()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    assert story.told == ["step 1", "step 2", "step 3", "step 4", "saved 2", "saved 4", "end"]
    assert len(list_checkpoints(trainer.checkpoint_dir)) == 2


@pytest.mark.parametrize("parameters", [{}, {"monitor": "train/epoch_loss"}, {"save_last": True}], ids=str)
def test_a_signal_before_the_first_checkpoint_saves_its_step_once(parameters: dict[str, Any]) -> None:
    """A checkpoint hook does not save the last step, too, while it is being written because of the signal."""
    trainer = make_trainer(accumulate=2)
    trainer.add_checkpointing(**parameters)
    trainer.on("step_end", name="signal", at=2)(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.fit()
    assert [path.name for path in list_checkpoints(trainer.checkpoint_dir)] == ["step-00000002"]


def test_a_second_signal_leaves_a_whole_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C twice, while the run waits for the disk: it ends as any failure does, with the save finished."""
    trainer, gate = make_trainer(), Gate(monkeypatch)
    story = ask_at(trainer, 2)
    trainer.on("exception")(lambda: gate.opened.set())

    @trainer.on("after_backward", at=4)
    def kill() -> None:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert story.told[-4:] == ["step 4", "exception", "saved 2", "end"]
    assert [path.name for path in list_checkpoints(trainer.checkpoint_dir)] == ["step-00000002"]


def train_with_loaders_that_fork() -> None:
    """Train two epochs with workers; a save of the first one is written until the second has made two steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer, gate = make_trainer(), Gate(monkeypatch)
        data = TensorDataset(*batches_of(16)[0])
        story = ask_at(trainer, 3)
        trainer.on("step_end", at=6)(lambda: gate.open())
        trainer.fit(DataLoader(data, batch_size=4, num_workers=2), max_epochs=2)
    assert story.told[5:8] == ["step 6", "saved 3", "step 7"]


def test_loaders_may_fork_while_a_save_is_written() -> None:
    """An epoch's workers are made while a save of the last epoch is being written."""
    assert status_of(start(train_with_loaders_that_fork)) == 0


def test_a_run_that_is_dropped_finishes_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the iterator of a run ends it as an exception does."""
    trainer = make_trainer()
    slow_disk(trainer, monkeypatch)
    story = ask_at(trainer, 2)
    steps = trainer.stepper()
    for _ in range(2):
        next(steps)
    assert trainer.saving
    steps.close()
    assert story.told[-2:] == ["saved 2", "end"] and not trainer.saving


def test_a_save_at_once_comes_after_the_pending_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """save_checkpoint() returns a durable path as always, and hooks get both events in order."""
    trainer = make_trainer(max_epochs=2)
    slow_disk(trainer, monkeypatch)
    story, paths = ask_at(trainer, 7), []
    trainer.on("epoch_end", at="1 epoch")(lambda trainer: paths.append(trainer.save_checkpoint("now")))
    trainer.train()
    assert [line for line in story.told if "saved" in line][:2] == ["saved 7", "saved 8"]
    assert (paths[0] / "manifest.json").exists()


def test_a_pending_failure_is_not_charged_to_a_hook_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that saves at once gets its checkpoint; the earlier save's failure ends the run at the boundary."""
    trainer, gate, saved = make_trainer(max_epochs=2), Gate(monkeypatch), []
    ask_at(trainer, 7)

    @trainer.on("epoch_end")
    def save(trainer: Trainer) -> None:
        gate.fail()
        saved.append(trainer.save_checkpoint("now").name)

    with pytest.raises(CheckpointError, match="step-00000007"):
        trainer.train()
    assert saved == ["now"] and trainer.step == 9
    assert [entry.failures.total for entry in trainer.hooks.entries() if entry.name == "save"] == [0]


def test_half_a_validation_is_rejected_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """save_checkpoint() inside a validation fails at once, and the pending save is reported after the validation."""
    trainer, gate, refused = make_scored([0.5] * 4), Gate(monkeypatch), []
    story = ask_at(trainer, 2)

    @trainer.on("validation_end", name="wrong")
    def wrong(trainer: Trainer, step: int) -> None:
        if step == 3:
            with pytest.raises(CheckpointError, match="in the middle of a validation"):
                trainer.save_checkpoint()
            refused.append(trainer.saving)
            gate.open()

    trainer.train()
    assert refused == ["step-00000002"] and story.told == ["step 1", "step 2", "step 3", "step 4", "saved 2", "end"]


def test_loading_after_a_stop_loads_the_save_that_was_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends when its last save is durable, so that the newest checkpoint is that one."""
    trainer = make_trainer()
    slow_disk(trainer, monkeypatch)
    ask_at(trainer, 2, 4)
    trainer.on("step_end", at=4)(lambda trainer: trainer.request_stop("enough"))
    trainer.train()
    assert trainer.load_checkpoint(trainer.run_dir).name == "step-00000004"


def make_scored(scores: list[float], **options: Any) -> Trainer:
    """Validates after every step, which then has its score."""
    trainer = make_trainer(val_dataloader=make_batches(1), validate_every=1, max_steps=len(scores), **options)

    @trainer.on("validation_end", name="score")
    def score(metrics: dict[str, float], step: int) -> None:
        metrics["val/score"] = scores[step - 1]

    return trainer


def test_the_best_are_kept_as_in_a_run_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, links and what the hook knows: retention sees durable checkpoints only, and comes to the same."""
    results, name = [], "{step}-{val/score:.2f}"
    for async_save in (False, True):
        trainer = make_scored([0.9, 0.5, 0.7, 0.6, 0.4, 0.45, 0.3, 0.8], async_save=async_save)
        slow_disk(trainer, monkeypatch)
        trainer.add_checkpointing(monitor="val/score", mode="min", save_top_k=2, save_last=True, filename=name)
        trainer.train()
        directory, hook = trainer.checkpoint_dir, trainer.hooks.get("checkpoint")
        assert hook.best_path == directory / "step=7-val_score=0.30"
        links = {path.name: os.readlink(path) for path in directory.iterdir() if path.is_symlink()}  # noqa: PTH115
        results.append((sorted(path.name for path in list_checkpoints(directory)), links, hook.kept, hook.state_dict()))
    assert results[0] == results[1]


def test_one_that_is_worse_than_what_is_being_written_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is compared with those on disk and with that of the pending save."""
    trainer, gate = make_scored([0.5, 0.9, 0.7, 0.6, 0.4]), Gate(monkeypatch)
    trainer.add_checkpointing(monitor="val/score", mode="min")
    story = ask_at(trainer)
    trainer.on("step_end", at=4)(lambda: gate.open())
    trainer.train()
    assert [line for line in story.told if "saved" in line] == ["saved 1", "saved 5"]


def test_resuming_from_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint that was written while training went on, the run comes to the same, bit for bit."""
    whole = make_trainer(LiveState(), max_epochs=2, async_save=False)
    whole.train()
    first = make_trainer(LiveState(), CheckpointHook(save_every_n_epochs=None, save_every_n_steps=3), max_steps=5)
    slow_disk(first, monkeypatch)
    first.train()
    second = make_trainer(LiveState(), max_epochs=2)
    second.fit(resume=first.run_dir)
    assert second.hooks.get("live_state").losses == whole.hooks.get("live_state").losses
    assert all(map(torch.equal, whole.model.state_dict().values(), second.model.state_dict().values()))
