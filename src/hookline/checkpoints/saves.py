"""Save one checkpoint: in three parts, because several ranks may write it, and threads may write the files.

Beginning and ending a save are for the thread that trains, on all ranks at the same point, because they communicate.
Writing the files is for any thread, and communicates with nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hookline.checkpoints.format import TAG, Section
from hookline.checkpoints.store import (
    AS_ON_RANK_0,
    Files,
    begin_checkpoint,
    commit_checkpoint,
    remove_temporary,
    write_checkpoint,
    write_part,
)
from hookline.core.failures import hook_notes
from hookline.errors import CheckpointError, RankError, error_text
from hookline.ranks import Ranks

Result = TypeVar("Result")
Written = Any
"""What `write` returns, for `finish`."""


class Save(Protocol):
    """A checkpoint that is being saved."""

    def write(self) -> Written:
        """Write the files of this rank, durably."""

    def finish(self, written: Callable[[], Written]) -> Path:
        """Make the checkpoint exist, and return its path.

        Args:
            written: Returns what `write` returned, or raises what it raised.

        Raises:
            CheckpointError: On all ranks, if one of them could not write.
        """

    def abandon(self) -> None:
        """Remove what was written, without the other ranks: this one has failed."""


class OneSave:
    """A save in one process: all of it is in `write`.

    Args:
        directory: The directory of the run's checkpoints.
        name: The checkpoint's name.
        sections: Its sections.
        meta: Its meta.
    """

    def __init__(self, directory: Path, name: str, sections: Mapping[str, Section], meta: Mapping[str, Any]) -> None:
        self._arguments = directory, name, sections, meta

    def write(self) -> Path:
        """Write the checkpoint."""
        return write_checkpoint(*self._arguments)

    def finish(self, written: Callable[[], Written]) -> Path:
        """Return the path of the checkpoint."""
        path: Path = written()
        return path

    def abandon(self) -> None:
        """Do nothing: `write` removes what it does not finish."""


class SharedSave:
    """A save of several ranks. Each writes its files; once all are durable, rank 0 writes the manifest and renames.

    Args:
        ranks: The ranks; all of them make the save at the same point.
        directory: The directory of the run's checkpoints.
        name: The checkpoint's name; rank 0's counts.
        sections: What this rank has.
        meta: The checkpoint's meta.
        alike: What rank 0 alone saves.

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
            return {"to": str(begin_checkpoint(directory, name, sections)), "marks": _marks(sections, alike)}

        begun = _first(ranks, begin)
        self._temporary = Path(begun["to"])
        self._sections = sections if ranks.rank == 0 else _differing(sections, begun["marks"], ranks.rank)

    def write(self) -> Files:
        """Write the files of this rank."""
        try:
            if not self._temporary.is_dir():
                raise CheckpointError(f"it does not see {self._temporary}; all hosts must share the run's directory")
            rank = self._ranks.rank
            return write_part(self._temporary, self._sections, None if rank else self._meta, rank)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot write checkpoint {self._name!r}: {error}") from error

    def finish(self, written: Callable[[], Written]) -> Path:
        """Agree that all ranks have written, then let rank 0 write the manifest and rename."""
        try:
            files = gather_from_all(self._ranks, on_all(self._ranks, written))
            listed = {name: entry for of_rank in files for name, entry in of_rank.items()}
            return Path(_first(self._ranks, partial(self._commit, listed)))
        finally:
            self.abandon()

    def _commit(self, files: Files) -> str:
        return str(commit_checkpoint(self._temporary, self._name, files, self._meta))

    def abandon(self) -> None:
        """Remove the temporary directory; after the rename there is nothing to remove."""
        if self._ranks.rank == 0:
            remove_temporary(self._temporary)


# ---- what all ranks do together --------------------------------------------------------------------------------------


