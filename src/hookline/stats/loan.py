"""Tensors on loan: memory that its owner uses again as soon as whoever looks at it returns.

Compiled code plans its buffers beforehand and writes into one that it needs no more, without raising the tensor's
version. What a hook is shown there must be read or copied before the hook returns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
lenders = 0  # blocks that lend, in all threads: looking at a number is cheaper than at what belongs to a thread
_here = threading.local()


def on_loan() -> bool:
    """Whether the tensors that this thread handles are on loan."""
    return lenders > 0 and getattr(_here, "depth", 0) > 0


@contextmanager
def lending() -> Iterator[None]:
    """What this thread hands out inside the block is on loan."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(by: int) -> None:
    global lenders
    _here.depth = getattr(_here, "depth", 0) + by
    with _lock:
        lenders += by
