"""Forward hooks inside compiled code.

`torch.compile` traces the torch hooks of a module together with it. There the tap puts one operator into the graph,
which shows the tensors to the hooks whenever the graph runs: no graph break, and no other graph when hooks become due
or not. Hooks that change the output or measure time need the graph broken at their modules.

Three traps are kept shut here. Dynamo does not look whether a module that had no torch hook has one now: it is made to,
and code that was compiled before is forgotten. Numbers in a hook's closure make a graph each: a module is told by a
tensor. And an operator that returns nothing is removed as dead code: this one says that it writes into that tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from hookline.activations.structure import flatten, rebuild
from hookline.stats.loan import lending

NOTHING = ""  # what a module's hooks want in compiled code: nothing, a graph break, or some of these parts
OUTSIDE = "outside"
CALLED, INPUTS, KWARGS, OUTPUT, LIVE = "called", "inputs", "kwargs", "output", "live"


def wish(shown: Collection[str]) -> str:
    """What the hooks of a module want together, as text: Dynamo compares it when it looks for a graph that fits."""
    return OUTSIDE if OUTSIDE in shown else " ".join(sorted(shown))


class Place(Protocol):
    """A module as compiled code knows it."""

    wants: str
    token: torch.Tensor
    hear: Callable[[torch.nn.Module | None, Any, Any, Any], Any]  # tells its hooks that it ran

    @property
    def module(self) -> torch.nn.Module | None:
        """The module itself; None when it is gone."""


# ---- in the graph ----------------------------------------------------------------------------------------------------

_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
_tokens: list[torch.Tensor] = []  # those that nobody has; making one costs more than attaching a torch hook
_made = 0


def take_token(place: Place) -> torch.Tensor:
    """A tensor that stands for a place in compiled code until it is given back."""
    global _made
    try:
        token = _tokens.pop()
    except IndexError:
        _made += 1
        token = torch.tensor(_made, device="cpu")
    _places[int(token)] = place
    return token


def give_back(token: torch.Tensor) -> None:
    """The place is no more; compiled code that still has its token reaches nobody."""
    _places.pop(int(token), None)
    _tokens.append(token)


def _show(tensors: list[torch.Tensor], structure: str, token: torch.Tensor) -> None:
    """Show the tensors of one module call to its hooks, each time the graph runs."""
    place = _places.get(int(token))
    if place is not None:
        with lending():
            place.hear(place.module, *rebuild(structure, tensors))


def _show_nothing(tensors: list[torch.Tensor], structure: str, token: torch.Tensor) -> None:
    """Of tensors without values there is nothing to show."""


# Not by `torch.library.custom_op`, whose layers of Python for gradients and aliases cost more than the hook.
_SCHEMA = "heard(Tensor[] tensors, str structure, Tensor(a!) token) -> ()"
_library = torch.library.Library("hookline", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
_library.impl("heard", _show, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("heard", _show_nothing, "Meta")  # type: ignore[no-untyped-call]
heard = torch.ops.hookline.heard.default


def enter_graph(place: Place, inputs: Any, kwargs: Any, output: Any) -> bool:
    """Have the hooks of a module called by the graph that is being traced; False when they need to be outside."""
    wants = place.wants
    if wants == NOTHING:
        return True
    if wants == OUTSIDE:
        return False
    tensors: list[torch.Tensor] = []
    told = [
        flatten(inputs if INPUTS in wants else None, tensors, exact=True),
        flatten(kwargs if KWARGS in wants else None, tensors, exact=True),
        flatten(output if OUTPUT in wants or LIVE in wants else None, tensors, exact=OUTPUT in wants),
    ]
    if None in told:
        return False
    heard(tensors, f"({told[0]}, {told[1]}, {told[2]})", place.token)
    return True


# ---- the compiler ----------------------------------------------------------------------------------------------------

_set_aside = 0


def is_loaded() -> bool:
    """Whether there is a compiler in this process; it is slow to import, and where it is not, nothing is compiled."""
    return hasattr(sys.modules.get("torch._dynamo"), "reset")  # and not half-way through its import


def is_used() -> bool:
    """Whether models may run compiled now."""
    return is_loaded() and not _set_aside


def notice_hooks() -> None:
    """From now on compiled code sees torch hooks come, and what cannot is compiled anew at its next call.

    Dynamo leaves out that look by default, and says in its own settings that this is unsafe.
    """
    from torch._dynamo import config, convert_frame, reset_code_caches

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        if convert_frame.input_codes.seen:
            reset_code_caches()


@contextmanager
def as_plain_python() -> Iterator[None]:
    """Compiled models run uncompiled inside the block, in all threads; what is compiled stays for later."""
    global _set_aside
    if not is_loaded():
        yield
        return
    _set_aside += 1
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _set_aside -= 1


def never_a_frame_of_its_own(function: Callable[..., Any]) -> None:
    """Let Dynamo follow calls of a function into its code, but never compile it, or what it calls, for itself."""
    code: CodeType = function.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
