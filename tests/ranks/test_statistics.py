"""Statistics of several ranks are those of one process on the global batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import make_trainer

from hookline import read_layers, read_metrics
from hookline.activations.monitor import Monitor

METRICS = ("mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs", "count", "histogram", "dead_units")
EXACT = {"zeros", "nans", "infs", "count", "counts", "dead_units", "units"}
Numbers = dict[tuple[str, str, str], torch.Tensor]


def watch(rank: int, kind: str, world_size: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)  # so that the order of additions does not show in the numbers
    trainer = make_trainer(kind, rank, world_size, folder, max_epochs=2, max_grad_norm=0.5)
    monitor = Monitor("*", METRICS, percentiles=[5, 50, 95], gradients=True, dead_window=3)
    trainer.add_hook(monitor, "monitor")
    trainer.add_hook("gradient_monitor", every=2, log_histogram=True, percentiles=[10, 90], log_update_ratio=True)
    trainer.add_hook("gradient_flow", every=3)
    trainer.add_hook("measure", metrics=["norm", "mean", "count"])
    trainer.add_hook("link_norms")
    trainer.add_hook("lr_monitor")
    trainer.train()


def run(kind: str, world_size: int, folder: Path) -> Path:
    run_on_ranks(watch, world_size, kind, world_size, str(folder))
    (found,) = folder.iterdir()
    return found


def layers_of(path: Path) -> Numbers:
    """Return the numbers of layers.jsonl by series, layer and column."""
    return {
        (name, layer, column): series.of(layer, column)[torch.tensor(series.steps).argsort()]
        for name, series in read_layers(path).items()
        for layer in series.names
        for column in series.columns
    }


def metrics_of(path: Path) -> dict[tuple[int, str], Any]:
    left_out = ("step", "epoch", "time")
    found: dict[tuple[int, str], Any] = {}
    for row in read_metrics(path):
        found |= {(row["step"], name): value for name, value in row.items() if name not in left_out}
    return {key: value for key, value in found.items() if not key[1].startswith("ranks/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("none", 1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4)])
def test_rows_histograms_and_norms_are_those_of_the_global_batch(
    kind: str, world_size: int, alone: Path, tmp_path: Path
) -> None:
    path = run(kind, world_size, tmp_path)
    expected, found = layers_of(alone), layers_of(path)
    assert found.keys() == expected.keys()
    assert len({series for series, _, _ in found}) == 4
    for key, values in found.items():
        tolerance = 0.0 if key[2].removeprefix("grad_") in EXACT else 1e-5
        torch.testing.assert_close(values, expected[key], rtol=tolerance, atol=1e-9, equal_nan=True, msg=str(key))
    expected_metrics, found_metrics = metrics_of(alone), metrics_of(path)
    assert found_metrics.keys() == expected_metrics.keys()
    for one, value in found_metrics.items():
        assert value == pytest.approx(expected_metrics[one], rel=1e-5, abs=1e-12), one


def test_repeats_are_bitwise(tmp_path: Path) -> None:
    first, second = (run("fsdp2", 2, tmp_path / name) for name in ("first", "second"))
    assert (first / "layers.jsonl").read_bytes() == (second / "layers.jsonl").read_bytes()
    assert metrics_of(first) == metrics_of(second)
