"""The JSON log has a line for each part of the run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import make_batches

from hookline import JSONLogHook

make_trainer = partial(builders.make_trainer, record=True)


def refuse(name: str) -> Any:
    """Reject NaN, which is not JSON."""
    raise AssertionError(name)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, as strict JSON."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.req("001-26")
def test_the_json_log() -> None:
    """One object a line: the start, every n batches, each epoch and validation, the end."""
    trainer = make_trainer(val_dataloader=make_batches(1))
    trainer.add_json_logging(log_every_n_batches=2)
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    lines = read(trainer.run_dir / "log.jsonl")
    assert [line["event"] for line in lines] == [
        "train_start", "batch_end", "batch_end", "validation_end", "epoch_end", "train_end",
    ]  # fmt: skip
    assert lines[0]["run_id"] == trainer.run_id
    assert [line["step"] for line in lines[1:]] == [2, 4, 4, 4, 4]
    assert lines[1]["latest_loss"] == pytest.approx(losses[1])
    assert lines[1]["lr"] == 0.1 and lines[1]["current_batch_idx"] == 1
    assert "val/loss" in lines[3]["metrics"]
    assert lines[-1]["status"] == "completed"
    assert not any("model" in line or "optimizer" in line for line in lines)


@pytest.mark.req("001-26", "001-31")
def test_the_json_log_elsewhere_and_its_default() -> None:
    """A path can be given; the default is every 100 batches, and the name is 'json_log'."""
    assert JSONLogHook().log_every_n_batches == 100
    trainer = make_trainer(record=False)
    trainer.add_json_logging(path="mine.jsonl")
    trainer.train()
    assert [line["event"] for line in read(Path("mine.jsonl"))] == ["train_start", "epoch_end", "train_end"]
    assert "json_log" in trainer.hooks


@pytest.mark.req("001-05", "001-26")
def test_the_json_log_counts_batches_not_steps() -> None:
    """A step of several batches is several batches; the count runs over epochs."""
    trainer = make_trainer(data=make_batches(5), accumulate=2, max_epochs=2)
    trainer.add_json_logging(log_every_n_batches=3)
    trainer.train()
    lines = [line for line in read(trainer.run_dir / "log.jsonl") if line["event"] == "batch_end"]
    places = [(line["current_epoch"], line["current_batch_idx"], line["step"]) for line in lines]
    assert places == [(0, 2, 2), (1, 0, 4), (1, 3, 5)]  # batches 3, 6 and 9 of the run


def test_the_json_log_without_a_path(caplog: pytest.LogCaptureFixture) -> None:
    """A run without a record needs a path; the run itself continues."""
    trainer = make_trainer(record=False)
    trainer.add_json_logging(log_every_n_batches=1)
    trainer.train()
    assert "hook 'json_log': writes nothing, because this run has no record on disk; give it a path" in caplog.text
    assert trainer.step == 4


def test_a_failed_run_is_in_the_json_log() -> None:
    """Its last line has the status 'error'."""
    trainer = make_trainer()
    trainer.add_json_logging()
    trainer.on("step_end", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert read(trainer.run_dir / "log.jsonl")[-1]["status"] == "error"
