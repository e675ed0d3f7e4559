"""`hookline runs`: what it lists, in which order, and what it skips."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Captured, error_of, json_of, output_of, python
from records import start_record
from rich.console import Console

from hookline.cli import main, runs
from hookline.record.labels import Labels

DIES = """
import os
from hookline.record import Record
Record.on_disk("runs", config={}, seed=None, run_id="dead").start([])
os.kill(os.getpid(), 9)
"""
ESCAPE = "\x1b[31m\u202e"


def write_run(
    run_id: str, outcome: str | None = "completed", reason: str | None = None, labels: Labels | None = None, **more: Any
) -> Path:
    """Write a run of some steps; one without an outcome is left as by a kill."""
    record = start_record(run_id=run_id, labels=labels, lineage=more.get("lineage"))
    for step in range(1, more.get("steps", 2) + 1):
        record.log(step, 0, more.get("metric", "train/loss"), 1 / step)
    if "best" in more:
        record.event("best_checkpoint", 1, path="x", monitor="val/acc", value=9.0)
        record.event("best_checkpoint", 2, path="x", monitor="val/acc", value=more["best"])
    if outcome is None:
        record.sync()
        record._storage._lock._close()  # as the system does it when a process dies
        (record.path / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "started": "1", "host": _host()}))
    else:
        record.close(outcome, reason, [], [], {"step": more.get("steps", 2)})
    return record.path


def _host() -> str:
    import platform

    return platform.node()


def listed(capsys: Captured, *arguments: str) -> list[dict[str, Any]]:
    """Return what the command prints for programs."""
    return json_of(capsys, "runs", *arguments)


def test_fields(capsys: Captured) -> None:
    """Each run has its labels, outcome, score, steps, times and lineage."""
    source = {"run_id": "one", "step": 2, "checkpoint": "/c"}
    write_run("one", "stopped", "stopped by early_stopping: enough", Labels("base", ("a",), "n"), best=0.5)
    write_run("two", lineage=source, metric="val/loss", steps=4)
    two, stopped = listed(capsys)
    assert (stopped["run_id"], stopped["name"], stopped["tags"], stopped["notes"]) == ("one", "base", ["a"], "n")
    assert (stopped["outcome"], stopped["reason"]) == ("stopped", "stopped by early_stopping: enough")
    assert stopped["score"] == {"metric": "val/acc", "value": 0.5, "kind": "best"} and stopped["steps"] == 2
    assert two["score"] == {"metric": "val/loss", "value": 0.25, "kind": "last"} and two["steps"] == 4
    assert two["lineage"] == source and stopped["attempts"] == 1 and 0 <= stopped["seconds"] < 100
    header, second, first = output_of(capsys, ["runs"]).splitlines()
    assert " ".join(header.split()) == "id name tags verdict outcome best steps duration started from"
    assert two["verdict"] is None and " -  " in second  # a report of its end would have judged it
    assert "stopped by early_stopping  val/acc 0.5 " in first and "val/loss 0.25 (last)" in second
    assert second.endswith("one @ 2")


def test_running_and_killed(capsys: Captured) -> None:
    """A run without an outcome is running as long as its process lives."""
    write_run("killed", None, steps=3)
    record = start_record(run_id="running")
    states = {run["run_id"]: (run["outcome"], run["steps"]) for run in listed(capsys)}
    assert states == {"killed": ("killed", 3), "running": ("running", None)}
    record.close("completed", None, [], [], {})
    assert listed(capsys, "--outcome", "killed")[0]["run_id"] == "killed"
    python("-c", DIES)
    assert [run["run_id"] for run in listed(capsys, "--outcome", "killed")] == ["dead", "killed"]


def test_sort_filter_and_limit(capsys: Captured) -> None:
    """Filters leave the runs that pass all of them; what has no value for the key comes last."""
    write_run("a", labels=Labels("Base one", ("x", "y")), best=0.5, steps=2)
    write_run("b", "failed", labels=Labels("base two", ("x",)), best=0.1, steps=5)
    write_run("c", labels=Labels(None, ()), metric="other", steps=3)

    def ids(*arguments: str) -> str:
        return " ".join(run["run_id"] for run in listed(capsys, *arguments))

    assert ids() == "c b a" and ids("--reverse") == "a b c"
    assert ids("--sort", "best") == "a b c" and ids("--sort", "steps") == "b c a" and ids("--sort", "id") == "a b c"
    assert ids("--sort", "name") == "a b c" and ids("--sort", "outcome", "--limit", "1") in ("c", "a")
    assert ids("--tag", "x") == "b a" and ids("--tag", "x", "--tag", "y") == "a" and ids("--name", "BASE") == "b a"
    assert ids("--outcome", "failed") == "b" and ids("--tag", "z") == ""
    assert output_of(capsys, ["runs", "--limit", "1"]).endswith("2 more; --limit 3 prints all\n")
    assert "no run in runs/ matches the filters; without them there are 3" in output_of(capsys, ["runs", "--tag", "z"])
    for wrong in (["--sort", "lenght"], ["--outcome", "faild"], ["elsewhere"]):
        assert error_of(capsys, ["runs", *wrong]).count("\n") == 1


def test_the_best_of_each_metric_comes_first(capsys: Captured) -> None:
    """An accuracy is not compared with a loss; a high accuracy and a low loss are good."""
    for run_id, best in (("good", 0.9), ("bad", 0.1)):
        write_run(run_id, best=best)
    for run_id, steps in (("long", 4), ("short", 2)):  # 1 / steps is the loss
        write_run(run_id, metric="val/loss", steps=steps)
    assert [run["run_id"] for run in listed(capsys, "--sort", "best")] == ["good", "bad", "long", "short"]


def test_a_mode_of_a_hook_says_what_is_best(capsys: Captured) -> None:
    """It comes before what the name of the metric says."""
    for run_id, best in (("low", 0.1), ("high", 0.9)):
        path = write_run(run_id, best=best)
        run = json.loads((path / "run.json").read_text())
        run["hooks"] = [{"name": "checkpoint", "parameters": {"monitor": "val/acc", "mode": "min"}}]
        (path / "run.json").write_text(json.dumps(run))
    assert [run["run_id"] for run in listed(capsys, "--sort", "best")] == ["low", "high"]


def test_an_outcome_may_have_a_hyphen(capsys: Captured) -> None:
    """`show` prints it so."""
    write_run("bad", "non_finite")
    write_run("good")
    for given in ("non-finite", "non_finite"):
        assert [run["run_id"] for run in listed(capsys, "--outcome", given)] == ["bad"]


def test_what_is_not_a_run_is_skipped(capsys: Captured) -> None:
    """Empty, torn, foreign and newer directories get one note; damaged files inside of a run do no harm."""
    good = write_run("good")
    (good / "labels.json").write_bytes(b"\xff[")
    with (good / "metrics.jsonl").open("ab") as file:
        file.write(b'\nnot json\n[1]\n{"step": "x", "val/loss": "y"}\n{"step": 9, "tr')
    Path("runs/file").write_text("x")
    contents = {"empty": None, "torn": '{"run_id": "x', "foreign": "[1, 2]", "newer": '{"run_id": "n", "format": 2}'}
    for name, text in {**contents, f"evil{ESCAPE}": "{}"}.items():
        Path("runs", name).mkdir()
        if text is not None:
            Path("runs", name, "run.json").write_text(text)
    Path("runs/link").mkdir()
    Path("runs/link/run.json").symlink_to(good / "run.json")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "good" in out and "train/loss 0.5 (last)" in out
    assert err.startswith(
        "hookline: skipped in runs/ (not a run, damaged, or written by a newer Hookline): empty, evil\\x1b[31m"
    )
    assert err.count("\n") == 1 and err.strip().isprintable() and err.endswith("and 1 more\n")


def test_a_damaged_run_json_is_skipped(capsys: Captured) -> None:
    """Times that are none are left out; a field of another type is damage."""
    for name, attempts in (("good", [{"started": "soon"}]), ("odd", [3])):
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/run.json").write_text(json.dumps({"run_id": name, "started": "soon", "attempts": attempts}))
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert "good" in out and "odd" not in out and "damaged" in err and "odd" in err


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(width: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider, and the columns that are left out are named; names cannot control the terminal."""
    for number in range(3):
        run = write_run(f"20261117-08580{number}-bkz4c0k5", labels=Labels("n", ("tag one", "tag two"), None))
        hostile = {"version": 1, "name": f"{ESCAPE}{'n' * 10_000}", "tags": [ESCAPE], "notes": None}
        (run / "labels.json").write_text(json.dumps(hostile))
    monkeypatch.setattr(runs, "is_terminal", lambda stream: True)
    monkeypatch.setattr(runs, "open_console", lambda: Console(width=width, markup=False, highlight=False))
    lines = output_of(capsys, ["runs"]).splitlines()
    assert max(map(len, lines)) <= width and "".join(lines).isprintable()
    assert lines[3].startswith("20261117-085800-bkz4c0k5  " if width == 200 else "20261117-085800  ")
    assert any("too narrow" in line for line in lines) is (width < 200)


