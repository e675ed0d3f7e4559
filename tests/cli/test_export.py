"""`hookline export`: the files of tables, hostile names, and how a run is named."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from commands import Captured, error_of, output_of
from records import close_record, start_record

from hookline import load_run
from hookline.cli import main

NAN = float("nan")


def write_run(run_id: str = "20260101-000000-aaaa", series: str = "act", root: str = "runs") -> Path:
    """Write a short run, whose texts a spreadsheet would run."""
    record = start_record(root, run_id)
    for step, loss in enumerate((-2.0, NAN), start=1):
        record.log(step, 0, "train/loss", loss)
        record.log_layers(series, step, ["=a()", "b"], ["mean"], torch.full((2, 1), -0.5))
    record.log(2, 0, "=val", True)
    record.event("note", 1, text="=cmd()", more={"a": [1, NAN]})
    record.event("note", 2, text="-1\n+2", more="plain", odd="\ud800")
    return close_record(record)


def csv_rows(path: Path) -> list[list[str]]:
    """Return the rows of a file, the titles first."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_csv(capsys: Captured) -> None:
    """Numbers are as they are, texts that a spreadsheet would run get an apostrophe, lists and dicts are JSON."""
    run = write_run()
    assert main(["export", str(run), "--to", "csv"]) == 0
    folder = Path(f"{run.name}-export")
    assert capsys.readouterr().out.splitlines() == [
        f"{folder / 'metrics.csv'}: 2 rows", f"{folder / 'layers-act.csv'}: 4 rows", f"{folder / 'events.csv'}: 2 rows",
    ]  # fmt: skip
    titles, first, second = csv_rows(folder / "metrics.csv")
    assert titles == ["step", "epoch", "time", "train/loss", "'=val"]
    assert (first[0], first[3:], second[3:]) == ("1", ["-2.0", ""], ["nan", "true"])
    assert csv_rows(folder / "layers-act.csv")[:3] == [
        ["step", "name", "mean"], ["1", "'=a()", "-0.5"], ["1", "b", "-0.5"],
    ]  # fmt: skip
    titles, first, second = csv_rows(folder / "events.csv")
    assert titles == ["time", "kind", "step", "text", "more", "odd"]
    assert first[1:] == ["note", "1", "'=cmd()", '{"a":[1,"NaN"]}', ""]
    assert second[1:] == ["note", "2", "'-1\n+2", "plain", "\\ud800"]


def test_jsonl() -> None:
    """Every line is strict JSON with all columns; the texts are as they were logged."""
    run = write_run()
    assert main(["export", str(run), "--to", "jsonl", "--output", "deep/there"]) == 0
    lines = {path.name: path.read_text().splitlines() for path in Path("deep/there").iterdir()}
    assert sorted(lines) == ["events.jsonl", "layers-act.jsonl", "metrics.jsonl"]
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines["metrics.jsonl"]]
    assert [(row["step"], row["train/loss"], row["=val"]) for row in rows] == [(1, -2.0, None), (2, "NaN", True)]
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines["events.jsonl"]]
    assert [event["more"] for event in events] == [{"a": [1, "NaN"]}, "plain"]


def test_parquet() -> None:
    """Columns keep their types, and those of several types are text."""
    parquet = pytest.importorskip("pyarrow.parquet")
    run = write_run()
    assert main(["export", str(run), "--to", "parquet", "--output", "out"]) == 0
    layers = parquet.read_table("out/layers-act.parquet").to_pydict()
    assert layers == load_run(run).layers["act"]
    metrics = parquet.read_table("out/metrics.parquet").to_pydict()
    assert metrics["step"] == [1, 2] and metrics["=val"] == [None, True]
    assert repr(metrics["train/loss"]) == "[-2.0, nan]"
    events = parquet.read_table("out/events.parquet").to_pydict()
    assert events["more"] == ['{"a":[1,"NaN"]}', "plain"] and events["text"] == ["=cmd()", "-1\n+2"]


