"""A crash folder holds what is needed to run its batch again, and says what it lacks."""

import errno
import json
import os
from collections import UserDict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from torch import nn

from hookline import HooklineError, SimpleTrainer, Trainer, replay_crash
from hookline.errors import CheckpointError


class Fine(nn.Module):
    """Drops out, so that the random streams matter, and divides by what may be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.drop(self.layer(x))
        return (kept / kept).sum()


class Once:
    """A loader of one batch, which may be any object."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        yield self.batch


def make_trainer(seed: int = 0, batch: Any = None, seen: list[Any] | None = None) -> SimpleTrainer:
    """Make a trainer with one batch; the model gets ones, whatever the batch is, which is appended to `seen`."""

    def step_fn(model: nn.Module, batch: Any) -> Any:
        if seen is not None:
            seen.append(batch)
        return model(torch.ones(4, 3))

    torch.manual_seed(seed)
    return builders.make_trainer(model=Fine, data=Once(batch), loss_fn=None, step_fn=step_fn, record=True)


def crash(batch: Any, *names: str, **options: Any) -> tuple[Trainer, list[Path]]:
    """Train until the loss is NaN; return the trainer and the folder of each hook's crash."""
    trainer = make_trainer(batch=batch)
    for name in names or ("nan_forensics",):
        trainer.add_hook("nan_forensics", name, **options)
    trainer.on("train_batch_start", name="eval")(lambda model: model.layer.eval())
    trainer.train()
    return trainer, [trainer.hooks.get(name).crash for name in names or ("nan_forensics",)]


def test_the_report_is_plain_json() -> None:
    """With the reason, the batch, the diagnosis and every parameter's statistics."""
    _, (folder,) = crash(torch.ones(4, 3))
    report = json.loads((folder / "crash.json").read_text())
    assert folder.parent.name == "crashes" and folder.name == "step-00000001"
    assert (report["reason"], report["batch_idx"], report["dataloader_name"]) == ("loss nan", 0, "train")
    assert report["autopsy"]["module"] == "" and report["autopsy"]["loss"] == "NaN"
    assert set(report["parameters"]) == {"layer.weight", "layer.bias"}
    assert report["parameters"]["layer.bias"]["shape"] == [3]
    assert report["left_out"] == {}


def test_another_trainer_reproduces_the_nan() -> None:
    """Its weights, random states and the modes of its modules are different before."""
    _, (folder,) = crash(torch.ones(4, 3))
    other = make_trainer(seed=5)
    other.model.eval()
    torch.manual_seed(99)
    replay = replay_crash(folder, other)
    assert replay.same
    assert replay.now.module == ""
    assert not other.model.layer.training and other.model.drop.training


def test_a_replay_that_differs_says_so() -> None:
    """Without dropout's zeros the division is fine, and the replay is not the same."""
    _, (folder,) = crash(torch.ones(4, 3))
    other = make_trainer()
    other.model.drop.p = 0.0
    replay = replay_crash(folder, other)
    assert not replay.same and replay.now.finite


def test_nothing_is_pickled() -> None:
    """The folder holds JSON and safetensors only, and a flipped byte is noticed."""
    _, (folder,) = crash(torch.ones(4, 3))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    damaged = folder / "state" / "batch.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match=r"batch\.safetensors"):
        replay_crash(folder, make_trainer())


def test_without_weights_a_replay_needs_them_loaded() -> None:
    """A crash without weights is replayed after the right ones are loaded; before, the error says so."""
    trainer, (folder,) = crash(torch.ones(4, 3), state=False)
    assert not (folder / "state" / "model.safetensors").exists()
    with pytest.raises(HooklineError, match="has no weights: load those before step 1"):
        replay_crash(folder, trainer)
    assert replay_crash(folder, trainer, weights_loaded=True).same


def test_a_batch_that_cannot_be_written_is_left_out() -> None:
    """The rest of the evidence is kept; a replay says what is missing and why."""
    _, (folder,) = crash(object())
    assert (
        "cannot be saved exactly without pickle" in json.loads((folder / "crash.json").read_text())["left_out"]["batch"]
    )
    with pytest.raises(HooklineError, match="cannot be replayed without its batch: cannot save"):
        replay_crash(folder, make_trainer())


def test_another_folder_is_rejected() -> None:
    """The error says what was expected."""
    with pytest.raises(HooklineError, match=r"has no crash\.json"):
        replay_crash("nowhere", make_trainer())


def test_crashes_of_one_step_do_not_overwrite_each_other() -> None:
    """The second one gets a number."""
    _, folders = crash(torch.ones(4, 3), "first", "second")
    assert [folder.name for folder in folders] == ["step-00000001", "step-00000001-1"]


def test_mappings_of_any_class_are_written_as_dicts() -> None:
    """Also inside lists and tuples; everything else is unchanged."""
    _, (folder,) = crash(({"a": UserDict(b=[UserDict(c=torch.ones(1))])}, "x"))
    batches: list[Any] = []
    replay_crash(folder, make_trainer(seen=batches))
    assert batches[0] == ({"a": {"b": [{"c": torch.ones(1)}]}}, "x")
    assert type(batches[0][0]["a"]) is dict


class FailingOs:
    """The module `os` with a function that fails once for a file of a crash folder: the n-th time it is called."""

    def __init__(self, name: str, fail_at: int) -> None:
        self.name, self.fail_at, self.calls = name, fail_at, 0

    def __getattr__(self, name: str) -> Any:
        return self.call if name == self.name else getattr(os, name)

    def call(self, target: Any, *more: Any) -> Any:
        """Call the function, or fail as a full disk does."""
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
        self.calls += "crashes" in path.parts
        if "crashes" in path.parts and self.calls == self.fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, self.name)(target, *more)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
@pytest.mark.hooks_fail(raises=(HooklineError, OSError))
def test_a_disk_that_fails_leaves_no_part_of_a_folder(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call fails, the folder is whole or absent; its absence is a failure of the hook, and the run ends."""
    calls, absent = 0, []
    for fail_at in count():
        failing = FailingOs(call, fail_at)
        with monkeypatch.context() as patch:
            patch.setattr("hookline._fs.os", failing)
            trainer, _ = crash(torch.ones(4, 3))
        calls = calls or failing.calls
        assert trainer.stopped_by == "nan_forensics"
        folders = list((trainer.run_dir / "crashes").iterdir())
        if not folders:
            absent.append(fail_at)
            assert trainer.hooks.entry("nan_forensics").failures.total == 1
        else:
            assert [path.name for path in folders] == ["step-00000001"]
            assert replay_crash(folders[0], make_trainer(seed=5)).same
        if fail_at == calls:
            break
    assert absent[0] == 1
