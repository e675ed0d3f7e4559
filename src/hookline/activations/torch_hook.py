"""What every torch hook of ours is: it does not hinder its module from being pickled, and does not go along."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class TorchHook:
    """An object to be called, as functions inside functions cannot be pickled, nor say what becomes of them.

    A copy of its module has in its place a method that takes anything and does nothing: nobody watches the copy, and
    what it computes is not taken for the original's. The method is Python's own, so a model that was saved while it was
    watched needs no Hookline where it is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
