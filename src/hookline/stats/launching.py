"""Launching a Triton kernel again and again, without what Triton works out anew at each call."""

from __future__ import annotations

from functools import partial
from typing import Any


class Launch:
    """A kernel with so many programs, with what it gets first at each call, and its constants, in its own order.

    The first call goes through Triton, which compiles the kernel for the arguments that it sees. Later calls go to what
    was compiled: to find out again what kinds of arguments these are takes as long as the launch. So at each call whole
    numbers must be the same, and tensors of the same dtype and begin at a boundary of 16 bytes, as all do that torch
    allocates.
    """

    def __init__(self, kernel: Any, programs: int, *fixed: Any, num_warps: int = 4, **constants: Any) -> None:
        self._first = partial(kernel[(programs,)], *fixed, **constants, num_warps=num_warps)
        self._fixed, self._constants, self._grid = fixed, tuple(constants.values()), (programs, 1, 1)
        self._again: Any = None

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Queue the kernel on the current stream of the current device, which `stream` must be."""
        if self._again is not None:
            self._again(*self._fixed, *arguments, *self._constants, stream=stream)
        elif (compiled := self._first(*arguments)) is not None:  # Triton's interpreter compiles nothing
            self._again = compiled[self._grid]
