"""The files of a run have limits: what is larger is refused before it is read, and never written."""

import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import make_trainer
from records import close_record, start_record
from saved_checkpoints import verify_checkpoint

from hookline import CheckpointHook, TrainingHook, _limits, load_run
from hookline.checkpoints.store import read_checkpoint
from hookline.cli import main
from hookline.config.load import load_config
from hookline.errors import CheckpointError, ConfigError, HooklineError, RecordError, error_text, traceback_text
from hookline.record import Record, read_events, read_json, read_jsonl, read_metrics, redaction
from hookline.record import record as record_module
from hookline.record.labels import read_labels
from hookline.runs.find import RunFiles
from hookline.runs.media import read_media
from hookline.runs.summary import RunSummary

MB = 1_000_000


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fail if the block needs more memory than so many bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak:,} bytes"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with one row of metrics, one event and a table."""
    record = start_record(tmp_path, "r", config={"a": 1})
    record.log(1, 0, "x", 0.5)
    record.event("noted", 1)
    record.log_table(1, 0, "t", ["a"], [[1]])
    return close_record(record)


READERS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "run.json": (16 * MB, RunFiles.read),
    "labels.json": (MB, read_labels),
    "config.yaml": (16 * MB, load_run),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_beyond_its_limit_is_refused_unread(run: Path, name: str) -> None:
    """On one line: the file, its size, the limit and what to do. A sparse file of 5 GB takes no memory."""
    limit, read = READERS[name]
    read(run)
    os.truncate(run / name, 5 << 30)
    with at_most(MB), pytest.raises(RecordError) as raised:
        read(run)
    assert str(raised.value) == (
        f"cannot read {run / name}: it has {5 << 30:,} bytes, and {limit:,} is the limit; "
        "it is damaged or was not written by Hookline, so replace it with an undamaged copy"
    )


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", read_metrics), ("events.jsonl", read_events), ("media.jsonl", read_media),
        ("events.jsonl", lambda run: read_jsonl(run / "events.jsonl")[0]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_line_beyond_its_limit_is_left_out_unread(run: Path, name: str, read: Callable[[Path], list[Any]]) -> None:
    """As a damaged one is: those before and behind it are read."""
    line = (run / name).read_bytes()
    before = read(run)
    os.truncate(run / name, 300 * MB)
    with (run / name).open("ab") as file:
        file.write(b"\n" + line.replace(b'"step":1', b'"step":7'))
    with at_most(60 * MB):
        assert len(read(run)) == 2 * len(before)


def test_the_warning_of_a_long_line_has_its_number_and_the_limit(run: Path) -> None:
    """It is not called torn, although it is the last one."""
    os.truncate(run / "metrics.jsonl", 40 * MB)
    words = r"metrics.jsonl: line 2 is damaged \(a line has more than 16,000,000 bytes, the limit\); the other"
    with pytest.warns(RuntimeWarning, match=words):
        assert len(read_metrics(run)) == 1


def test_a_resume_mark_behind_a_long_line_is_found(run: Path) -> None:
    """Where a line begins does not depend on those that were not read into memory."""
    os.truncate(run / "metrics.jsonl", 40 * MB)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\n{"step":5,"x":1}\n{"step":1,"resumed":true}\n{"step":2,"x":2}\n')
    with pytest.warns(RuntimeWarning, match="line 2 is damaged"):
        assert [row["step"] for row in read_metrics(run)] == [1, 2]


def test_a_line_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted as lost, with a warning, and the run continues."""
    monkeypatch.setattr(_limits, "_OTHER_LINES", 1000)
    record = start_record(tmp_path, "r")
    with pytest.warns(RuntimeWarning, match=r"events\.jsonl: it has 1,\d+ bytes, and 1,000 is the limit; store"):
        record.event("large", 1, numbers="7" * 1000)
    record.event("small", 1)
    assert [event["kind"] for event in read_events(close_record(record))] == ["small"]
    assert record.lost == 1


def test_a_config_too_large_to_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not begin, and leaves its lock to the next."""
    monkeypatch.setitem(_limits._FILES, "config.yaml", 1000)
    record = Record.on_disk(tmp_path, config={"x": "7" * 1000}, seed=None, run_id="r")
    with pytest.raises(RecordError, match=r"config\.yaml: it has 1,\d+ bytes, and 1,000 is the limit; store"):
        record.start([])
    close_record(start_record(tmp_path, "r"))


def test_a_long_config_is_recorded_as_json(tmp_path: Path) -> None:
    """PyYAML takes seconds for a MB; JSON is YAML, too. Long YAML is refused before it is parsed."""
    config = {"x": list(range(100_000))}
    path = close_record(start_record(tmp_path, "r", config=config))
    assert (path / "config.yaml").read_text().startswith("{")
    assert load_run(path).config == config
    (path / "config.yaml").write_text("a: [" + "b, " * 100_000 + "c]")
    with pytest.raises(
        RecordError, match=r"config\.yaml: it has 300,006 bytes of YAML, and 250,000 is the limit; write"
    ):
        load_run(path)


def test_names_that_would_fill_the_memory_are_refused(run: Path) -> None:
    """A table has a place for each name in each row: one of 20,000 by 20,000 is not made."""
    (run / "metrics.jsonl").write_text("".join(f'{{"step":{i},"n{i}":1}}\n' for i in range(20_000)))
    with pytest.raises(
        RecordError, match="20,003 names in 20,000 rows, a table of 400,060,000 places for 40,000 values"
    ):
        load_run(run)
    assert len(read_metrics(run)) == 20_000


def test_as_many_names_in_full_rows_are_fine(run: Path) -> None:
    """The limit is on gaps, not on names."""
    row = ",".join(f'"n{i}":1' for i in range(20_000))
    (run / "metrics.jsonl").write_text("".join(f'{{"step":{step},{row}}}\n' for step in range(3)))
    assert len(load_run(run).metrics) == 20_003


def test_a_pipe_as_a_config_does_not_hang(run: Path) -> None:
    """`resume` reads the config of a run as `train` does; a link to a config is fine."""
    (run / "link.yaml").symlink_to(run / "config.yaml")
    assert load_config(run / "link.yaml")[0] == {"a": 1}
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: it is not a plain file; copy it into one"):
        load_config(run / "config.yaml")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Saves(TrainingHook):
    """Has a state of any kind."""

    saves = ("value",)
    value: Any = None

    def on_step_end(self) -> None:
        """Count as a hook."""


def saved(**options: Any) -> tuple[Any, Path]:
    """Train four steps, and return the trainer and its last checkpoint."""
    trainer = make_trainer(CheckpointHook(save_every_n_steps=2), record=True, **options)
    trainer.train()
    return trainer, trainer.checkpoint_dir / "step-00000004"


@pytest.mark.parametrize(("name", "limit"), [("state.json", "64,000,000"), ("manifest.json", "16,000,000")])
def test_files_of_a_checkpoint_beyond_their_limit(name: str, limit: str) -> None:
    """They are refused unread, and the run resumes from the checkpoint before."""
    trainer, path = saved()
    os.truncate(path / name, 100 * MB)
    with at_most(MB):
        assert "100000000 bytes" in (problem := verify_checkpoint(path)[0].replace(",", "")) or limit in problem
    with pytest.raises(CheckpointError, match="100"):
        read_checkpoint(path)
    assert trainer.load_checkpoint(trainer.run_dir).name == "step-00000002"


def test_a_state_too_large_to_read_is_not_saved() -> None:
    """The error says so when it is saved, not when it is needed."""
    hook = Saves()
    hook.value = "7" * 65 * MB
    trainer = make_trainer(hook, CheckpointHook(save_every_n_steps=2), record=True)
    with pytest.raises(
        CheckpointError, match=r"state\.json: it has 65,\d+,\d+ bytes, and 64,000,000 is the limit; store"
    ):
        trainer.train()


@pytest.mark.parametrize("name", ["step", "steps_done", "epoch_over", "seconds", "loader_batches"])
def test_progress_that_is_text_is_a_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run can be resumed at once: its lock is free."""
    trainer, _ = saved()
    whole = type(trainer.progress).state_dict
    monkeypatch.setattr(type(trainer.progress), "state_dict", lambda self: {**whole(self), name: "x"})
    broken, path = saved(seed=1)
    monkeypatch.undo()
    again = make_trainer(record=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"the checkpoint's progress has {name} 'x'"):
            again.fit(resume=broken.run_dir)
        assert not (broken.run_dir / ".lock").exists()
    assert path.is_dir()


def test_a_run_that_cannot_be_closed_leaves_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails at its end."""
    trainer = make_trainer(record=True)
    monkeypatch.setattr(type(trainer), "counters", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not (trainer.run_dir / ".lock").exists()


@pytest.mark.parametrize("async_save", [True, False])
def test_without_threads_checkpoints_are_written_in_this_one(
    async_save: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No save fails because the system gives no more threads."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(("hookline-save", "hookline-sha256")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    trainer, path = saved(async_save=async_save, on_save_error="warn")
    assert not verify_checkpoint(path) and trainer.failed_saves == 0
    assert ("training waits for this save" in caplog.text) == async_save


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_the_text_of_an_exception_is_cut() -> None:
    """At 10,000 characters, with the length of the rest."""
    assert error_text(ValueError("x" * 9988)) == "ValueError: " + "x" * 9988
    cut = error_text(ValueError("x" * 50_000))
    assert cut == "ValueError: " + "x" * 9988 + "… (40,012 more characters)"


SECRET = "correct horse battery staple"


@pytest.mark.parametrize(
    "message",
    ["x" * 9970 + SECRET + "y" * 90_000, f"{SECRET} " * 1000, *(SECRET + "y" * (9960 - shift) for shift in range(8))],
    ids=lambda message: f"{message[:3]}-{len(message)}",
)
def test_no_half_of_a_secret_is_left_where_a_text_is_cut(message: str) -> None:
    """It would no longer be known as a secret; a traceback is cut at its beginning."""
    redaction.for_good.add([(SECRET, "<redacted>")])
    for text in (error_text(ValueError(message)), traceback_text(ValueError(message))):
        recorded = redaction.redact_text(text)
        assert not any(part in recorded for part in SECRET.split()), recorded[:100] + recorded[-100:]


@pytest.mark.hooks_fail(raises=ValueError)
def test_the_log_of_a_failed_hook_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Also what the exception came from, and the reason of a skipped step in the record."""

    class Fails(TrainingHook):
        on_error = "warn"

        def on_before_backward(self, trainer: Any, step: int) -> None:
            if step == 1:
                trainer.skip_step("long " * 10_000)

        def on_step_end(self) -> None:
            raise ValueError("long " * 10_000) from KeyError("longer " * 10_000)

    trainer = make_trainer(Fails(), record=True)
    trainer.train()
    assert all(len(line) < 25_000 for line in caplog.text.split("WARNING")) and "raised by hook 'fails'" in caplog.text
    assert (Path(trainer.run_dir) / "events.jsonl").stat().st_size < 100_000


class Ends(TrainingHook):
    """Ends the run in a given way."""

    def __init__(self, how: str, text: str, times: int = 1) -> None:
        self.how, self.text, self.times = how, text, times

    def on_step_end(self, trainer: Any, step: int) -> None:
        """End it in the second step."""
        if step == 2 and self.how == "raises":
            raise ValueError(self.text * self.times)
        if step == 2:
            trainer.request_stop(self.text * self.times)
            trainer.save()


@pytest.mark.parametrize("how", ["raises", "stops"])
def test_a_run_that_ends_with_a_very_long_text_can_be_shown(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The record has the beginning of the text."""
    trainer = make_trainer(record=True)
    trainer.add_hook(Ends(how, "long ", 1_000_000), "ends", on_error="raise")
    try:
        trainer.train()
    except ValueError:
        assert how == "raises"
    sizes = {file.name: file.stat().st_size for file in Path(trainer.run_dir).rglob("*.json*")}
    assert max(sizes.values()) < 100_000, sizes
    reason = read_json(Path(trainer.run_dir) / "run.json")["reason"]
    assert len(reason) < 10_200 and "more characters)" in reason
    RunSummary.read(trainer.run_dir)
    assert main(["show", str(trainer.run_dir)]) == 0 and "long long" in capsys.readouterr().out


def test_a_secret_in_the_reason_of_a_stop_is_in_no_file() -> None:
    """A checkpoint that is saved while the run stops holds the reason."""
    trainer = make_trainer(record=True)
    trainer.add_hook(Ends("stops", "401 for password='tr0ub4dor'"), "ends")
    trainer.train()
    state = (trainer.checkpoint_dir / "step-00000002" / "state.json").read_text()
    assert "401 for password=<redacted>" in state
    files = [file for file in Path(trainer.run_dir).rglob("*") if file.is_file()]
    assert not [file for file in files if b"tr0ub4dor" in file.read_bytes()]


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_a_removed_working_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command, before torch's libraries end the process; and by a run that would write there."""
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert main(["runs", str(tmp_path)]) == 2
        with pytest.raises(HooklineError, match="cannot make the run's directory in runs"):
            start_record("runs")
    finally:
        os.chdir(tmp_path)
    assert "the current directory was removed; change to one that exists (cd ..)" in capsys.readouterr().err


@pytest.mark.parametrize("hours", [-5, 5])
def test_durations_do_not_follow_a_clock_that_is_set(
    tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured by the clock that only runs forward."""
    record = start_record(tmp_path, "r")
    later = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="milliseconds")
    monkeypatch.setattr(record_module, "utc_now", lambda: later)
    files = RunFiles.read(close_record(record))
    assert files.run["attempts"][-1]["closed"] == later
    assert 0 <= files.run["attempts"][-1]["seconds"] < 3600 and files.seconds == files.last_attempt_seconds
    assert files.seconds == files.run["attempts"][-1]["seconds"]
