"""Statistics of several ranks are those of one process on the global batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import (
    DEVICE,
    FEATURES,
    SAMPLES,
    layers_of,
    make_batches,
    make_mesh,
    make_model,
    make_trainer,
    metrics_of,
    wrap,
)
from torch import nn

from hookline import Trainer, read_layers, read_metrics
from hookline.activations.monitor import Monitor
from hookline.hooks.console import times

METRICS = ("mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs", "count", "histogram", "dead_units")
EXACT = {"zeros", "nans", "infs", "count", "counts", "dead_units", "units"}
no_tensor_parallelism_over_gloo = pytest.mark.skipif(
    DEVICE == "cuda", reason="torch's functional collectives crash over gloo for tensors on a GPU (torch 2.11)"
)


def watch(rank: int, kind: str, world_size: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)  # so that the order of additions does not show in the numbers
    options: dict[str, Any] = {}
    if kind == "tensor":
        options = {"model": tensor_parallel(make_model(), world_size), "batches": make_batches()}
    trainer = make_trainer(kind, rank, world_size, folder, max_epochs=2, max_grad_norm=0.5, **options)
    watch_everything(trainer)
    trainer.train()


def tensor_parallel(model: nn.Module, world_size: int) -> nn.Module:
    """Return the model with tensor parallelism, and outputs that are DTensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = {"output_layouts": Replicate(), "use_local_output": False}
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "2": RowwiseParallel(input_layouts=Shard(-1), **whole),
        "4": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    }
    return parallelize_module(model, make_mesh(tensor=world_size), plan)


def watch_everything(trainer: Trainer) -> None:
    monitor = Monitor("*", METRICS, percentiles=[5, 50, 95], gradients=True, dead_window=3)
    trainer.add_hook(monitor, "monitor")
    trainer.add_hook("gradient_monitor", every=2, log_histogram=True, percentiles=[10, 90], log_update_ratio=True)
    trainer.add_hook("gradient_flow", every=3)
    trainer.add_hook("measure", metrics=["norm", "mean", "count"])
    trainer.add_hook("link_norms")
    trainer.add_hook("lr_monitor")


def run(kind: str, world_size: int, folder: Path) -> Path:
    run_on_ranks(watch, world_size, kind, world_size, str(folder))
    (found,) = folder.iterdir()
    return found


TENSOR_PARALLEL = pytest.param("tensor", 2, marks=no_tensor_parallelism_over_gloo)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("none", 1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("hsdp", 4), TENSOR_PARALLEL])
def test_rows_histograms_and_norms_are_those_of_the_global_batch(
    kind: str, world_size: int, alone: Path, tmp_path: Path
) -> None:
    path = run(kind, world_size, tmp_path)
    expected, found = layers_of(alone), layers_of(path)
    without = {key for key in expected if key[2] in ("units", "dead_units")} if kind == "tensor" else set()  # DTensors
    assert found.keys() == expected.keys() - without
    assert len({series for series, _, _ in found}) == 4
    for key, values in found.items():
        column = key[2].removeprefix("grad_")
        tolerance = 0.0 if column in EXACT else 1e-5
        if column == "counts" and DEVICE == "cuda":  # where a value at the edge of two bins may fall into either
            moved = (values - expected[key]).cumsum(-1)  # over the upper edge of each bin
            assert moved.abs().sum(-1).max() <= 1, key
            assert not moved[..., -1].any(), key
            continue
        torch.testing.assert_close(values, expected[key], rtol=tolerance, atol=1e-9, equal_nan=True, msg=str(key))
    expected_metrics, found_metrics = metrics_of(alone), metrics_of(path)
    assert found_metrics.keys() == expected_metrics.keys()
    for one, value in found_metrics.items():
        assert value == pytest.approx(expected_metrics[one], rel=1e-5, abs=1e-12), one


def test_repeats_are_bitwise(tmp_path: Path) -> None:
    first, second = (run("fsdp2", 2, tmp_path / name) for name in ("first", "second"))
    found, again = read_layers(first), read_layers(second)  # from a device, lines may arrive in another order
    assert found.keys() == again.keys()
    for name, series in found.items():
        assert (series.names, series.columns, series.steps) == (
            again[name].names,
            again[name].columns,
            again[name].steps,
        )
        assert series.values.nan_to_num(-1.0).equal(again[name].values.nan_to_num(-1.0))
    assert metrics_of(first) == metrics_of(second)


