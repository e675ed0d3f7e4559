"""Metrics of training batches over several ranks."""

import math
from typing import Any

import torch
from rank_processes import run_on_ranks
from rank_runs import FEATURES, make_trainer

IGNORED = -100.0


def train(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train three steps: of the first both ranks have targets, of the second rank 0, of the third none."""
    targets = [[1.0, 1.0], [1.0 if rank == 0 else IGNORED] * 2, [IGNORED, IGNORED]]
    batches = [(torch.full((2, FEATURES), rank + 1.0), torch.tensor(one).reshape(2, 1)) for one in targets]
    found: dict[str, Any] = {}
    trainer = make_trainer(
        "ddp", rank, 2, None, batches=batches, loss_fn=lambda output, target: output.sum() * 1e-9,
        metrics=[{"name": "accuracy", "threshold": -1e9}], **options,
    )  # fmt: skip
    trainer.on("epoch_end")(lambda trainer: found.update(latest=trainer.latest_metrics()["train/accuracy"]))
    trainer.train()
    found["steps"] = [row["train/accuracy"] for row in trainer.record.metrics if "train/accuracy" in row]
    found["epoch"] = [row["train/epoch_accuracy"] for row in trainer.record.metrics if "train/epoch_accuracy" in row]
    return found


def test_a_rank_without_counted_targets_has_no_part_in_the_mean() -> None:
    """Neither in the step's accuracy nor in the latest value; where no rank has any, it is not a number."""
    for options in ({}, {"loss_weight": "samples"}):
        first, second = (result.value for result in run_on_ranks(train, 2, options))
        assert first["steps"][:2] == [1.0, 1.0] and math.isnan(first["steps"][2])
        assert first["epoch"] == [1.0]
        assert math.isnan(first["latest"]) and math.isnan(second["latest"])
    last = {"limit_train_batches": 2}
    assert [result.value["latest"] for result in run_on_ranks(train, 2, last)] == [1.0, 1.0]


def train_on_samples(rank: int) -> dict[str, float]:
    """Train one step, of one sample on rank 0 and of three on rank 1; return the latest metrics of the epoch."""
    samples, found = 1 + 2 * rank, dict[str, float]()
    trainer = make_trainer(
        "ddp", rank, 2, None, batches=[(torch.full((samples, FEATURES), rank + 1.0), torch.zeros(samples, 1))],
        step_fn=lambda model, batch: {"loss": model(batch[0]).sum() * 1e-9, "who": float(rank)},
        loss_weight="samples",
    )  # fmt: skip
    trainer.on("epoch_end")(lambda trainer: found.update(trainer.latest_metrics()))
    trainer.train()
    return found


def test_the_latest_value_of_a_step_weighs_ranks_as_its_loss_does() -> None:
    """All ranks have the same one, because hooks may decide by it."""
    assert [result.value["train/who"] for result in run_on_ranks(train_on_samples, 2)] == [0.75, 0.75]
