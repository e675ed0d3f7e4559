"""Learning in time that something is about to be compiled.

A compiler in the process says little: `torch.optim` imports one, and most who train compile nothing. What must be gone
before a model is traced may stay until then: Dynamo tells when it begins with a frame, before it looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.activations.compiled import is_used

_begun = False
_before: list[Callable[[], None]] = []


def before_the_first(call: Callable[[], None]) -> None:
    """Have something called before the first frame is compiled, once somebody has asked `has_begun`."""
    _before.append(call)


def has_begun() -> bool:
    """Whether models may run compiled: something has been compiled, or is about to be, and that is not set aside."""
    if not is_used():
        return False
    _listen()
    return _begun


def _listen() -> None:
    """Hear of the first frame. Dynamo forgets who listens when it is reset."""
    global _begun
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.convert_frame import input_codes

    _begun = _begun or bool(input_codes.seen)
    if not _begun and _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)


def _begin(_: Any = None) -> None:
    global _begun
    if not _begun:
        _begun = True
        for call in _before:
            call()
