"""What a reference (``${env:NAME}``) stands for is text; where a parameter takes numbers, it is read as a number."""

from __future__ import annotations

import inspect
from typing import Any

_LISTS = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection"}
_READABLE = {"bool", "int", "float", *_LISTS}
_TEXTS = {"str", "Any", "Literal", "object", "Path", "PathLike"}  # what may be meant as text is left as it is


def as_expected(value: Any, parameter: inspect.Parameter) -> Any:
    """A value that knows how to be read (`read()`), as the parameter takes it; any other as it is.

    Raises ValueError, with what was expected, where the parameter takes no text and the value is nothing else.
    """
    if isinstance(value, (list, tuple)) and any(map(_can_be_read, value)):
        return _as_elements(value, parameter)
    if not _can_be_read(value):
        return value
    kinds = expected_kinds(parameter)
    if not kinds & _READABLE or kinds & _TEXTS:
        return value
    plain = value.read()
    if _kinds_of(plain) & kinds:
        return plain
    if kinds & _LISTS or parameter.annotation is parameter.empty:
        return value  # a list of texts perhaps, of which one alone is often taken, too; or a default is all we know
    raise ValueError(f"expected {written_kind(parameter)}")


def _as_elements(values: Any, parameter: inspect.Parameter) -> list[Any]:
    """The same for each element, where the annotation says what these are, or all others are numbers."""
    others = [one for one in values if not _can_be_read(one)]
    kinds = _kinds_inside(written_kind(parameter))
    if not kinds and others and all(map(_kinds_of, others)):
        kinds = {"bool", "int", "float"}
    if not kinds & _READABLE or kinds & _TEXTS:
        return list(values)
    read = [one.read() if _can_be_read(one) else one for one in values]
    if not all(_kinds_of(new) & kinds for new, one in zip(read, values, strict=True) if _can_be_read(one)):
        raise ValueError(f"expected {written_kind(parameter) or 'numbers'}")
    return read


def _can_be_read(value: Any) -> bool:
    return isinstance(value, str) and hasattr(value, "read")


def written_kind(parameter: inspect.Parameter) -> str:
    """A parameter's annotation as it is written; without one, the type of its default."""
    if parameter.annotation is parameter.empty:
        return "" if parameter.default is parameter.empty else type(parameter.default).__name__
    given = parameter.annotation
    return given if isinstance(given, str) else inspect.formatannotation(given)


def expected_kinds(parameter: inspect.Parameter) -> set[str]:
    """The names of the types that a parameter takes: 'float' and 'None' of `float | None`, 'list' of `list[int]`."""
    if parameter.annotation is parameter.empty and type(parameter.default) in (int, float):
        return {"int", "float"}  # who writes `rate=1` takes 0.5 as well
    return _names(written_kind(parameter))


def _names(written: str) -> set[str]:
    """Unions are taken apart; of a type with others in brackets, the outer one counts."""
    parts = _split(written, "|")
    if len(parts) > 1:
        return set[str]().union(*map(_names, parts))
    head, _, inner = written.strip().removesuffix("]").partition("[")
    outer = head.rpartition(".")[2]
    if outer in ("Optional", "Union"):
        return set[str]().union(*map(_names, _split(inner, ",")), ["None"] if outer == "Optional" else [])
    return {outer} - {""}


def _kinds_inside(written: str) -> set[str]:
    """The names of the types in the brackets of a list: 'int' of `Iterable[int]`, 'float' of `list[float] | None`."""
    found: set[str] = set()
    for part in _split(written, "|"):
        head, _, inner = part.strip().removesuffix("]").partition("[")
        outer = head.rpartition(".")[2]
        read = _kinds_inside if outer in ("Optional", "Union") else _names if outer in _LISTS else None
        if read is not None:
            found = found.union(*map(read, _split(inner, ",")))
    return found - {"..."}


def _split(written: str, mark: str) -> list[str]:
    """The pieces between marks that stand in no brackets."""
    parts, depth = [""], 0
    for letter in written:
        depth += (letter == "[") - (letter == "]")
        parts = [*parts, ""] if letter == mark and not depth else [*parts[:-1], parts[-1] + letter]
    return parts


def _kinds_of(plain: Any) -> set[str]:
    """The types as which a value that was read may pass."""
    if isinstance(plain, list):
        return _LISTS if all(_kinds_of(one) for one in plain) else set()
    fits = {bool: {"bool"}, int: {"int", "float"}, float: {"float"}, type(None): {"None"}}
    return fits.get(type(plain), set())
