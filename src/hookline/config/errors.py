"""Turn pydantic's validation errors into one `ConfigError`: the dotted path, the bad value and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hookline.errors import ConfigError, got, nearest

Model = TypeVar("Model", bound=type)
Path = tuple[str, ...]
FindKeys = Callable[[Path], Iterable[str]]  # from the path of a mapping to the keys it may have

_PATHS_SHOWN = 5
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_NOT_A_MAPPING = ("model_type", "model_attributes_type", "dataclass_type", "dict_type")


def raises_config_error(
    root: Callable[[Path], str], keys: FindKeys, when_missing: str = ""
) -> Callable[[Model], Model]:
    """Class decorator: raise a ConfigError when the class is constructed with wrong values.

    It wraps the finished class, so that pydantic still builds it directly where it is a field of another one, and the
    outermost class reports the whole path.

    Args:
        root: Returns the prefix of a path, such as "trainer.".
        keys: Returns the valid keys of the mapping at a path.
        when_missing: A hint for messages about missing top-level keys.
    """

    def decorate(cls: Model) -> Model:
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
    error: ValidationError, given: Any, root: Callable[[Path], str], keys: FindKeys, when_missing: str = ""
) -> ConfigError:
    """Describe the most likely cause of a validation error, and list the paths of the other problems.

    A misspelt key comes first, because it may be what is missing elsewhere; keys missing from one mapping are one
    problem. The arguments are those of `raises_config_error`.
    """
    found: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path(detail, given), []).append(detail)
    path, details = min(found.items(), key=lambda item: item[1][0]["type"] not in _UNKNOWN)
    where, problem, covered = path, _problem(path, details, keys), [path]
    absent = [other for other in found if found[other][0]["type"] in _MISSING]
    siblings = [other for other in absent if other[:-1] == path[:-1]]
    if path in absent and len(siblings) > 1:
        *most, last = [sibling[-1] for sibling in siblings]
        where, problem, covered = path[:-1], f"{', '.join(most)} and {last} are missing", siblings
    for what in ("missing", "wrong"):
        paths = [other for other in found if other not in covered and (other in absent) == (what == "missing")]
        if paths:
            more = f" and {len(paths) - _PATHS_SHOWN} more" if len(paths) > _PATHS_SHOWN else ""
            shown = ", ".join(root(other) + ".".join(other) for other in paths[:_PATHS_SHOWN])
            problem += f" (also {what}: {shown}{more})"
    if len(path) == 1 and path in absent:
        problem += when_missing
    return ConfigError((root(path) + ".".join(where)).rstrip("."), problem)


def _path(detail: ErrorDetails, given: Any) -> Path:
    """Return the path of an error in the given values, without the union alternatives that pydantic adds to it."""
    path: list[str] = []
    for part in detail["loc"]:
        if detail["type"] in _MISSING and part == detail["loc"][-1]:
            return (*path, str(part))
        is_key = isinstance(given, Mapping) and part in given
        is_index = isinstance(given, Sequence) and isinstance(part, int) and part < len(given)
        if not is_key and not is_index:
            break
        path.append(str(part))
        given = given[part]
    return tuple(path)


def _problem(path: Path, details: list[ErrorDetails], keys: FindKeys) -> str:
    first = details[0]
    if first["type"] in _UNKNOWN:
        return f"unknown key; {_right_key(path[:-1], path[-1], keys)}"
    if first["type"] in _MISSING:
        return "is missing"
    expected = " or ".join(dict.fromkeys(_expectation(detail) for detail in details))
    return f"expected {expected}, {got(first['input'])}"


def _right_key(above: Path, key: str, keys: FindKeys) -> str:
    """Name the place of a key that is one level too high or too low, or else the nearest valid key."""
    here = list(keys(above))
    for place in [(*above, inner) for inner in here] + ([above[:-1]] if above else []):
        if key in keys(place):
            return f"did you mean '{'.'.join((*place, key))}'?"
    return nearest(key, here, 40)


def _expectation(detail: ErrorDetails) -> str:
    """Shorten pydantic's message: 'Input should be a valid integer, unable to parse …' → 'a valid integer'."""
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        return message
    return "a mapping" if detail["type"] in _NOT_A_MAPPING else message.partition(",")[0]
