"""A checkpoint holds what a run needs to resume, and loading it restores every part."""

import errno
import io
import os
import random
import shutil
import time
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import pytest
import torch
from builders import batches_of, make_batches, make_model
from opened_files import opened_files
from safetensors.torch import load_file
from saved_checkpoints import list_checkpoints
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hookline import CheckpointHook, EarlyStopping, SimpleTrainer, Trainer, TrainingHook, UpdateHook, _fs
from hookline.checkpoints.store import read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError, HooklineError
from hookline.record import read_events, read_json


class Counter(TrainingHook):
    """A hook whose count is saved with the run."""

    saves = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self) -> None:
        self.count += 1


class Momentum(UpdateHook):
    """An update hook with state."""

    def init(self, params: Any) -> dict[str, Any]:
        return {"sum": {name: torch.zeros_like(param) for name, param in params.items()}}

    def on_update(self, grads: Any, state: Any) -> Any:
        state["sum"] = {name: state["sum"][name] + grad for name, grad in grads.items()}
        return dict(state["sum"])


def make_trainer(*hooks: Any, seed: int = 0, **options: Any) -> SimpleTrainer:
    """Make a trainer with dropout, AdamW, a scheduler and two hooks with state; the seed decides only the start."""
    options = {
        "model": make_model(3, 8, 1, between=partial(nn.Dropout, 0.5), seed=seed), "data": make_batches(3),
        "optimizer": partial(torch.optim.AdamW, lr=0.01), "record": True,
        "scheduler": partial(LambdaLR, lr_lambda=lambda step: 0.9**step), **options,
    }  # fmt: skip
    return builders.make_trainer(Counter(), Momentum(), *hooks, **options)


def saved_run(every: int | None = None, **options: Any) -> SimpleTrainer:
    """Train, with a checkpoint of each epoch, and every few steps if asked for."""
    trainer = make_trainer(CheckpointHook(save_every_n_steps=every), **options)
    trainer.train()
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    """Note every loss from now on."""
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    return losses


@pytest.mark.req("002-68", "002-67", "004-06", "004-19")
def test_a_run_resumes_where_it_was() -> None:
    """Two epochs at once, and one epoch, a checkpoint and another process for the second: bit for bit the same."""
    whole = make_trainer(max_epochs=2)
    expected = losses_of(whole)
    whole.train()

    first = make_trainer(max_epochs=1)
    first.add_checkpointing()
    saved: list[tuple[int, str, str]] = []

    class Told(TrainingHook):
        def on_checkpoint_save(self, step: int, path: str, checkpoint_path: str) -> None:
            saved.append((step, path, checkpoint_path))

    first.add_hook(Told())
    begun = losses_of(first)
    first.train()
    assert saved == [(3, str(first.checkpoint_dir), str(first.checkpoint_dir / "step-00000003"))]

    torch.rand(5), random.random()
    second = make_trainer(seed=99, max_epochs=2)
    continued = losses_of(second)
    second.fit(resume=saved[0][2])
    assert begun + continued == expected
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    assert second.hooks.get("counter").count == 6
    assert (second.step, second.progress.batches, second.epoch) == (6, 6, 1)
    assert second.lr == whole.lr


@pytest.mark.parametrize("given", ["checkpoint", "holder", "run"])
def test_what_a_path_may_mean(given: str) -> None:
    """A checkpoint's directory, the one that holds them, or the run's: the newest whole one is taken."""
    first = saved_run(every=1)
    newest = first.checkpoint_dir / "step-00000003"
    path = {"checkpoint": newest, "holder": first.checkpoint_dir, "run": first.run_dir}[given]
    second = make_trainer(seed=5, record=False)
    assert second.load_checkpoint(path).name == "step-00000003"
    assert second.step == 3
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_a_trainer_goes_back_inside_an_earlier_epoch() -> None:
    """A run after `load_checkpoint` continues with the batches that came after the checkpoint, in their order."""
    trainer, read = make_trainer(max_epochs=2), list[float]()
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.on("train_batch_start")(lambda batch: read.append(batch[0].sum().item()))
    trainer.fit(DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=2, shuffle=True))
    first, read[:] = list(read), []
    trainer.load_checkpoint(trainer.checkpoint_dir / "step-00000002")
    trainer.train()
    assert read == first[2:] and trainer.step == 12