def test_parquet_without_pyarrow(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it, and nothing is written."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(write_run()), "--to", "parquet", "--output", "out"]) == 2
    assert "pip install 'hookline[parquet]'" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("series", ["../../../up", "/etc/x", "a\0b\n\x1b[31m", "x" * 10_000, "", "..", "ü/=@"])
def test_a_series_cannot_choose_where_it_is_written(series: str, capsys: Captured) -> None:
    """Whatever its name, its file is in the directory, with a plain name."""
    assert main(["export", str(write_run(series=series)), "--to", "jsonl", "--output", "here/out"]) == 0
    names = [path.name for path in Path("here/out").iterdir()]
    assert len(names) == 3 and all(re.fullmatch(r"[A-Za-z0-9._=-]{1,120}", name) for name in names)
    assert [path.name for path in Path("here").iterdir()] == ["out"]
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_series_whose_names_become_alike_have_files_each() -> None:
    """No file is overwritten, also where a file system does not tell upper case from lower case."""
    record = start_record(run_id="r")
    for value, series in enumerate(("a/b", "a_b", "A_B")):
        record.log_layers(series, 1, ["n"], ["x"], torch.full((1, 1), float(value)))
    close_record(record)
    assert main(["export", "r", "--to", "jsonl"]) == 0
    rows = {path.name: json.loads(path.read_text())["x"] for path in Path("r-export").glob("layers-*")}
    assert rows == {"layers-a_b.jsonl": 0.0, "layers-a_b-2.jsonl": 1.0, "layers-A_B-3.jsonl": 2.0}


def test_a_run_cannot_choose_the_directory() -> None:
    """A run.json from elsewhere whose run_id is a path leads nowhere else."""
    run = write_run()
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**described, "run_id": "../up/x"}))
    assert main(["export", str(run), "--to", "csv"]) == 0
    assert Path(".._up_x-export/metrics.csv").exists()


def test_a_directory_in_use_is_refused(capsys: Captured) -> None:
    """Files that are there stay as they are; an empty directory is used."""
    run = write_run()
    Path("out").mkdir()
    assert main(["export", str(run), "--to", "csv", "--output", "out"]) == 0
    before = Path("out/metrics.csv").read_bytes()
    assert main(["export", str(run), "--to", "jsonl", "--output", "out"]) == 2
    assert "out is not empty; remove it, or choose another directory with --output" in capsys.readouterr().err
    assert Path("out/metrics.csv").read_bytes() == before and len(list(Path("out").iterdir())) == 3
    assert main(["export", str(run), "--to", "csv", "--output", "out/metrics.csv"]) == 2
    assert "cannot write out/metrics.csv" in capsys.readouterr().err


def test_a_run_before_its_first_step(capsys: Captured) -> None:
    """Its tables have titles and no rows."""
    record = start_record(run_id="r")
    assert main(["export", "latest", "--to", "csv"]) == 0
    assert capsys.readouterr().out == "r-export/metrics.csv: 0 rows\nr-export/events.csv: 0 rows\n"
    assert Path("r-export/metrics.csv").read_text() == "step,epoch,time\n"
    close_record(record)


def test_what_is_not_a_run_is_an_error(capsys: Captured) -> None:
    """Nothing is written for it."""
    Path("other").mkdir()
    for given in ("nowhere", "other", "x" * 5000, f"{'x' * 5000}/y", "runs/zzz"):
        assert "pass a run's directory" in error_of(capsys, ["export", given, "--to", "csv"]) or given == "other"
    assert [path.name for path in Path().iterdir()] == ["other"]


def test_the_beginning_of_an_id_names_a_run(capsys: Captured) -> None:
    """It must be that of one run, unless it is a whole id; DIR/ID is a run in another directory."""
    for run_id in ("20260101-a", "20260101-b", "20260101-bb"):
        write_run(run_id)
    write_run("2027-c", root="there")
    for given, run_id in {"20260101-a": "20260101-a", "20260101-b": "20260101-b", "there/20": "2027-c"}.items():
        assert f"{run_id}-export/metrics.csv" in output_of(capsys, ["export", given, "--to", "csv"])
    error = error_of(capsys, ["export", "2026", "--to", "csv"])
    assert "2026: 3 runs in runs/ begin with it: 20260101-a (completed, 2" in error
    assert "pass more of the id" in error
    assert main(["checkpoints", "20260101-bb"]) == 2
    assert "no checkpoint in runs/20260101-bb; the run has not saved one yet" in capsys.readouterr().err
    assert main(["checkpoints", "20260101-c"]) == 2
    assert "20260101-c: no run in runs/ has this path, id or name; did you mean '2026" in capsys.readouterr().err


def test_the_end_of_an_id_names_a_run(capsys: Captured) -> None:
    """It must be that of one run; a beginning comes first."""
    for run_id in ("20260101-aax", "20260101-bby", "20260101-ccy", "y-20260101"):
        write_run(run_id)
    for given, run_id in {"ax": "20260101-aax", "by": "20260101-bby", "y": "y-20260101"}.items():
        assert f"{run_id}-export/metrics.csv" in output_of(capsys, ["export", given, "--to", "csv"])
    Path("runs/y-20260101").rename("elsewhere")
    assert main(["export", "y", "--to", "csv"]) == 2
    assert "y: 2 runs in runs/ end with it: 20260101-bby (completed, 2" in capsys.readouterr().err


def test_a_format_must_be_given(capsys: Captured) -> None:
    """Without one, or with one that does not exist, the error lists what there is."""
    for arguments in (["export", "r"], ["export", "r", "--to", "xlsx"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "--to" in capsys.readouterr().err
