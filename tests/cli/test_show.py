"""`hookline show`: one run at a glance."""

from __future__ import annotations

import json
import platform
import shlex
from pathlib import Path
from typing import Any

import pytest
from builders import make_batches, make_trainer
from commands import error_of, json_of, output_of
from records import close_record, start_record

import hookline
from hookline.cli import main
from hookline.record import Record


def train(*hooks: Any, steps: int = 30, **options: Any) -> Path:
    trainer = make_trainer(*hooks, data=make_batches(steps), record=True, seed=1, **options)
    trainer.train()
    return trainer.run_dir


def show(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    return output_of(capsys, ["show", *map(str, arguments)])


def test_a_run_is_shown_with_its_outcome_curves_metrics_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    path = train(hookline.CheckpointHook(), name="baseline", tags=["first"], notes="a note")
    shown = show(capsys, "latest")
    for text in (
        f"baseline  {path.name}",
        "outcome    completed, 30 steps",
        "tags       first",
        "notes      a note",
        "seed 1",
        "healthy\n",
        "── train/loss",
        "train/loss ",
        "last       runs/",
        f"report     runs/{path.name}/report.html",
    ):
        assert text in shown
    assert "resume" not in shown


def interrupt(path: Path, hostname: str | None = None, **fields: Any) -> None:
    """Make a run one that was interrupted, by a command with these fields of its environment."""
    run = json.loads((path / "run.json").read_text())
    environment = {**run["environment"], **fields, "hostname": hostname or platform.node()}
    (path / "run.json").write_text(json.dumps({**run, "outcome": "interrupted", "environment": environment}))


RESUMABLE = """
model: {name: char_gpt, context: 16, width: 8, heads: 2, layers: 1}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: adamw
trainer: {max_steps: 2}
hooks: {lifecycle: [{name: checkpoint, save_every_n_steps: 1}]}
"""


def test_the_command_that_resumes_repeats_the_arguments_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs as it is printed, on one line, for a run that was not completed; labels are not given again."""
    Path("own_parts.py").write_text("")
    Path("a.yaml").write_text(RESUMABLE)
    words = ["a.yaml", "--import", "own_parts", "trainer.name=one", "optimizer.lr=0.01", "--output", "runs"]
    assert main(["train", *words]) == 0
    (path,) = Path("runs").iterdir()
    capsys.readouterr()
    assert json_of(capsys, "show", "one")["resume"] is None
    interrupt(path, argv=["/bin/hookline", "train", *words])
    expected = f"hookline resume runs/{path.name} optimizer.lr=0.01 --import own_parts"
    assert json_of(capsys, "show", "one")["resume"] == expected
    assert f"    resume     {expected}\n" in show(capsys, "one")
    assert main(shlex.split(expected)[1:]) == 0
    capsys.readouterr()
    resumed = ["resume", "a=1", "--fork", "--debug", "--allow", "mine", "optimizer.lr=0.01", "--device", "cpu"]
    interrupt(path, argv=["/bin/hookline", *resumed])  # the name of that run is no override
    expected = f"hookline resume runs/{path.name} optimizer.lr=0.01 --device cpu --allow mine"
    assert json_of(capsys, "show", "one")["resume"] == expected
    for wrong in (["--import"], [*words, "--help"], [*words, "--fast-dev-run", "x"], [*words, "--nothing"]):
        interrupt(path, argv=["/bin/hookline", "train", *wrong])
        assert json_of(capsys, "show", "one")["resume"] == f"hookline resume runs/{path.name}"
    interrupt(path, argv=["/bin/hookline", "train", *words], hostname="elsewhere")
    assert json_of(capsys, "show", "one")["resume"] == f"hookline resume runs/{path.name}"


def test_a_run_that_was_made_in_code_is_resumed_in_code(capsys: pytest.CaptureFixture[str]) -> None:
    path = train(hookline.CheckpointHook())
    interrupt(path)
    assert "in code: trainer.fit(resume=" in show(capsys, path)
    assert json_of(capsys, "show", path)["resume"] is None


def test_few_points_are_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """A chart of four points says less than the table, and NaN are not points."""
    for losses, is_drawn in (([1.0] * 4, False), ([1.0] * 5, True), ([1.0] + [float("nan")] * 60, False)):
        record = start_record()
        for step, loss in enumerate(losses, start=1):
            record.log(step, 0, "train/loss", loss)
        close_record(record)
        assert ("┤" in show(capsys, record.path)) == is_drawn


def test_a_run_outside_of_a_repository_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    path = train()
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**run, "git": {"commit": "unknown", "dirty": None}}))
    assert ", not in a git repository" in show(capsys, path)


def test_the_share_of_hooks_is_that_of_the_last_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run knows the cost of its hooks in the last attempt only."""
    path = train()
    run = json.loads((path / "run.json").read_text())
    (attempt,) = run["attempts"]
    attempt |= {"started": "2026-01-02T00:00:00+00:00", "closed": "2026-01-02T00:00:10+00:00", "seconds": 10.0}
    run["attempts"] = [{**attempt, "started": "2026-01-01T00:00:00+00:00"}, attempt]
    run["costs"] = [{"hook": "slow", "seconds": 5.0}]
    (path / "run.json").write_text(json.dumps(run))
    assert "slowest hooks slow 5.000 s (50.0%)" in show(capsys, path)


def test_every_reader_adds_up_the_seconds_of_all_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    """A pause between two attempts does not count, and `show`, `runs` and the report say the same."""
    path = train()
    run = json.loads((path / "run.json").read_text())
    times = [("2026-01-01T00:00:00+00:00", 30.0), ("2026-01-02T00:00:00+00:00", 10.0)]
    run["attempts"] = [{**run["attempts"][0], "started": started, "seconds": seconds} for started, seconds in times]
    (path / "run.json").write_text(json.dumps(run))
    assert "30 steps in 40.0 s" in show(capsys, path)
    assert json_of(capsys, "show", path)["seconds"] == 40
    assert json_of(capsys, "runs", path.parent)[0]["seconds"] == 40
    assert main(["report", str(path)]) == 0
    assert '"seconds":40.0,"step_seconds"' in (path / "report.html").read_text()


def test_where_a_step_spends_its_time_is_a_mean_over_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the same numbers."""
    record = start_record()
    for step, seconds in ((1, 0.1), (2, 0.3)):
        record.log(step, 0, "throughput/step_seconds", seconds)
        record.log(step, 0, "throughput/data_wait_seconds", seconds / 2)
    close_record(record, step=2)
    assert "mean time  a step 200 ms, waiting for data 100 ms" in show(capsys, record.path)
    assert main(["report", str(record.path)]) == 0
    assert '"step_seconds":{"step":0.2,"data_wait":0.1}' in (record.path / "report.html").read_text()


def test_labels_and_reasons_of_any_length_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    path = train()
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**run, "reason": "r" * 10**6, "seed": None}))
    labels = {"version": 1, "name": "n" * 10**5, "tags": ["t" * 10**5] * 3, "notes": "o" * 10**5}
    (path / "labels.json").write_text(json.dumps(labels))
    shown = show(capsys, path)
    assert len(shown) < 10_000 and "seed" not in shown
    other = train()
    for command in (["label", path], ["compare", path, other], ["plot", path, other]):
        assert len(output_of(capsys, [*map(str, command)])) < 30_000


@pytest.mark.hooks_fail(raises=ValueError)
def test_alerts_come_with_their_steps(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(hookline.TrainingHook):
        name = "broken"

        def on_step_end(self) -> None:
            raise ValueError("no good")

    shown = show(capsys, train(Broken()))
    assert shown.startswith("look at this\n") and "    step 3     broken: the hook was disabled after" in shown
    assert "no good" in shown
    assert "disabled: broken" in shown


def test_a_run_before_its_first_step_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    record = start_record()
    shown = show(capsys, record.path)
    assert "running" in shown
    assert "checkpoints  none" in shown
    close_record(record)


HOSTILE = "\x1b[31mred\x1b]0;title\x07 \u202egnp <script>"


def test_names_and_texts_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record.on_disk(tmp_path, config={}, seed=None)
    record.start([{"name": HOSTILE, "enabled": False, "failures": 3}])
    for step in range(3):
        record.log(step, 0, f"val/{HOSTILE}", 1.0)
        record.log(step, 0, "x" * 10_000, float("nan"))
    record.event("hook_disabled", 1, hook=HOSTILE, message=HOSTILE)
    record.event("exception", 1, error="e" * 10_000)
    record.close("failed", HOSTILE, [{"name": HOSTILE, "enabled": False, "failures": 3}],
                 [{"hook": HOSTILE, "seconds": 1.0}], {"seconds": 2.0})  # fmt: skip
    shown = show(capsys, record.path)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert max(map(len, shown.splitlines())) < 1000


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"run_id": 7}'])
def test_a_foreign_run_json_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    (tmp_path / "run.json").write_text(damage)
    error = error_of(capsys, ["show", str(tmp_path)])
    assert "is not a run" in error
    assert error.count("\n") == 1


WRONG = (None, 7, "text", [1], {"a": 1}, [{"name": 1}], [{"hook": None, "seconds": "x"}])


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.parametrize("field", ["hooks", "costs", "attempts", "git", "environment", "counters", "lineage", "reason"])
def test_a_run_json_that_was_edited_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, field: str
) -> None:
    """A field of another type is named; one that Hookline could have written is shown."""
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml"):
        (tmp_path / name).write_text("")
    for value in WRONG:
        (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "seed": value, field: value}))
        status, error = main([command, str(tmp_path)]), capsys.readouterr().err
        if status:
            assert f"run.json is damaged: Hookline did not write its field {field}" in error and error.count("\n") == 1
        else:
            fits = (dict, str, type(None)) if field in ("lineage", "reason") else dict
            assert isinstance(value, fits)


NESTED = f'"x": {"[" * 450}{"]" * 450}'  # deeper than any value of a record


def test_an_event_that_is_nested_too_deeply_is_an_incomplete_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(steps=3)
    with (path / "events.jsonl").open("a") as file:
        file.write(f'{{"time": 1, "kind": "a", "step": 1, {NESTED}}}\n')
    shown = json_of(capsys, "show", path)
    assert [alert["text"] for alert in shown["alerts"]] == ["events.jsonl: line 1 is damaged"]
    assert main(["report", str(path), "--output", str(tmp_path / "report.html")]) == 0


def test_a_run_json_that_is_nested_too_deeply_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    path = train(steps=3)
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(f"{text.rstrip()[:-1]}, {NESTED}}}")
    for arguments in (["show", str(path), "--json"], ["report", str(path)]):
        assert "its run.json cannot be read or is damaged" in error_of(capsys, arguments)
    with pytest.raises(hookline.HooklineError, match=r"its run\.json cannot be read or is damaged"):
        hookline.load_run(path)


def test_a_checkpoint_whose_name_is_too_long_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    path = train(steps=3)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1, "kind": "checkpoint_saved", "step": 1, "path": "a" * 5000}) + "\n")
    assert "checkpoints  none" in show(capsys, path)


class Ruin(hookline.TrainingHook):
    """Make weights NaN at the end of a step, as an optimizer does with a gradient that is not finite."""

    intervenes = True

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == self.at:
            next(trainer.model.parameters()).data[0] = float("nan")


@pytest.mark.parametrize(
    ("ruined_at", "outcome", "resumed_at"),
    [(9, "non_finite", 8), (8, "non_finite", 6), (12, "non_finite", 10), (9, None, 8), (2, "non_finite", None)],
)
def test_a_run_with_ruined_weights_resumes_from_before(
    ruined_at: int, outcome: str | None, resumed_at: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest checkpoints have the NaN, also that of the step before the first loss which shows it."""
    path = train(Ruin(ruined_at), hookline.CheckpointHook(save_every_n_steps=2, save_top_k=9), steps=12)
    run = json.loads((path / "run.json").read_text())
    assert run["outcome"] == "non_finite"
    if outcome is None:  # it was killed
        del run["verdict"]
        (path / "run.json").write_text(json.dumps({**run, "outcome": None, "reason": None}))
    shown = show(capsys, path)
    if resumed_at is None:
        assert "resume     no checkpoint has weights that are known to be finite\n" in shown
        return
    newest = path / "checkpoints" / f"step-{resumed_at:08d}"
    assert f"fit(resume='{newest.relative_to(Path.cwd())}')" in shown
    assert "step-00000012\n" in shown
    if outcome is None:
        assert f"resume it from its checkpoint of step {resumed_at}" in " ".join(shown.split())


def test_a_run_that_was_stopped_before_the_nan_reached_its_weights_resumes_from_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = make_batches(12)
    batches[8] = (batches[8][0] * float("nan"), batches[8][1])
    trainer = make_trainer(
        hookline.NanForensics(), hookline.CheckpointHook(save_every_n_steps=1), data=batches, record=True
    )
    trainer.train()
    shown = show(capsys, trainer.run_dir)
    assert "stopped by nan_forensics" in shown and f"fit(resume='runs/{trainer.run_dir.name}')" in shown


def test_resuming_with_ruined_weights_warns(caplog: pytest.LogCaptureFixture) -> None:
    path = train(Ruin(9), hookline.CheckpointHook(save_every_n_steps=2, save_top_k=9), steps=12)
    make_trainer(data=make_batches(12)).load_checkpoint(path / "checkpoints" / "step-00000008")
    assert "not finite" not in caplog.text
    make_trainer(data=make_batches(12)).load_checkpoint(path)
    assert "step-00000012 are not finite" in caplog.text and "an earlier step" in caplog.text
