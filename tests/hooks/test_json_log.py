"""The JSON log and the activation statistics."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import ActivationStats, JSONLogHook, Trainer, get_trainer, read_layers, read_metrics


def make_trainer(batches: int = 4, **options: Any) -> Trainer:
    """A trainer that writes to runs/."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(batches)]
    options = {"console": False, "loss_fn": torch.nn.functional.mse_loss, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


def refuse(name: str) -> Any:
    """NaN is no JSON."""
    raise AssertionError(name)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, as strict JSON."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.req("001-26")
def test_the_json_log() -> None:
    """One object a line: the start, every so many batches, each epoch and validation, the end."""
    trainer = make_trainer(val_dataloader=[(torch.randn(2, 3), torch.randn(2, 1))])
    trainer.add_json_logging(log_every_n_batches=2)
    losses: list[float] = []
    trainer.on("train_batch_end", name="losses")(lambda loss: losses.append(loss))
    trainer.train()
    lines = read(trainer.run_dir / "log.jsonl")  # type: ignore[operator]
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
    """A path of one's own, every 100 batches unless told otherwise, and the name 'json_log'."""
    assert JSONLogHook().log_every_n_batches == 100
    trainer = make_trainer(record=False)
    trainer.add_json_logging(path="mine.jsonl")
    trainer.train()
    assert [line["event"] for line in read(Path("mine.jsonl"))] == ["train_start", "epoch_end", "train_end"]
    assert "json_log" in trainer.hooks


def test_the_json_log_without_a_place(caplog: pytest.LogCaptureFixture) -> None:
    """A run that keeps no record needs a path; the run itself goes on."""
    trainer = make_trainer(record=False)
    trainer.add_json_logging(log_every_n_batches=1)
    trainer.train()
    assert "give json_log a path" in caplog.text
    assert trainer.step == 4


def test_a_failed_run_is_in_the_json_log() -> None:
    """Its last line has the status 'error'."""
    trainer = make_trainer()
    trainer.add_json_logging()
    trainer.on("step_end", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert read(trainer.run_dir / "log.jsonl")[-1]["status"] == "error"  # type: ignore[operator]


@pytest.mark.req("000-11", "000-12")
def test_activation_statistics_are_those_of_torch() -> None:
    """Mean and standard deviation of the selected modules, recorded at their step."""
    trainer = make_trainer(2)
    trainer.add_hook(ActivationStats(modules="0"))
    expected: list[tuple[float, float]] = []

    @trainer.on("forward", name="check")
    def check(name: str, output: torch.Tensor) -> None:
        if name == "0":
            expected.append((output.mean().item(), output.std().item()))

    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]  # type: ignore[arg-type]
    assert (series.names, series.columns, series.steps) == (("0",), ("mean", "std"), (1, 2))
    for found, true in zip(series.values[:, 0].tolist(), expected, strict=True):
        assert found == pytest.approx(true, rel=1e-4)
    latest = trainer.hooks.get("activation_stats").latest()["0"]
    assert latest == pytest.approx(dict(zip(("mean", "std"), expected[-1], strict=True)), rel=1e-4)


def test_activation_statistics_leave_the_metrics_short() -> None:
    """metrics.jsonl holds one number for all modules: how many values were NaN or infinite."""
    trainer = make_trainer(2)
    trainer.add_hook("activation_stats")
    trainer.train()
    records = read_metrics(trainer.run_dir)  # type: ignore[arg-type]
    assert [record["activations/non_finite"] for record in records] == [0, 0]
    assert {key for record in records for key in record if "activations" in key} == {"activations/non_finite"}


def test_validation_does_not_count_as_training() -> None:
    """Only the training passes are in the statistics, and outputs that are no floats are left alone."""
    trainer = make_trainer(1, val_dataloader=[(torch.randn(2, 3) + 100, torch.randn(2, 1))])
    trainer.add_hook(ActivationStats(modules="0"))
    trainer.train()
    assert abs(trainer.hooks.get("activation_stats").latest()["0"]["mean"]) < 10
    hook = ActivationStats()
    hook.on_forward("x", torch.ones(2, dtype=torch.long), 0)
    hook.on_forward("y", {"logits": [torch.ones(2)]}, 0)
    assert list(hook.latest()) == ["y"]
