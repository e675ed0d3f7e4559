"""Files and their hashes agree, and a hash is of what was meant."""

import hashlib
import threading
from pathlib import Path

import pytest

from hookline.checkpoints import hashing
from hookline.checkpoints.hashing import write_hashed


def test_sizes_and_hashes(tmp_path: Path) -> None:
    """Every file has its entry, in the order of names."""
    entries = write_hashed(tmp_path, {"b": [b"one", memoryview(b"two")], "a": [b""]})
    assert list(entries) == ["a", "b"]
    assert entries["b"] == {"sha256": hashlib.sha256(b"onetwo").hexdigest(), "bytes": 6}
    assert (tmp_path / "b").read_bytes() == b"onetwo"


def test_hashing_runs_beside_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest is hashed first, and no write waits for a hash."""
    order: list[int] = []
    written = threading.Event()
    real_hash, real_write = hashing._sha256, hashing.write_file

    def hash_late(parts: list[bytes]) -> str:
        order.append(len(parts[0]))
        assert written.wait(10)
        return real_hash(parts)

    def write(path: Path, parts: list[bytes]) -> None:
        real_write(path, parts)
        if path.name == "c":
            written.set()

    monkeypatch.setattr(hashing, "HASHERS", 1)
    monkeypatch.setattr(hashing, "_sha256", hash_late)
    monkeypatch.setattr(hashing, "write_file", write)
    entries = write_hashed(tmp_path, {"a": [b"1"], "b": [b"333"], "c": [b"22"]})
    assert order == [3, 2, 1]
    assert entries["b"]["sha256"] == hashlib.sha256(b"333").hexdigest()


def test_a_failing_write_leaves_no_thread(tmp_path: Path) -> None:
    """The error passes through and the threads end."""
    before = threading.active_count()
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError):
        write_hashed(tmp_path, {"x": [b"1"], "y": [b"2"]})
    assert threading.active_count() == before
