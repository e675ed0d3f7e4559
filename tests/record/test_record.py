"""Test that a record is complete from the start, survives failing disks and devices, and continues after a resume."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from records import start_record

from hookline import read_metrics
from hookline._device import HostCopy
from hookline.errors import RecordError
from hookline.record import Record, read_jsonl


def run_json(record: Record) -> dict[str, Any]:
    """Read run.json."""
    return json.loads((record.path / "run.json").read_text())


def close(record: Record, outcome: str = "completed") -> None:
    """Close the record."""
    record.close(outcome, None, [{"name": "console"}], [{"hook": "console", "seconds": 1.0}], {"steps": 2})


@pytest.mark.req("000-29")
def test_every_run_has_its_own_directory(tmp_path: Path) -> None:
    """Two runs with one root differ in id and directory."""
    first, second = (Record.on_disk(tmp_path / "runs", config={}, seed=None) for _ in range(2))
    assert first.run_id != second.run_id
    assert first.path == tmp_path / "runs" / first.run_id
    assert first.path.is_dir()


@pytest.mark.req("000-30", "000-34")
def test_the_start_is_recorded(tmp_path: Path) -> None:
    """run.json has id, commit, config hash, environment, seed and hooks before the first step."""
    record = Record.on_disk(tmp_path, config={"lr": 0.1}, seed=3, run_id="mine")
    record.start([{"name": "console", "kind": "lifecycle"}])
    run = run_json(record)
    assert (run["run_id"], run["seed"], run["outcome"], run["lineage"]) == ("mine", 3, None, None)
    assert set(run["git"]) == {"commit", "dirty", "diff_hash"}
    assert len(run["config_hash"]) == 64
    assert run["environment"]["torch"] == str(torch.__version__)
    assert run["hooks"] == [{"name": "console", "kind": "lifecycle"}]
    assert run["attempts"][0]["pid"] == os.getpid()


def test_what_is_added_to_one_run_is_not_in_the_next() -> None:
    """Two records share no part of what they write."""
    first, second = Record.in_memory(), Record.in_memory()
    first.start([])
    first.run["git"]["commit"] = "found later"
    second.start([])
    assert second.run["git"]["commit"] == "unknown"


def test_the_config_is_readable_and_without_secrets(tmp_path: Path) -> None:
    """config.yaml holds the resolved config for safe_load, with secrets hidden and odd values as text."""
    config = {"lr": 1e-5, "betas": (0.9, 0.99), "hooks": [{"name": "s", "webhook": "https://h"}], "dir": Path("x"),
              "nan": float("nan"), "text": "ü: [", 1: torch.float32}  # fmt: skip
    record = start_record(tmp_path, config=config)
    written = yaml.safe_load((record.path / "config.yaml").read_text(encoding="utf-8"))
    assert written.pop("nan") != config["nan"]
    assert written == {"lr": 1e-5, "betas": [0.9, 0.99], "hooks": [{"name": "s", "webhook": "<redacted>"}], "dir": "x",
                     "text": "ü: [", 1: "float32"}  # fmt: skip


def test_metrics_and_events(record: Record) -> None:
    """Metrics are written by a flush, events at once, and the close writes what is left."""
    record.log(1, 0, "loss", torch.tensor(2.0))
    record.flush()
    assert [line["loss"] for line in read_metrics(record.path)] == [2.0]
    record.event("stopped", 2, by="early_stopping", error=ValueError("x"))
    events, _ = read_jsonl(record.path / "events.jsonl")
    assert [(line["kind"], line["step"], line["by"]) for line in events] == [("stopped", 2, "early_stopping")]
    record.log(2, 0, "loss", 1.0)
    close(record, "stopped")
    assert [line["loss"] for line in read_metrics(record.path)] == [2.0, 1.0]
    run = run_json(record)
    assert (run["outcome"], run["counters"], run["lost"]) == ("stopped", {"steps": 2}, 0)
    assert run["costs"] == [{"hook": "console", "seconds": 1.0}]


def test_closing_twice_changes_nothing(record: Record) -> None:
    """The first outcome stays."""
    close(record, "failed")
    close(record, "completed")
    assert run_json(record)["outcome"] == "failed"


def test_a_run_that_failed_before_its_start_has_a_record(tmp_path: Path) -> None:
    """A close without a start still writes what the run was and how it ended."""
    record = Record.on_disk(tmp_path, config={"lr": 1}, seed=5)
    close(record, "failed")
    run = run_json(record)
    assert (run["outcome"], run["seed"], len(run["attempts"])) == ("failed", 5, 1)


def test_a_resumed_run_continues_in_its_directory(tmp_path: Path) -> None:
    """The same id appends to the same files; run.json keeps the start and lists both attempts."""
    first = Record.on_disk(tmp_path, config={}, seed=1, run_id="r")
    first.start([], lineage={"parent": "p"})
    first.log(1, 0, "loss", 3.0)
    first.log(2, 0, "loss", 2.0)
    close(first, "interrupted")
    started = run_json(first)["started"]
    second = start_record(tmp_path, "r", seed=1)
    assert run_json(second)["outcome"] is None
    second.log(2, 0, "loss", 1.0)
    close(second)
    run = run_json(second)
    assert [attempt["outcome"] for attempt in run["attempts"]] == ["interrupted", "completed"]
    assert (run["started"], run["outcome"], run["lineage"]) == (started, "completed", {"parent": "p"})
    assert [line["loss"] for line in read_metrics(tmp_path / "r")] == [3.0, 1.0]


def test_a_damaged_run_json_does_not_prevent_a_resume(tmp_path: Path) -> None:
    """An unreadable run.json is warned of and replaced."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text('{"run_id"')
    record = Record.on_disk(tmp_path, config={}, seed=None, run_id="r")
    with pytest.warns(RuntimeWarning, match=r"run\.json is not a JSON object"):
        record.start([])
    record.commit()
    assert len(run_json(record)["attempts"]) == 1


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors for a file in the directory's place and a read-only directory name path and remedy."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(RecordError, match=r"file.*choose a directory"):
            Record.on_disk(root, config={}, seed=None)

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RecordError, match="Permission denied"):
        Record.on_disk(tmp_path, config={}, seed=None)


