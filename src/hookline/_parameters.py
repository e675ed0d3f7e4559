"""Check parameters: against annotations (`Annotated[int, Ge(0)]` is an integer of at least 0), names and choices.

The base class of hooks checks the constructors of built-in hooks this way, and `hookline schema` has the same bounds.
Other constructors call `check`, `names` and `one_of`.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen

from hookline._words import nearest
from hookline.errors import ConfigError, got, written

if TYPE_CHECKING:
    from pydantic import TypeAdapter

INFINITE = "infinity is valid"
"""Marks a float for which infinity is valid, too."""
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), INFINITE]
FinitePositive = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Percentage = Annotated[float, Ge(0), Le(100)]
NonEmptyStr = Annotated[str, MinLen(1)]
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # attributes there, functions of `operator`
MADE_FROM_FILE: ContextVar[bool] = ContextVar("MADE_FROM_FILE", default=False)
"""Whether the hook being created gets its parameters from a config file, which may come from someone else."""


class ParameterError(ConfigError):
    """A parameter is wrong; the message names it and, if it belongs to a hook, the hook."""


# ---- constructors --------------------------------------------------------------------------------------------------


def with_checks(cls: type) -> Callable[..., None]:
    """Return the constructor of a class, wrapped in a check of its arguments.

    Its signature has the parameters that ``**settings`` passes on to a base class, too; the base class checks them.

    Raises:
        TypeError: If a keyword is unknown; the message suggests the one that was probably meant.
        ParameterError: If a value does not fit its annotation.
    """
    init = cls.__init__  # type: ignore[misc]  # of this very class
    accepted = inspect.signature(init).parameters
    signature = inspect.Signature(_all_parameters(cls))
    known = list(signature.parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        for keyword in [name for name in keywords if name not in known]:
            raise TypeError(f"{type(self).__name__} has no parameter {keyword!r}; {nearest(keyword, known)}")
        try:
            given = signature.bind(self, *args, **keywords)
        except TypeError:  # an argument is missing, or there are too many
            init(self, *args, **keywords)  # raises Python's own message
            raise
        name = type(self).name
        label = name if isinstance(name, str) else type(self).__name__  # a user's class may make it a property
        for key in [key for key in given.arguments if key in known and key in accepted]:
            hint = type_hint(accepted[key], init, bounds=True)
            given.arguments[key] = check(given.arguments[key], hint, f"{label}.{key}")
        init(**given.arguments)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _all_parameters(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of a constructor, with those of the base class in the place of its ``**settings``.

    The base class is the nearest one that is not itself a hook: a tracker may be a variant of another tracker.
    """
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    if parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return parameters
    base = next(base for base in cls.__mro__[1:] if "__init__" in vars(base) and "built_in" not in vars(base))
    passed_on = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    names = [parameter.name for parameter in parameters]
    return [*parameters[:-1], *(parameter for name, parameter in passed_on.items() if name not in names)]


def check(value: Any, hint: Any, path: str) -> Any:
    """Check a value against an annotation, and return it with Python's own numbers, floats where annotated.

    Args:
        value: The value that was given.
        hint: The annotation. If `expected_value` has no words for it, the value is returned as it is.
        path: The parameter and its owner, for the message.

    Raises:
        ParameterError: If the value does not fit.
    """
    expected = expected_value(hint)
    if expected is None or (value is None and NoneType in alternatives(hint)):
        return value
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    kind = _kinds(hint)[-1 if is_list else 0]
    try:
        if is_list and (item_hint := _item_hint(kind)) is not None:
            return [check(item, item_hint, path) for item in value]  # a wrong item is named instead of the list
        return _fitting(value, *_parts(kind))
    except ParameterError:
        raise
    except Exception:  # it does not fit, or its own methods failed
        choices = _choices(kind)
        if choices and isinstance(value, str):
            raise ParameterError(path, f"invalid value {written(value)}; {nearest(value, choices)}") from None
        raise ParameterError(path, f"expected {expected}, {got(value)}") from None


def _fitting(value: Any, kind: Any, *bounds: Any) -> Any:
    """Return a value, a number as Python's own; raise an exception if it is not of a type, or not within its bounds."""
    if kind is bool:
        fits = isinstance(value, bool)
    elif kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            raise TypeError
        value = kind(value)
        is_valid = kind is int or INFINITE in bounds or math.isfinite(value)
        fits = is_valid and all(getattr(operator, key)(value, limit) for key, limit in _limits(bounds))
    else:
        fits = isinstance(value, str) and (value in _choices(kind) or (kind is str and value != ""))
    if not fits:
        raise ValueError
    return value


