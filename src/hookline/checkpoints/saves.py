"""Save one checkpoint: copy its state to the host, write its files in any thread, and finish it on all ranks.

The thread that trains begins and finishes a save, on all ranks at the same point, because both communicate. Writing the
files needs no communication, so any thread can do it while training changes the original state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hookline import _device
from hookline._device import HostCopy
from hookline.checkpoints.errors import failing_as
from hookline.checkpoints.format import TAG, Section, encode_section, safetensors_parts
from hookline.checkpoints.store import (
    AS_ON_RANK_0,
    Files,
    begin_checkpoint,
    commit_checkpoint,
    remove_temporary,
    sha256,
    write_checkpoint,
    write_part,
)
from hookline.core.failures import hook_notes
from hookline.errors import CheckpointError, RankError, error_text
from hookline.ranks import Ranks

Result = TypeVar("Result")


class HostMemory:
    """Host memory for one snapshot, reused by the next.

    Memory that is new to the process costs about three times as much as the copying, and pinned memory even more. A
    snapshot is therefore valid only until the next one is taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def snapshot(self, sections: Mapping[str, Any]) -> dict[str, Section]:
        """Copy the current sections for `write_checkpoint`; returns when every copy is complete.

        Encoding copies everything but tensors, finds tied tensors, and rejects what cannot be saved.

        Raises:
            CheckpointError: If a value has no exact form, memory is missing or a device failed.
        """
        with failing_as("cannot copy the state to the host's memory"):
            encoded = {name: encode_section(name, tree) for name, tree in sections.items()}
            # All copies run on each device's current stream: after the step that computed the values, before the next.
            copies: dict[tuple[str, str], HostCopy] = {}
            for section, parts in encoded.items():
                for name, tensor in parts.tensors.items():
                    buffer = self._buffers.get((section, name))
                    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                        # A copy from a device makes its own buffer, in pinned memory.
                        on_host = not _device.is_accelerator(tensor.device)
                        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if on_host else None
                    copies[section, name] = HostCopy(tensor, into=buffer)
            self._buffers = {key: copy.wait() for key, copy in copies.items()}
        return {
            name: Section(parts.value, {tensor: self._buffers[name, tensor] for tensor in parts.tensors}, parts.shards)
            for name, parts in encoded.items()
        }


# ---- one save --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneSave:
    """A save in one process, whose `write` does all of it.

    Args:
        directory: The directory of the run's checkpoints.
        name: The checkpoint's name.
        sections: Its sections.
        meta: Its meta.
    """

    directory: Path
    name: str
    sections: Mapping[str, Section]
    meta: Mapping[str, Any]

    def write(self) -> Path:
        """Write the checkpoint."""
        return write_checkpoint(self.directory, self.name, self.sections, self.meta)

    def finish(self, written: Callable[[], Any]) -> Path:
        """Return the checkpoint's path; `written` returns what `write` returned, or raises what it raised."""
        path: Path = written()
        return path


