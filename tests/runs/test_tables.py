"""Test `load_run`: the columns of whole, empty, torn, resumed and damaged records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from records import close_record, start_record

from hookline import LoadedRun, load_run, read_metrics
from hookline.errors import RecordError
from hookline.record import Record
from hookline.stats.histograms import fold, histograms

NAN = float("nan")


def load(record: Record) -> LoadedRun:
    """Close the record and read it."""
    return load_run(close_record(record))


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    """Return a run of three steps with a validation, a NaN, a series and a series of histograms."""
    record = start_record(tmp_path, "r", {"trainer": {"max_steps": 3, "lr": 1e-5}}, 7)
    for step, loss in enumerate((2.0, NAN, 1.0), start=1):
        record.log(step, 0, "train/loss", loss)
        record.log_layers("act", step, ["a", "b"], ["mean", "std"], torch.full((2, 2), float(step)))
    record.log(3, 0, "val/loss", 0.5)
    record.log_layers("hist", 2, ["a"], ["counts"], torch.arange(3).reshape(1, 1, 3))
    record.event("lr_changed", 2, by="me", values=[1, 2])
    return load(record)


def same(given: list[Any], expected: list[Any]) -> bool:
    """Compare cells, for which NaN is NaN."""
    return list(map(repr, given)) == list(map(repr, expected))


def test_a_whole_run_is_columns(run: LoadedRun, tmp_path: Path) -> None:
    """Metrics are equally long columns, None where a step has no value, and a NaN is a float."""
    assert list(run.metrics) == ["step", "epoch", "time", "train/loss", "val/loss"]
    assert run.metrics["step"] == [1, 2, 3] and run.metrics["epoch"] == [0, 0, 0]
    assert same(run.metrics["train/loss"], [2.0, NAN, 1.0])
    assert run.metrics["val/loss"] == [None, None, 0.5]
    assert all(type(time) is float for time in run.metrics["time"])
    assert run.path == tmp_path / "r"
    assert (run.run["run_id"], run.run["seed"], run.run["outcome"]) == ("r", 7, "completed")
    assert run.config == {"trainer": {"max_steps": 3, "lr": 1e-5}}
    assert [(event["kind"], event["values"]) for event in run.events] == [("lr_changed", [1, 2])]


def test_layers_are_long(run: LoadedRun) -> None:
    """A series has one row per step and name; histograms have one per bin, too."""
    assert list(run.layers) == ["act", "hist"]
    assert run.layers["act"] == {
        "step": [1, 1, 2, 2, 3, 3],
        "name": ["a", "b"] * 3,
        "mean": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        "std": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
    }
    assert run.layers["hist"] == {
        "step": [2, 2, 2], "name": ["a", "a", "a"], "bin": [0, 1, 2], "counts": [0.0, 1.0, 2.0],
    }  # fmt: skip


def log_histograms(record: Record, step: int, *tensors: torch.Tensor, per_octave: int = 8) -> None:
    """Log histograms of tensors and where their bins end, as `gradient_monitor` does."""
    counts, tops = histograms(tensors)
    names = [f"layer{index}" for index in range(len(tensors))]
    record.log_layers("gradients", step, names, ["norm", "top_octave"], torch.stack([tops, tops], dim=1))
    record.log_layers("gradient_histograms", step, names, ["count"], fold(counts, per_octave).unsqueeze(1))


@pytest.mark.parametrize("per_octave", [1, 2, 4, 8])
def test_bins_of_a_monitor_have_edges(per_octave: int, record: Record) -> None:
    """Each value is counted in the bin that encloses it, and empty bins have no row."""
    spread = torch.randn(300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 3, 300)
    log_histograms(record, 7, torch.tensor([0.0, 0.0, 1.0, -1.0, 3.0, -1e-30]), spread, per_octave=per_octave)
    columns = load(record).layers["gradient_histograms"]
    assert list(columns) == ["step", "name", "low", "high", "count"] and set(columns["step"]) == {7}
    assert all(type(count) is int and count > 0 for count in columns["count"])
    rows = list(zip(columns["name"], columns["low"], columns["high"], columns["count"], strict=True))
    small = [row[1:] for row in rows if row[0] == "layer0"]
    assert (0.0, 0.0, 2) in small and sum(count for *_, count in small) == 6
    assert [count for low, high, count in small if low < -1e-30 < high == 0] == [1]
    counted = [row[1:] for row in rows if row[0] == "layer1"]
    assert sum(count for *_, count in counted) == 300
    for low, high, count in counted:
        inside = (spread >= low) & (spread < high) if low >= 0 else (spread > low) & (spread <= high)
        assert int(inside.sum()) == count


def test_nan_and_infinities_have_bins(record: Record) -> None:
    """Their edges are what is counted."""
    log_histograms(record, 1, torch.tensor([NAN, NAN, math.inf, -math.inf, 2.0]))
    columns = load(record).layers["gradient_histograms"]
    assert same(columns["low"], [-math.inf, columns["low"][1], math.inf, NAN])
    assert same(columns["high"], [-math.inf, columns["high"][1], math.inf, NAN])
    assert columns["count"] == [1, 1, 1, 2]


def test_histograms_of_one_layer_have_rows_each(record: Record) -> None:
    """The bins of activations and of their gradients have different edges; without an end, a step is left out."""
    counts, tops = histograms([torch.tensor([1.0]), torch.tensor([8.0])])
    ends = ["histogram_top", "grad_histogram_top"]
    record.log_layers("activations", 1, ["a", "b"], ends, tops.expand(2, 2))
    for step in (1, 2):
        values = counts.expand(2, *counts.shape)
        record.log_layers("activation_histograms", step, ["a", "b"], ["counts", "grad_counts"], values)
    columns = load(record).layers["activation_histograms"]
    assert (columns["step"], columns["name"]) == ([1] * 4, ["a", "a", "b", "b"])
    assert (columns["counts"], columns["grad_counts"]) == ([1, None] * 2, [None, 1] * 2)
    assert columns["low"][0] <= 1 <= columns["high"][0] < columns["low"][1] <= 8 <= columns["high"][1]


def test_histograms_of_several_hooks_are_all_there(record: Record) -> None:
    """Two monitors may write one series in different resolutions."""
    counts, tops = histograms([torch.tensor([1.0, 3.0])])
    for step in (1, 2):
        for name, per_octave in (("fine", 8), ("coarse", 1)):
            record.log_layers("gradients", step, [name], ["norm", "top_octave"], torch.stack([tops, tops], dim=1))
            record.log_layers("gradient_histograms", step, [name], ["count"], fold(counts, per_octave).unsqueeze(1))
    columns = load(record).layers["gradient_histograms"]
    assert columns["step"] == [1] * 4 + [2] * 4
    assert columns["name"] == ["fine", "fine", "coarse", "coarse"] * 2
    fine, coarse = ([columns[end][index] for end in ("low", "high")] for index in (1, 3))
    assert coarse == [2.0, 4.0] and 2.0 < fine[0] < 3.0 <= fine[1] < 4.0
    assert columns["count"] == [1] * 8


def test_a_nan_of_a_layer_is_not_a_missing_value(record: Record) -> None:
    """A statistic that was NaN is NaN, one that was not written is None, and a name without any has no row."""
    record.log_layers("s", 1, ["a"], ["x", "y"], torch.tensor([[NAN, 2.0]]))
    record.log_layers("s", 2, ["b", "a"], ["y"], torch.tensor([[float("inf")], [4.0]]))
    columns = load(record).layers["s"]
    assert (columns["step"], columns["name"]) == ([1, 2, 2], ["a", "a", "b"])
    assert same(columns["x"], [NAN, None, None]) and columns["y"] == [2.0, 4.0, math.inf]


def test_a_statistic_may_be_named_as_a_column(record: Record) -> None:
    """It gets a number, and the column is as always."""
    record.log_layers("s", 1, ["a"], ["name", "step"], torch.tensor([[1.0, 2.0]]))
    assert load(record).layers["s"] == {"step": [1], "name": ["a"], "name#2": [1.0], "step#2": [2.0]}


def test_an_empty_run(record: Record) -> None:
    """A run before its first step has the columns of every run, empty, and no series."""
    run = load_run(record.path)
    assert (run.metrics, run.layers, run.events) == ({"step": [], "epoch": [], "time": []}, {}, [])
    assert run.run["outcome"] is None
    record.close("completed", None, [], [], {})


def test_a_column_has_numbers_of_one_type(record: Record) -> None:
    """Data frames infer a column's type from its first cells, so integers beside floats become floats."""
    for step, (count, flag) in enumerate([(1, True), (NAN, 2), (3, False)], start=1):
        record.log(step, 0, "count", count)
        record.log(step, 0, "flag", flag)
    run = load(record)
    assert same(run.metrics["count"], [1.0, NAN, 3.0]) and same(run.metrics["flag"], [1, 2, 0])