def test_a_wide_terminal_shows_cells_as_a_whole(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of 50 characters is cut where there is no room for it, and only there."""
    name = "n" * 50
    write_run("20261117-085800-bkz4c0k5", labels=Labels(name, (), None))
    monkeypatch.setattr(runs, "is_terminal", lambda stream: True)
    for width, is_whole in ((80, False), (200, True)):
        console = Console(width=width, markup=False, highlight=False)
        monkeypatch.setattr(runs, "open_console", lambda console=console: console)
        assert (name in output_of(capsys, ["runs"])) is is_whole


def test_line_breaks_in_a_label_are_spaces(capsys: Captured) -> None:
    """labels.json may have been edited by hand."""
    write_run("one", labels=Labels("a\nb", ("c\nd",)))
    _, row = output_of(capsys, ["runs"]).splitlines()
    assert "a b" in row and "c d" in row


def test_before_the_first_run(capsys: Captured) -> None:
    """That there is no runs/ yet is not an error; that another directory does not exist is."""
    assert output_of(capsys, ["runs"]) == "no runs yet in runs/\n"
    assert listed(capsys) == []
    assert main(["runs", "elsewhere"]) == 2


def test_an_empty_outcome_is_listed(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a terminal that is too narrow for the table, where outcomes are cut."""
    monkeypatch.setattr("hookline.cli.runs.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "30")
    run = Path("runs", "one" * 12)
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"run_id": "one", "outcome": ""}))
    assert "one" in output_of(capsys, ["runs"])
