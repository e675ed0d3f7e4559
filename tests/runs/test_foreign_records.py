"""Records that were edited or not written by Hookline: what is not usable is damaged or left out, and nothing fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live_summary import LiveSummary
from records import close_record, start_record

from hookline.cli import main
from hookline.errors import RecordError
from hookline.record import Record
from hookline.runs.alerts import find_alerts
from hookline.runs.compare import find_differences, find_divergence, likely_causes
from hookline.runs.find import list_runs
from hookline.runs.summary import RunSummary

HUGE = "1" + "0" * 400
HEADER = '{"series":1,"name":"g","names":["a"],"columns":["c"]}\n'
BINS = HEADER.replace("}", ',"bins":%d}')
MONITORED = BINS.replace('"g"', '"gradient_histograms"').replace('"c"', '"count"')
MEDIA = '{"step":1,"epoch":%s,"time":%s,"name":"t","type":"table","file":"media/t.json"}\n'
LINES = {
    "metric that no float holds": ("metrics.jsonl", '{"step":1,"train/loss":HUGE}\n'.replace("HUGE", HUGE)),
    "metrics that are lists": ("metrics.jsonl", '{"step":1,"x":[1,2]}\n{"step":2,"x":[1,2]}\n'),
    "metric at a huge step": ("metrics.jsonl", f'{{"step":{HUGE},"x":1}}\n{{"step":{2**63 - 1},"x":1}}\n'),
    "huge time of an event": (
        "events.jsonl",
        '{"kind":"a","time":HUGE}\n{"kind":"b","time":1.5}\n'.replace("HUGE", HUGE),
    ),
    "hook that is a list": ("events.jsonl", '{"kind":"hook_failed","hook":["x"]}\n'),
    "kind and step that are lists": ("events.jsonl", '{"kind":["x"],"step":[1]}\n'),
    "huge loss of a spike": (
        "events.jsonl",
        '{"kind":"loss_spike","loss":HUGE,"spreads":1,"median":1}\n'.replace("HUGE", HUGE),
    ),
    "huge best value": ("events.jsonl", '{"kind":"best_checkpoint","value":HUGE}\n'.replace("HUGE", HUGE)),
    "series that is a list": ("layers.jsonl", HEADER.replace('"series":1', '"series":[1]')),
    "values of a series that is a list": ("layers.jsonl", '{"series":[1],"step":1,"data":"AAAAAA=="}\n'),
    "histograms of a monitor without bins": ("layers.jsonl", MONITORED % 0),
    "histograms of a monitor with odd bins": ("layers.jsonl", MONITORED % 7),
    "histograms without bins": ("layers.jsonl", BINS % 0 + '{"series":1,"step":1,"data":""}\n'),
    "histograms of a million million bins": ("layers.jsonl", BINS % 10**12),
    "columns that are a number": ("layers.jsonl", HEADER.replace('["c"]', "5")),
    "layers at a huge step": (
        "layers.jsonl",
        HEADER + '{"series":1,"step":HUGE,"data":"AAAAAA=="}\n'.replace("HUGE", HUGE),
    ),
    "infinite epoch of a table": ("media.jsonl", MEDIA % ("1e999", HUGE)),
    "epoch of a table that is NaN": ("media.jsonl", MEDIA % ("NaN", "0")),
}


LEFT_OUT = {  # values that are not usable in rows that are
    "metric that no float holds", "metrics that are lists", "huge time of an event", "hook that is a list",
    "huge loss of a spike", "huge best value", "histograms without bins",
}  # fmt: skip


def write_run(directory: Path, **fields: Any) -> Path:
    record = start_record(directory)
    for step in (1, 2, 3):
        record.log(step, 0, "train/loss", 1 / step)
    record.log_table(1, 0, "t", ["a"], [[1]])
    path = close_record(record, step=3)
    (path / "media" / "t.json").write_text('{"columns":["a"],"rows":[]}')
    (path / "run.json").write_text(json.dumps(json.loads((path / "run.json").read_text()) | fields))
    return path


def look_at(path: Path, other: Path) -> RunSummary:
    """Do what the commands runs, show and compare do, and look at every array of the summary."""
    summary, second = RunSummary.read(path, media=True, numbers=True), RunSummary.read(other, numbers=True)
    differences = find_differences([summary, second])
    divergence = find_divergence(summary, second)
    assert divergence is not None
    likely_causes(summary, second, divergence, differences)
    find_alerts(summary)
    assert [len(curve.steps) for curve in summary.curves.values()]
    assert all(table.steps.dtype == int for table in summary.layers.values())
    runs, _ = list_runs(path.parent)
    assert all((run.score, run.step, run.seconds) for run in runs)
    return summary


@pytest.mark.parametrize("what", LINES)
def test_lines_with_values_of_another_type_are_damaged_or_left_out(tmp_path: Path, what: str) -> None:
    path, (file, lines) = write_run(tmp_path), LINES[what]
    with (path / file).open("a") as stream:
        stream.write(lines)
    assert look_at(path, write_run(tmp_path)).files.damage.keys() == (set() if what in LEFT_OUT else {file})


def test_a_cost_that_is_not_a_number_is_damage(tmp_path: Path) -> None:
    path = write_run(tmp_path, costs=[{"hook": "a", "seconds": int(HUGE)}, {"hook": "b", "seconds": [1]}])
    with pytest.raises(RecordError, match=r"damaged: Hookline did not write its field costs\[1\]\.seconds"):
        RunSummary.read(path)


def test_a_cost_that_no_float_holds_is_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, costs=[{"hook": "a", "seconds": int(HUGE)}])
    look_at(path, write_run(tmp_path))
    assert main(["show", str(path)]) == 0 and "inf s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ['{"columns":["a"]}', '{"columns":["a"],"rows":5}', '{"columns":5,"rows":[]}', "[]"]
)
def test_a_table_that_is_damaged_is_left_out(tmp_path: Path, content: str) -> None:
    path = write_run(tmp_path)
    (path / "media" / "t.json").write_text(content)
    with (path / "media.jsonl").open("a") as stream:
        stream.write(MEDIA % (0, 0))
    with pytest.warns(RuntimeWarning, match=r"media/t\.json is missing or damaged"):
        assert [*RunSummary.read(path, media=True).newest_media()] == []


def test_a_metric_that_no_float_holds_is_left_out() -> None:
    record, live = Record.in_memory(), LiveSummary()
    record.add_sink(live)
    record.log(1, 0, "big", -(10**400))
    record.log(2, 0, "big", 7)
    record.flush(wait=True)
    assert live.curves["big"].points == 1
