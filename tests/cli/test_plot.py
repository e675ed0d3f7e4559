"""`hookline plot`: metrics of runs in the terminal, as points and as files."""

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Captured, error_of, json_of, output_of
from records import close_record, start_record

from hookline.cli import main
from hookline.record.labels import Labels

NAN = float("nan")


def write_run(run_id: str, name: str | None = None, **metrics: list[float]) -> Path:
    """Write a run with some curves."""
    record = start_record(run_id=run_id, labels=Labels(name))
    for metric, values in metrics.items():
        for step, value in enumerate(values, start=1):
            record.log(step, 0, metric.replace("_", "/"), value)
    return close_record(record)


def test_runs_over_each_other(capsys: Captured) -> None:
    """A chart per metric, a curve per run with its name, and the runs that lack the metric."""
    write_run("one", "base", train_loss=[3.0, 2.0, 1.0], val_loss=[3.0])
    write_run("two", None, train_loss=[4.0, 3.0, 2.0])
    out = output_of(capsys, ["plot", "base", "two", "one"])
    first, second = out.split("val/loss\n")
    assert first.startswith("train/loss\n") and "* base   + two" in first
    assert "* base\n" in second and "without this metric: two" in second


def test_a_run_has_the_same_colour_and_marker_in_all_charts(capsys: Captured) -> None:
    """Also in the chart of a metric that the runs before it do not have."""
    write_run("one", "base", train_loss=[3.0, 2.0, 1.0])
    write_run("two", "wide", train_loss=[4.0, 3.0, 2.0, 1.5, 1.0], val_loss=[3.0, 2.0, 1.0, 0.8, 0.6])
    first, second = output_of(capsys, ["plot", "base", "wide"]).split("val/loss\n")
    assert "* base   + wide" in first and "+ wide" in second and "*" not in second
    first, second = output_of(capsys, ["compare", "base", "wide"]).split("val/loss\n")
    assert "* base   + wide" in first and "+ wide" in second


def test_points(capsys: Captured) -> None:
    """--json has the points of each run; runs with the same name have different ids."""
    write_run("one", "base", train_loss=[3.0, NAN])
    write_run("two", "base", train_loss=[4.0])
    (chart,) = json_of(capsys, "plot", "one", "two", "--metric", "train/loss")
    assert chart["metric"] == "train/loss" and [run["run_id"] for run in chart["runs"]] == ["one", "two"]
    assert chart["runs"][0]["steps"] == [1, 2] and chart["runs"][0]["mean"] == [3.0, "NaN"]
    assert "base (one)" in output_of(capsys, ["plot", "one", "two", "--metric", "train/loss", "--log"])


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ([], "base: 23 of 2,000 points are not finite"),
        (["--log"], "base: 4 of 501 ranges of steps have no finite, positive value"),
    ],
)
def test_values_that_are_not_finite_are_counted_in_a_long_run(capsys: Captured, log: list[str], words: str) -> None:
    """A point of the chart is a range of four steps, and some ranges have none that is finite."""
    values = [NAN if step % 100 == 7 or 1000 <= step < 1003 else 1.0 for step in range(1, 2001)]
    values[1599:1615] = [-1.0 if value == 1.0 else value for value in values[1599:1615]]
    write_run("one", "base", train_loss=values)
    assert words in " ".join(output_of(capsys, ["plot", "one", *log]).split())


def test_errors(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong metric gets the nearest name, a wrong file the endings, a missing package its command."""
    write_run("one", train_loss=[1.0])
    write_run("empty")

    def error_of(*arguments: str) -> str:
        assert main(["plot", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    assert "--metric train/los: no such metric; did you mean 'train/loss'?" in error_of("one", "--metric", "train/los")
    assert "empty: no metric has been written yet" in error_of("empty")
    assert "must end with .svg or .png" in error_of("one", "--output", "x.jpg")
    assert "nowhere: no run in runs/ has this path, id or name" in error_of("nowhere")
    Path("x.svg").mkdir()
    assert "x.svg: it is a directory" in error_of("one", "--output", "x.svg")
    assert "the directory no/ does not exist; create it first" in error_of("one", "--output", "no/x.svg")
    original = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install 'hookline[plot]'" in error_of("one", "--output", "y.svg")


def test_a_metric_is_suggested_by_a_part_of_its_name(capsys: Captured) -> None:
    """Beginnings of words come first, metrics of validation and training before others; `show` lists all."""
    names = ("train_accuracy", "val_accuracy", "train_a", "train_b", "activations_macc", "x_c", "x_d", "x_e", "x_f")
    write_run("one", **{name: [1.0] for name in names})
    error = error_of(capsys, ["plot", "one", "--metric", "acc"])
    assert "did you mean 'val/accuracy' or 'train/accuracy'? `hookline show RUN --metrics` lists all 9" in error
    assert "`hookline show RUN --metrics` lists all 9" in error_of(capsys, ["plot", "one", "--metric", "zzz"])
    listed = [line.split()[0] for line in output_of(capsys, ["show", "one", "--metrics"]).splitlines()[2:]]
    assert sorted(listed) == sorted(name.replace("_", "/", 1) for name in names)


def test_what_a_file_gets(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure gets every curve with a label that is not a formula, and the file is named."""
    calls: list[tuple[str, Any]] = []

    class Axes:
        def plot(self, *values: Any, label: str, color: str, **more: Any) -> None:
            calls.append((color, label))

        def set(self, **fields: Any) -> None:
            calls.append(("set", fields["yscale"]))

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **more: None

    class Figure:
        def __init__(self, **more: Any) -> None: ...

        def add_subplot(self, *place: int, sharex: Axes | None) -> Axes:
            assert (sharex is None) == (place[-1] == 1)
            return Axes()

        def savefig(self, path: Path, **more: Any) -> None:
            path.write_text("figure")

    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=Figure))
    write_run("one", "_$x$", train_loss=[1.0, 2.0])
    write_run("two", "b", train_loss=[1.0, 2.0], val_loss=[1.0])
    assert main(["plot", "one", "two", "--output", "x.svg", "--log"]) == 0
    assert capsys.readouterr().out == "x.svg\n" and Path("x.svg").read_text() == "figure"
    assert calls == [("C0", r" _\$x\$"), ("C1", "b"), ("set", "log"), ("C1", "b"), ("set", "log")]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_files(ending: str) -> None:
    """matplotlib writes the file, whatever the names contain."""
    pytest.importorskip("matplotlib")
    write_run("one", r"$\frac _ 训练", train_loss=[1.0, NAN, 2.0], val_loss=[0.0])
    assert main(["plot", "one", "--output", f"x.{ending}"]) == 0
    assert Path(f"x.{ending}").stat().st_size > 1000
