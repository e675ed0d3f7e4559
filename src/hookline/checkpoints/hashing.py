"""Files written and hashed at the same time: sha256 runs in threads, over the memory that is being written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hookline.checkpoints.disk import Part, write_file

HASHERS = 2  # a checkpoint has two large files, the model and the optimizers

Files = Mapping[str, Sequence[Part]]


def write_hashed(directory: Path, files: Files) -> dict[str, dict[str, Any]]:
    """Write new files, durable when this returns; the size and sha256 of each, by name.

    What was meant to be written is hashed, not what a disk made of it. Hashing takes as long as writing: the largest
    begin at once, and on a machine with a core to spare nobody waits for them.
    """
    sizes = {name: sum(map(len, parts)) for name, parts in files.items()}
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="hookline-sha256") as threads:
        hashes = {name: threads.submit(_sha256, files[name]) for name in sorted(sizes, key=lambda name: -sizes[name])}
        for name, parts in files.items():
            write_file(directory / name, parts)
        return {name: {"sha256": hashes[name].result(), "bytes": sizes[name]} for name in sorted(sizes)}


def _sha256(parts: Sequence[Part]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
