"""The list of a checkpoint's files with their sizes and hashes, and the comparison with what is on disk."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


def manifest_text(files: Mapping[str, Any], meta: Any) -> str:
    """The one spelling of a manifest: with a byte changed it is not this text, so it vouches for itself."""
    return _spell({"format": FORMAT, "files": files, "meta": meta})


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest. Raises `CheckpointError` when it is missing, damaged or of another format."""
    raw = _read(path)
    try:
        manifest = json.loads(raw)
        untouched = _spell(manifest).encode("ascii") == raw
    except (ValueError, RecursionError):
        raise CheckpointError(f"{MANIFEST}: is no JSON; it was torn or damaged") from None
    if not untouched:
        raise CheckpointError(f"{MANIFEST}: was changed after it was written")
    return _checked(manifest)


def check_files(path: Path, expected: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How the files on disk differ from the manifest: missing, extra, links, wrong size, wrong hash."""
    problems = [problem for name, entry in expected.items() if (problem := _check_file(path, name, entry))]
    extra = sorted({file.name for file in path.iterdir()} - {MANIFEST, *expected})
    return problems + [f"{name}: is not in the manifest" for name in extra]


def sha256_of(file: Path) -> str:
    """The file's hash, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _spell(manifest: Any) -> str:
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def _read(path: Path) -> bytes:
    manifest = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    try:
        if not stat.S_ISREG(manifest.lstat().st_mode):
            raise CheckpointError(f"{MANIFEST}: is a link or no plain file")
        return manifest.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST}: is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror}") from error


def _checked(manifest: Any) -> dict[str, Any]:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST}: is not of format {FORMAT}, the one this version reads")
    files = manifest.get("files")
    well_formed = isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values())
    if not well_formed or STATE not in manifest["files"] or not isinstance(manifest.get("meta"), dict):
        raise CheckpointError(f"{MANIFEST}: lacks its list of files or its meta")
    return manifest


def _check_file(path: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        return f"{name!r}: leads out of the checkpoint"
    try:
        found = (path / name).lstat()
    except OSError as error:
        return f"{name}: is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{name}: is a link or no plain file"
    if found.st_size != entry.get("bytes"):
        return f"{name}: has {found.st_size} bytes instead of {entry.get('bytes')}"
    same = sha256_of(path / name) == entry.get("sha256")
    return None if same else f"{name}: its contents changed (sha256 differs)"
