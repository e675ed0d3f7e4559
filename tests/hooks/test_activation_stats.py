"""Activation statistics are those of torch, per module."""

from functools import partial

import builders
import pytest
import torch
from builders import make_batches

from hookline import ActivationStats, read_layers, read_metrics

make_trainer = partial(builders.make_trainer, record=True)
train = partial(builders.train, record=True)


@pytest.mark.req("000-11", "000-12")
def test_activation_statistics_are_those_of_torch() -> None:
    """Mean and standard deviation of the selected modules, recorded at their step."""
    trainer = make_trainer(ActivationStats(modules="0"), data=make_batches(2))
    expected: list[tuple[float, float]] = []

    @trainer.on("forward", name="check")
    def check(name: str, output: torch.Tensor) -> None:
        if name == "0":
            expected.append((output.mean().item(), output.std().item()))

    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    assert (series.names, series.columns, series.steps) == (("0",), ("mean", "std"), (1, 2))
    for recorded, true in zip(series.values[:, 0].tolist(), expected, strict=True):
        assert recorded == pytest.approx(true, rel=1e-4)
    latest = trainer.hooks.get("activation_stats").latest()["0"]
    assert latest == pytest.approx(dict(zip(("mean", "std"), expected[-1], strict=True)), rel=1e-4)


def test_activation_statistics_leave_the_metrics_short() -> None:
    """metrics.jsonl holds one number for all modules: how many values were NaN or infinite."""
    trainer = train("activation_stats", data=make_batches(2))
    records = read_metrics(trainer.run_dir)
    assert [record["activations/non_finite"] for record in records] == [0, 0]
    assert {key for record in records for key in record if "activations" in key} == {"activations/non_finite"}


def test_validation_does_not_count_as_training() -> None:
    """Only the training passes are in the statistics, and outputs that are not floats are ignored."""
    trainer = make_trainer(data=make_batches(1), val_dataloader=[(torch.full((2, 3), 100.0), torch.ones(2, 1))])
    trainer.add_hook(ActivationStats(modules="0"))
    trainer.train()
    assert abs(trainer.hooks.get("activation_stats").latest()["0"]["mean"]) < 10
    hook = ActivationStats()
    hook.on_forward("x", torch.ones(2, dtype=torch.long), 0, "train")
    hook.on_forward("y", {"logits": [torch.ones(2)]}, 0, "train")
    assert list(hook.latest()) == ["y"]
