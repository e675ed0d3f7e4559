"""When the report is written, what it holds, how large it is, and what `hookline report` says."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_trainer
from commands import error_of
from live_summary import LiveSummary
from report_page import curve_of, read_page, write_record

from hookline import CheckpointHook, TrainingHook, read_metrics
from hookline.cli import main
from hookline.record import Record
from hookline.record.format import SeriesHeader
from hookline.report.page import make_report
from hookline.runs.curves import Curve
from hookline.runs.summary import RunSummary

Captured = pytest.CaptureFixture[str]


def test_a_run_has_a_report_with_its_outcome() -> None:
    """At the end report.html is in the run's directory, with the outcome and every step."""
    trainer = make_trainer(record=True, max_steps=3)
    trainer.train()
    page = read_page(trainer.run_dir / "report.html")
    assert page["runs"][0]["run"]["outcome"] == "completed"
    losses = [row["train/loss"] for row in read_metrics(trainer.run_dir) if "train/loss" in row]
    assert curve_of(page, "train/loss") == pytest.approx(losses)


def test_report_can_be_switched_off() -> None:
    """`report: false` writes none; a run without a directory has none either."""
    trainer = make_trainer(record=True, report=False)
    trainer.train()
    assert not (trainer.run_dir / "report.html").exists()
    in_memory = make_trainer()
    in_memory.train()
    assert not list(Path().glob("**/report.html"))


def test_a_disk_that_refuses_the_report_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """The run completes, with one warning."""

    class InTheWay(TrainingHook):
        def on_train_start(self, trainer: Any) -> None:
            (trainer.run_dir / "report.html").mkdir()

    trainer = make_trainer(InTheWay(), record=True)
    trainer.train()
    assert trainer.record.run["outcome"] == "completed"
    assert [record for record in caplog.records if "the report was not written" in record.getMessage()]


def test_a_resumed_run_has_one_report_of_all_attempts() -> None:
    """The steps of earlier attempts are in the report, and those that were discarded are not."""
    first = make_trainer(record=True, max_steps=2)
    first.train()
    again = make_trainer(record=True, max_steps=4)
    again.fit(resume=first.run_dir)
    assert again.run_dir == first.run_dir
    page = read_page(again.run_dir / "report.html")
    assert curve_of(page, "train/loss", "steps") == [1, 2, 3, 4]
    assert len(page["runs"][0]["run"]["attempts"]) == 2


def test_100_000_steps_of_200_metrics_take_3_mb() -> None:
    """The page of a long run is bounded, and a spike of one step is in it."""
    summary, steps, draw = LiveSummary({"run_id": "long"}), list(range(1, 100_001)), np.random.default_rng(0)
    rows = draw.normal(size=(2000, 200))
    for start in range(0, 100_000, 2000):
        part = rows + draw.normal(size=(1, 200))
        if start == 50_000:
            part[7] = 1e6
        for index in range(200):
            name = f"group{index // 20}/metric{index}"
            curve = summary.curves.setdefault(name, Curve())
            curve.extend(steps[start : start + 2000], part[:, index].tolist())
    html = make_report([summary])
    assert len(html) <= 3_000_000
    page = read_page(html)
    assert len(page["runs"][0]["curves"]) == 200
    assert max(curve_of(page, "group3/metric77", "highest")) == 1e6


def test_curves_of_few_points_keep_them_on_a_crowded_page() -> None:
    """Only the longest tables are merged: a validation of 20 points has them all beside 800 curves of 800."""
    summary, steps = LiveSummary({"run_id": "crowded"}), list(range(1, 801))
    for index in range(800):
        values = np.random.default_rng(index).normal(size=800).tolist()
        summary.curves.setdefault(f"group/metric{index}", Curve()).extend(steps, values)
    summary.curves.setdefault("val/loss", Curve()).extend(steps[::40], [1.0] * 20)
    page = read_page(make_report([summary]))
    assert len(curve_of(page, "group/metric0")) < 800 and curve_of(page, "val/loss", "steps") == steps[::40]


def test_a_run_in_python_prints_where_its_report_is(capsys: Captured) -> None:
    """After its closing line, as on the command line; a run without a report prints none."""
    trainer = make_trainer(record=True, max_steps=2, console=True)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"report: {trainer.run_dir.relative_to(Path.cwd())}/report.html" and "completed" in lines[-2]
    make_trainer(record=True, max_steps=2, console=True, report=False).train()
    assert "report:" not in capsys.readouterr().out


def test_the_page_has_the_verdict_and_the_last_finite_step() -> None:
    summary = LiveSummary({"run_id": "sick", "counters": {"step": 9, "tokens_seen": 90}})
    losses = {step: "NaN" if step > 6 else 1.0 for step in range(1, 10)}
    summary.write_metrics([{"step": step, "time": 100.0 + step, "train/loss": loss} for step, loss in losses.items()])
    (run,) = read_page(make_report([summary]))["runs"]
    assert run["verdict"]["health"] == "broken" and run["verdict"]["step"] == 7 and run["verdict"]["reason"]
    assert run["last_finite"] == 6 and run["clock"]["tokens_per_step"] == 10


