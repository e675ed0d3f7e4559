"""Custom operators in compiled graphs: how they are defined, and how values and objects reach them.

A graph passes tensors and constants. A nested value is passed as its tensors and a string that describes its
structure. An object is identified by a tensor on the CPU, because a constant would cause a graph for every module.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from hookline._console import logger

_warned = False


def warn_once(missing: object) -> None:
    """Warn that this version of torch lacks a name, the first time in a process."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "torch %s lacks features that compiled code with forward hooks uses (%s): graphs call the hooks, "
            "statistics are computed module by module, and hooks added after compilation may not be called",
            torch.__version__,
            missing,
        )


# ---- operators -------------------------------------------------------------------------------------------------------

# Not `torch.library.custom_op`, whose layers of Python for gradients and aliases cost more than the hook.
_library = torch.library.Library("hookline", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(schema: str, call: Callable[..., None], tag: str = "cudagraph_unsafe") -> Any:
    """Define an operator that calls Python each time its graph runs.

    Args:
        schema: Its name and arguments. It returns nothing and would be removed as dead code, so the schema must declare
            that it writes into one of its arguments.
        call: What it calls.
        tag: A `torch.Tag`; the default says that a CUDA graph cannot replay the operator.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    tags = [getattr(torch.Tag, tag)] if hasattr(torch.Tag, tag) else []
    _library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _library.impl(name, call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, lambda *_: None, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.hookline, name).default


# ---- objects ---------------------------------------------------------------------------------------------------------

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)  # No number is used twice: a graph may have kept what it read through an old one.


def take_id(target: Any) -> torch.Tensor:
    """Return a tensor that identifies an object in compiled code until it is returned."""
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor(number, device="cpu")


def give_back_id(graph_id: torch.Tensor | str) -> None:
    """Make a tensor, or its number as text, identify nothing; compiled code may still use it."""
    _objects.pop(int(graph_id), None)


def object_of(graph_id: torch.Tensor | str) -> Any:
    """Return the object that a tensor, or its number as text, identifies; None if it was returned or is gone."""
    return _objects.get(int(graph_id))


# ---- nested values: traced by Dynamo, so written in what it follows without a graph break ----------------------------

CONSTANTS = (bool, str, type(None))  # An int may be a size that varies; as text it would be fixed.


def flatten(value: Any, tensors: list[torch.Tensor], exact: bool) -> str | None:
    """Append the tensors of a value to a list and describe its structure.

    Args:
        value: Tuples, lists and dicts of tensors and simple constants.
        tensors: Gets the value's tensors, detached.
        exact: If False, subclasses become plain containers and unknown objects None.

    Returns:
        A Python literal with indices into `tensors`; None if the value cannot be described exactly.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return str(len(tensors) - 1)
    if isinstance(value, CONSTANTS):
        return repr(value)
    if exact and type(value) not in (tuple, list, dict):
        return None
    if isinstance(value, dict):
        opening, items, closing = "{", [(f"{key!r}: ", item) for key, item in value.items()], "}"
    elif isinstance(value, (tuple, list)):
        opening, closing = ("(", ")") if isinstance(value, tuple) else ("[", "]")
        items = [("", item) for item in value]
    else:
        return "None"
    text = opening
    for key, item in items:
        described = flatten(item, tensors, exact)
        if described is None:
            return None
        text += f"{key}{described}, "
    return text + closing


def rebuild(structure: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `flatten` described."""
    return _fill(_parse(structure), tensors)


@lru_cache(maxsize=1024)
def _parse(structure: str) -> Any:
    return ast.literal_eval(structure)


def _fill(parsed: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(parsed) is int:
        return tensors[parsed]
    if isinstance(parsed, dict):
        return {key: _fill(item, tensors) for key, item in parsed.items()}
    if isinstance(parsed, (tuple, list)):
        return type(parsed)(_fill(item, tensors) for item in parsed)
    return parsed
