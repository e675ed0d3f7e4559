"""Which checkpoints are kept, and how the others are deleted: the newest two that verify never are."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hookline.checkpoints import disk
from hookline.checkpoints.files import list_checkpoints, verify_checkpoint

ALL = -1  # as a number of checkpoints to keep
NEVER_DELETED = 2  # of the newest that verify: one may be torn by the crash that made the other one needed


@dataclass(frozen=True)
class Kept:
    """A checkpoint on disk: its name, its step, and its score if it has one."""

    name: str
    step: int
    score: float | None = None


def best_first(kept: Iterable[Kept], mode: str) -> list[Kept]:
    """Those with a score, best first; of equal ones the older is ahead, so a tie never replaces anything."""
    sign = 1 if mode == "min" else -1
    ranked = [(sign * one.score, one.step, one.name, one) for one in kept if one.score is not None]
    return [one for *_, one in sorted(ranked, key=lambda row: row[:3])]


def would_be_kept(score: float, kept: Sequence[Kept], top_k: int, mode: str) -> bool:
    """Whether a new checkpoint with this score would be one of the best."""
    ranked = best_first(kept, mode)
    if top_k == ALL or len(ranked) < top_k:
        return True
    worst = ranked[top_k - 1].score if top_k else None
    return worst is not None and (score < worst if mode == "min" else score > worst)


def surplus(kept: Sequence[Kept], top_k: int, mode: str, keep_last: bool) -> list[Kept]:
    """Those that are neither among the best nor, where that one is kept, the last."""
    if top_k == ALL:
        return []
    wanted = best_first(kept, mode)[:top_k]
    if keep_last and kept:
        wanted.append(max(kept, key=lambda one: one.step))
    return [one for one in kept if one not in wanted]


def delete_checkpoints(directory: Path, names: Sequence[str], trusted: Collection[str] = ()) -> list[str]:
    """Delete checkpoints, except the newest two that verify; returns the names that are gone.

    Those that this process wrote itself are `trusted`: their bytes are not read again. What is not there, is gone.
    """
    there = [name for name in names if (directory / name).is_dir()]
    spared = _newest_verified(directory, trusted) if there else set()
    for name in there:
        if name not in spared:
            delete_checkpoint(directory / name)
    return [name for name in names if not (directory / name).exists()]


def delete_checkpoint(path: Path) -> None:
    """Take its name away first, durably: a crash leaves it whole, or as rubbish that the next save sweeps up."""
    rubbish = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    path.rename(rubbish)
    disk.sync_directory(path.parent)
    shutil.rmtree(rubbish, ignore_errors=True)


def point_to(link: Path, name: str) -> None:
    """Make `link` a symbolic link to its neighbour `name`; whoever follows it finds the old one or the new one."""
    if link.is_symlink() and os.readlink(link) == name:  # noqa: PTH115 - the text, not a path
        return
    fresh = link.with_name(f".tmp-{link.name}-{os.getpid()}-{secrets.token_hex(4)}")
    fresh.symlink_to(name, target_is_directory=True)
    fresh.replace(link)


def _newest_verified(directory: Path, trusted: Collection[str]) -> set[str]:
    """The names of the newest checkpoints that are whole."""
    found: set[str] = set()
    for path in list_checkpoints(directory):
        if path.name in trusted or not verify_checkpoint(path):
            found.add(path.name)
        if len(found) == NEVER_DELETED:
            break
    return found
