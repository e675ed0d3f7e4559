"""A run that goes on from an earlier checkpoint sets the later ones aside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import SimpleTrainer
from hookline.checkpoints.abandoned import set_aside_later
from hookline.checkpoints.files import list_checkpoints, verify_checkpoint, write_checkpoint


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in list_checkpoints(directory))


def test_later_ones_are_moved_and_stay_whole(tmp_path: Path) -> None:
    """By the step that they were made at, whatever their names."""
    holder = tmp_path / "checkpoints"
    for step, name in ((8, "step-8"), (16, "best"), (24, "step-24")):
        write_checkpoint(holder, name, {"x": step}, {"step": step})
    moved = set_aside_later(holder, 8)
    assert steps(holder) == ["step-8"]
    assert sorted(Path(path).name for path in moved) == ["best", "step-24"]
    assert all(not verify_checkpoint(Path(path)) for path in moved)
    assert set_aside_later(holder, 8) == []


def test_nothing_is_overwritten_there(tmp_path: Path) -> None:
    """The same step may be abandoned more than once."""
    holder = tmp_path / "checkpoints"
    for _ in range(2):
        write_checkpoint(holder, "step-24", {"x": 1}, {"step": 24})
        set_aside_later(holder, 8)
    assert sorted(path.name for path in (tmp_path / "abandoned").iterdir()) == ["step-24", "step-24-1"]


def make_trainer(root: Path, steps: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    trainer = SimpleTrainer(
        model, [(torch.ones(1, 2), torch.ones(1, 1))] * 30, torch.optim.SGD(model.parameters(), lr=0.1), "cpu",
        loss_fn=torch.nn.MSELoss(), max_steps=steps, console=False, output_dir=str(root),
    )  # fmt: skip
    trainer.add_hook("checkpoint", save_every_n_steps=8, save_every_n_epochs=None)
    return trainer


def test_a_plain_resume_then_follows_the_new_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resumed from step 8 and stopped at 16, the newest checkpoint is the new 16, not the old 24."""
    first = make_trainer(tmp_path, 24)
    first.train()
    holder = first.checkpoint_dir
    (early,) = [path for path in list_checkpoints(holder) if path.name.endswith("8")]
    make_trainer(tmp_path, 16).fit(resume=early)
    assert steps(holder) == ["step-00000008", "step-00000016"]
    assert "was set aside" in caplog.text
    third = make_trainer(tmp_path, 20)
    third.fit(resume=first.run_dir)
    assert third.step == 20
    lines = [json.loads(line) for line in (first.run_dir / "events.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "checkpoint_abandoned" for line in lines) == 2