class SharedSave:
    """A save of several ranks. Each writes its files; once all are durable, rank 0 writes the manifest and renames.

    Args:
        ranks: The ranks; all of them make the save at the same point.
        directory: The directory of the run's checkpoints.
        name: The checkpoint's name; only rank 0's is used.
        sections: The sections of this rank.
        meta: The checkpoint's meta.
        alike: The parts that rank 0 saves for all ranks.

    Raises:
        CheckpointError: On all ranks, if rank 0 cannot begin it.
    """

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        name: str,
        sections: Mapping[str, Section],
        meta: Mapping[str, Any],
        alike: Alike,
    ) -> None:
        self._ranks, self._name, self._meta = ranks, name, meta

        def begin() -> dict[str, Any]:
            with failing_as(f"cannot write checkpoint {name!r}"):
                return {"to": str(begin_checkpoint(directory, name, sections)), "marks": _marks(sections, alike)}

        begun = _first(ranks, begin)
        self._temporary = Path(begun["to"])
        self._sections = sections if ranks.rank == 0 else _differing(sections, begun["marks"], ranks.rank)

    def write(self) -> Files:
        """Write the files of this rank."""
        with failing_as(f"cannot write checkpoint {self._name!r}"):
            if not self._temporary.is_dir():
                raise CheckpointError(f"it does not see {self._temporary}; all hosts must share the run's directory")
            rank = self._ranks.rank
            return write_part(self._temporary, self._sections, None if rank else self._meta, rank)

    def finish(self, written: Callable[[], Any]) -> Path:
        """Agree that all ranks have written their files; rank 0 then writes the manifest and renames.

        Raises:
            CheckpointError: On all ranks, if one of them could not write.
        """
        try:
            by_rank = self._ranks.gather(on_all(self._ranks, written))
            if len(by_rank) != self._ranks.world_size:
                raise CheckpointError("a rank has failed, but a checkpoint needs all ranks")
            files = {name: entry for of_rank in by_rank for name, entry in of_rank.items()}

            def commit() -> str:
                with failing_as(f"cannot write checkpoint {self._name!r}"):
                    return str(commit_checkpoint(self._temporary, self._name, files, self._meta))

            return Path(_first(self._ranks, commit))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the written files, without the other ranks; after the rename there is nothing to remove."""
        if self._ranks.rank == 0:
            remove_temporary(self._temporary)


Save = OneSave | SharedSave


# ---- what all ranks do together --------------------------------------------------------------------------------------


def on_all(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Call a function on every rank, and return this rank's result if no rank has failed.

    Raises:
        CheckpointError: On all ranks, with the same message, if it fails with such an error on one.
        RankError: On the other ranks, if it fails on one with another error, which that rank raises itself.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    if failure is not None and ranks.world_size == 1:
        raise failure
    if ranks.decide(failure is not None):
        # A hook's failure ends the run whatever `on_save_error` says, so the other ranks raise a different error, too.
        is_of_saving = isinstance(failure, CheckpointError) and not hook_notes(failure)
        answers = ranks.gather(None if failure is None else [error_text(failure), is_of_saving])
        failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        said = "; ".join(f"rank {rank}: {text.removeprefix('CheckpointError: ')}" for rank, (text, _) in failed.items())
        if all(is_of_saving for _, is_of_saving in failed.values()):
            raise CheckpointError(said) from failure
        if failure is not None:
            raise failure
        raise RankError(said)
    return result


def _first(ranks: Ranks, make: Callable[[], Any]) -> Any:
    """Return the result of rank 0; if it fails there with `CheckpointError`, raise that on all ranks."""
    made = on_all(ranks, lambda: make() if ranks.rank == 0 else None)
    return ranks.first(lambda: made)


# ---- what differs between ranks --------------------------------------------------------------------------------------

Alike = Mapping[str, Collection[str] | None]
"""State that all ranks share, by section: names of whole tensors, or None for all but shards. Rank 0 saves it."""


def without_alike(sections: Mapping[str, Section], alike: Alike) -> dict[str, Section]:
    """Return the parts that a rank other than 0 may have to save; the rest is neither copied nor compared."""
    differing = {}
    for name, section in sections.items():
        same = alike.get(name, ())
        kept = {
            key: tensor
            for key, tensor in section.tensors.items()
            if key in section.shards or not (same is None or key in same)
        }
        differing[name] = Section(AS_ON_RANK_0 if same is None else section.value, kept, section.shards)
    return differing


def _marks(sections: Mapping[str, Section], alike: Alike) -> dict[str, list[Any]]:
    """Return hashes that other ranks compare with theirs: of each section's JSON, and of its whole tensors."""
    marks: dict[str, list[Any]] = {}
    for name, section in sections.items():
        if (same := alike.get(name, ())) is not None:
            whole = {key: _tensor_digest(tensor) for key, tensor in _whole(section).items() if key not in same}
            marks[name] = [_digest(section.value), whole]
    return marks


def _whole(section: Section) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in section.tensors.items() if name not in section.shards}


def _differing(sections: Mapping[str, Section], marks: Mapping[str, Any], rank: int) -> dict[str, Section]:
    """Return the parts that a rank must save: its shards, and the rest of each section where it differs from rank 0's.

    Tensors that differ get names of this rank, because a section has the names of all ranks together.
    """
    differing = {}
    for name, section in sections.items():
        value_mark, tensor_marks = marks.get(name, [None, {}])
        whole = _whole(section)
        names = {
            key: f"{key}@rank-{rank}"
            for key, tensor in whole.items()
            if tensor_marks.get(key) != _tensor_digest(tensor)
        }
        saved = {key: tensor for key, tensor in section.tensors.items() if key in names or key not in whole}
        tensors = {names.get(key, key): tensor for key, tensor in saved.items()}
        value = section.value
        if value is not AS_ON_RANK_0:
            is_same = not names and _digest(value) == value_mark
            value = AS_ON_RANK_0 if is_same else _renamed(value, names)
        differing[name] = Section(value, tensors, section.shards)
    return differing


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    """Return a section's JSON value with other names of tensors."""
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get(TAG) in ("tensor", "ndarray"):
        return {**node, "v": names.get(node["v"], node["v"])}
    return {key: _renamed(item, names) for key, item in node.items()}


def _digest(value: Any) -> str:
    return sha256([json.dumps(value).encode("ascii")])


def _tensor_digest(tensor: torch.Tensor) -> str:
    return sha256(safetensors_parts({"": tensor}))
