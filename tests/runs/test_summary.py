"""`RunSummary`: a run in bounded memory."""

from __future__ import annotations

import json
import math
import sys
import tracemalloc
import warnings
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_batches, make_trainer
from live_summary import LiveSummary
from records import close_record, start_record
from torch import Tensor

import hookline
from hookline.errors import RecordError
from hookline.record import Record, read_layers, read_metrics
from hookline.record.events import describe_event
from hookline.runs.alerts import find_alerts
from hookline.runs.curves import MAX_RANGES, Curve, Point
from hookline.runs.reader import Damage
from hookline.runs.summary import HistogramTable, RunSummary
from hookline.stats.histograms import histograms

# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_short_curve_is_exact() -> None:
    curve = Curve()
    curve.extend([1, 2, 3], [0.1, 0.7, 0.3])
    assert curve.steps.tolist() == [1, 2, 3]
    assert curve.lowest.tolist() == curve.highest.tolist() == curve.mean.tolist() == [0.1, 0.7, 0.3]
    assert (curve.points, curve.width) == (3, 1)
    assert (curve.last, curve.least, curve.greatest) == (Point(3, 0.3), Point(1, 0.1), Point(2, 0.7))


def test_a_spike_of_one_step_survives_a_long_run() -> None:
    curve = Curve()
    values = np.ones(100_000)
    values[61_803] = 1000.0
    for begin in range(0, 100_000, 50):  # as the record is flushed
        curve.extend(list(range(begin, begin + 50)), values[begin : begin + 50].tolist())
    assert curve.steps.size <= MAX_RANGES
    (place,) = np.flatnonzero(curve.highest == 1000.0)
    assert curve.steps[place] <= 61_803 < curve.steps[place] + curve.width
    assert curve.greatest == Point(61_803, 1000.0)
    assert curve.points == 100_000
    assert curve.lowest.tolist() == [1.0] * curve.steps.size