def test_a_metric_may_have_the_name_of_a_text_field(record: Record) -> None:
    """A NaN of the metric `error` is a number, too."""
    record.log(1, 0, "error", NAN)
    assert same(load(record).metrics["error"], [NAN])
    assert same([read_metrics(record.path)[0]["error"]], [NAN])


def test_torn_lines_are_left_out_with_a_warning(run: LoadedRun) -> None:
    """Each torn file is warned of once, at the line that called `load_run`."""
    for name in ("metrics", "layers", "events"):
        path = run.path / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(RuntimeWarning, match="line [0-9]+ was torn") as caught:
        torn = load_run(run.path)
    assert [warning.filename for warning in caught] == [__file__] * 3
    assert torn.metrics["step"] == [1, 2] and torn.events == [] and "hist" not in torn.layers


def test_a_directory_that_is_not_a_run(tmp_path: Path) -> None:
    """Whatever is missing, the error is a RecordError that says which directory is no run, and why."""
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "other", tmp_path / "a\0b"):
        with pytest.raises(RecordError, match=r"is not a run: .*run\.json|: no run is in "):
            load_run(path)
    with pytest.raises(RecordError, match="this run has no directory"):
        load_run(None)


@pytest.mark.parametrize(
    "text",
    ["a: [", "a: !!python/object:os.system {}", "d: 2001-99-99", "a: &a {b: 1}\nc: {<<: *a}", "[" * 100_000, "\0", "%"],
)
def test_a_damaged_config_is_an_error(text: str, run: LoadedRun) -> None:
    """Nothing but a RecordError is raised, and nothing is created from tags or merged."""
    (run.path / "config.yaml").write_text(text)
    with pytest.raises(RecordError, match=r"config\.yaml is damaged or was not written by Hookline"):
        load_run(run.path)


