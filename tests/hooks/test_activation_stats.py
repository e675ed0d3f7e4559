"""Activation statistics are those of torch, per module."""

from typing import Any

import pytest
import torch

from hookline import ActivationStats, Trainer, get_trainer, read_layers, read_metrics


def make_trainer(batches: int = 4, **options: Any) -> Trainer:
    """Make a trainer that writes to runs/."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(batches)]
    options = {"console": False, "loss_fn": torch.nn.functional.mse_loss, **options}
    return get_trainer("simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)


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
    """Only the training passes are in the statistics, and outputs that are not floats are ignored."""
    trainer = make_trainer(1, val_dataloader=[(torch.randn(2, 3) + 100, torch.randn(2, 1))])
    trainer.add_hook(ActivationStats(modules="0"))
    trainer.train()
    assert abs(trainer.hooks.get("activation_stats").latest()["0"]["mean"]) < 10
    hook = ActivationStats()
    hook.on_forward("x", torch.ones(2, dtype=torch.long), 0)
    hook.on_forward("y", {"logits": [torch.ones(2)]}, 0)
    assert list(hook.latest()) == ["y"]