@pytest.mark.parametrize("run_id", ["../up", "a/b", ".hidden", "", "a b", "a\n", "..", "/x"])
def test_invalid_run_ids_raise(tmp_path: Path, run_id: str) -> None:
    """An id that is not a plain directory name creates no directory."""
    with pytest.raises(RecordError, match="cannot be a run_id"):
        Record.on_disk(tmp_path / "runs", config={}, seed=None, run_id=run_id)
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_does_not_stop_training(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    """If writing fails during a run, one warning names the record, and run.json has the number of lost lines."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken, pytest.warns(RuntimeWarning) as caught:
        broken.setattr(os, "write", full)
        for step in range(1, 4):
            record.log(step, 0, "loss", 1.0)
            record.flush()
        record.event("saved", 3)
    assert len(caught) == 1
    assert str(record.path) in str(caught[0].message)
    assert record.lost == 4
    record.log(4, 0, "loss", 0.5)
    close(record)
    assert run_json(record)["lost"] == 4
    assert [line["step"] for line in read_metrics(record.path)] == [4]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_close(call: str, monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    """If run.json cannot be written, the close warns, the old run.json stays, and nothing is left beside it."""
    files = {file.name for file in record.path.iterdir()}

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken, pytest.warns(RuntimeWarning, match=r"run\.json: No space left"):
        broken.setattr(os if call == "fsync" else Path, call, full)
        close(record)
    assert run_json(record)["outcome"] is None
    assert {file.name for file in record.path.iterdir()} == files - {".lock"}


def test_a_failed_device_does_not_lose_the_outcome(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    """If metrics cannot be read from a device, the rest and the outcome are written."""
    record.log(1, 0, "loss", torch.tensor(1.0))
    record.log(1, 0, "lr", 0.1)

    def broken(_: HostCopy) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(HostCopy, "wait", broken)
    with pytest.warns(RuntimeWarning, match="device-side assert"):
        close(record, "failed")
    assert (run_json(record)["outcome"], run_json(record)["lost"]) == ("failed", 1)
    assert [line["lr"] for line in read_metrics(record.path)] == [0.1]


def test_a_killed_process_leaves_a_readable_record(tmp_path: Path) -> None:
    """After SIGKILL every flushed line is there, and run.json has no outcome."""
    code = """
        import os, signal, sys
        from hookline.record import Record
        record = Record.on_disk(sys.argv[1], config={}, seed=0, run_id="r")
        record.start([])
        for step in range(100):
            record.log(step, 0, "loss", 0.5)
            record.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read_metrics(tmp_path / "r")) == 100
    assert json.loads((tmp_path / "r" / "run.json").read_text())["outcome"] is None


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_records_on_disk_and_in_memory_have_the_same_surface(tmp_path: Path, kind: str) -> None:
    """The same calls work on both; the record in memory has no paths, the one on disk has no lists."""
    record = Record.on_disk(tmp_path, config={}, seed=1) if kind == "disk" else Record.in_memory({}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record.start([])
        record.log(1, 0, "loss", 1.0)
        record.flush()
        record.event("saved", 1, by="me")
        with pytest.raises(RecordError, match="is not an outcome"):
            close(record, "done")
        close(record)
    assert record.run_id
    assert record.lost == 0
    assert (record.path is None) == (kind == "memory")
    assert (record.run["outcome"], hasattr(record, "metrics")) == ("completed", kind == "memory")


def test_sync_writes_everything(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    """Everything logged is on disk before a checkpoint is written; a failing sync is counted, not raised."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    record.log(1, 0, "loss", torch.tensor(2.0))
    record.sync()
    assert [line["loss"] for line in read_metrics(record.path)] == [2.0]
    assert len(synced) == 2

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken, pytest.warns(RuntimeWarning, match="losing data"):
        broken.setattr(os, "fsync", fail)
        record.sync()
    assert record.lost == 2
    close(record)


def test_a_run_that_could_not_begin_releases_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt in the same process gets the lock."""
    record = Record.on_disk(tmp_path, config={}, seed=None, run_id="r")
    with monkeypatch.context() as broken, pytest.raises(RecordError):
        broken.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        record.start([])
    Record.on_disk(tmp_path, config={}, seed=None, run_id="r").start([])


# ---- in memory -------------------------------------------------------------------------------------------------------


def test_everything_is_in_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, events and the run are dicts; no file is created and git is not called."""
    monkeypatch.setattr(subprocess, "run", None)
    record = Record.in_memory({"token": "abc"}, seed=4)
    record.start([{"name": "x", "api_key": "k"}], lineage={"parent": "p"})
    record.log(1, 0, "loss", torch.tensor(float("inf")))
    record.log(1, 0, "n", 2)
    record.flush()
    record.event("saved", 1, by="x", token="abc")
    record.close("completed", None, [], [], {"steps": 1})
    record.close("failed", None, [], [], {})
    assert [{k: v for k, v in line.items() if k != "time"} for line in record.metrics] == [
        {"step": 1, "epoch": 0, "loss": float("inf"), "n": 2}
    ]
    assert (record.events[0]["kind"], record.events[0]["token"]) == ("saved", "<redacted>")
    assert (record.run["run_id"], record.run["seed"], record.run["outcome"]) == (record.run_id, 4, "completed")
    assert (record.run["lineage"], record.run["git"]["commit"]) == ({"parent": "p"}, "unknown")
    assert list(tmp_path.iterdir()) == []


def test_long_runs_do_not_fill_the_memory() -> None:
    """Only the last rows are kept once there are too many."""
    record = Record.in_memory(keep=10)
    for step in range(1000):
        record.log(step, 0, "loss", 1.0)
        record.flush()
    assert 10 <= len(record.metrics) < 20
    assert record.metrics[-1]["step"] == 999


def test_an_interrupt_while_waiting_for_a_device_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was waited for is written by the next flush."""
    record, wait, interrupts = Record.in_memory(), HostCopy.wait, [KeyboardInterrupt()]

    def interrupted(self: HostCopy) -> torch.Tensor:
        if interrupts:
            raise interrupts.pop()
        return wait(self)

    monkeypatch.setattr(HostCopy, "wait", interrupted)
    record.log(1, 0, "loss", torch.tensor(0.5))
    record.log_layers("norms", 1, ["a"], ["l2"], torch.tensor([[2.0]]))
    with pytest.raises(KeyboardInterrupt):
        record.flush(wait=True)
    record.flush(wait=True)
    assert [row["loss"] for row in record.metrics] == [0.5]
    assert [row.values.tolist() for row in record.layer_rows] == [[[2.0]]] and record.lost == 0


def test_a_failed_device_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that cannot be read from a device are counted as lost."""
    record = Record.in_memory()
    record.start([])
    record.log(1, 0, "loss", torch.tensor(1.0))

    def broken(_: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(HostCopy, "wait", broken)
    record.close("failed", None, [], [], {})
    assert (record.lost, record.run["lost"], record.metrics) == (1, 1, [])


def test_a_deleted_directory_is_a_loss(record: Record) -> None:
    """The system accepts lines for a deleted file; they are counted, and the first one causes a warning."""
    record.log(1, 0, "loss", 1.0)
    record.flush()
    assert record.path is not None and record.lost == 0
    shutil.rmtree(record.path)
    record.log(2, 0, "loss", 1.0)
    with pytest.warns(RuntimeWarning, match="metrics.jsonl was deleted while the run was writing it"):
        record.flush()
    record.event("happened")
    close(record)
    assert record.run["lost"] == 2
