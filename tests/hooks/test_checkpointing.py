"""The checkpoint hook saves when it should, and a save that fails ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import CheckpointHook, Trainer, get_trainer


def make_trainer(**options: Any) -> Trainer:
    """Four batches an epoch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
    options = {"console": False, "loss_fn": torch.nn.functional.mse_loss, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


def saved(trainer: Trainer) -> list[str]:
    """The checkpoints on disk."""
    directory = trainer.checkpoint_dir
    return sorted(path.name for path in directory.iterdir()) if directory is not None and directory.exists() else []


@pytest.mark.req("001-27")
@pytest.mark.parametrize(
    ("parameters", "steps"),
    [
        ({}, [4, 8]),
        ({"save_every_n_epochs": 2}, [8]),
        ({"save_every_n_epochs": None, "save_every_n_steps": 3}, [3, 6]),
        ({"save_every_n_epochs": 1, "save_every_n_steps": 4}, [4, 8]),
        ({"save_every_n_epochs": None}, []),
    ],
    ids=str,
)
def test_when_checkpoints_are_saved(parameters: dict[str, Any], steps: list[int]) -> None:
    """Every few epochs, every few steps, or both; one asked for twice is made once."""
    trainer = make_trainer(max_epochs=2)
    trainer.add_hook(CheckpointHook(**parameters))
    heard: list[int] = []
    trainer.on("checkpoint_save", name="ear")(lambda step: heard.append(step))
    trainer.train()
    assert saved(trainer) == [f"step-{step:08d}" for step in steps]
    assert heard == steps


@pytest.mark.req("001-27", "004-30", "002-67")
def test_the_checkpoint_is_durable_when_it_is_told() -> None:
    """A hook that uploads finds every file in place, with the step and the path it is told."""
    trainer = make_trainer()
    trainer.add_checkpointing()
    uploaded: list[str] = []

    @trainer.on("checkpoint_save", name="upload", on_error="raise")
    def upload(trainer: Trainer, checkpoint_path: str, path: str, step: int) -> None:
        assert Path(checkpoint_path).parent == Path(path)
        uploaded.extend(file.name for file in Path(checkpoint_path).iterdir() if file.stat().st_size)

    trainer.train()
    assert "manifest.json" in uploaded
    assert [event["kind"] for event in read_events(trainer)] == ["hooks_without_state", "checkpoint_saved"]


def read_events(trainer: Trainer) -> list[dict[str, Any]]:
    """The run's events."""
    from hookline.record import read_jsonl

    assert trainer.run_dir is not None
    return read_jsonl(trainer.run_dir / "events.jsonl")[0]


def test_a_save_that_fails_ends_the_run() -> None:
    """A run that cannot save would lose everything at its end, so it says so now."""
    trainer = make_trainer()
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.on("train_start")(lambda trainer: Path(trainer.checkpoint_dir).write_text("a file in the way"))
    with pytest.raises(Exception, match="checkpoints"):
        trainer.train()
    assert trainer.step == 1
    assert trainer.status == "error"