class Branches(nn.Module):
    """Run one of two layers, depending on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.left if batch.shape[0] > 4 else self.right)(batch)


def branch(rank: int, folder: str) -> None:
    model = wrap(Branches(), "ddp", find_unused_parameters=True)
    batches = [(torch.ones(6 - 2 * rank, 6), torch.zeros(6 - 2 * rank, 1)) for _ in range(3)]
    trainer = make_trainer("none", rank, 2, folder, model=model, batches=batches)
    trainer.add_hook(Monitor("*", ["count", "mean"]), "monitor")

    @trainer.on("step_end")
    def count(step: int, trainer: Any) -> None:
        if rank == 1:
            trainer.log("only_one", step, reduce="sum")

    trainer.train()


def test_modules_and_metrics_that_only_some_ranks_have_are_recorded(tmp_path: Path) -> None:
    run_on_ranks(branch, 2, str(tmp_path))
    (path,) = tmp_path.iterdir()
    series = read_layers(path)["activations"]
    assert series.of("left", "count").tolist() == [6.0] * 3
    assert series.of("right", "count").tolist() == [4.0] * 3
    assert [row["only_one"] for row in read_metrics(path) if "only_one" in row] == [1, 2, 3]


def speed(rank: int, folder: str) -> int:
    batches = [(torch.ones(4 + 4 * rank, 6), torch.zeros(4 + 4 * rank, 1)) for _ in range(4)]
    trainer = make_trainer("ddp", rank, 2, folder, batches=batches, count_tokens=lambda batch: batch[0].numel())
    trainer.add_hook("throughput", every=4, flops_per_sample=1e12)
    trainer.train()
    return trainer.rank_tokens


def test_throughput_is_that_of_all_ranks(tmp_path: Path) -> None:
    assert [one.value for one in run_on_ranks(speed, 2, str(tmp_path))] == [96, 192]
    (row,) = [row for row in read_metrics(next(tmp_path.iterdir())) if "throughput/samples_per_s" in row]
    samples, tokens = row["throughput/samples_per_s"], row["throughput/tokens_per_s"]
    assert tokens == pytest.approx(6 * samples)
    assert row["throughput/tflops"] == pytest.approx(samples)
    assert 8 <= samples / row["throughput/steps_per_s"] <= 16  # 4 and 8 samples a step, by each rank's own clock


def count_shared(rank: int, folder: str) -> list[int]:
    """Train with tensor parallelism, where both ranks have each batch; the loss of the last one is infinite."""
    batches, seen = make_batches(steps=4), []
    batches[3][1][0] = float("inf")
    model = tensor_parallel(make_model(), 2)
    trainer = make_trainer(
        "tensor", rank, 2, folder, model=model, batches=batches, count_tokens=lambda batch: batch[0].numel()
    )
    times.perf_counter = lambda: float(trainer.step)  # type: ignore[attr-defined] # a step takes a second
    trainer.add_hook("throughput", every=4, flops_per_sample=1e12, peak_flops=1e12)
    trainer.on("train_end")(lambda tokens_seen: seen.append(tokens_seen))
    trainer.train()
    return seen


@no_tensor_parallelism_over_gloo
def test_a_batch_that_the_ranks_share_counts_once(tmp_path: Path) -> None:
    tokens = 4 * SAMPLES * FEATURES
    assert [one.value for one in run_on_ranks(count_shared, 2, str(tmp_path))] == [[tokens], [tokens]]
    (path,) = tmp_path.iterdir()
    counters = json.loads((path / "run.json").read_text())["counters"]
    assert (counters["tokens_seen"], counters["non_finite_losses"]) == (tokens, 1)
    (row,) = [row for row in read_metrics(path) if "throughput/samples_per_s" in row]
    samples = row["throughput/samples_per_s"]
    assert row["throughput/tokens_per_s"] == pytest.approx(FEATURES * samples)
    assert row["throughput/tflops"] == pytest.approx(samples)
    assert row["throughput/steps_per_s"] == pytest.approx(samples / SAMPLES)
    assert row["throughput/mfu"] == pytest.approx(samples / 2)  # of what both devices can do
