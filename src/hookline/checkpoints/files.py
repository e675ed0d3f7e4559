"""Checkpoints on disk: written beside, fsynced, hashed into a manifest, renamed; verified before reading."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hookline.checkpoints.codec import decode, encode
from hookline.checkpoints.manifest import (
    MANIFEST,
    STATE,
    check_files,
    describe_files,
    manifest_text,
    read_manifest,
)
from hookline.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_TENSORS = ".safetensors"
_TEMPORARY = re.compile(r"\.tmp-.+-(\d+)-[0-9a-z]+")


def write_checkpoint(directory: Path, name: str, sections: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
    """Write ``directory/name`` so that it exists whole and durable, or not at all; its path.

    ``sections`` are trees of state, each with its own safetensors file; ``meta`` is a small tree without
    tensors, whose ``step`` orders the checkpoints. A name that is taken gets -1, -2 … appended: nothing is
    overwritten.
    """
    directory = Path(directory)
    for text, what in ((name, "checkpoint"), *((section, "section") for section in sections)):
        _check_name(text, what)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        with _temporary(directory, name) as temporary:
            _fill(temporary, sections, meta)
            path = _rename_to_free_name(temporary, directory, name)
        _sync_directory(directory)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot write checkpoint {name!r} in {directory}: {error}") from error
    return path


def read_checkpoint(path: Path, map_location: str | torch.device = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections and meta of a checkpoint, after every byte has been verified against its manifest."""
    path = Path(path)
    problems = verify_checkpoint(path)
    if problems:
        raise CheckpointError(f"{path} is not what was written: {'; '.join(problems)}; use another one")
    state = _load_state(path)
    sections = {}
    for name, skeleton in state["sections"].items():
        sections[name] = decode(skeleton, _load_tensors(path / f"{name}{_TENSORS}", map_location))
    return sections, decode(state["meta"], {})


def verify_checkpoint(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a sentence each; empty when every file is as it was written."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
        problems = check_files(path, manifest["files"])
        if not problems and json.dumps(_load_state(path)["meta"]) != json.dumps(manifest["meta"]):
            problems = [f"{MANIFEST}: its meta differs from that in {STATE}"]
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot be read: {error}"]
    return problems


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a directory, newest first: by step, then by time. Damaged ones are listed, too."""
    try:
        found = [entry for entry in Path(directory).iterdir() if _is_checkpoint(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=_age_key, reverse=True)


def _is_checkpoint(entry: Path) -> bool:
    """Whether a checkpoint was written there, be it damaged since: at least one of its files is left."""
    if not _NAME.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
        return False
    return any(file.name in (MANIFEST, STATE) or file.suffix == _TENSORS for file in entry.iterdir())


def newest_good(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, or None; and what was wrong with the newer ones passed over."""
    passed_over: list[str] = []
    for path in list_checkpoints(directory):
        problems = verify_checkpoint(path)
        if not problems:
            return path, passed_over
        passed_over += [f"{path}: {problem}" for problem in problems]
    return None, passed_over


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot name a {what}; use letters, digits and . _ = - only, and no leading dot"
        )


@contextlib.contextmanager
def _temporary(directory: Path, name: str) -> Iterator[Path]:
    """A hidden sibling to write in, removed on any failure; after the rename nothing is left to remove."""
    temporary = directory / f".tmp-{name}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(temporary: Path, sections: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """All files of a checkpoint, each durable before the manifest that vouches for it."""
    plain_meta = _encode_meta(meta)
    skeletons = {}
    for name, tree in sections.items():
        skeletons[name] = _write_section(temporary, name, tree)
    state = json.dumps({"sections": skeletons, "meta": plain_meta}, allow_nan=False)
    _write_text(temporary / STATE, state)
    _write_text(temporary / MANIFEST, manifest_text(describe_files(temporary), plain_meta))
    _sync_directory(temporary)


def _encode_meta(meta: Mapping[str, Any]) -> Any:
    plain, tensors = encode(dict(meta))
    if tensors:
        raise CheckpointError(f"meta holds the tensor {next(iter(tensors))!r}; put tensors into a section")
    return plain


def _write_section(temporary: Path, name: str, tree: Any) -> Any:
    try:
        skeleton, tensors = encode(tree)
    except CheckpointError as error:
        raise CheckpointError(f"section {name!r}: {error}") from error
    if tensors:
        path = temporary / f"{name}{_TENSORS}"
        path.touch()
        mode = path.stat().st_mode  # what the umask gives; safetensors makes its files private
        save_file(_on_host(tensors), path)
        path.chmod(mode)
        _sync_file(path)
    return skeleton


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, each in memory of its own: safetensors refuses views that overlap."""
    ready: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.cpu()
        address = host.untyped_storage().data_ptr()
        ready[name] = host.clone() if address in seen else host
        seen.add(address)
    return ready


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="ascii", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Make names durable. Some network file systems cannot, and say so with EINVAL."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _rename_to_free_name(temporary: Path, directory: Path, name: str) -> Path:
    path, count = directory / name, 0
    while True:
        if not os.path.lexists(path):
            try:
                return temporary.rename(path)
            except OSError as error:  # another process took the name since we looked
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
        count += 1
        path = directory / f"{name}-{count}"


def _sweep(directory: Path) -> None:
    """Remove what killed processes left half-written; a live process' files, also our own, are left alone."""
    for entry in directory.iterdir():
        match = _TEMPORARY.fullmatch(entry.name)
        if match and not _is_alive(int(match[1])) and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists and belongs to somebody else
        return True
    return True


def _load_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE}: is no JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("sections"), dict) or "meta" not in state:
        raise CheckpointError(f"{STATE}: lacks sections or meta")
    return state


def _load_tensors(path: Path, map_location: str | torch.device) -> Mapping[str, torch.Tensor]:
    if not path.exists():  # a section without tensors; the manifest has vouched for the set of files
        return {}
    try:
        return load_file(path, device=str(map_location))
    except Exception as error:
        raise CheckpointError(f"cannot load {path} to {map_location}: {error}") from error


def _age_key(path: Path) -> tuple[float, float, str]:
    """By the step in meta; a damaged checkpoint's step is taken from the digits in its name."""
    try:
        step = read_manifest(path)["meta"].get("step")
    except (CheckpointError, OSError, AttributeError):
        step = None
    if not isinstance(step, (int, float)):
        digits = re.findall(r"\d+", path.name)
        step = int(digits[0]) if digits else -1
    with contextlib.suppress(OSError):
        return float(step), path.stat().st_mtime, path.name
    return float(step), 0.0, path.name
