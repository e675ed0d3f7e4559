"""Observe the calls of two functions without changing what they do: `torch.autograd.backward` and `sys.exit`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch

from hookline.activations.compile.detection import never_compile
from hookline.activations.hooked_modules import NO_BACKWARD, backward_id

TOOL = 4  # A tool id of sys.monitoring; Python gives 3 and 4 no meaning.


def sole_loss(tensors: Any, grad_tensors: Any) -> torch.Tensor | None:
    """Return the loss of a backward pass; None for other kinds of passes, such as a checkpointed block's.

    With a gradient, as in ``loss.backward(gradient)``, it is the number whose gradients the pass computes, in no less
    than single precision: a sum of many elements overflows half precision although no gradient does.

    Args:
        tensors: One tensor, or what `sole` leaves of a sequence.
        grad_tensors: Its gradient.
    """
    if not isinstance(tensors, torch.Tensor) or backward_id() != NO_BACKWARD:
        return None
    try:
        if grad_tensors is None:
            return tensors if tensors.numel() == 1 else None
        if not isinstance(grad_tensors, torch.Tensor) or grad_tensors.shape != tensors.shape:
            return None
        dtype = torch.promote_types(tensors.dtype, torch.float32)
        return (tensors.detach().to(dtype) * grad_tensors.detach().to(dtype)).sum()
    except Exception:  # Tensors of some kinds have no shape or no such product; the backward pass may still work.
        return None


def sole(given: Any) -> Any:
    """Return the element of a sequence of one, and any other value unchanged."""
    return given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given


class BackwardWatch(threading.local):
    """Reports the losses of backward passes. From Python 3.12 on nothing is replaced; in 3.11, one function is.

    Each thread has its own pass in progress.

    Args:
        begins: Called with the loss before a backward pass.
        ends: Called after it.
    """

    def __init__(self, begins: Callable[[torch.Tensor], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._loss = self._frame = 0  # the ids of those in progress: the graph must not live longer than without them

    def start(self) -> Callable[[], None]:
        """Begin to watch; return the function that stops it."""
        monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
        if monitoring is not None and monitoring.get_tool(TOOL) is None:
            return self._monitor(monitoring, torch.autograd.backward.__code__)
        plain = torch.autograd.backward
        watched = wrapped(plain, self._wrapped_begins, self._wrapped_ends)
        torch.autograd.backward = watched

        def stop() -> None:
            if torch.autograd.backward is watched:
                torch.autograd.backward = plain

        return stop

    def _enter(self, tensors: Any, grad_tensors: Any) -> bool:
        """Report the loss; return whether it is one. Under a torch mode, the function calls itself."""
        tensors = sole(tensors)
        loss = None if id(tensors) == self._loss else sole_loss(tensors, sole(grad_tensors))
        if loss is None:
            return False
        self._loss = id(tensors)
        self._begins(loss)
        return True

    def _leave(self, has_failed: bool = False) -> None:
        self._loss = 0
        if not has_failed:
            self._ends()

    # ---- Python 3.11 -------------------------------------------------------------------------------------------------

    def _wrapped_begins(self, tensors: Any = None, grad_tensors: Any = None, *_: Any, **__: Any) -> bool:
        return self._enter(tensors, grad_tensors)

    def _wrapped_ends(self, has_begun: bool, has_failed: bool) -> None:
        if has_begun:
            self._leave(has_failed)

    # ---- Python 3.12 and newer ---------------------------------------------------------------------------------------

    def _monitor(self, monitoring: Any, code: CodeType) -> Callable[[], None]:
        events = monitoring.events
        with suppress(ImportError):
            never_compile(self._on_start)
            never_compile(self._on_return)
        monitoring.use_tool_id(TOOL, "hookline")
        monitoring.register_callback(TOOL, events.PY_START, self._on_start)
        monitoring.register_callback(TOOL, events.PY_RETURN, self._on_return)
        monitoring.set_local_events(TOOL, code, events.PY_START | events.PY_RETURN)

        def stop() -> None:
            monitoring.set_local_events(TOOL, code, 0)
            monitoring.free_tool_id(TOOL)

        return stop

    def _on_start(self, code: CodeType, offset: int) -> None:
        frame = sys._getframe(1)
        if self._frame and not _is_called_by(frame, code):  # An exception ended it: PY_UNWIND is not a local event.
            self._frame = self._loss = 0
        given = frame.f_locals
        if self._enter(given["tensors"], given["grad_tensors"]):
            self._frame = id(frame)

    def _on_return(self, code: CodeType, offset: int, value: Any) -> None:
        if id(sys._getframe(1)) == self._frame:
            self._frame = 0
            self._leave()


def _is_called_by(frame: FrameType, code: CodeType) -> bool:
    """Return whether a call of some code led to this frame."""
    caller = frame.f_back
    while caller is not None and caller.f_code is not code:
        caller = caller.f_back
    return caller is not None


def wrapped(
    function: Callable[..., Any], begins: Callable[..., Any], ends: Callable[[Any, bool], None] = lambda *_: None
) -> Callable[..., Any]:
    """Return a function that does what another one does, and leaves no line in a traceback.

    Args:
        function: The function.
        begins: Called before it, with its arguments.
        ends: Called after it, with what `begins` returned, and whether the function raised.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = begins(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            ends(begun, True)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # a bare raise adds none
            raise
        ends(begun, False)
        return result

    with suppress(ImportError):
        never_compile(call)
    return call
