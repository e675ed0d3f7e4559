"""What a list of runs says of each: its step, score and duration, without reading long files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hookline.runs.find import RunFiles, Score, list_runs

BEGIN = 1_767_225_600  # 2026-01-01T00:00:00Z


def clock(hours: float) -> str:
    return datetime.fromtimestamp(BEGIN + 3600 * hours, UTC).isoformat()


def write_run(path: Path, metrics: Any = (), events: Any = (), **fields: Any) -> RunFiles:
    (path / "run.json").write_text(json.dumps({"run_id": "r", "outcome": None, **fields}))
    for name, rows in (("metrics", metrics), ("events", events)):
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return RunFiles.read(path)


def row(step: int, hours: float = 0.0, **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "time": BEGIN + 3600 * hours, "train/loss": step / 10, **values}


@pytest.mark.parametrize("width", [1, 3000, 100_000])
def test_rows_of_any_width_say_step_and_score(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path, [row(step, text="x" * width) for step in range(1, 11)])
    assert (run.step, run.score) == (10, Score("train/loss", 1.0, False))


def test_a_row_that_is_too_wide_says_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, [row(1, text="x" * (9 << 20))])
    assert (run.step, run.score) == (None, None)


def test_values_that_a_resumed_run_has_discarded_are_not_its_score(tmp_path: Path) -> None:
    """It went back to step 5, and was killed before it reached step 10 again."""
    resumed = {"step": 5, "epoch": 0, "time": BEGIN, "resumed": True}
    metrics = [row(5), row(10, **{"val/loss": 0.01}), resumed, row(6)]
    run = write_run(tmp_path, metrics)
    assert (run.step, run.score) == (6, Score("train/loss", 0.6, False))


def test_values_before_the_earliest_resumed_step_are_the_score(tmp_path: Path) -> None:
    """A run that went back to step 10 and then to step 4 has discarded what it measured at steps 5 to 10."""
    marks = {at: {"step": at, "epoch": 0, "time": BEGIN, "resumed": True} for at in (10, 4)}
    measured = [row(4, **{"val/loss": 0.4}), row(8, **{"val/loss": 0.8}), row(10)]
    run = write_run(tmp_path, [*measured, marks[10], row(11), marks[4], row(5)])
    assert (run.step, run.score) == (5, Score("val/loss", 0.4, False))


def test_the_row_of_the_step_at_which_a_run_resumed_counts(tmp_path: Path) -> None:
    """A run that was killed before its next step is at the step of its checkpoint."""
    resumed = {"step": 5, "epoch": 0, "time": BEGIN, "resumed": True}
    run = write_run(tmp_path, [row(4), row(5), row(6), resumed])
    assert (run.step, run.score) == (5, Score("train/loss", 0.5, False))


def test_the_steps_of_a_run_that_was_resumed_are_those_that_it_has_written(tmp_path: Path) -> None:
    """The counters are those with which the attempt before it ended."""
    run = write_run(tmp_path, [row(5), row(7)], counters={"step": 5})
    assert run.step == 7


def test_the_best_checkpoint_is_found_behind_thousands_of_other_events(tmp_path: Path) -> None:
    best = [{"kind": "best_checkpoint", "monitor": "val/loss", "value": value} for value in (0.5, 0.1)]
    others = [{"kind": "checkpoint_saved", "step": step, "path": "x" * 80} for step in range(10_000)]
    run = write_run(tmp_path, [row(1)], [*best, *others])
    assert run.score == Score("val/loss", 0.1, True)


def test_attempts_that_were_killed_count_until_their_last_row(tmp_path: Path) -> None:
    """The days until the run was resumed do not count, nor does an attempt without any row."""
    attempts = [
        {"started": clock(0)},  # killed after ten hours
        {"started": clock(60)},  # killed before its first step
        {"started": clock(90), "closed": clock(91)},
    ]
    metrics = [*(row(step, step) for step in range(1, 11)), row(11, 90.5)]
    run = write_run(tmp_path, metrics, attempts=attempts, outcome="completed")
    assert run.seconds == 11 * 3600


def test_the_duration_of_an_attempt_that_was_killed_before_its_first_row_is_not_known(tmp_path: Path) -> None:
    """The rows of the attempt before it do not say how long it took."""
    attempts = [{"started": clock(0), "closed": clock(1)}, {"started": clock(2)}]
    run = write_run(tmp_path, [row(1, 0.5)], attempts=attempts)
    assert (run.seconds, run.last_attempt_seconds) == (3600, None)


def test_a_killed_run_ends_with_its_last_row_also_after_it_was_copied(tmp_path: Path) -> None:
    """The times of a copied file say nothing about the run."""
    run = write_run(tmp_path, [row(1, 0.5), row(2, 2)], attempts=[{"started": clock(0)}])
    assert run.seconds == 2 * 3600


def test_an_attempt_whose_rows_are_too_far_back_ends_when_the_next_one_begins(tmp_path: Path) -> None:
    attempts = [{"started": clock(0)}, {"started": clock(12), "closed": clock(13)}]
    metrics = [row(1, 1), *(row(step, 12.5, text="x" * 1000) for step in range(2, 10_000))]
    run = write_run(tmp_path, metrics, attempts=attempts, outcome="completed")
    assert run.seconds == 13 * 3600


def test_a_link_to_itself_is_not_a_run(tmp_path: Path) -> None:
    """The runs beside it are listed."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "a").mkdir()
    write_run(tmp_path / "a", [row(1)])
    runs, others = list_runs(tmp_path)
    assert [run.path.name for run in runs] == ["a"] and others == []
