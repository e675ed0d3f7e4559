"""Tell whether a class or function was defined again, as in a notebook whose cell is run a second time."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any


def is_redefinition(new: Any, old: Any) -> bool:
    """Return whether a class or function is `old`, defined again.

    It then has the same module and qualified name, and code that was compiled again. Two functions that a factory
    returns, or two passes of a loop, share their code: these are two definitions. So are two at different lines of one
    file. An edited cell of a notebook is another file; there, `_` does not name the same function, and a lambda never
    has a name.
    """
    if isinstance(new, type) is not isinstance(old, type) or _place(new) != _place(old) or None in _place(new):
        return False
    if new.__name__ == "<lambda>":
        return False
    new_code, old_code = _code(new), _code(old)
    if not new_code or not old_code or not {id(code) for code in new_code}.isdisjoint(map(id, old_code)):
        return False
    (new_file, new_line), (old_file, old_line) = _first_line(new_code), _first_line(old_code)
    return new_line == old_line if new_file == old_file else new.__name__ != "_"


def _place(definition: Any) -> tuple[Any, Any]:
    return getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)


def _code(definition: Any) -> list[CodeType]:
    """Return the code objects that a definition consists of."""
    bodies = vars(definition).values() if isinstance(definition, type) else [definition]
    found: list[CodeType] = []
    for body in bodies:
        code = getattr(inspect.unwrap(getattr(body, "__func__", body)), "__code__", None)
        # A class may hold functions that were defined elsewhere, and those that a dataclass generates.
        if isinstance(code, CodeType) and code.co_qualname.startswith(definition.__qualname__):
            found.append(code)
    return found


def _first_line(codes: list[CodeType]) -> tuple[str, int]:
    return min((code.co_filename, code.co_firstlineno) for code in codes)