def test_a_config_that_was_written_as_json(run: LoadedRun) -> None:
    (run.path / "config.yaml").write_text(json.dumps({"lr": 1e-5}))
    assert load_run(run.path).config == {"lr": 1e-5}


def test_events_with_strange_times_are_read(run: LoadedRun) -> None:
    """Times that are not numbers do not keep the events from being read."""
    lines = ['{"time":"x","kind":"a"}', '{"time":[1],"kind":"b"}', '{"time":1.0,"kind":"c"}']
    (run.path / "events.jsonl").write_text("\n".join(lines))
    assert [event["kind"] for event in load_run(run.path).events] == ["a", "b", "c"]


def test_pandas_takes_the_columns(run: LoadedRun) -> None:
    """Every table makes a data frame with its rows and columns."""
    pandas = pytest.importorskip("pandas")
    for columns in (run.metrics, *run.layers.values()):
        frame = pandas.DataFrame(columns)
        assert list(frame.columns) == list(columns) and len(frame) == len(columns["step"])
    assert pandas.DataFrame(run.metrics)["val/loss"].isna().tolist() == [True, True, False]


def test_polars_takes_the_columns(run: LoadedRun) -> None:
    """Every table makes a data frame with its rows and columns."""
    polars = pytest.importorskip("polars")
    for columns in (run.metrics, *run.layers.values()):
        frame = polars.DataFrame(columns)
        assert frame.columns == list(columns) and len(frame) == len(columns["step"])
    assert polars.DataFrame(run.metrics)["val/loss"].to_list() == [None, None, 0.5]
