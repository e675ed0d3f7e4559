"""Say in the error of a checkpoint what failed and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hookline.errors import CheckpointError


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise `CheckpointError` for any exception of the block, with what could not be done before its text.

    A `CheckpointError` says that already and stays as it is.
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
