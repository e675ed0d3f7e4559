"""The files of a checkpoint: how they are written, verified, listed and read.

A checkpoint is a directory with a safetensors file per section, ``state.json`` and ``manifest.json``, which lists the
size and sha256 of every file. It is written under a temporary name, synced and renamed: it exists whole or not at all.

For a run with several ranks, rank 0's files are the same, except that shards of tensors are in a file per section and
rank, ``model.rank-00001.safetensors``. Other state of a rank that differs from rank 0's is in that file and in
``state.rank-00001.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from hookline._fs import (
    NotAPlainFile,
    Part,
    check_size,
    explain,
    is_pid_alive,
    make_directory,
    read_whole,
    rename_to_free_name,
    sync_directory,
    write_file,
)
from hookline._limits import size_limit
from hookline.checkpoints.errors import failing_as, inside
from hookline.checkpoints.format import Section, decode, encode, encode_section, safetensors_parts
from hookline.checkpoints.shards import Like, SavedTensors
from hookline.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
ABANDONED = "abandoned"
HASHERS = 2  # threads; a checkpoint has two large files, the model and the optimizers

_TENSORS = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_TEMPORARY = re.compile(r"\.tmp-.+-(\d+)-[0-9a-z]+@(.*)")  # pid and host, as `temporary_name` writes them
_OF_RANK = re.compile(r"(.+)\.rank-(\d{5,})(\.safetensors|\.json)")
_MAX_HOST = 40  # characters; the name of a checkpoint has up to 150, and file systems accept 255

AS_ON_RANK_0 = object()
"""The value of a section whose JSON a rank does not write, because it is rank 0's."""

Files = dict[str, dict[str, Any]]
"""The size and sha256 of files, by name."""


