"""Test that files that grow have whole lines, whatever happens to the process or the disk."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RecordError
from hookline.record import Record, read_jsonl
from hookline.record.json_lines import JsonLines


def open_record(root: Path) -> Record:
    """Open the record of one run, which is always the same; each event is one line of its events.jsonl."""
    return Record.on_disk(root, config={}, seed=None, run_id="r")


def events(root: Path) -> tuple[list[str], bool]:
    """Return the kinds of the events in the file, and whether a line is torn."""
    records, torn = read_jsonl(root / "r" / "events.jsonl")
    return [record["kind"] for record in records], torn


def record_writes(monkeypatch: pytest.MonkeyPatch, limits: list[int | OSError]) -> list[bytes]:
    """Record calls of os.write; each takes the next limit: a largest number of bytes, or an error to raise."""
    written: list[bytes] = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        limit = limits.pop(0) if limits else len(data)
        if isinstance(limit, OSError):
            raise limit
        written.append(bytes(data[:limit]))
        return real(fd, data[:limit])

    monkeypatch.setattr(os, "write", write)
    return written


def test_one_write_per_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is written at once, with exactly one write."""
    record = open_record(tmp_path)
    written = record_writes(monkeypatch, [])
    record.event("first")
    record.event("second", text="two\nlines")
    assert [json.loads(line)["kind"] for line in written] == ["first", "second"]
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in written)
    assert (tmp_path / "r" / "events.jsonl").read_bytes() == b"".join(written)


@pytest.mark.parametrize("end", range(1, 9))
def test_a_torn_line_is_ended_first(end: int, tmp_path: Path) -> None:
    """Wherever a killed process stopped in a line, the next records are whole."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "events.jsonl").write_text('{"kind":"a"}\n' + '{"kind":"lost"}'[:end])
    record = open_record(tmp_path)
    record.event("b")
    record.event("c")
    assert events(tmp_path) == (["a", "b", "c"], True)


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a short write is written after it."""
    record = open_record(tmp_path)
    record_writes(monkeypatch, [3, 2])
    record.event("whole")
    assert events(tmp_path) == (["whole"], False)


def test_after_a_full_disk_the_next_record_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning has path and remedy, and the next record that fits is whole."""
    record = open_record(tmp_path)
    record_writes(monkeypatch, [4, OSError(errno.ENOSPC, "No space left on device")])
    with pytest.warns(RuntimeWarning, match=r"events\.jsonl: No space left on device; free space"):
        record.event("lost")
    record.event("kept")
    assert events(tmp_path) == (["kept"], True) and record.lost == 1


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """The error for a directory in the file's place names the path."""
    (tmp_path / "r" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"cannot write .*events\.jsonl"):
        open_record(tmp_path)


def test_what_comes_after_the_close_is_counted(tmp_path: Path) -> None:
    """It is not written, and the warning says why."""
    record = open_record(tmp_path)
    record.event("kept")
    record.close("completed", None, [], [], {})
    with pytest.warns(RuntimeWarning, match="is closed"):
        record.event("late")
    assert events(tmp_path) == (["kept"], False) and record.lost == 1


def test_two_writers_never_mix_lines(tmp_path: Path) -> None:
    """Each line is one write in append mode, however long it is and whatever another writer does meanwhile."""
    path, ready = tmp_path / "x.jsonl", threading.Barrier(2)

    def append(writer: str, lines: JsonLines) -> None:
        ready.wait()
        for index in range(200):
            lines.write({"writer": writer, "index": index, "text": writer * 50_000})  # longer than a file's buffer
        lines.close()

    threads = [threading.Thread(target=append, args=(writer, JsonLines(path))) for writer in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records, torn = read_jsonl(path)
    assert not torn and all(record["text"] == record["writer"] * 50_000 for record in records)
    for writer in "ab":
        assert [record["index"] for record in records if record["writer"] == writer] == list(range(200))


@pytest.mark.parametrize("levels", [49, 50, 200])
def test_whatever_is_nested_is_written_so_that_it_is_read(levels: int, tmp_path: Path) -> None:
    """The writer cuts what is deeper than the limit, so that no line of ours is too deep for the reader."""
    record = open_record(tmp_path)
    value: list[Any] = []
    for _ in range(levels - 2):  # The line itself is one level, and so is the innermost list.
        value = [value]
    record.event("mine", 1, value=value)
    record.event("after", 1)
    (mine, _), torn = read_jsonl(tmp_path / "r" / "events.jsonl")
    assert not torn
    assert (mine["value"] == value) is (levels <= 50)
    with (tmp_path / "r" / "events.jsonl").open("a") as file:
        file.write(f'{{"kind": "foreign", "value": {"[" * 50}{"]" * 50}}}\n')
    assert events(tmp_path) == (["mine", "after"], True)