def test_much_of_everything_still_fits() -> None:
    """Layers, histograms and images share the page's size with the curves."""
    summary = LiveSummary({"run_id": "wide"})
    for number in range(6):
        header = SeriesHeader(f"series{number}", tuple(f"layer{index}" for index in range(150)), ("a", "b", "c"))
        for step in range(0, 3000, 10):
            values = np.random.default_rng(step).normal(size=(150, 3))
            summary.write_layers([SimpleNamespace(step=step, header=header, values=values)])
    assert len(make_report([summary])) <= 3_000_000
    assert len(read_page(make_report([summary]))["runs"][0]["layers"]) == 6


def test_histograms_of_a_large_model_are_kept() -> None:
    """Ranges of steps are merged, down to a single one, before a series is left out; what is left out is named."""

    def make(layers: int) -> dict[str, Any]:
        summary, counts = LiveSummary({"run_id": "large"}), np.ones((layers, 1, 60), np.float32)
        names = tuple(f"layer{index}" for index in range(layers))
        tops = SeriesHeader("gradients", names, ("top_octave",))
        bins = SeriesHeader("gradient_histograms", names, ("count",), 60)
        for step in range(8):
            rows = [(tops, np.zeros((layers, 1), np.float32)), (bins, counts)]
            summary.write_layers([SimpleNamespace(step=step, header=header, values=values) for header, values in rows])
        html = make_report([summary])
        assert len(html) <= 3_000_000
        return dict(read_page(html)["runs"][0])

    kept = make(15_000)
    assert len(kept["histograms"]["gradient_histograms"]["names"]) == 15_000 and kept["left_out"]["names"] == {}
    too_large = make(40_000)
    assert too_large["histograms"] == {} and too_large["left_out"]["names"] == {"histograms": ["gradient_histograms"]}


def test_completed_epochs() -> None:
    """An epoch that the run ended in counts only if it was completed."""
    for options, epochs in (({"max_epochs": 2}, 2), ({"max_steps": 6}, 1), ({"max_steps": 3}, 0)):
        trainer = make_trainer(record=True, **options)
        trainer.train()
        assert read_page(trainer.run_dir / "report.html")["runs"][0]["epochs"] == epochs


def test_costs_are_those_of_the_last_attempt() -> None:
    """The steps and the duration that hooks' costs are divided by are those of the last attempt, too."""
    first = make_trainer(CheckpointHook(save_every_n_steps=5), record=True, max_steps=5)
    first.train()
    again = make_trainer(record=True, max_steps=8)
    again.fit(resume=first.run_dir)
    run = json.loads((again.run_dir / "run.json").read_text())
    run["attempts"][0] |= {"started": "2026-01-01T00:00:00+00:00", "closed": "2026-01-02T00:00:00+00:00"}
    (again.run_dir / "run.json").write_text(json.dumps(run))
    assert main(["report", str(again.run_dir)]) == 0
    attempt = read_page(again.run_dir / "report.html")["runs"][0]["attempt"]
    assert attempt["steps"] == 3 and attempt["seconds"] < 3600


BOMB = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrst"))


@pytest.mark.parametrize("config", ["a: 2026-99-99", BOMB, "a: ["])
def test_configs_of_strangers_are_compared(tmp_path: Path, config: str) -> None:
    """A date that does not exist, aliases that multiply and a file that is not YAML neither fail nor take long."""
    runs = [write_record(tmp_path, name) for name in ("first", "second")]
    (runs[0] / "config.yaml").write_text(config)
    assert main(["report", *map(str, runs)]) == 0
    page = read_page("comparison.html")
    assert any(difference["section"] == "config" for difference in page["differences"])


def test_nothing_of_a_run_is_markup(tmp_path: Path) -> None:
    """The page's data has no "<", and its policy names hashes only."""
    run = write_record(tmp_path, "one", text="</script><script>x()</script>")
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert "<" not in data and html.count("<script") == 3
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert json.loads(data)["runs"][0]["run"]["hooks"][0]["name"] == "watch</script><script>x()</script>"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_report_command_prints_the_path(tmp_path: Path, capsys: Captured) -> None:
    """One run's report goes into its directory, a comparison to comparison.html unless --output names a file."""
    runs = [write_record(tmp_path, name) for name in ("first", "second")]
    assert main(["report", str(runs[0])]) == 0
    assert main(["report", *map(str, runs)]) == 0
    assert main(["report", str(runs[1]), "--output", "mine.html"]) == 0
    assert capsys.readouterr().out.splitlines() == ["first/report.html", "comparison.html", "mine.html"]
    assert [run["run_id"] for run in read_page("comparison.html")["runs"]] == ["first", "second"]


