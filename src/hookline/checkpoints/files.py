"""Checkpoints on disk: written beside, fsynced, hashed into a manifest, renamed; verified before reading."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hookline.checkpoints import disk
from hookline.checkpoints.codec import decode, encode
from hookline.checkpoints.hashing import write_hashed
from hookline.checkpoints.manifest import MANIFEST, STATE, check_files, manifest_text, read_manifest
from hookline.checkpoints.snapshot import encode_section
from hookline.checkpoints.tensor_file import file_parts
from hookline.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_TENSORS = ".safetensors"
_LARGEST_STEP = 2**63
_TEMPORARY = re.compile(r"\.tmp-.+-(\d+)-[0-9a-z]+")


def write_checkpoint(directory: Path, name: str, sections: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
    """Write ``directory/name`` so that it exists whole and durable, or not at all; its path.

    ``sections`` are trees of state, each with its own safetensors file, or a snapshot of them; ``meta`` is a small
    tree without tensors, whose ``step`` orders the checkpoints. A name that is taken gets -1, -2 … appended: nothing
    is overwritten.
    """
    directory = Path(directory)
    for text, what in ((name, "checkpoint"), *((section, "section") for section in sections)):
        _check_name(text, what)
    try:
        disk.make_directory(directory)
        _sweep(directory)
        with _temporary(directory, name) as temporary:
            _fill(temporary, sections, meta)
            path = disk.rename_to_free_name(temporary, directory / name)
        disk.sync_directory(directory)
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
        try:
            sections[name] = decode(skeleton, _load_tensors(path / f"{name}{_TENSORS}", map_location))
        except CheckpointError as error:
            raise CheckpointError(f"{path}, section {name!r}: {error}") from error
    return sections, decode(state["meta"], {})


def verify_checkpoint(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a sentence each; empty when every file is as it was written."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
        return check_files(path, manifest["files"]) or _contradictions(manifest, _load_state(path))
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot be read: {error}"]


def _contradictions(manifest: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """How a manifest and the state it vouches for disagree: only a forger writes such a pair."""
    problems = [f"section {name!r}: is no name" for name in state["sections"] if not _NAME.fullmatch(name)]
    if json.dumps(state["meta"]) != json.dumps(manifest["meta"]):
        problems.append(f"{MANIFEST}: its meta differs from that in {STATE}")
    known = {STATE, *(f"{name}{_TENSORS}" for name in state["sections"])}
    return problems + [f"{name}: belongs to no section" for name in manifest["files"] if name not in known]


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a directory, newest first: by step, then by time. Damaged ones are listed, too."""
    try:
        found = [entry for entry in Path(directory).iterdir() if _is_checkpoint(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=age_key, reverse=True)


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
    plain_meta, skeletons, files = _encode_meta(meta), {}, {}
    for name, tree in sections.items():
        section = encode_section(name, tree)
        skeletons[name] = section.value
        if section.tensors:
            files[f"{name}{_TENSORS}"] = file_parts(section.tensors)
    state = json.dumps({"sections": skeletons, "meta": plain_meta}, allow_nan=False)
    written = write_hashed(temporary, {**files, STATE: [state.encode("ascii")]})
    disk.write_file(temporary / MANIFEST, [manifest_text(written, plain_meta).encode("ascii")])
    disk.sync_directory(temporary)


def _encode_meta(meta: Mapping[str, Any]) -> Any:
    plain, tensors = encode(dict(meta))
    if tensors:
        raise CheckpointError(f"meta holds the tensor {next(iter(tensors))!r}; put tensors into a section")
    return plain


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


def age_key(path: Path) -> tuple[float, float, str]:
    """By the step in meta; a damaged checkpoint's step is taken from the digits in its name."""
    try:
        step = read_manifest(path)["meta"].get("step")
    except (CheckpointError, OSError, AttributeError):
        step = None
    if not isinstance(step, (int, float)) or not abs(step) < _LARGEST_STEP:
        digits = re.findall(r"\d+", path.name)
        step = int(digits[0]) if digits else -1
    with contextlib.suppress(OSError):
        return float(step), path.stat().st_mtime, path.name
    return float(step), 0.0, path.name