@pytest.mark.parametrize("seed", range(5))
def test_ranges_agree_with_the_values_in_whatever_order_they_come(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = random.permutation(5000)
    values = random.normal(size=5000)
    curve = Curve()
    for begin in range(0, 5000, 700):
        curve.extend(steps[begin : begin + 700].tolist(), values[begin : begin + 700].tolist())
    by_step = values[np.argsort(steps)]
    for start, low, high, mean in zip(curve.steps, curve.lowest, curve.highest, curve.mean, strict=True):
        own = by_step[start : start + curve.width]
        assert (low, high) == (own.min(), own.max())
        assert math.isclose(mean, own.mean(), abs_tol=1e-12)
    assert curve.points == 5000


def test_values_that_are_not_finite_are_counted_and_leave_a_gap() -> None:
    curve = Curve()
    curve.extend([1, 2, 3, 4], [1.0, "NaN", "Infinity", 2.0])
    assert curve.non_finite == (2, 2)
    assert np.isnan(curve.mean).tolist() == [False, True, True, False]
    assert curve.greatest == Point(4, 2.0)


def test_the_last_value_of_a_step_counts() -> None:
    curve = Curve()
    curve.extend([1, 2], [5.0, 6.0])
    assert curve.mean.tolist() == [5.0, 6.0]
    curve.extend([2, 3], [7.0, 8.0])
    assert curve.mean.tolist() == [5.0, 7.0, 8.0]
    assert curve.points == 3


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_value_that_was_replaced_is_not_an_extreme(looked_at: bool) -> None:
    """Whether the curve was looked at between the two values does not matter."""
    curve = Curve()
    curve.extend([1, 2, 3, 4], [5.0, -100.0, 100.0, "NaN"])
    if looked_at:
        assert curve.points == 4
    curve.extend([2, 3, 4], [6.0, 7.0, 8.0])
    assert (curve.least, curve.greatest) == (Point(1, 5.0), Point(4, 8.0))
    assert (curve.last, curve.non_finite, curve.points) == (Point(4, 8.0), None, 4)


def test_a_curve_takes_as_little_memory_as_its_summary_says() -> None:
    tracemalloc.start()
    try:
        curves, most = [Curve() for _ in range(10)], 0
        for begin in range(0, 5000, 47):  # as the record is flushed
            for curve in curves:
                curve.extend([*range(begin, begin + 47)], [1.1 * step for step in range(begin, begin + 47)])
            most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert most / len(curves) < 60_000  # 58 kB, and the integers that metrics of one row share


def test_values_that_only_numpy_takes_for_numbers_are_left_out() -> None:
    """Null is not NaN, which would be an alert, and a text is not a number."""
    curve = Curve()
    curve.extend([1, 2, 3, 4], [1.0, None, "12", "NaN"])
    assert (curve.steps.tolist(), curve.points, curve.non_finite) == ([1, 4], 2, (4, 1))
    curve = Curve()
    curve.extend([1, 2], [None, None])
    assert curve.points == 0


def test_what_is_not_a_number_is_left_out() -> None:
    curve = Curve()
    curve.extend([1, 2, 3, 4], [1.0, "text", {"a": 1}, None])
    assert curve.steps.tolist() == [1]


# ---- files and sinks -------------------------------------------------------------------------------------------------


def test_what_a_resumed_run_discarded_is_not_in_the_summary(tmp_path: Path) -> None:
    """Steps after the checkpoint that a run was resumed from count once, as in `read_metrics`."""
    first = start_record(tmp_path)
    for step in range(1, 31):
        first.log(step, 0, "train/loss", float(step))
        first.log_layers("gradients", step, ("a",), ("norm",), torch.tensor([[float(step)]]))
    path = close_record(first)
    second = start_record(tmp_path, path.name)
    second.resume_at(20, 0)
    for step in range(21, 26):
        second.log(step, 0, "train/loss", -float(step))
        second.log_layers("gradients", step, ("a",), ("norm",), torch.tensor([[-float(step)]]))
    close_record(second)
    summary = RunSummary.read(path)
    curve = summary.curves["train/loss"]
    assert [*zip(curve.steps.tolist(), curve.mean.tolist(), strict=True)] == [
        (row["step"], row["train/loss"]) for row in read_metrics(path) if "train/loss" in row
    ]
    assert curve.greatest == Point(20, 20.0)
    assert summary.layers["gradients"].values[:, 0, 0].tolist() == [*range(1, 21), *range(-21, -26, -1)]


def test_later_lines_of_a_step_win_also_if_they_have_other_fields(tmp_path: Path) -> None:
    path = close_record(start_record(tmp_path))
    rows = [{"step": 0, "x": 0.0, "y": 1.0}, {"step": 5, "x": 1.0}, {"step": 5, "x": 2.0, "y": 1.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunSummary.read(path).curves["x"].last == Point(5, 2.0)
    assert hookline.load_run(path).metrics["x"] == [0.0, 2.0]


@pytest.mark.parametrize("resumed_at", [[8, 3], [3, 8], [3, 3], [0, 8]])
def test_of_several_attempts_each_counts_up_to_where_a_later_one_began(tmp_path: Path, resumed_at: list[int]) -> None:
    """Also if one after the next began earlier than the next; all readers agree."""
    path = close_record(start_record(tmp_path))
    expected: dict[int, float] = {}
    rows = [{"step": step, "x": float(step)} for step in range(1, 11)]
    expected |= {row["step"]: row["x"] for row in rows}
    for attempt, begin in enumerate(resumed_at, start=1):
        rows += [{"step": begin, "resumed": True}, {"step": begin + 2, "x": 100.0 * attempt}]
        expected = {step: x for step, x in expected.items() if step <= begin} | {begin + 2: 100.0 * attempt}
    layers = [{"series": 0, "name": "s", "names": ["a"], "columns": ["c"]}]
    for row in rows:
        data = b64encode(np.float32(row.get("x", 0)).tobytes()).decode()
        layers.append(
            {"resumed": row["step"]} if "resumed" in row else {"series": 0, "step": row["step"], "data": data}
        )
    for name, lines in (("metrics.jsonl", rows), ("layers.jsonl", layers)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = RunSummary.read(path)
    curve, table, series = summary.curves["x"], summary.layers["s"], read_layers(path)["s"]
    assert dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True)) == expected
    assert dict(zip(table.steps.tolist(), table.values[:, 0, 0].tolist(), strict=True)) == expected
    assert dict(zip(series.steps, series.of("a", "c").tolist(), strict=True)) == expected
    assert {row["step"]: row["x"] for row in read_metrics(path)} == expected


def test_a_run_that_was_resumed_after_many_megabytes_loses_no_row(tmp_path: Path) -> None:
    """A file is read in blocks of 8 MB, and the mark is found at its place in a later one."""
    path, wide = close_record(start_record(tmp_path)), "x" * (1 << 20)
    rows = [{"step": step, "x": float(step), "text": wide} for step in range(1, 21)]
    rows += [{"step": 19, "resumed": True}, {"step": 20, "x": 0.5}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = RunSummary.read(path)
    assert summary.curves["x"].mean.tolist() == [*range(1, 20), 0.5]
    assert summary.files.damage == {}


@pytest.mark.parametrize("read", [RunSummary.read, read_metrics, read_layers])
def test_the_work_of_reading_a_run_that_was_resumed_often_is_linear(tmp_path: Path, read: Callable[..., Any]) -> None:
    """Twice as many lines and attempts take about twice as many instructions of the interpreter, not four times."""
    path, header = close_record(start_record(tmp_path)), '{"series":0,"name":"s","names":["a"],"columns":["c"]}\n'

    def instructions(size: int) -> int:
        count, before = 0, sys.gettrace()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        rows = "".join(f'{{"step":{step},"x":1}}\n' for step in range(size))
        (path / "metrics.jsonl").write_text(rows + f'{{"step":{size},"resumed":true}}\n' * size)
        steps = "".join(f'{{"series":0,"step":{step},"data":"AAAAAA=="}}\n' for step in range(size))
        (path / "layers.jsonl").write_text(header + steps + f'{{"resumed":{size}}}\n' * size)
        sys.settrace(trace)
        try:
            read(path)
        finally:
            sys.settrace(before)
        return count

    read(path)
    assert instructions(400) - instructions(200) < 3 * (instructions(200) - instructions(100))


def test_no_metric_can_be_named_like_the_mark_of_a_resumed_run() -> None:
    with pytest.raises(RecordError, match="no metric can be named 'resumed'"):
        Record.in_memory().log(3, 0, "resumed", 1)


def test_a_report_that_cannot_be_prepared_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with the files of earlier attempts, the run trains."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of the summary")

    monkeypatch.setattr(RunSummary, "read", fail)
    trainer = make_trainer(record=True)
    trainer.train()
    assert trainer.progress.steps_done == 4
    assert "the report was not written: ZeroDivisionError: of the summary" in caplog.text


def test_layers_are_bounded_and_keep_what_is_farthest_from_zero() -> None:
    summary = LiveSummary()
    record = Record.in_memory()
    record.add_sink(summary)
    for step in range(5000):
        value = -77.0 if step == 3210 else 1.0
        record.log_layers("activations", step, ("a", "b"), ("mean",), torch.tensor([[value], [0.0]]))
    record.flush(wait=True)
    table = summary.layers["activations"]
    assert 200 <= table.values.shape[0] <= 400  # ranges become twice as wide, and no wider
    assert (table.values == -77.0).sum() == 1


def test_two_hooks_that_write_one_series_share_a_table() -> None:
    summary = LiveSummary()
    record = Record.in_memory()
    record.add_sink(summary)
    record.log_layers("activations", 1, ("a",), ("mean",), torch.tensor([[1.0]]))
    record.log_layers("activations", 2, ("a", "b"), ("std",), torch.tensor([[2.0], [3.0]]))
    record.flush(wait=True)
    table = summary.layers["activations"]
    assert (table.names, table.columns, table.steps.tolist()) == (("a", "b"), ("mean", "std"), [1, 2])
    assert table.values[0, 0, 0] == 1.0
    assert table.values[1, 1, 1] == 3.0
    assert np.isnan(table.values[0, 1]).all()


def test_a_spike_survives_if_the_layers_of_a_series_change() -> None:
    """Where the ranges of both sets of layers begin at the same step, the value farthest from zero counts."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    for step in range(1, 8000):
        names = ("a", "b") if step < 600 else ("a",)
        value = 1e6 if step == 577 else 1.0
        record.log_layers("gradients", step, names, ("norm",), torch.full((len(names), 1), value))
    record.flush(wait=True)
    assert np.nanmax(summary.layers["gradients"].values[:, 0, 0]) == 1e6


def test_layers_that_change_at_every_step_take_bounded_memory() -> None:
    """A model that skips layers at random keeps the newest sets of layers, and one that is written all the time."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    for step in range(1, 101):
        record.log_layers("activations", step, ("always",), ("mean",), torch.ones(1, 1))
        record.log_layers("activations", step, (f"layer {step}",), ("mean",), torch.ones(1, 1))
    record.flush(wait=True)
    table = summary.layers["activations"]
    assert table.names == ("always", *(f"layer {step}" for step in range(86, 101)))
    assert table.steps.tolist() == [*range(1, 101)]


def edges_of(table: HistogramTable, name: str) -> Any:
    """Return the edges of the bins of a name."""
    octaves = 2.0 ** (table.tops[table.names.index(name)] + np.arange(1 - table.counts.shape[-1] // 2, 2.0))
    return np.concatenate([-octaves[::-1], octaves])


def test_histograms_of_a_series_are_those_of_all_hooks() -> None:
    """Two monitors of one series, one of which measured once, have their layers in one table."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    for step in range(1, 300):
        name = "b" if step == 3 else "a"
        record.log_layers("gradients", step, (name,), ("top_octave",), torch.zeros(1, 1))
        record.log_layers("gradient_histograms", step, (name,), ("count",), torch.ones(1, 1, 68))
    record.flush(wait=True)
    table = summary.histograms["gradient_histograms"]
    assert table.names == ("a", "b")
    assert table.counts.sum(axis=(0, 2)).tolist() == [298 * 65.0, 65.0]  # without infinities and NaN


def test_histograms_count_the_values_of_a_monitored_model() -> None:
    """Every value of an activation is in one bin, between edges that enclose it."""
    hooks = {"forward": [{"name": "monitor", "modules": "1", "metrics": ["absmax", "histogram"]}]}
    trainer = make_trainer(data=make_batches(4, 16), hooks=hooks, record=True)
    trainer.train()
    table = RunSummary.read(trainer.run_dir).histograms["activation_histograms"]
    assert table.counts.sum(axis=2).tolist() == [[16.0 * 4]] * 4
    middle = table.counts.shape[2] // 2
    assert (table.counts[:, 0, :middle] == 0).all()  # no output of a ReLU is negative
    assert (table.counts[:, 0, middle] > 0).all()


def histograms_of(*steps: Tensor) -> HistogramTable:
    """Return the summary of the histograms of a layer whose gradients have these values at steps 1, 2, …"""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    for step, values in enumerate(steps, start=1):
        counted = histograms([values])
        record.log_layers("gradients", step, ("a",), ("top_octave",), counted.tops.unsqueeze(1))
        record.log_layers("gradient_histograms", step, ("a",), ("count",), counted.counts.unsqueeze(1).float())
    record.flush(wait=True)
    return summary.histograms["gradient_histograms"]


def test_statistics_of_several_hooks_may_come_before_the_histograms_of_a_step() -> None:
    """The windows of all of them are known, and those of another step are not used."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    counted = histograms([torch.ones(8)])
    for name in "ab":
        record.log_layers("gradients", 1, (name,), ("top_octave",), counted.tops.unsqueeze(1))
    for step, name in ((1, "a"), (1, "b"), (2, "a")):
        record.log_layers("gradient_histograms", step, (name,), ("count",), counted.counts.unsqueeze(1).float())
    record.flush(wait=True)
    table = summary.histograms["gradient_histograms"]
    assert (table.names, table.steps.tolist()) == (("a", "b"), [1])
    assert table.counts.sum(axis=2).tolist() == [[8.0, 8.0]]


def is_counted_right(table: HistogramTable, step: int, values: Tensor) -> bool:
    """Whether a step's histogram is that of the values, between the edges of the table."""
    counts, _ = np.histogram(values.numpy(), edges_of(table, "a"))
    return bool((table.counts[step, 0] == counts).all())


def test_histograms_of_vanishing_gradients_show_their_sizes() -> None:
    """The window of a layer follows its values, however small, even while they become larger or smaller."""
    draw = torch.Generator().manual_seed(0)
    for sizes in ([1e-11, 1e-11], [1e-20, 1e-12, 1e-18], [1e3, 1e-3], [1e-24]):
        steps = [size * (0.1 + torch.rand(500, generator=draw)) * (-1) ** torch.arange(500) for size in sizes]
        table = histograms_of(*steps)
        assert all(is_counted_right(table, index, values) for index, values in enumerate(steps))


def test_a_nan_does_not_move_the_window_of_a_histogram() -> None:
    """The bins of a step with NaN end at 2^16, which is not the size of any value."""
    small = torch.full((8,), 3e-12)
    table = histograms_of(small, torch.tensor([float("nan"), 1e-3]), small)
    assert edges_of(table, "a")[-1] < 2e-3
    assert is_counted_right(table, 2, small)


def test_the_smallest_bins_of_a_histogram_hold_what_is_below_its_window() -> None:
    small, large = torch.tensor([-1e-15, 1e-15, 2e-15]), torch.tensor([1e9])
    table = histograms_of(small, large)
    middle = table.counts.shape[2] // 2
    assert table.counts[0, 0, middle - 1 : middle + 2].tolist() == [1, 0, 2]
    assert edges_of(table, "a")[middle + 2] > 2e-15
    assert is_counted_right(table, 1, large)


def test_histograms_of_many_steps_are_added_up() -> None:
    steps = [torch.tensor([1.5 * 2.0**-octave, -1.5 * 2.0**-octave]) for octave in range(1, 41)] * 10
    table = histograms_of(*steps)
    expected, _ = np.histogram(torch.cat(steps).numpy(), edges_of(table, "a"))
    assert len(table.steps) <= 100
    assert table.counts.sum(axis=0).tolist() == [expected.tolist()]


def test_the_newest_tables_and_images_are_kept(record: Record) -> None:
    for step in range(1, 31):
        record.log_table(step, 0, "predictions", ["step"], [[step]])
        record.log_image(step, 0, "sample", torch.rand(64, 64))
    media = [*RunSummary.read(close_record(record), media=True).newest_media()]
    assert [row.step for row in media if row.name == "predictions"] == [*range(30, 22, -1)]
    assert [row.step for row in media if row.name == "sample"] == [*range(30, 22, -1)]


def test_only_files_of_media_that_are_kept_are_opened(record: Record) -> None:
    """Without `media`, none is; the newest of each name otherwise, so that the others may be missing."""
    for step in range(1, 31):
        record.log_table(step, 0, "predictions", ["step"], [[step]])
    path = close_record(record)
    for step in range(1, 23):
        (path / "media" / f"predictions-{step}.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [row.step for row in RunSummary.read(path, media=True).newest_media()] == [*range(30, 22, -1)]
        (path / "media" / "predictions-30.json").unlink()
        assert [*RunSummary.read(path).newest_media()] == []


def test_torn_lines_are_left_out_and_named(record: Record) -> None:
    record.log(1, 0, "train/loss", 1.0)
    path = close_record(record)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/lo')
    summary = RunSummary.read(path)
    assert summary.curves["train/loss"].points == 1
    assert summary.files.damage == {"metrics.jsonl": Damage(2, 1)}
    assert [alert.text for alert in find_alerts(summary)] == [
        "metrics.jsonl: line 2 was torn because the run was killed"
    ]


@pytest.mark.parametrize("file", ["metrics.jsonl", "layers.jsonl", "events.jsonl"])
def test_a_line_that_a_live_run_is_writing_is_not_incomplete(file: str, record: Record) -> None:
    record.log(1, 0, "train/loss", 1.0)
    record.flush(wait=True)
    with (record.path / file).open("a") as stream:
        stream.write('{"step": 2, "tra')
    assert RunSummary.read(record.path).files.damage == {}
    close_record(record)
    with (record.path / file).open("a") as stream:
        stream.write('{"step": 2, "tra')
    assert RunSummary.read(record.path).files.damage.keys() == {file}


def test_a_line_that_another_rank_is_writing_is_not_incomplete(record: Record) -> None:
    """The lock of the run is in its directory, not in that of the rank."""
    (record.path / "ranks" / "1").mkdir(parents=True)
    file = record.path / "ranks" / "1" / "events.jsonl"
    file.write_text('{"time":1,"kind":"x","step":1,"rank":1}\n{"time":2,"ki')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [event["kind"] for event in hookline.load_run(record.path).events] == ["x"]
        assert RunSummary.read(record.path).files.damage == {}
    close_record(record)
    with pytest.warns(RuntimeWarning, match=r"ranks/1/events\.jsonl: line 2 was torn") as caught:
        hookline.load_run(record.path)
    assert [warning.filename for warning in caught] == [__file__]
    assert RunSummary.read(record.path).files.damage == {"ranks/1/events.jsonl": Damage(2, 1)}


@pytest.mark.parametrize(
    "line", ["[1, 2]", "7", '{"step": "one", "train/loss": 1}', '{"step": 1e400}', "{}", '{"step": 1}, {"step": 2}']
)
def test_lines_of_others_do_not_matter(line: str, record: Record) -> None:
    record.log(1, 0, "train/loss", 1.0)
    path = close_record(record)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert RunSummary.read(path).curves["train/loss"].points == 1


@pytest.mark.parametrize("missing", ["run.json", "metrics.jsonl", "events.jsonl"])
def test_a_directory_that_is_not_a_run_is_one_clear_error(tmp_path: Path, missing: str) -> None:
    path = close_record(start_record(tmp_path))
    (path / missing).unlink()
    with pytest.raises(RecordError, match=missing):
        RunSummary.read(path)


# ---- alerts ----------------------------------------------------------------------------------------------------------


def alerts_of(*events: dict[str, Any], **curves: list[Any]) -> list[tuple[str, str, int | None]]:
    summary = LiveSummary()
    summary.write_events(events)
    for name, values in curves.items():
        summary.write_metrics([{"step": step, name: value} for step, value in enumerate(values)])
    return [(alert.kind, alert.severity, alert.step) for alert in find_alerts(summary)]


def falling_loss(steps: int) -> list[float]:
    return [2.0 + math.exp(-5 * step / steps) + 0.01 * math.sin(step) for step in range(steps)]


def test_a_healthy_run_has_no_alerts() -> None:
    assert (
        alerts_of({"kind": "checkpoint_saved", "step": 1}, **{"train/loss": [1 / (step + 1) for step in range(500)]})
        == []
    )


def test_events_that_mean_trouble_are_alerts_the_worst_first() -> None:
    alerts = alerts_of(
        {"kind": "hook_costly", "step": 3, "hook": "slow", "message": "takes 9 % of the run's time"},
        {"kind": "hook_disabled", "step": 9, "hook": "bad", "message": "failed 3 times"},
        {"kind": "gradient_flow", "step": 5, "verdict": "gradients vanish in a", "parameters": {"a": "vanishing"}},
        {"kind": "gradient_flow", "step": 6, "verdict": "gradients are healthy", "parameters": {}},
    )  # fmt: skip
    assert alerts == [("hook_disabled", "warning", 9), ("hook_costly", "info", 3), ("gradient_flow", "info", 5)]


def test_events_that_say_the_same_are_one_alert_and_many_others_a_few() -> None:
    summary = LiveSummary()
    failed = {"kind": "hook_failed", "hook": "bad", "message": "failed"}
    summary.write_events({**failed, "step": step} for step in range(100))
    summary.write_events({"kind": "slow_rank", "step": step, "slow_rank": step} for step in range(20))
    alerts = find_alerts(summary)
    assert (alerts[0].step, alerts[0].text) == (0, "bad: failed (100 times)")
    assert [alert.kind for alert in alerts] == ["hook_failed", *["slow_rank"] * 6]
    assert alerts[-1].text == "15 more slow rank events"


def test_events_that_are_not_listed_are_all_counted() -> None:
    """Those that say the same as another one that is not listed count, too."""
    summary = LiveSummary()
    ranks = [*range(5), 7, 7, 7]
    summary.write_events({"kind": "slow_rank", "step": 1, "slow_rank": rank} for rank in ranks)
    assert find_alerts(summary)[-1].text == "3 more slow rank events"


def flow_event(step: int, over: list[str] | None = None, **parameters: str) -> dict[str, Any]:
    event = {"kind": "gradient_flow", "step": step, "by": "watch", "verdict": f"at {step}", "parameters": parameters}
    return event if over is None else {**event, "over": over}


def test_layers_whose_gradients_vanish_are_one_alert_however_often_they_change() -> None:
    """It says how many layers there were, since when, and which one is the worst."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    record.log_layers("gradients", 5, ("a", "b", "c"), ("norm",), torch.tensor([[3e-9], [2e-12], [1e-20]]))
    record.flush(wait=True)
    vanishing = dict.fromkeys("ab", "vanishing")
    summary.write_events([
        flow_event(5, over=[], **vanishing),
        flow_event(10, over=["a"], d="exploding"),
        flow_event(15, over=["d"], a="vanishing"),
        flow_event(20, over=[], e="vanishing"),
    ])  # fmt: skip
    vanish, explode = find_alerts(summary)
    assert vanish.text == "watch: gradients vanish in 1 to 3 layers from step 5 on, the worst b at 2e-12 (4 times)"
    assert (vanish.severity, vanish.step) == ("warning", 5)
    assert vanish.place == {"series": "gradients", "name": "b", "column": "norm"}
    assert (explode.text, explode.step) == ("watch: gradients explode in d in steps 10 to 15", 10)


def test_the_worst_of_the_layers_whose_gradients_explode_has_the_largest_norm() -> None:
    """Of those that vanish it is the one with the smallest norm."""
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    record.log_layers("gradients", 5, ("a", "b", "c"), ("norm",), torch.tensor([[20.0], [3e6], [1e9]]))
    record.flush(wait=True)
    summary.write_events([flow_event(5, over=[], a="exploding", b="exploding")])
    (alert,) = find_alerts(summary)
    assert alert.text == "watch: gradients explode in 2 layers from step 5 on, the worst b at 3e+06"
    assert alert.place == {"series": "gradients", "name": "b", "column": "norm"}


def test_of_thousands_of_changes_each_counts() -> None:
    """Also those of which a summary does not keep the event."""
    summary = LiveSummary()
    changes = [flow_event(step, over=[], head="exploding") for step in range(2, 3000)]
    changes[1400] = flow_event(1402, over=["early"], head="exploding")
    summary.write_events([flow_event(1, over=[], early="vanishing"), *changes])
    vanish, explode = find_alerts(summary)
    assert vanish.text == "watch: gradients vanish in early in steps 1 to 1,402 (1,401 times)"
    assert explode.text == "watch: gradients explode in head from step 2 on (2,998 times)"


def test_an_accuracy_without_a_value_is_no_error() -> None:
    """A batch without counted targets has none; a loss that is not finite is an error."""
    for name, severity in (("train/accuracy", "info"), ("train/mse_loss", "error")):
        summary = LiveSummary()
        summary.write_metrics([{"step": 1, name: 0.5}, {"step": 2, name: math.nan}])
        assert [(alert.place["curve"], alert.severity) for alert in find_alerts(summary)] == [(name, severity)]


def test_a_loss_that_is_not_finite_is_an_alert_also_without_its_event() -> None:
    """The event comes later than the row, so a run that is killed between the two lacks it."""
    assert alerts_of(**{"train/loss": [1.0, math.nan]}) == [("non_finite", "error", 1)]


def test_an_accuracy_that_never_had_a_value_is_an_error() -> None:
    """Single batches may have no counted targets; that no batch has any is a mistake."""
    assert alerts_of(**{"train/accuracy": [math.nan, math.nan]}) == [("non_finite", "error", 0)]


def test_gradients_that_recovered_and_those_without_norms_are_described() -> None:
    summary = LiveSummary()
    summary.write_events([flow_event(3, **dict.fromkeys("abcde", "never arrived")), flow_event(7)])
    (alert,) = find_alerts(summary)
    assert alert.text == "watch: gradients never arrive at 5 layers in steps 3 to 7: a, b, c and 2 more"


def test_a_hook_whose_random_numbers_were_isolated_is_not_a_warning() -> None:
    assert alerts_of({"kind": "hook_drew", "step": 3, "message": "drew"}) == [("hook_drew", "info", 3)]


def test_events_are_described_in_sentences() -> None:
    """Lists are read as words, and a kind without a sentence has its fields."""
    saved = {"kind": "checkpoint_saved", "time": 1.0, "step": 3, "path": "checkpoints/step-3"}
    assert describe_event(saved) == "saved checkpoints/step-3"
    fresh = {"kind": "hooks_without_state", "step": 3, "hooks": ["a", "b"]}
    assert describe_event(fresh) == "hooks that will start fresh after a resume: a, b"
    assert describe_event({"kind": "own", "by": "mine", "what": [1, 2], "no": None}) == "mine: what 1, 2"
    assert describe_event({"kind": "own"}) == "own"


def test_a_loss_that_spikes_once_is_an_alert_at_its_step() -> None:
    loss = falling_loss(400)
    loss[222] = 9.0
    assert alerts_of(**{"train/loss": loss}) == [("spike", "info", 222)]


def test_a_spike_of_a_long_run_is_an_alert_at_its_step() -> None:
    """Also where a range of many steps is one point of the curve."""
    loss = falling_loss(20_000)
    loss[10_010] = 9.0
    assert alerts_of(**{"train/loss": loss}) == [("spike", "info", 10_010)]


@pytest.mark.parametrize("name", ["loss_spike", "other"])
def test_spikes_are_not_looked_for_where_a_hook_did(name: str) -> None:
    summary = LiveSummary({"hooks": [{"name": name}]})
    loss = falling_loss(400)
    loss[222] = 9.0
    summary.write_metrics([{"step": step, "train/loss": value} for step, value in enumerate(loss)])
    assert [alert.kind for alert in find_alerts(summary)] == ([] if name == "loss_spike" else ["spike"])


def test_values_near_the_largest_float_print_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = [1e308, -1e308, 1.7e308, 0.0, 5e-324, "NaN", "Infinity"]
        alerts_of(**{"train/loss": [values[index % 7] for index in range(500)]})
        alerts_of(**{"train/loss": [values[index % 7] for index in range(5000)]})


def test_events_that_say_the_same_are_counted_however_many_there_are() -> None:
    summary = LiveSummary()
    summary.write_events({"kind": "step_skipped", "step": step, "reason": "inf"} for step in range(10_000))
    assert [alert.text for alert in find_alerts(summary)] == ["an optimizer step was skipped: inf (10,000 times)"]
    summary.write_events({"kind": "slow_rank", "step": step, "slow_rank": step} for step in range(3_000))
    (more,) = [alert.text for alert in find_alerts(summary) if "more" in alert.text]
    assert more == "2,995 more slow rank events"


def test_a_metric_that_is_not_finite_is_an_alert() -> None:
    assert alerts_of(**{"val/loss": [1.0, "NaN", 2.0]}) == [("non_finite", "error", 1)]


def test_layers_with_nan_and_dead_units_are_alerts_with_their_places() -> None:
    summary = LiveSummary()
    record = Record.in_memory()
    record.add_sink(summary)
    columns = ("nans", "dead_units", "units")
    record.log_layers("activations", 1, ("a", "b"), columns, torch.tensor([[0.0, 0, 8], [0, 1, 8]]))
    record.log_layers("activations", 2, ("a", "b"), columns, torch.tensor([[0.0, 0, 8], [5, 7, 8]]))
    record.flush(wait=True)
    (story,) = find_alerts(summary)
    assert story.place == {"series": "activations", "name": "b", "column": "nans"}
    nan, dead = story.parts
    assert (nan.kind, nan.step, nan.place) == (
        "non_finite",
        2,
        {"series": "activations", "name": "b", "column": "nans"},
    )
    assert (dead.kind, dead.severity, dead.place["name"]) == ("dead_units", "info", "b")
    assert "88%" in dead.text


def test_nan_is_an_alert_at_the_step_and_in_the_layer_where_it_began_also_in_a_long_run() -> None:
    summary, record = LiveSummary(), Record.in_memory()
    record.add_sink(summary)
    names = tuple(f"l{index}" for index in range(8))
    for step in range(1, 1001):
        nans = torch.full((8, 1), float(step > 902))
        nans[5] = step >= 902
        record.log_layers("activations", step, names, ("nans",), nans)
    record.flush(wait=True)
    (alert,) = find_alerts(summary)
    assert (alert.step, alert.text) == (902, "activations: NaN in module 'l5' and later in 7 more")
    assert alert.place == {"series": "activations", "name": "l5", "column": "nans"}


def test_events_of_a_foreign_record_are_alerts_without_their_fields() -> None:
    assert alerts_of({"kind": "loss_spike", "loss": "high"}) == [("loss_spike", "warning", None)]