def test_report_of_a_torn_record(tmp_path: Path) -> None:
    """A run that was killed in the middle of a line has a report of its whole lines, which says so."""
    run = write_record(tmp_path, "torn")
    for name in ("metrics.jsonl", "layers.jsonl", "events.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"step": 99, "tr')
    assert main(["report", str(run)]) == 0
    page = read_page(run / "report.html")
    assert curve_of(page, "train/loss", "steps")[-1] == 60
    assert "incomplete" in json.dumps(page["runs"][0]["alerts"])


@pytest.mark.parametrize("kind", ["no such directory", "an empty directory", "a foreign run.json", "a link"])
def test_report_of_what_is_not_a_run(tmp_path: Path, capsys: Captured, kind: str) -> None:
    """The message says what is wrong, on one line, and nothing is written elsewhere."""
    directory = tmp_path / "x"
    if kind != "no such directory":
        directory.mkdir()
    if kind == "a foreign run.json":
        (directory / "run.json").write_text("[1, 2]")
    if kind == "a link":
        directory = write_record(tmp_path, "linked")
        (tmp_path / "target").write_text("mine")
        (directory / "report.html").symlink_to(tmp_path / "target")
    error = error_of(capsys, ["report", str(directory)])
    expected = {"a link": "symbolic link", "no such directory": "no run is in"}.get(kind, "is not a run")
    assert expected in error and error.count("\n") == 1
    assert kind != "a link" or (tmp_path / "target").read_text() == "mine"


def test_a_page_says_how_many_images_and_columns_it_leaves_out() -> None:
    """The newest images are shown; a wide table is cut, and its shares are those of whole rows."""
    trainer = make_trainer(record=True, max_steps=1)

    @trainer.on("step_end", name="logs")
    def log(trainer: Any) -> None:
        for step in range(20):
            trainer.log_image("picture", torch.rand(3, 8, 8), step=step)
        trainer.log_image("large", torch.rand(3, 500, 500))
        trainer.log_table("matrix", ["target", *map(str, range(90))], [["a", *[1] * 90]], kind="confusion_matrix")

    trainer.train()
    for _ in ("written by the run", "made from its record"):
        run = read_page((trainer.run_dir / "report.html").read_bytes())["runs"][0]
        assert [row["name"] for row in run["media"]] == ["picture"] * 8 + ["matrix"]
        assert run["left_out"]["counts"]["media"] == 13
        matrix = run["media"][-1]
        assert (len(matrix["columns"]), matrix["total_columns"], matrix["sums"]) == (50, 91, [90])
        assert main(["report", str(trainer.run_dir)]) == 0


def test_runs_of_one_name_have_different_names_in_a_comparison(tmp_path: Path) -> None:
    """And a run that is given twice is there once."""
    runs = []
    for _ in range(2):
        trainer = make_trainer(record=True, name="same")
        trainer.train()
        runs.append(str(trainer.run_dir))
    page = tmp_path / "comparison.html"
    assert main(["report", *runs, f"{runs[0]}/../{Path(runs[0]).name}", "--output", str(page)]) == 0
    ids = [Path(run).name for run in runs]
    assert [run["name"] for run in read_page(page.read_bytes())["runs"]] == [f"same ({run_id})" for run_id in ids]


def test_frequent_events_displace_no_others() -> None:
    """Of a kind with thousands of events, the first and the last ones are shown, among all rare ones."""
    summary = LiveSummary({"run_id": "many"})
    frequent = [{"kind": "lr_changed", "step": step, "time": 0.0} for step in range(3000)]
    summary.write_events([*frequent, {"kind": "exception", "step": 3, "error": "out of memory"}, *frequent])
    (run,) = read_page(make_report([summary]))["runs"]
    assert (run["event_count"], len(run["events"])) == (6001, 600)
    steps = [event["step"] for event in run["events"] if event["kind"] == "lr_changed"]
    assert steps[:300] == [*range(300)] and steps[300:] == [*range(2701, 3000)]
    assert [event["kind"] for event in run["events"]].index("exception") == 300


def test_an_image_that_is_too_large_displaces_no_other(tmp_path: Path) -> None:
    record = Record.on_disk(tmp_path, config={}, seed=1, run_id="r")
    record.start([])
    record.log_table(1, 0, "predictions", ["step"], [[1]])
    record.log_image(1, 0, "small", torch.rand(8, 8))
    record.log_image(2, 0, "large", torch.rand(3, 700, 700, generator=torch.Generator().manual_seed(0)))
    record.close("completed", None, [], [], {"step": 2})
    (run,) = read_page(make_report([RunSummary.read(tmp_path / "r", media=True)]))["runs"]
    assert [row["name"] for row in run["media"]] == ["predictions", "small"]
    assert run["left_out"]["counts"]["media"] == 1


def test_very_many_metrics_still_fit() -> None:
    """Their names and fields take room, too; those that are left out are listed."""
    summary = LiveSummary({"run_id": "many"})
    for step in (1, 2):
        summary.write_metrics([{"step": step, **{f"group/metric-{number}": 0.5 + step for number in range(20_000)}}])
    html = make_report([summary])
    assert len(html) <= 3_000_000 and read_page(html)["runs"][0]["left_out"]["counts"]["curves"] >= 5_000