def test_a_mark_that_the_first_batch_after_a_resume_passes_is_due() -> None:
    """Schedules by tokens go on from the tokens of the checkpoint."""
    options: dict[str, Any] = {"max_epochs": 2, "count_tokens": lambda batch: 10}
    first, resumed, due = saved_run(every=1, **options), make_trainer(**options), list[int]()
    resumed.on("step_end", every="20 tokens")(lambda step: due.append(step))
    resumed.fit(resume=first.checkpoint_dir / "step-00000001", fork=True)
    assert due == [2, 4, 6]


def test_a_skip_is_forgotten_when_a_trainer_goes_back() -> None:
    """It was asked for in a step that the checkpoint does not have."""
    trainer = make_trainer()
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.on("train_batch_start", name="skips", at=3)(lambda trainer: trainer.skip_step("a bad batch"))
    trainer.train()
    assert trainer.skipped_steps == 1
    trainer.load_checkpoint(trainer.checkpoint_dir / "step-00000002")
    for name in ("skips", "checkpoint"):
        trainer.remove_hook(name)
    trainer.training_step((torch.ones(4, 3), torch.ones(4, 1)))
    assert (trainer.step, trainer.skipped_steps) == (3, 0)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The newest good one is used, and the log names the bad one."""
    first = saved_run(every=1)
    files = [file for file in (first.checkpoint_dir / "step-00000003").rglob("*") if file.suffix == ".safetensors"]
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(bytes(content))
    second = make_trainer(seed=5, record=False)
    assert second.load_checkpoint(first.checkpoint_dir).name == "step-00000002"
    assert "skipped a damaged checkpoint" in caplog.text


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make everything in a folder unreadable, also for root."""

    def refusing(method: str) -> Any:
        allowed = getattr(Path, method)

        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            if folder == path.parent or (folder == path and method == "iterdir"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return allowed(path, *args, **kwargs)

        return call

    for method in ("stat", "lstat", "iterdir"):
        monkeypatch.setattr(Path, method, refusing(method))


def test_a_checkpoint_that_cannot_be_read_is_skipped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged one is, unless it is the one that is asked for, or nothing can be read."""
    first = saved_run(every=1)
    second, newest = make_trainer(seed=5, record=False), first.checkpoint_dir / "step-00000003"
    with monkeypatch.context() as patched:
        forbid(patched, newest)
        assert second.load_checkpoint(first.checkpoint_dir).name == "step-00000002"
        problem = "manifest.json: cannot be read: Permission denied"
        assert f"skipped a damaged checkpoint: {newest}: {problem}" in caplog.text
        with pytest.raises(CheckpointError, match=rf"step-00000003 is damaged \({problem}\); use a diff"):
            second.load_checkpoint(newest)
    forbid(monkeypatch, first.checkpoint_dir)
    with pytest.raises(CheckpointError, match=r"cannot read .*/checkpoints: Permission denied"):
        second.load_checkpoint(first.run_dir)


def test_a_checkpoint_is_verified_once() -> None:
    """By its path or chosen as the newest one: reading every byte twice would double the time to resume."""
    first = make_trainer()
    first.add_checkpointing(save_every_n_steps=1)
    first.train()
    assert first.checkpoint_dir is not None
    newest = first.checkpoint_dir / "step-00000003"

    for path in (newest, first.checkpoint_dir):
        trainer = make_trainer(seed=5, record=False)
        for load in (trainer.load_checkpoint, trainer.load_weights, lambda path: trainer.restore(str(path))):  # noqa: B023
            with opened_files() as files:
                load(path)
            assert files.count(newest / "model.safetensors") == 1


def test_a_run_resumes_by_a_link_to_it(tmp_path: Path) -> None:
    """It is the same run, with the same id."""
    first = saved_run()
    link = tmp_path / "latest"
    link.symlink_to(first.run_dir)
    second = make_trainer(max_epochs=2)
    second.fit(resume=link)
    assert (second.run_id, second.run_dir) == (first.run_id, first.run_dir)
    assert read_json(first.run_dir / "run.json")["run_id"] == first.run_id


def test_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    """The error says what it has instead."""
    path = write_checkpoint(tmp_path, "odd", {"batch": {}, "rng": {}}, {"step": 1})
    with pytest.raises(CheckpointError, match=r"odd has no weights: it has the sections batch, rng, and no model"):
        make_trainer(init_from=str(path), record=False).train()


@pytest.mark.parametrize(("how", "said"), [("emptied", "is empty"), ("deleted", "is missing")])
def test_the_newest_checkpoint_is_not_passed_over_silently(
    how: str, said: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The record says that it was saved; what is used instead is in the log and in the record."""
    first = saved_run(every=1)
    newest = first.checkpoint_dir / "step-00000003"
    newest.rename(tmp_path / "elsewhere")
    if how == "emptied":
        newest.mkdir()
    second = make_trainer(seed=5)
    second.fit(resume=first.run_dir)
    assert f"{newest}: {said}, although the run saved it" in caplog.text
    damaged = [event for event in read_events(first.run_dir) if event["kind"] == "checkpoint_damaged"]
    assert [Path(event["instead"]).name for event in damaged] == ["step-00000002"]
    caplog.clear()  # the resumed run has saved that step again, or has been set back to an earlier one since
    make_trainer().fit(resume=first.run_dir)
    assert "although" not in caplog.text


def test_the_only_checkpoint_is_missing() -> None:
    """Such a run does not start again at its first step, as one without a checkpoint does."""
    first = saved_run()
    shutil.rmtree(first.checkpoint_dir / "step-00000003")
    with pytest.raises(CheckpointError, match=r"has no undamaged checkpoint \(1 damaged\)"):
        make_trainer().fit(resume=first.run_dir)


def break_the_third_save(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full during one step."""
    real = _fs.os.write

    def write(fd: int, data: Any) -> int:
        if trainer.step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(_fs, "os", SimpleNamespace(**{**vars(os), "write": write}))


def test_a_failed_save_ends_the_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the disk's own words, in the error, in the record and among the counters; the older ones still load."""
    trainer = make_trainer(max_epochs=2)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1)
    break_the_third_save(trainer, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.train()
    assert "checkpoint_failed" in (trainer.run_dir / "events.jsonl").read_text()
    run = read_json(trainer.run_dir / "run.json")
    assert (run["outcome"], run["counters"]["failed_saves"]) == ("failed", 1)
    assert make_trainer(record=False).load_checkpoint(trainer.run_dir).name == "step-00000002"


def test_a_failed_save_may_be_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues, with a warning, an event and a count."""
    trainer = make_trainer(max_epochs=2, on_save_error="warn", console=True)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1)
    break_the_third_save(trainer, monkeypatch)
    trainer.train()
    assert trainer.step == 6 and trainer.failed_saves == 1
    assert "step 3 has no checkpoint; training continues: cannot write checkpoint" in caplog.text
    assert "1 failed save" in capsys.readouterr().out
    assert [path.name[-1] for path in list_checkpoints(trainer.checkpoint_dir)] == ["6", "5", "4", "2", "1"]


def test_one_flipped_bit_in_any_file(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever file of the newest checkpoint it is in, the one before is used, and log and record say why."""
    first = saved_run(every=1)
    newest = first.checkpoint_dir / "step-00000003"
    assert len(list(newest.iterdir())) > 4
    for number, file in enumerate(sorted(newest.iterdir())):
        good = file.read_bytes()
        place = (7919 * (number + 1)) % len(good)
        file.write_bytes(good[:place] + bytes([good[place] ^ (1 << number % 8)]) + good[place + 1 :])
        caplog.clear()
        second = make_trainer(max_epochs=1)
        second.fit(resume=first.run_dir)
        assert second.event_args.checkpoint_path.endswith("step-00000002"), file
        assert f"skipped a damaged checkpoint: {newest}: " in caplog.text
        events = (first.run_dir / "events.jsonl").read_text()
        assert events.count('"kind":"checkpoint_damaged"') > number
        (first.run_dir / "abandoned" / newest.name).rename(newest)  # where a later checkpoint goes
        file.write_bytes(good)


def test_changed_hooks_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Added, removed, renamed and moved hooks: each keeps its own state by name, and the record says what changed.

    Whose state is left out is said aloud.
    """

    def run_with(names: list[str], **how: Any) -> Trainer:
        trainer = make_trainer(max_epochs=how.pop("max_epochs", 1))
        trainer.remove_hook("counter")
        for name in names:
            trainer.add_hook(Counter(), name)
        trainer.add_checkpointing()
        trainer.fit(**how)
        return trainer

    first = run_with(["a", "b", "c"])
    kept = {"same": ["a", "b", "c"], "moved": ["c", "a", "b"], "changed": ["a", "new", "c"]}
    changes = {}
    for kind, names in kept.items():
        second = run_with(names, resume=first.checkpoint_dir / "step-00000003", max_epochs=2)
        assert [second.hooks.get(name).count for name in names] == [6 if name in "abc" else 3 for name in names]
        events = [event for event in read_events(second.run_dir) if event["kind"] == "hooks_changed"]
        changes[kind] = [(event["added"], event["removed"], event["reordered"]) for event in events]
    assert changes["same"] == []
    assert changes["moved"] == [([], [], True)]
    assert changes["changed"][-1] == (["new"], ["b"], False)
    assert [line for line in caplog.messages if "not used" in line] == [
        "the checkpoint's state of 'b' is not used: this run has no such hook (a renamed hook starts without its state)"
    ]


def test_two_hooks_of_one_class_have_a_state_each() -> None:
    """States are restored in place, into the registered objects."""
    first = make_trainer()
    first.add_hook(Counter(), "second")
    first.hooks.get("second").count = 100
    first.add_checkpointing()
    first.train()
    again = make_trainer(max_epochs=2)
    mine = Counter()
    again.add_hook(mine, "second")
    again.fit(resume=first.run_dir)
    assert (mine.count, again.hooks.get("counter").count) == (106, 6)
    assert again.hooks.get("second") is mine


def test_nothing_to_load() -> None:
    """An empty place is named."""
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="empty has no checkpoint; the hook `checkpoint` saves them"):
        make_trainer(record=False).load_checkpoint("empty")


def test_init_from_takes_the_weights_and_nothing_else() -> None:
    """Counters, optimizer and hooks start from nothing."""
    first = saved_run()
    second = make_trainer(seed=5, init_from=str(first.run_dir), record=False)
    seen: list[Any] = []

    @second.on("train_start")
    def look(model: torch.nn.Module, step: int, resumed: bool) -> None:
        same = all(map(torch.equal, model.parameters(), first.model.parameters()))
        seen.append((same, step, resumed, len(second.optimizers[0].state), second.hooks.get("counter").count))

    second.train()
    assert seen == [(True, 0, False, 0, 0)]


def test_a_checkpoint_that_does_not_fit() -> None:
    """Another number of schedulers is an error that says both numbers."""
    first = saved_run()
    second = make_trainer(scheduler=None)
    with pytest.raises(CheckpointError, match="the checkpoint has 1 scheduler, but this run has 0"):
        second.load_checkpoint(first.run_dir)


def test_state_without_a_hook_is_reported() -> None:
    """A hook that is missing, or that has no state saved, is in the record."""
    first = saved_run()
    second = make_trainer(record=False)
    second.remove_hook("counter")
    second.add_hook(Counter(), "another")
    second.load_checkpoint(first.run_dir)
    told = [(event["hook"], event["problem"]) for event in second.record.events if event["kind"] == "hook_state"]
    assert ("counter", "no hook has this name") in told
    assert ("another", "the checkpoint has no state for it") in told


class Raises(TrainingHook):
    """A hook whose state cannot be read."""

    def on_train_end(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")


class HoldsSet(TrainingHook):
    """A hook whose state has no exact form."""

    saves = ("seen",)

    def __init__(self) -> None:
        self.seen = {1, 2}

    def on_train_end(self) -> None: ...


class HoldsFile(UpdateHook):
    """An update hook whose state cannot be saved."""

    def init(self, params: Any) -> dict[str, Any]:
        return {"file": io.StringIO()}

    def on_update(self, grads: Any, state: Any) -> Any:
        return grads


UNSAVABLE = {
    Raises: "ValueError: no state today",
    HoldsSet: "CheckpointError: cannot save odd.seen: a set cannot be saved exactly without pickle",
    HoldsFile: "CheckpointError: cannot save odd.file: a _io.StringIO cannot be saved exactly without pickle",
}


class RaisesAtTimes(Raises):
    """A hook whose state can be read every other time."""

    times = 0

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        return super().state_dict() if self.times % 2 else {"times": self.times}


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_whose_state_cannot_be_saved_at_times_stays_enabled() -> None:
    """A state that was saved ends the row of failures after which a hook is switched off."""
    trainer, hook = make_trainer(max_epochs=2), RaisesAtTimes()
    trainer.add_hook(hook, "odd")
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1)
    trainer.train()
    assert hook.times == 6 and trainer.hooks.is_enabled("odd")


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("policy", ["warn", "disable"])
@pytest.mark.parametrize("hook", UNSAVABLE)
@pytest.mark.hooks_fail(raises=(CheckpointError, ValueError))
def test_a_hook_whose_state_cannot_be_saved(hook: type[Any], policy: str, async_save: bool) -> None:
    """The checkpoint is saved without that state, and the record names the hook; the others' states are in it."""
    trainer = make_trainer(async_save=async_save)
    trainer.add_hook(hook(), "odd", on_error=policy)
    trainer.add_checkpointing()
    trainer.train()
    events = read_events(trainer.run_dir)
    failed = next(event for event in events if event["kind"] == "hook_failed")
    assert (failed["hook"], failed["on"], failed["step"]) == ("odd", "state_dict", 3)
    assert failed["error"].startswith(UNSAVABLE[hook])
    assert trainer.hooks.is_enabled("odd") is (policy == "warn")
    assert [event["hooks"] for event in events if event["kind"] == "hooks_without_state"] == [["odd"]]
    second = make_trainer(seed=5, record=False)
    second.add_hook(hook(), "odd", on_error="warn")
    second.load_checkpoint(trainer.run_dir)
    assert second.hooks.get("counter").count == 3 and trainer.failed_saves == 0


@pytest.mark.parametrize(("policy", "failures"), [("warn", 3), ("disable", 1)])
@pytest.mark.parametrize("hook", UNSAVABLE)
@pytest.mark.hooks_fail(raises=(CheckpointError, ValueError))
def test_a_state_that_can_never_be_saved_is_not_reported_at_every_save(
    hook: type[Any], policy: str, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The hook is switched off as at an event, with one traceback; from then on there is nothing to report."""
    trainer = make_trainer(max_epochs=5)
    trainer.add_hook(hook(), "odd", on_error=policy)
    trainer.add_checkpointing()
    trainer.train()
    events = read_events(trainer.run_dir)
    kinds = [event["kind"] for event in events if event.get("hook") == "odd"]
    assert kinds == ["hook_failed"] * failures + ["hook_disabled"]
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert not trainer.hooks.is_enabled("odd") and len(list_checkpoints(trainer.checkpoint_dir)) == 5


class CountsReads(dict[str, Any]):
    """A state that counts how often it is encoded."""

    reads = 0

    def items(self) -> Any:
        self.reads += 1
        return super().items()


@pytest.mark.hooks_fail(raises=CheckpointError)
def test_the_state_of_a_hook_is_encoded_once_per_checkpoint() -> None:
    """Nothing remains of one that cannot be saved, even if a part of it can."""
    trainer = make_trainer()
    odd, state = trainer.hooks.get(trainer.add_hook(HoldsSet())), CountsReads(weight=torch.ones(2))
    odd.saves, odd.weight = ("weight", "seen"), torch.zeros(3)
    trainer.hooks.get(trainer.add_hook(HoldsSet(), "good")).state_dict = lambda: state
    trainer.train()
    path = trainer.save_checkpoint()
    assert state.reads == 1
    assert list(load_file(path / "hooks.safetensors")) == ["good.weight"]


@pytest.mark.parametrize("on_save_error", ["stop", "warn"])
@pytest.mark.parametrize("hook", UNSAVABLE)
def test_under_raise_a_state_that_cannot_be_saved_ends_the_run(hook: type[Any], on_save_error: Any) -> None:
    """The error names the hook, whatever happens when a checkpoint cannot be written."""
    trainer = make_trainer(on_save_error=on_save_error)
    trainer.add_hook(hook(), "odd", on_error="raise")
    trainer.add_checkpointing()
    with pytest.raises((ValueError, CheckpointError)) as raised:
        trainer.train()
    assert "raised by hook 'odd' in state_dict, step 3" in raised.value.__notes__
    assert read_json(trainer.run_dir / "run.json")["outcome"] == "failed"


def test_a_hook_that_fails_when_a_checkpoint_was_saved_is_not_a_failed_save() -> None:
    """Its policy ends the run, also with `on_save_error: warn` and if it raises a CheckpointError."""
    trainer = make_trainer(on_save_error="warn")
    trainer.add_checkpointing()

    @trainer.on("checkpoint_save", name="uploads", on_error="raise")
    def upload() -> None:
        raise CheckpointError("no such bucket")

    with pytest.raises(CheckpointError, match="no such bucket"):
        trainer.train()
    assert trainer.failed_saves == 0


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler"])
def test_another_part_whose_state_dict_raises_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failed save, about which `on_save_error` decides."""
    trainer = make_trainer(on_save_error="warn")
    owner = {"model": trainer.model, "optimizer": trainer.optimizers[0], "scheduler": trainer.schedulers[0]}[part]
    monkeypatch.setattr(owner, "state_dict", lambda: 1 / 0)
    trainer.add_checkpointing()
    trainer.train()
    assert trainer.failed_saves == 1
    events = read_events(trainer.run_dir)
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert f"{part} ({type(owner).__name__}) raised ZeroDivisionError: division by zero" in failed[0]["error"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("losses.beside", r"now-1 lacks something that a run needs to resume: KeyError\('beside'\)"),
        ("progress.step", r"now-1 lacks something that a run needs to resume: KeyError\('step'\)"),
        ("hooks.early_stopping.looked", "hook 'early_stopping' .* cannot load the state .* KeyError: 'looked'"),
    ],
)
def test_a_state_that_lacks_a_field_is_refused(place: str, words: str) -> None:
    """Nothing is completed: a checkpoint has every field that saving writes, or it is damaged."""
    first, second = (make_trainer(EarlyStopping(monitor="train/loss"), record=record) for record in (True, False))
    first.train()
    path = first.save_checkpoint("now")
    sections, meta = read_checkpoint(path)
    *above, field = place.split(".")
    del reduce(getitem, above, sections)[field]
    with pytest.raises(HooklineError, match=words):
        second.load_checkpoint(write_checkpoint(path.parent, "now", sections, meta))


def test_save_now_waits_for_the_end_of_the_window() -> None:
    """Asked for in the middle of a window, the checkpoint is made at the step's boundary."""
    trainer = make_trainer(accumulate=2)
    story: list[str] = []
    trainer.on("train_batch_start", at="1 batch", name="ask")(lambda trainer: trainer.save())
    trainer.on("step_end", name="step")(lambda step: story.append(f"step {step}"))
    trainer.on("checkpoint_save", name="saved")(lambda step: story.append(f"saved {step}"))
    trainer.train()
    assert story == ["step 1", "saved 1", "step 2"]


def test_checkpoints_by_name_are_made_once_each() -> None:
    """Two names are two checkpoints, one asked for twice is one, and a function is asked when it is written."""
    trainer, step_at_writing = make_trainer(), []

    def late() -> str:
        step_at_writing.append(trainer.progress.steps_done)
        return "late"

    @trainer.on("train_batch_start", at=2)
    def ask(trainer: Trainer) -> None:
        for name in ("mine", None, late, "mine", late, None):
            trainer.save(name)

    trainer.train()
    assert sorted(path.name for path in trainer.checkpoint_dir.iterdir()) == ["late", "mine", "step-00000002"]
    assert set(step_at_writing) == {2}


def test_half_a_validation_cannot_be_saved() -> None:
    """Inside a validation the position and the random streams are not training's; save() waits for its end."""
    trainer = make_trainer(val_dataloader=make_batches(1), sanity_batches=0)
    caught: list[str] = []

    @trainer.on("validation_end")
    def save(trainer: Trainer) -> None:
        try:
            trainer.save_checkpoint()
        except CheckpointError as error:
            caught.append(str(error))
        trainer.save()

    trainer.train()
    said = "save_checkpoint() cannot save in the middle of a validation; call trainer.save(), which waits for its end"
    assert caught == [said]
    assert [path.name for path in trainer.checkpoint_dir.iterdir()] == ["step-00000003"]


def test_a_run_without_a_directory_cannot_save() -> None:
    """record=False has nowhere to write, and that is said."""
    trainer = make_trainer(record=False)
    trainer.add_checkpointing()
    with pytest.raises(CheckpointError, match="record=False"):
        trainer.train()


def shuffling_trainer(seed: int = 0, **options: Any) -> SimpleTrainer:
    """Make a trainer for six shuffled batches, with dropout, so that data and model draw from the same stream."""
    loader = DataLoader(TensorDataset(*batches_of(24)[0]), batch_size=4, shuffle=True)
    return make_trainer(seed=seed, data=loader, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_resumes_in_the_middle_of_an_epoch(accumulate: int) -> None:
    """The batches already trained on are passed over, the shuffle is the same, and the epoch does not begin twice."""
    whole = shuffling_trainer(accumulate=accumulate, max_epochs=2, record=False)
    expected = losses_of(whole)
    whole.train()

    steps = 4 // accumulate
    first = shuffling_trainer(accumulate=accumulate, max_steps=steps)
    first.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=steps)
    begun = losses_of(first)
    first.train()

    second = shuffling_trainer(seed=9, accumulate=accumulate, max_epochs=2, record=False)
    continued = losses_of(second)
    epochs: list[tuple[str, int]] = []
    second.on("epoch_start", name="start")(lambda epoch: epochs.append(("start", epoch)))
    second.on("epoch_end", name="end")(lambda epoch: epochs.append(("end", epoch)))
    second.fit(resume=first.run_dir)
    assert begun + continued == expected
    assert epochs == [("end", 0), ("start", 1), ("end", 1)]
    assert second.progress.batches == whole.progress.batches == 12


def test_a_stopped_run_continues_in_the_same_process() -> None:
    """Two calls of fit make the same curve as one, although the first stopped inside an epoch."""
    whole = shuffling_trainer(max_steps=9, record=False)
    expected = losses_of(whole)
    whole.train()
    parts = shuffling_trainer(max_steps=4, record=False)
    losses = losses_of(parts)
    parts.train()
    parts.fit(max_steps=9)
    assert losses == expected


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", [None, "step-00000002", "mine"])
def test_what_was_requested_by_save_is_not_deleted(name: str | None, asynchronous: bool) -> None:
    """The hook keeps the newest checkpoints only; one that was requested, also under a name of the hook, stays."""
    trainer = make_trainer(async_save=asynchronous, max_epochs=2)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1, save_top_k=1)
    trainer.on("step_end", at=2)(lambda trainer: trainer.save(name))
    trainer.train()
    kept = {path.name for path in list_checkpoints(trainer.checkpoint_dir)}
    assert {name or "step-00000002", "step-00000006"} <= kept
    assert not kept & {"step-00000001", "step-00000003", "step-00000004"}


def test_slow_saves_are_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes less than a stall, all of them at one boundary more: every save is a sign of life."""
    trainer, now = make_trainer(max_steps=2), [0.0]
    trainer.add_hook("stall_watchdog", seconds=0.8)
    monkeypatch.setattr("hookline.hooks.stall_watchdog.monotonic", lambda: now[0])

    @trainer.model.register_state_dict_pre_hook
    def take_long(*_: Any) -> None:
        now[0] += 0.4
        time.sleep(0.1)  # so that the watchdog checks, as it does every 0.04 s

    @trainer.on("step_end", at=1)
    def save(trainer: Trainer) -> None:
        for name in ("one", "two", "three"):
            trainer.save(name)

    trainer.train()
    events = (trainer.run_dir / "events.jsonl").read_text()
    assert events.count('"checkpoint_saved"') == 3 and '"stall"' not in events
