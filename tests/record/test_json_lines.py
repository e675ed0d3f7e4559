"""Test that files are whole, whatever happens to the process or the disk."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RecordError
from hookline.record import read_jsonl
from hookline.record.json_lines import JsonLines, write_json_atomic


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
    written = record_writes(monkeypatch, [])
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"a": 1})
    lines.write({"b": "two\nlines"})
    assert written == [b'{"a":1}\n', b'{"b":"two\\nlines"}\n']
    assert (tmp_path / "x.jsonl").read_bytes() == b"".join(written)


def test_reopening_appends(tmp_path: Path) -> None:
    """A second writer continues the file."""
    for value in (1, 2):
        lines = JsonLines(tmp_path / "x.jsonl")
        lines.write({"a": value})
        lines.close()
        lines.close()
    assert (tmp_path / "x.jsonl").read_text() == '{"a":1}\n{"a":2}\n'


def test_a_torn_line_is_ended_first(tmp_path: Path) -> None:
    """A line that a killed process left half-written does not damage the next record."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a":1}\n{"a":')
    lines = JsonLines(path)
    lines.write({"a": 2})
    lines.write({"a": 3})
    assert read_jsonl(path) == ([{"a": 1}, {"a": 2}, {"a": 3}], True)


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a short write is written after it."""
    record_writes(monkeypatch, [3, 2])
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"abc": 12345})
    assert (tmp_path / "x.jsonl").read_text() == '{"abc":12345}\n'


def test_a_full_disk_raises_and_the_next_record_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a RecordError with path and remedy, and the next record that fits is whole."""
    path = tmp_path / "x.jsonl"
    record_writes(monkeypatch, [4, OSError(errno.ENOSPC, "No space left on device")])
    lines = JsonLines(path)
    with pytest.raises(RecordError, match=r"x\.jsonl: No space left on device; free space"):
        lines.write({"lost": 1})
    lines.write({"kept": 2})
    assert read_jsonl(path) == ([{"kept": 2}], True)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    """The errors for a missing directory, a directory in the file's place and a closed file name the path."""
    for path in (tmp_path / "missing" / "x.jsonl", tmp_path):
        with pytest.raises(RecordError, match="cannot write"):
            JsonLines(path)
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.close()
    with pytest.raises(RecordError, match="is closed"):
        lines.write({})


def test_atomic_json(tmp_path: Path) -> None:
    """The file is replaced whole, and nothing is left beside it."""
    path = tmp_path / "run.json"
    write_json_atomic(path, {"a": float("nan")})
    write_json_atomic(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """When the disk fails before the rename, the old file is untouched and nothing is left beside it."""
    path = tmp_path / "run.json"
    write_json_atomic(path, {"old": 1})

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(RecordError, match=r"run\.json: Input/output error"):
            write_json_atomic(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_two_writers_never_mix_lines(tmp_path: Path) -> None:
    """Lines of several open files on one path interleave whole."""
    writers = [JsonLines(tmp_path / "x.jsonl") for _ in range(3)]
    for index in range(30):
        writers[index % 3].write({"i": index, "text": "x" * 500})
    records, torn = read_jsonl(tmp_path / "x.jsonl")
    assert [record["i"] for record in records] == list(range(30))
    assert not torn


def test_a_failing_sync_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file; a closed file has nothing to sync."""
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"a": 1})
    lines.sync()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordError, match=r"cannot write .*x\.jsonl: Input/output error"):
        lines.sync()
    lines.close()
    lines.sync()
