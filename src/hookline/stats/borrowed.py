"""Mark tensors as borrowed: memory that its owner reuses as soon as the callee returns.

Compiled code plans its buffers ahead and overwrites those that it no longer needs without raising a tensor's version. A
hook that is called from there must read or copy a tensor before it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

threads: list[int] = []
"""The threads inside `borrowing`, once for each block. Hot paths test it before they call `is_borrowed`."""


def is_borrowed() -> bool:
    """Return whether the tensors that this thread handles are borrowed."""
    return bool(threads) and get_ident() in threads


@contextmanager
def borrowing() -> Iterator[None]:
    """Mark the tensors that this thread passes on inside the block as borrowed."""
    threads.append(get_ident())
    try:
        yield
    finally:
        threads.remove(get_ident())
