"""Say in a checkpoint's error what failed and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hookline.errors import CheckpointError


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise `CheckpointError` for any exception in the block, prefixed with the action that failed.

    A `CheckpointError` already says this and stays unchanged.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {error}") from error


@contextmanager
def inside(where: str) -> Iterator[None]:
    """Name the place, such as a section, in a `CheckpointError` of the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
