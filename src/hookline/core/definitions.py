"""Tell whether a class or function was defined again, as in a notebook whose cell is run a second time."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any


def is_redefinition(new: Any, old: Any) -> bool:
    """Return whether a class or function is `old`, defined again.

    It then has the same module and qualified name, and code that was compiled again. Two functions that a factory
    returns, or two passes of a loop, share their code: these are two definitions.
    """
    if isinstance(new, type) is not isinstance(old, type) or _place(new) != _place(old) or None in _place(new):
        return False
    new_code, old_code = _code(new), _code(old)
    return bool(new_code and old_code) and new_code.isdisjoint(old_code)


def _place(definition: Any) -> tuple[Any, Any]:
    return getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)


def _code(definition: Any) -> set[int]:
    """Return the identities of the code objects that a definition consists of; equal code compiled twice has two."""
    bodies = vars(definition).values() if isinstance(definition, type) else [definition]
    found: set[int] = set()
    for body in bodies:
        code = getattr(inspect.unwrap(getattr(body, "__func__", body)), "__code__", None)
        # A class may hold functions that were defined elsewhere, and those that a dataclass generates.
        if isinstance(code, CodeType) and code.co_qualname.startswith(definition.__qualname__):
            found.add(id(code))
    return found
