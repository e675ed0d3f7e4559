"""pydantic's report of what is wrong, as one `ConfigError`: the dotted path, the bad value and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hookline.errors import ConfigError, got, nearest

Checked = TypeVar("Checked", bound=type)
FindKeys = Callable[[tuple[str, ...]], Iterable[str]]  # from the path of a mapping to the keys it may have

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_PATHS_SHOWN = 5
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def raises_config_error(
    root: Callable[[tuple[str, ...]], str], keys: FindKeys, when_missing: str = ""
) -> Callable[[Checked], Checked]:
    """Class decorator: constructing the class with wrong values raises a ConfigError.

    Applied to the finished class, so that pydantic still builds it directly where it is a field of another one, and
    the outermost class reports the whole path. `when_missing` helps whoever left out one of its own keys.
    """

    def decorate(cls: Checked) -> Checked:
        construct = cls.__init__  # type: ignore[misc]  # the decorated class is what is constructed

        @wraps(construct)
        def checked_init(self: Any, *args: Any, **values: Any) -> None:
            try:
                construct(self, *args, **values)
            except ValidationError as error:
                raise config_error(error, values, root, keys, when_missing) from None

        cls.__init__ = checked_init  # type: ignore[misc]
        return cls

    return decorate


def config_error(
    error: ValidationError, given: Any, root: Callable[[tuple[str, ...]], str], keys: FindKeys, when_missing: str = ""
) -> ConfigError:
    """One thing that is wrong, and where the others are. `root` says what a path is prefixed with.

    A misspelt key comes first, for it may be what is missing elsewhere; keys missing from one mapping are one problem.
    """
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path(detail, given), []).append(detail)
    path, details = min(found.items(), key=lambda item: item[1][0]["type"] not in _UNKNOWN)
    where, problem, told = path, _problem(path, details, keys), [path]
    missing = [other for other in found if _is_missing(found[other]) and other[:-1] == path[:-1]]
    if path in missing and len(missing) > 1:
        where, problem, told = path[:-1], _missing_together(missing), missing
    others = {root(other) + ".".join(other): _is_missing(found[other]) for other in found if other not in told}
    problem += _also("missing", [place for place, absent in others.items() if absent])
    problem += _also("wrong", [place for place, absent in others.items() if not absent])
    if len(path) == 1 and path in missing:
        problem += when_missing
    return ConfigError((root(path) + ".".join(where)).rstrip("."), problem)


def _also(what: str, paths: list[str]) -> str:
    more = f" and {len(paths) - _PATHS_SHOWN} more" if len(paths) > _PATHS_SHOWN else ""
    return f" (also {what}: {', '.join(paths[:_PATHS_SHOWN])}{more})" if paths else ""


def _is_missing(details: list[ErrorDetails]) -> bool:
    return details[0]["type"] in _MISSING


def _missing_together(paths: list[tuple[str, ...]]) -> str:
    """'model, data and optimizer are missing'."""
    *most, last = [path[-1] for path in paths]
    return f"{', '.join(most)} and {last} are missing"


def _path(detail: ErrorDetails, given: Any) -> tuple[str, ...]:
    """Where in the given values it went wrong; pydantic also names the alternatives it tried, which are no keys."""
    path: list[str] = []
    for part in detail["loc"]:
        if detail["type"] in _MISSING and part == detail["loc"][-1]:
            return (*path, str(part))
        if not _holds(given, part):
            break
        path.append(str(part))
        given = given[part]
    return tuple(path)


def _holds(given: Any, part: Any) -> bool:
    if isinstance(given, Mapping):
        return part in given
    return isinstance(given, Sequence) and isinstance(part, int) and part < len(given)


def _problem(path: tuple[str, ...], details: list[ErrorDetails], keys: FindKeys) -> str:
    first = details[0]
    if first["type"] in _UNKNOWN:
        return f"unknown key; {_right_key(path[:-1], path[-1], keys)}"
    if _is_missing(details):
        return "is missing"
    expected = " or ".join(dict.fromkeys(_expectation(detail) for detail in details))
    return f"expected {expected}, {got(first['input'])}"


def _right_key(above: tuple[str, ...], key: str, keys: FindKeys) -> str:
    """Where the key belongs, if it only stands a level too high or too low; else the nearest that may stand here."""
    here = list(keys(above))
    around = [(*above, inner) for inner in here] + ([above[:-1]] if above else [])
    for place in around:
        if key in keys(place):
            return f"did you mean '{'.'.join((*place, key))}'?"
    return nearest(key, here, 40)


def _expectation(detail: ErrorDetails) -> str:
    """'Input should be a valid integer, unable to parse …' → 'a valid integer'."""
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        return message
    if detail["type"] in ("model_type", "model_attributes_type", "dataclass_type", "dict_type"):
        return "a mapping"
    return message.partition(",")[0]