def on_all(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Do something on every rank, and return this rank's result if none has failed.

    Raises:
        CheckpointError: If it fails on a rank with such an error, on all ranks with the same text.
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
        # A hook's failure ends the run whatever `on_save_error` says, so it is another error on the other ranks, too.
        is_of_saving = isinstance(failure, CheckpointError) and not hook_notes(failure)
        texts = ranks.gather(None if failure is None else [error_text(failure), is_of_saving])
        failed = {rank: one for rank, one in enumerate(texts) if one is not None}
        said = "; ".join(f"rank {rank}: {one[0].removeprefix('CheckpointError: ')}" for rank, one in failed.items())
        if all(one[1] for one in failed.values()):
            raise CheckpointError(said) from failure
        if failure is not None:
            raise failure
        raise RankError(said)
    return result


def gather_from_all(ranks: Ranks, value: Any) -> list[Any]:
    """Return what all ranks pass. Raises `CheckpointError` if one of them does not take part any more."""
    found = ranks.gather(value)
    if len(found) != ranks.world_size:
        raise CheckpointError("a rank has failed, and a checkpoint needs all of them")
    return found


def _first(ranks: Ranks, make: Callable[[], Any]) -> Any:
    """Return what rank 0 makes; if it fails there, raise the same `CheckpointError` on all ranks."""

    def try_to() -> dict[str, Any]:
        try:
            return {"result": make()}
        except Exception as error:
            return {"error": error_text(error).removeprefix("CheckpointError: ")}

    answer = ranks.first(try_to)
    if "error" in answer:
        raise CheckpointError(f"rank 0: {answer['error']}")
    return answer["result"]


# ---- what differs between ranks --------------------------------------------------------------------------------------

Alike = Mapping[str, Collection[str] | None]
"""What all ranks have alike, by section: the names of whole tensors, or None for all but shards. Rank 0 saves it."""


def without_alike(sections: Mapping[str, Section], alike: Alike) -> dict[str, Section]:
    """Return what a rank other than 0 may have to save, so that the rest is neither copied nor compared."""
    found = {}
    for name, section in sections.items():
        same = alike.get(name, ())
        kept = {key: one for key, one in section.tensors.items() if key in section.shards or not _has(same, key)}
        found[name] = Section(AS_ON_RANK_0 if same is None else section.value, kept, section.shards)
    return found


def _has(alike: Collection[str] | None, name: str) -> bool:
    return alike is None or name in alike


def _marks(sections: Mapping[str, Section], alike: Alike) -> dict[str, list[Any]]:
    """Return hashes of what other ranks compare with theirs: of each section's JSON, and of its whole tensors."""
    found: dict[str, list[Any]] = {}
    for name, section in sections.items():
        if (same := alike.get(name, ())) is not None:
            whole = {key: _tensor_digest(one) for key, one in _whole(section).items() if key not in same}
            found[name] = [_digest(section.value), whole]
    return found


def _whole(section: Section) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in section.tensors.items() if name not in section.shards}


def _differing(sections: Mapping[str, Section], marks: Mapping[str, Any], rank: int) -> dict[str, Section]:
    """Return what a rank has to save: its shards, and the rest of each section where it differs from rank 0's.

    Tensors that differ get names of this rank, because the names of a section are those of all ranks together.
    """
    found = {}
    for name, section in sections.items():
        value_mark, tensor_marks = marks.get(name, [None, {}])
        whole = _whole(section)
        names = {
            key: f"{key}@rank-{rank}" for key, one in whole.items() if tensor_marks.get(key) != _tensor_digest(one)
        }
        tensors = {names.get(key, key): one for key, one in section.tensors.items() if key in names or key not in whole}
        value = section.value
        if value is not AS_ON_RANK_0:
            is_same = not names and _digest(value) == value_mark
            value = AS_ON_RANK_0 if is_same else _renamed(value, names)
        found[name] = Section(value, tensors, section.shards)
    return found


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
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(f"{host.dtype} {tuple(host.shape)}".encode("ascii"))
    if host.numel():
        digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
