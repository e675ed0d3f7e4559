"""Operators of ours in compiled graphs: how they are made, and how they know whom they are for.

A graph gets tensors and constants, and a constant would make a graph of its own for every module. So whoever is
reached from a graph is told by a tensor on the CPU, its token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tokens: list[torch.Tensor] = []  # those that nobody has; making one costs more than attaching a torch hook
_made = 0


def take_token(holder: Any) -> torch.Tensor:
    """A tensor that stands for somebody in compiled code until it is given back."""
    global _made
    try:
        token = _tokens.pop()
    except IndexError:
        _made += 1
        token = torch.tensor(_made, device="cpu")
    _holders[int(token)] = holder
    return token


def give_back(token: torch.Tensor) -> None:
    """The holder is no more; compiled code that still has the token reaches nobody."""
    _holders.pop(int(token), None)
    _tokens.append(token)


def holder_of(token: torch.Tensor) -> Any:
    """Whom a token stands for; None when it was given back."""
    return _holders.get(int(token))


# Not by `torch.library.custom_op`, whose layers of Python for gradients and aliases cost more than the hook.
_library = torch.library.Library("hookline", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(schema: str, call: Callable[..., None], tag: torch.Tag = torch.Tag.cudagraph_unsafe) -> Any:
    """An operator that calls Python each time the graph runs, which by its tag a CUDA graph could not repeat.

    It returns nothing and would be removed as dead code, so its schema must say that it writes into something.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, _nothing, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.hookline, name).default


def _nothing(*_: Any) -> None:
    """Tensors without values are nobody's concern."""