def write_checkpoint(directory: Path, name: str, sections: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
    """Write ``directory/name`` so that it exists whole and durable, or not at all.

    Args:
        directory: The directory of the run's checkpoints; created if it does not exist.
        name: The checkpoint's name; -1, -2 … is appended if it is taken, nothing is overwritten.
        sections: Trees of state by name, each with its own safetensors file, or a snapshot of them.
        meta: A small tree without tensors; checkpoints are ordered by its ``step``.

    Returns:
        The path of the new checkpoint.

    Raises:
        CheckpointError: If a name is invalid, a value has no exact form, or the files cannot be written.
    """
    temporary = begin_checkpoint(directory, name, sections)
    try:
        with failing_as(f"cannot write checkpoint {name!r} in {directory}"):
            encoded = {section: encode_section(section, tree) for section, tree in sections.items()}
            return commit_checkpoint(temporary, name, write_part(temporary, encoded, meta), meta)
    finally:
        remove_temporary(temporary)


def begin_checkpoint(directory: Path, name: str, sections: Iterable[str]) -> Path:
    """Make the temporary directory of a new checkpoint, and return it; one process does this for all ranks.

    Args:
        directory: The directory of the run's checkpoints; created if it does not exist.
        name: The checkpoint's name.
        sections: The names of its sections.

    Raises:
        CheckpointError: If a name is invalid or the directory cannot be written to.
    """
    directory = Path(directory)
    for text, what in ((name, "checkpoint"), *((section, "section") for section in sections)):
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            rule = "use letters, digits and . _ = - only, and no leading dot"
            raise CheckpointError(f"{text!r} cannot name a {what}; {rule}")
    with failing_as(f"cannot write checkpoint {name!r} in {directory}"):
        make_directory(directory)
        # Remove what killed processes left half-written, but not the files of living processes, including this one.
        # It is not known here whether another host's process is alive.
        for entry in directory.iterdir():
            match = _TEMPORARY.fullmatch(entry.name)
            if match and match[2] == _host() and not is_pid_alive(int(match[1])) and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
        temporary = temporary_name(directory / name)
        temporary.mkdir()
    return temporary


def commit_checkpoint(temporary: Path, name: str, files: Files, meta: Mapping[str, Any]) -> Path:
    """Write the manifest of files that are durable, and give the checkpoint its name; returns its path."""
    manifest = _spell({"format": FORMAT, "files": dict(sorted(files.items())), "meta": _encode_meta(meta)})
    write_file(temporary / MANIFEST, [manifest.encode("ascii")])
    sync_directory(temporary)
    path = rename_to_free_name(temporary, temporary.parent / name)
    sync_directory(path.parent)
    return path


def remove_temporary(temporary: Path) -> None:
    """Remove the leftovers of an unfinished checkpoint; after its rename there is nothing to remove."""
    shutil.rmtree(temporary, ignore_errors=True)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections and meta of a checkpoint, after every byte was verified against its manifest.

    For a run with several ranks, these are rank 0's, with all tensors whole.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    saved = SavedCheckpoint(path).verified()
    return {name: saved.section(name) for name in saved.names}, saved.meta


class SavedCheckpoint:
    """A checkpoint on disk, whole or damaged. Its sections are read one by one, its other files once.

    Args:
        path: Its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._states: dict[int, dict[str, Any]] = {}  # by rank

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest. Raises `CheckpointError` if it is missing, damaged or of another format."""
        return read_manifest(self.path)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The meta that the checkpoint was written with."""
        meta: dict[str, Any] = decode(self._state(0)["meta"], {})
        return meta

    @property
    def names(self) -> list[str]:
        """The names of its sections."""
        return list(self._state(0)["sections"])

    @property
    def world_size(self) -> int:
        """How many ranks have saved it."""
        count: int = self.meta.get("world_size", 1)
        return count

    @cached_property
    def _state_bytes(self) -> bytes:
        return _read_state(self.path, STATE)

    def _state(self, rank: int) -> dict[str, Any]:
        """Return the state of a rank. Raises `CheckpointError` if it is missing or damaged."""
        if rank not in self._states:
            name = state_file(rank)
            self._states[rank] = _parse_state(name, _read_state(self.path, name) if rank else self._state_bytes)
        return self._states[rank]

    # ---- reading -----------------------------------------------------------------------------------------------------

    def tensors(self, section: str, like: Like | None = None) -> SavedTensors:
        """Return the tensors of a section, which are read when they are needed.

        Args:
            section: The section's name.
            like: Tells which tensors are read as shards; without it all are read whole.
        """
        files = [name for name in self.manifest["files"] if name.endswith(_TENSORS) and _section_of(name) == section]
        with inside(f"{self.path}, section {section!r}"):
            return SavedTensors([self.path / name for name in files], like)

    def section(self, name: str, rank: int = 0, like: Like | None = None) -> Any:
        """Return a section as it was on a rank.

        Args:
            name: The section's name.
            rank: The rank, one of those that the checkpoint was saved with.
            like: Tells which tensors are read as shards; without it all are read whole.

        Raises:
            CheckpointError: If it cannot be loaded.
        """
        skeleton = self._state(rank)["sections"].get(name, self._state(0)["sections"].get(name))
        tensors = self.tensors(name, like)
        with inside(f"{self.path}, section {name!r}"):
            return decode(skeleton, tensors)

    # ---- verifying ---------------------------------------------------------------------------------------------------

    def verified(self) -> SavedCheckpoint:
        """Return it, after verifying every byte once. Raises `CheckpointError` if it is damaged."""
        if self.problems:
            problems = "; ".join(self.problems)
            raise CheckpointError(f"checkpoint {self.path} is damaged ({problems}); use a different checkpoint")
        return self

    @cached_property
    def problems(self) -> list[str]:
        """The problems, one sentence each; empty if every file is as it was written."""
        try:
            files = self.manifest["files"]
            problems = [problem for name, entry in files.items() if (problem := self._check_file(name, entry))]
            extra = sorted({file.name for file in self.path.iterdir()} - {MANIFEST, *files})
            problems += [f"{name}: is not in the manifest" for name in extra]
            return problems or _contradictions(self.manifest, self._state(0))
        except CheckpointError as error:
            return [str(error)]
        except OSError as error:
            return [f"cannot be read: {error}"]

    def _check_file(self, name: str, entry: Mapping[str, Any]) -> str | None:
        """Return how a file on disk differs from its entry in the manifest: missing, a link, wrong size, wrong hash."""
        path = self.path / name
        if not _NAME.fullmatch(name) or name == MANIFEST:
            return f"{name!r}: points outside the checkpoint"
        if not os.path.lexists(path):
            of_rank = _OF_RANK.fullmatch(name)
            return f"{name}: is missing" + (f", the part of rank {int(of_rank[2])}" if of_rank else "")
        status = path.lstat()
        # Links are rejected unread: they may lead anywhere. So are pipes, on which reading would block.
        if not stat.S_ISREG(status.st_mode):
            return f"{name}: is a link or not a plain file"
        if status.st_size != entry.get("bytes"):
            return f"{name}: has {status.st_size} bytes instead of {entry.get('bytes')}"
        with BytesIO(self._state_bytes) if name == STATE else path.open("rb") as stream:
            same = hashlib.file_digest(stream, "sha256").hexdigest() == entry.get("sha256")
        return None if same else f"{name}: its contents changed (sha256 differs)"

    @property
    def age_key(self) -> tuple[int, float, str]:
        """The step in meta, the time and the name; a damaged checkpoint's step comes from the digits in its name."""
        try:
            step = self.manifest["meta"].get("step")
        except (CheckpointError, OSError):
            step = None
        if not isinstance(step, int):
            digits = re.findall(r"\d+", self.path.name)
            step = int(digits[0]) if digits else -1
        with contextlib.suppress(OSError):
            return step, self.path.stat().st_mtime, self.path.name
        return step, 0.0, self.path.name


def checkpoints_in(directory: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a directory, newest first: by step, then by time. Damaged ones are listed, too.

    Raises:
        CheckpointError: If the directory cannot be read.
    """
    checkpoints = map(SavedCheckpoint, _checkpoint_paths(directory))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.age_key, reverse=True)


def has_checkpoints(directory: Path) -> bool:
    """Return whether a directory has a checkpoint, which may be damaged. Raises an error as `checkpoints_in` does."""
    return bool(_checkpoint_paths(directory))


def _checkpoint_paths(directory: Path) -> list[Path]:
    try:
        return [entry for entry in Path(directory).iterdir() if is_checkpoint(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(explain(directory, error, "read")) from error


def newest_good(directory: Path) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, or None, and the problems of the newer ones that do not."""
    skipped: list[str] = []
    for checkpoint in checkpoints_in(directory):
        if not checkpoint.problems:
            return checkpoint, skipped
        skipped += [f"{checkpoint.path}: {problem}" for problem in checkpoint.problems]
    return None, skipped


def set_aside_later(directory: Path, step: int) -> list[str]:
    """Move checkpoints of later steps to ``abandoned/`` next to the directory, and return their new paths.

    A run that resumes from an earlier step never reaches them: if they stayed in place, the newest checkpoint would not
    be one that the run came from. Nothing is deleted.
    """
    later = [checkpoint.path for checkpoint in checkpoints_in(directory) if checkpoint.age_key[0] > step]
    if not later:
        return []
    abandoned = directory.parent / ABANDONED
    make_directory(abandoned)
    moved = [str(rename_to_free_name(path, abandoned / path.name)) for path in later]
    sync_directory(abandoned)
    sync_directory(directory)
    return moved


def temporary_name(path: Path) -> Path:
    """Return a hidden name next to `path`; it names process and host, to recognize what a killed process has left."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}@{_host()}")


def _host() -> str:
    return re.sub("[^A-Za-z0-9._-]", "_", platform.node())[:_MAX_HOST]


def state_file(rank: int) -> str:
    """Return the name of a rank's JSON file."""
    return f"state.rank-{rank:05d}.json" if rank else STATE


def _section_of(file: str) -> str:
    """Return the section that a safetensors file belongs to."""
    match = _OF_RANK.fullmatch(file)
    return match[1] if match else file.removesuffix(_TENSORS)


def write_part(
    directory: Path, sections: Mapping[str, Section], meta: Mapping[str, Any] | None, rank: int = 0
) -> Files:
    """Write the files of one rank, each durable before this returns, and return their sizes and hashes.

    Args:
        directory: The checkpoint's temporary directory.
        sections: The sections that the rank saves.
        meta: The checkpoint's meta, for the file of rank 0.
        rank: The rank.
    """
    files = dict[str, list[Part]]()
    for name, section in sections.items():
        # Whole tensors of rank 0 are in the file that a run in one process writes; a file of shards has a different
        # name, so that nothing mistakes it for the whole model.
        whole = {key: tensor for key, tensor in section.tensors.items() if rank == 0 and key not in section.shards}
        other = {key: tensor for key, tensor in section.tensors.items() if key not in whole}
        if whole:
            files[f"{name}{_TENSORS}"] = safetensors_parts(whole)
        if other:
            files[f"{name}.rank-{rank:05d}{_TENSORS}"] = safetensors_parts(other, section.shards)
    values = {name: section.value for name, section in sections.items() if section.value is not AS_ON_RANK_0}
    state: dict[str, Any] = {"sections": values}
    if meta is not None:
        state["meta"] = _encode_meta(meta)
    name = state_file(rank)
    files[name] = [text := json.dumps(state, allow_nan=False).encode("ascii")]
    try:
        check_size(directory / name, len(text), size_limit(name))
    except OSError as error:
        raise CheckpointError(explain(directory / name, error)) from error
    # Hash the memory, not the files, because the disk may already have changed them. Hashing takes as long as writing,
    # so threads do it at the same time, starting with the largest file; with a core to spare it costs no time.
    sizes = {name: sum(map(len, parts)) for name, parts in files.items()}
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="hookline-sha256") as threads:
        hashes = dict[str, Future[str]]()
        with contextlib.suppress(RuntimeError):  # the system has no more threads: this one hashes below
            for name in sorted(sizes, key=lambda name: -sizes[name]):
                hashes[name] = threads.submit(sha256, files[name])
        for name, parts in files.items():
            write_file(directory / name, parts)
        return {
            name: {"sha256": hashes[name].result() if name in hashes else sha256(files[name]), "bytes": sizes[name]}
            for name in sorted(sizes)
        }


def _encode_meta(meta: Mapping[str, Any]) -> Any:
    plain, tensors = encode(dict(meta))
    if tensors:
        raise CheckpointError(f"meta holds the tensor {next(iter(tensors))!r}; put tensors into a section")
    return plain


def sha256(parts: Sequence[Part]) -> str:
    """Return the sha256 of bytes that are in several parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def is_checkpoint(entry: Path) -> bool:
    """Return whether a directory is a checkpoint, possibly a damaged one: a file is left, or it cannot be read."""
    if not _NAME.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
        return False
    try:
        return any(file.name in (MANIFEST, STATE) or file.suffix == _TENSORS for file in entry.iterdir())
    except OSError:
        return True


def _read_state(path: Path, name: str) -> bytes:
    try:
        return read_whole(path / name)
    except OSError as error:
        raise CheckpointError(explain(path / name, error, "read")) from error


def _parse_state(name: str, text: bytes) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: is not JSON ({error})") from error
    is_whole = isinstance(state, dict) and isinstance(state.get("sections"), dict)
    if not is_whole or ("meta" not in state and name == STATE):
        raise CheckpointError(f"{name}: lacks sections or meta")
    return dict(state)


# ---- the manifest ----------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises `CheckpointError` if it is missing, damaged or of another format."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    try:
        raw = read_whole(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST}: is missing") from None
    except NotAPlainFile:
        raise CheckpointError(f"{MANIFEST}: is a link or not a plain file") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read: {error.strerror or error}") from error
    try:
        manifest = json.loads(raw)
        unchanged = _spell(manifest).encode("ascii") == raw
    except (ValueError, RecursionError):
        raise CheckpointError(f"{MANIFEST}: is not JSON; it is incomplete or damaged") from None
    if not unchanged:
        raise CheckpointError(f"{MANIFEST}: was changed after it was written")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST}: is not of format {FORMAT}, the one this version reads")
    files = manifest.get("files")
    well_formed = isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values())
    if not well_formed or STATE not in manifest["files"] or not isinstance(manifest.get("meta"), dict):
        raise CheckpointError(f"{MANIFEST}: lacks its list of files or its meta")
    return manifest


def _contradictions(manifest: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return how a manifest and its state disagree; only a forged checkpoint does that with correct hashes."""
    problems = [f"section {name!r}: is not a valid name" for name in state["sections"] if not _NAME.fullmatch(name)]
    if json.dumps(state["meta"]) != json.dumps(manifest["meta"]):
        problems.append(f"{MANIFEST}: its meta differs from that in {STATE}")
    files, count = manifest["files"], manifest["meta"].get("world_size", 1)
    ranks = range(count if type(count) is int and count <= len(files) else 1)
    states = {state_file(rank) for rank in ranks}
    problems += [f"{name}: is missing from the manifest" for name in sorted(states - files.keys())]
    others = [name for name in files if name not in states]
    return problems + [
        f"{name}: belongs to no section"
        for name in others
        if not name.endswith(_TENSORS) or _section_of(name) not in state["sections"]
    ]


def _spell(manifest: Any) -> str:
    """Return the only valid text of a manifest: a manifest with a changed byte is not this text."""
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"
