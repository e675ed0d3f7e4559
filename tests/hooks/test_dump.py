"""A crash folder holds what is needed to run its batch again, and says what it lacks."""

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import Trainer, get_trainer, replay_crash
from hookline.errors import CheckpointError, HooklineError
from hookline.hooks.nan_forensics.diagnosis import diagnose
from hookline.hooks.nan_forensics.dump import RecordedBatch, read_crash, write_crash


class Fine(nn.Module):
    """Drops out, so that the random streams matter, and divides by what may be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.drop(self.layer(x))
        return (kept / kept).sum()


def make_trainer(seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    model, never_run = Fine(), [torch.ones(4, 3)]
    return get_trainer("simple", model, never_run, torch.optim.SGD(model.parameters(), 0.1), "cpu", record=False)


def crash(batch: Any, with_state: bool = True) -> tuple[Trainer, Path]:
    """A trainer, and the folder of a crash of it."""
    trainer = make_trainer()
    trainer.model.layer.eval()  # type: ignore[union-attr, operator]
    state = trainer.random_state()
    given = batch if isinstance(batch, torch.Tensor) else torch.ones(4, 3)
    autopsy = diagnose(trainer, given, state)
    recorded = RecordedBatch(batch, 7, "train", state)
    folder = write_crash(Path("crashes"), trainer, recorded, "loss nan", autopsy, with_state)
    return trainer, folder


def test_the_report_is_for_people() -> None:
    """Plain JSON with the reason, the place, the autopsy and every parameter's statistics."""
    _, folder = crash(torch.ones(4, 3))
    report = json.loads((folder / "crash.json").read_text())
    assert folder == Path("crashes/step-00000000")
    assert (report["reason"], report["batch_idx"], report["dataloader_name"]) == ("loss nan", 7, "train")
    assert report["autopsy"]["module"] == "" and report["autopsy"]["loss"] == "NaN"
    assert set(report["parameters"]) == {"layer.weight", "layer.bias"}
    assert report["parameters"]["layer.bias"]["shape"] == [3]
    assert report["left_out"] == {}


def test_another_process_s_trainer_runs_into_the_same_nan() -> None:
    """With other weights and other random streams to begin with, and all modules in another mode."""
    _, folder = crash(torch.ones(4, 3))
    other = make_trainer(seed=5)
    other.model.eval()
    torch.manual_seed(99)
    replay = replay_crash(folder, other)
    assert replay.same
    assert replay.now.module == ""
    assert not other.model.layer.training and other.model.drop.training  # type: ignore[union-attr]


def test_a_replay_that_differs_says_so() -> None:
    """Without dropout's zeros the division is fine, and the replay is not the same."""
    _, folder = crash(torch.ones(4, 3))
    other = make_trainer()
    other.model.drop.p = 0.0  # type: ignore[union-attr, assignment]
    replay = replay_crash(folder, other)
    assert not replay.same and replay.now.finite


def test_nothing_is_pickled() -> None:
    """The folder holds JSON and safetensors only, and a flipped byte is noticed."""
    _, folder = crash(torch.ones(4, 3))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    damaged = folder / "state" / "batch.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match=r"batch\.safetensors"):
        read_crash(folder)


def test_without_weights_a_replay_needs_them_loaded() -> None:
    """A small crash can be replayed once the right weights are loaded, and says so before."""
    trainer, folder = crash(torch.ones(4, 3), with_state=False)
    assert not (folder / "state" / "model.safetensors").exists()
    with pytest.raises(HooklineError, match="has no weights: load those of step 0"):
        replay_crash(folder, trainer)
    assert replay_crash(folder, trainer, weights_loaded=True).same


def test_a_batch_that_cannot_be_written_is_left_out() -> None:
    """The rest of the evidence is kept; a replay says what is missing and why."""
    _, folder = crash(object())
    assert "no exact form without pickle" in json.loads((folder / "crash.json").read_text())["left_out"]["batch"]
    with pytest.raises(HooklineError, match="cannot be replayed without its batch: cannot save"):
        read_crash(folder)


def test_another_folder_is_rejected() -> None:
    """With a hint at what one looks like."""
    with pytest.raises(HooklineError, match=r"has no crash\.json"):
        read_crash("nowhere")


def test_crashes_of_one_step_do_not_overwrite_each_other() -> None:
    """The second one gets a number."""
    assert [crash(torch.ones(4, 3))[1].name for _ in range(2)] == ["step-00000000", "step-00000000-1"]


def test_mappings_of_any_class_are_written_as_dicts() -> None:
    """Also inside lists and tuples; everything else is unchanged."""
    _, folder = crash(({"a": UserDict(b=[UserDict(c=torch.ones(1))])}, "x"))
    batch = read_crash(folder)[1]["batch"]
    assert batch == ({"a": {"b": [{"c": torch.ones(1)}]}}, "x")
    assert type(batch[0]["a"]) is dict