def expected_value(hint: Any) -> str | None:
    """Describe what an annotation takes; None if checking its values is left to the constructor.

    >>> expected_value(float | None), expected_value(list[bool]), expected_value(int | str)
    ('a finite number', None, None)
    """
    kinds = _kinds(hint)
    if len(kinds) == 2 and _item_hint(kinds[1]) == kinds[0]:
        single = expected_value(kinds[0])
        none = " ([] for none)" if _choices(kinds[0]) else ""
        return single and f"{single}, or a list of these{none}"
    if len(kinds) != 1:
        return None
    kind, *bounds = _parts(kinds[0])
    limits = [f"{_BOUNDS[key]} {limit:g}" for key, limit in _limits(bounds)]
    if kind is bool:
        return "true or false"
    if kind is int:
        return " ".join(["an integer", *(f"of {limit}" for limit in limits)])
    if kind is float:
        number = "a number" if INFINITE in bounds else "a finite number"
        return f"{number}, {' and '.join(limits)}" if limits else number
    if kind is str and bounds:
        return "a non-empty string"
    if choices := _choices(kind):
        return f"one of {', '.join(choices)}"
    item = _item_hint(kind)
    each = item and expected_value(item)
    return each and f"a list, each item {each}"


def _kinds(hint: Any) -> list[Any]:
    """Return the types of a union without None."""
    return [kind for kind in alternatives(hint) if kind is not NoneType]


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return a type and its bounds."""
    return (kind.__origin__, *kind.__metadata__) if get_origin(kind) is Annotated else (kind,)


def _limits(bounds: Iterable[Any]) -> list[tuple[str, float]]:
    return [(key, getattr(bound, key)) for key in _BOUNDS for bound in bounds if hasattr(bound, key)]


def _choices(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _item_hint(hint: Any) -> Any:
    """Return the type of the items if a type is a list or may be one; None otherwise."""
    return next((get_args(kind)[0] for kind in alternatives(hint) if get_origin(kind) is Sequence), None)


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """Check that a string is one of several choices."""
    if value not in choices:
        raise ConfigError(name, f"invalid value {value!r}; {nearest(str(value), choices)}")
    return str(value)


def names(value: Any, name: str) -> tuple[str, ...]:
    """Check several names; a single name may be passed without a list."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(name, f"expected a name or a list of names, {got(value)}")
    return items


# ---- annotations ---------------------------------------------------------------------------------------------------


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a class or function by name, or None if Python does not know them (some C functions)."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def type_hint(parameter: inspect.Parameter, function: Callable[..., Any], bounds: bool = False) -> Any:
    """Return the type of a parameter: its annotation or, without one, what its default suggests; `Any` if unknown.

    Args:
        parameter: The parameter.
        function: The function that has it; its module resolves the annotation.
        bounds: Whether to keep what `Annotated` says about valid values.
    """
    annotation = parameter.annotation
    if annotation is parameter.empty:
        numbers = int | float  # a default of 1 does not make 0.5 invalid
        kinds: dict[type, Any] = {int: numbers, float: numbers, bool: bool, list: list[numbers], tuple: list[numbers]}
        return kinds.get(type(parameter.default), Any)
    # A parameter of a class may be one of a base class.
    classes = reversed(function.__mro__) if isinstance(function, type) else ()
    owners = [cls.__init__ for cls in classes] or [function]  # type: ignore[misc]
    namespace: dict[str, Any] = {}
    for owner in owners:
        namespace |= getattr(inspect.unwrap(owner), "__globals__", {})
    # get_type_hints resolves all annotations of an object, or fails; this one must not depend on the others.
    holder = SimpleNamespace(__annotations__={"type": annotation})
    try:
        names = _Namespace(vars(builtins) | namespace)
        return get_type_hints(holder, namespace, names, include_extras=bounds)["type"]
    except Exception:  # an annotation can be any string
        return Any


class _Namespace(dict[str, Any]):
    """Resolves names that a module imports for type checkers only: as `typing` has them, or to a placeholder."""

    def __missing__(self, name: str) -> Any:
        return getattr(typing, name, _Unresolved)


class _UnresolvedMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Unresolved(metaclass=_UnresolvedMeta):
    """Stands for a type that cannot be resolved, and for its attributes; the rest of the annotation still counts."""


def type_adapter(hint: Any) -> TypeAdapter[Any]:
    """Return the adapter that validates values of a type and creates its JSON Schema.

    Raises an exception of pydantic if pydantic does not support the type.
    """
    from pydantic import ConfigDict, TypeAdapter  # late: it takes 0.2 s

    return TypeAdapter(_supported(hint), config=ConfigDict(arbitrary_types_allowed=True))


def _supported(hint: Any) -> Any:
    """Replace Collection, which pydantic does not know, with Sequence."""
    if get_origin(hint) is Collection:
        return Sequence[get_args(hint)]  # type: ignore[misc]
    kinds = alternatives(hint)
    return hint if kinds == (hint,) else Union[tuple(map(_supported, kinds))]  # noqa: UP007


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
