"""What every torch hook of ours is: it does not hinder its module from being pickled, and does not go along."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Self


class TorchHook:
    """An object to be called, as functions inside functions cannot be pickled, nor say what becomes of them.

    Whoever loads the pickle finds in its place a method that takes anything and does nothing. It is Python's own: a
    model that was saved while it was watched needs no Hookline where it is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the model has the same torch hook, as it would have the same function."""
        return self
