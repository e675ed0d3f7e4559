"""The structure of a nested value as text, with the tensors beside it: operators of a graph take tensors and constants.

These functions are traced by Dynamo, so they are written in what it follows without a graph break.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

CONSTANTS = (bool, str, type(None))  # an int may be a size that varies: as text it would be fixed


def flatten(value: Any, tensors: list[torch.Tensor], exact: bool) -> str | None:
    """The value as a Python literal with the place in `tensors` where a tensor was; None when it cannot be told.

    Told are tuples, lists and dicts of tensors and simple constants. When it need not be `exact`, their subclasses
    become plain ones and what is unknown becomes None.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return str(len(tensors) - 1)
    if isinstance(value, CONSTANTS):
        return repr(value)
    if exact and type(value) not in (tuple, list, dict):
        return None
    if isinstance(value, dict):
        return _enclosed("{", [(f"{key!r}: ", item) for key, item in value.items()], "}", tensors, exact)
    if isinstance(value, (tuple, list)):
        opening, closing = ("(", ")") if isinstance(value, tuple) else ("[", "]")
        return _enclosed(opening, [("", item) for item in value], closing, tensors, exact)
    return "None"


def _enclosed(
    opening: str, items: Sequence[tuple[str, Any]], closing: str, tensors: list[torch.Tensor], exact: bool
) -> str | None:
    text = opening
    for key, item in items:
        told = flatten(item, tensors, exact)
        if told is None:
            return None
        text += f"{key}{told}, "
    return text + closing


def rebuild(structure: str, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `flatten` told."""
    return _filled(_parsed(structure), tensors)


@lru_cache(maxsize=1024)
def _parsed(structure: str) -> Any:
    return ast.literal_eval(structure)


def _filled(parsed: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(parsed) is int:
        return tensors[parsed]
    if isinstance(parsed, dict):
        return {key: _filled(item, tensors) for key, item in parsed.items()}
    if isinstance(parsed, (tuple, list)):
        return type(parsed)(_filled(item, tensors) for item in parsed)
    return parsed
