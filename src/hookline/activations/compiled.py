"""Forward hooks inside compiled code.

`torch.compile` traces the torch hooks of a module together with it. There the tap puts one operator into the graph,
which shows the tensors to the hooks whenever the graph runs: no graph break, and no other graph when hooks become due
or not. Where all they want are statistics of what a GPU computes, it is a kernel instead, and nobody need be called.
Hooks that change the output or measure time need the graph broken at their modules.

Three traps are kept shut here. Dynamo does not look whether a module that had no torch hook has one now: it is made to,
and code that was compiled before is forgotten. Numbers in a hook's closure make a graph each: a module is told by a
tensor. And an operator that returns nothing is removed as dead code: ours say that they write into such a tensor.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from hookline.activations.adding_up import Tallied, adds_up
from hookline.activations.operators import holder_of, operator
from hookline.activations.structure import flatten, rebuild
from hookline.stats.loan import lending

NOTHING = ""  # what a module's hooks want in compiled code: nothing, a graph break, statistics, or some of these parts
OUTSIDE, STATISTICS = "outside", "statistics"
CALLED, INPUTS, KWARGS, OUTPUT, LIVE = "called", "inputs", "kwargs", "output", "live"


def wish(shown: Collection[str]) -> str:
    """What the hooks of a module want together, as text: Dynamo compares it when it looks for a graph that fits."""
    if OUTSIDE in shown:
        return OUTSIDE
    parts = set(shown)
    if STATISTICS in parts and len(parts) > 1:  # a hook that is called anyway may bring the others along
        parts = parts - {STATISTICS} | {CALLED, LIVE}
    return " ".join(sorted(parts))


class Place(Tallied):
    """A module as compiled code knows it."""

    token: torch.Tensor  # stands for it in graphs
    hear: Callable[[torch.nn.Module | None, Any, Any, Any], Any]  # tells its hooks that it ran

    @property
    def module(self) -> torch.nn.Module | None:
        """The module itself; None when it is gone."""
        raise NotImplementedError


# ---- in the graph ----------------------------------------------------------------------------------------------------


def _show(tensors: list[torch.Tensor], structure: str, token: torch.Tensor) -> None:
    """Show the tensors of one module call to its hooks, each time the graph runs."""
    place = holder_of(token)
    if place is not None:
        with lending():
            place.hear(place.module, *rebuild(structure, tensors))


heard = operator("heard(Tensor[] tensors, str structure, Tensor(a!) token) -> ()", _show)


def enter_graph(place: Place, wants: str, title: str, inputs: Any, kwargs: Any, output: Any) -> bool:
    """Have the hooks of a module called by the graph that is being traced; False when they need to be outside."""
    if wants == NOTHING:
        return True
    if wants == OUTSIDE:
        return False
    if wants.startswith(STATISTICS):
        if adds_up(place, wants, title, output):
            return True
        wants = LIVE
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

_set_aside = 0  # blocks in which models run uncompiled, in all threads
_stance: Any = None  # how to change it back
_stance_lock = threading.Lock()
_waiting: list[weakref.WeakMethod[Callable[[], None]]] = []  # for the end of these blocks


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
    if not is_loaded():
        yield
        return
    _put_aside(1)
    try:
        yield
    finally:
        _put_aside(-1)
        _tell_who_waits()


def when_back(call: Callable[[], None]) -> None:
    """Have a method called when models run compiled again, which they do not now."""
    once = weakref.WeakMethod(call)
    if once not in _waiting:
        _waiting.append(once)


def _tell_who_waits() -> None:
    if not _set_aside:
        waiting, _waiting[:] = list(_waiting), []
        for call in filter(None, (once() for once in waiting)):
            call()


def _put_aside(by: int) -> None:
    """Only the first of several blocks changes the stance and only the last changes it back, whatever their threads."""
    global _set_aside, _stance
    with _stance_lock:
        if not _set_aside:
            _stance = torch.compiler.set_stance("force_eager")
        _set_aside += by
        if not _set_aside and _stance is not None:
            _stance.__exit__(None, None, None)


def never_a_frame_of_its_own(function: Callable[..., Any]) -> None:
    """Let Dynamo follow calls of a function into its code, but never compile it, or what it calls, for itself."""
    code: CodeType = function.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
