"""Rank checkpoints by a score and delete the ones that are no longer wanted.

The two newest intact checkpoints are never deleted; you can limit this to the newest.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hookline._fs import sync_directory
from hookline.checkpoints.store import checkpoints_in, temporary_name

KEEP_ALL = -1  # as `top_k`


@dataclass(frozen=True)
class RankedCheckpoint:
    """A checkpoint on disk: its name, its step, and its score if it has one; NaN is the worst score."""

    name: str
    step: int
    score: float | None = None


def best_first(checkpoints: Iterable[RankedCheckpoint], mode: str) -> list[RankedCheckpoint]:
    """Return those with a score, best first; with equal scores, the older comes first, so a tie replaces nothing.

    Non-finite scores come last, the newest first, because none is better than another.
    """
    sign = 1 if mode == "min" else -1

    def rank(checkpoint: RankedCheckpoint) -> tuple[bool, float, int, str]:
        score, step = checkpoint.score, checkpoint.step
        if score is None or not math.isfinite(score):
            return True, 0.0, -step, checkpoint.name
        return False, sign * score, step, checkpoint.name

    return sorted((checkpoint for checkpoint in checkpoints if checkpoint.score is not None), key=rank)


def is_among_best(score: float, checkpoints: Sequence[RankedCheckpoint], top_k: int, mode: str) -> bool:
    """Return whether a new checkpoint with this score would be one of the best.

    Args:
        score: The new checkpoint's score; one that is not finite is worse than all that are.
        checkpoints: Those on disk.
        top_k: How many are kept; `KEEP_ALL` for every one.
        mode: "min" if lower scores are better, otherwise "max".
    """
    new = RankedCheckpoint("", sys.maxsize, score)
    return top_k == KEEP_ALL or new in best_first([*checkpoints, new], mode)[:top_k]


def wanted_names(checkpoints: Sequence[RankedCheckpoint], top_k: int, mode: str, keep_last: bool) -> set[str]:
    """Return the names of the best checkpoints and, if `keep_last`, of the one of the latest step."""
    wanted = list(checkpoints) if top_k == KEEP_ALL else best_first(checkpoints, mode)[:top_k]
    if keep_last and checkpoints:
        wanted.append(max(checkpoints, key=lambda checkpoint: checkpoint.step))
    return {checkpoint.name for checkpoint in wanted}


def delete_checkpoints(
    directory: Path, names: Sequence[str], trusted: Collection[str] = (), keep_previous: bool = True
) -> list[str]:
    """Delete checkpoints, except the newest that verify.

    Args:
        directory: Where they are.
        names: Those to delete.
        trusted: Names of checkpoints that this process wrote itself; their bytes are not read again.
        keep_previous: Whether to keep the one before the newest, too, because the crash that makes it necessary may
            have torn the newest.

    Returns:
        The names that no longer exist, deleted here or before.
    """
    existing = [name for name in names if (directory / name).is_dir()]
    protected: set[str] = set()
    for checkpoint in checkpoints_in(directory) if existing else []:
        if checkpoint.path.name in trusted or not checkpoint.problems:
            protected.add(checkpoint.path.name)
        if len(protected) == 1 + keep_previous:
            break
    for name in existing:
        if name not in protected:
            delete_checkpoint(directory / name)
    return [name for name in names if not (directory / name).exists()]


def delete_checkpoint(path: Path) -> None:
    """Rename a checkpoint durably, then delete it: a crash leaves it whole or as a leftover of the next save."""
    # Files deleted one by one under the checkpoint's own name would leave a damaged checkpoint after a crash.
    leftover = temporary_name(path)
    path.rename(leftover)
    sync_directory(path.parent)
    shutil.rmtree(leftover, ignore_errors=True)


def update_link(link: Path, name: str) -> None:
    """Make `link` a symbolic link to `name` in the same directory; readers see the old target or the new one."""
    if link.is_symlink() and os.readlink(link) == name:  # noqa: PTH115 - the text, not a path
        return
    # A link cannot be overwritten in place. Renaming a new one over it means that there is always a link.
    temporary = temporary_name(link)
    temporary.symlink_to(name, target_is_directory=True)
    temporary.replace(link)
