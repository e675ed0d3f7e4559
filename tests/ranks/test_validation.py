"""A validation over several ranks counts each sample once, whatever number of batches the ranks have."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import FEATURES, make_batches, make_model, make_trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import Table, TrainingHook, read_media

KINDS = ["ddp", "fsdp2"]
SHARES = [[4, 4, 3], [5, 6]]  # the sizes of the batches of two ranks: 22 samples in all


def validation_batches(rank: int | None) -> list[Any]:
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(22, FEATURES, generator=generator)
    pieces = inputs.split([size for sizes in SHARES for size in sizes])
    chosen = pieces if rank is None else pieces[:3] if rank == 0 else pieces[3:]
    return [(one, one.sum(-1, keepdim=True)) for one in chosen]


class Broadcasts(TorchDispatchMode):
    """Counts the broadcasts of what runs inside."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "broadcast" in str(function)
        return function(*args, **(kwargs or {}))


class Spread:
    """A metric object that knows nothing of ranks."""

    def reset(self) -> None:
        self.values: list[float] = []

    def update(self, predictions: torch.Tensor, target: torch.Tensor) -> None:
        self.values += predictions.flatten().tolist()

    def compute(self) -> float:
        return max(self.values) - min(self.values)


def validate(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Validate once, and return the metrics and what happened in it."""
    share = None if world_size == 1 else rank

    def of_rank(output: torch.Tensor, batch: Any) -> dict[str, float]:
        return {"both": float(output.mean())} | ({"of_1": float(output.mean())} if share == 1 else {})

    model = nn.Sequential(*make_model(), nn.BatchNorm1d(1))
    trainer = make_trainer(
        kind, rank, world_size, None, model=model, val_loaders=validation_batches(share), sanity_batches=3,
        metrics={"mse": lambda output, batch: ((output - batch[1]) ** 2).mean(), "by": of_rank, "spread": Spread()},
    )  # fmt: skip
    found: dict[str, Any] = {"ended": 0, "forwards": 0}

    @trainer.on("on_validation_batch_end")
    def count_batches() -> None:
        found["ended"] += 1

    @trainer.on("on_forward")
    def count_forwards(name: str, phase: str) -> None:
        found["forwards"] += name == "0" and phase == "validation"

    found["metrics"] = trainer.validate()
    trainer.training_step(make_batches(rank, world_size)[0])  # DDP broadcasts buffers in the next forward pass
    with Broadcasts() as broadcasts:
        trainer.validate()
    trainer.training_step(make_batches(rank, world_size)[1])
    return found | {"broadcasts": broadcasts.count}


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_counts_once_in_a_validation(kind: str) -> None:
    alone = run_on_ranks(validate, 1, 1, "none")[0].value["metrics"]
    first, second = (result.value for result in run_on_ranks(validate, 2, 2, kind))
    assert first["metrics"] == second["metrics"]
    of_1 = first["metrics"].pop("val/by/of_1")  # over the 11 samples of rank 1, under its own name
    assert of_1 != pytest.approx(first["metrics"]["val/by/both"], rel=1e-3)
    spread = first["metrics"].pop("val/spread")  # the mean over the ranks of what such an object says
    assert 0 < spread <= alone.pop("val/spread")
    assert first["metrics"] == pytest.approx(alone, rel=1e-5)
    assert [first["ended"], second["ended"]] == [6, 4]  # a batch that is repeated for the others has no events
    assert [first["forwards"], second["forwards"]] == [6, 4]
    assert [first["broadcasts"], second["broadcasts"]] == [0, 0]


def train(rank: int, kind: str, sizes: list[list[int]]) -> dict[str, float]:
    """Train with validation batches of some sizes, and return the validation metrics that were recorded."""
    batches = [(one, one[:, :1]) for one in torch.ones(sum(sizes[rank]), FEATURES).split(sizes[rank])]
    trainer = make_trainer(kind, rank, 2, None, val_loaders=batches, sanity_batches=2, max_epochs=2)
    trainer.train()
    return {key: value for row in trainer.record.metrics for key, value in row.items() if key.startswith("val/")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sanity_check_and_every_epoch_validate_with_uneven_batches(kind: str) -> None:
    results = run_on_ranks(train, 2, kind, [[2, 2, 2], [2]])
    assert math.isfinite(results[0].value["val/loss"])


def test_a_rank_without_validation_batches_is_named() -> None:
    results = run_on_ranks(train_without_batches, 2, check=False)
    for result in results:
        assert "validation loader 'val' yielded no batch on rank 1" in result.error


def train_without_batches(rank: int) -> None:
    class Nothing:
        def __iter__(self) -> Any:
            return iter(validation_batches(0) if rank == 0 else [])

    make_trainer("fsdp2", rank, 2, None, val_loaders=Nothing()).train()


class NamesTokens(TrainingHook):
    """Names what all ranks add up, at an event that a rank may not have."""

    on_error = "raise"

    def on_validation_batch_end(self, tokens_seen: int) -> None:
        self.tokens = tokens_seen


class OnRankZero:
    """Validation batches that only rank 0 has; the others know that from their share."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(make_batches(0, 1, 1) if self.rank == 0 else [])


def validate_unevenly(rank: int) -> int:
    trainer = make_trainer(
        "ddp", rank, 2, None, val_loaders=OnRankZero(rank), validate_every=4, sanity_batches=0, count_tokens=len
    )
    trainer.add_hook(hook := NamesTokens())
    trainer.train()
    return hook.tokens if rank == 0 else 0


def test_a_rank_without_validation_batches_takes_part_in_what_hooks_name() -> None:
    assert run_on_ranks(validate_unevenly, 2)[0].value > 0


def measure_classes(rank: int, world_size: int, all_on_0: bool = False) -> dict[str, float]:
    """Validate with metrics that are made from sums, on batches of different sizes."""
    share = None if world_size == 1 or all_on_0 else rank
    batches = [(inputs, (target > 0).float()) for inputs, target in validation_batches(share)]
    loader = iter([] if all_on_0 and rank else batches)
    metrics = ["mse", "f1", "accuracy"] if rank else ["accuracy", "f1", "mse"]  # the order does not matter
    return make_trainer("ddp", rank, world_size, None, val_loaders=loader, metrics=metrics).validate()


def test_metrics_by_name_are_those_of_one_process() -> None:
    """Sums are added up over the ranks, so it does not matter how these divide the samples."""
    alone = run_on_ranks(measure_classes, 1, 1)[0].value
    for all_on_0 in (False, True):
        for result in run_on_ranks(measure_classes, 2, 2, all_on_0):
            assert result.value == pytest.approx(alone)
    assert {"val/accuracy", "val/f1", "val/mse"} <= set(alone) and 0 < alone["val/f1"] < 1


def confuse(rank: int, world_size: int, folder: str) -> None:
    """Train one step with a validation that counts predictions."""
    share = None if world_size == 1 else rank
    batches = [(inputs, (target > 0).float()) for inputs, target in validation_batches(share)]
    trainer = make_trainer("ddp", rank, world_size, folder, val_loaders=batches, max_steps=1, validate_every=1)
    trainer.add_hook("confusion_matrix")
    trainer.train()


def test_a_confusion_matrix_counts_the_samples_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 records one table, which has each sample once."""
    run_on_ranks(confuse, 2, 2, str(tmp_path))
    (row,) = [row for run in tmp_path.iterdir() for row in read_media(run)]
    assert isinstance(row.content, Table) and sum(sum(cells[1:]) for cells in row.content.rows) == 22
