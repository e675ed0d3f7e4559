"""Detect whether `torch.compile` is in use without importing the compiler, and run models uncompiled for a while.

Importing Dynamo takes a second or two, and most processes that train compile nothing. So this module only looks into
`sys.modules`; the other modules of this folder are imported when the first frame is about to be compiled.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger

if TYPE_CHECKING:  # It imports this module.
    from hookline.activations.forward_hooks import ForwardDispatcher


def has_compiled() -> bool:
    """Return whether this process has compiled anything, as far as this version of torch reports it."""
    convert_frame = getattr(sys.modules.get("torch._dynamo"), "convert_frame", None)
    return bool(getattr(getattr(convert_frame, "input_codes", None), "seen", ()))


def never_compile(function: Any) -> None:
    """Let Dynamo inline a function into the graph of a module, but not compile its frame where a graph is broken.

    There it is plain Python that calls hooks. Compiled, its frame would be specialized for every module.

    Raises:
        ImportError: If this version of torch has no such setting.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


# ---- before the first compilation ------------------------------------------------------------------------------------


_unprepared: weakref.WeakSet[ForwardDispatcher] = weakref.WeakSet()


def prepare_before_compiling(dispatcher: ForwardDispatcher) -> None:
    """Prepare a dispatcher's torch hooks for being traced before the next frame is compiled.

    If the compiler is imported only later, its first trace through one of the torch hooks does the same. A frame
    without any of them that is compiled before does not check for hooks, and serves modules with the same code: call
    `HookManager.watch` again after the import to exclude that. Trainers do.
    """
    _unprepared.add(dispatcher)
    handler: Any = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    callbacks = getattr(handler, "start_callbacks", None)
    if callbacks is not None and prepare_all not in callbacks:  # `torch._dynamo.reset` removes it.
        handler.register_start_callback(prepare_all)


def prepare_all(_: Any = None) -> None:
    """Prepare every dispatcher that is not prepared; a failure must not stop the compilation of a model."""
    for dispatcher in list(_unprepared):
        try:
            dispatcher.sync(compiling=True)
        except Exception:
            logger.warning("forward hooks may not be called in compiled code", exc_info=True)
        _unprepared.discard(dispatcher)


# ---- uncompiled ------------------------------------------------------------------------------------------------------

_uncompiled_blocks = 0  # In all threads.
_stance: Any = None
_stance_lock = threading.Lock()


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Run compiled models uncompiled inside the block, in all threads; compiled code is kept for later."""
    global _uncompiled_blocks, _stance
    if not hasattr(sys.modules.get("torch._dynamo"), "reset"):  # Dynamo is not imported, or not completely.
        yield
        return
    # The first of several blocks changes the stance and the last one changes it back, in whichever threads they are.
    with _stance_lock:
        if not _uncompiled_blocks:
            _stance = torch.compiler.set_stance("force_eager")
        _uncompiled_blocks += 1
    try:
        yield
    finally:
        with _stance_lock:
            _uncompiled_blocks -= 1
            if not _uncompiled_blocks:
                _stance.__exit__(None, None, None)
