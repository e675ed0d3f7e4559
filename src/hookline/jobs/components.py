"""Parts that a config names: found, their parameters checked, and made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookline.errors import ConfigError, HooklineError, got, nearest, written
from hookline.registry.loading import OWN_PARTS, Gate, import_dotted
from hookline.registry.loading_references import as_expected
from hookline.registry.names import Names


@dataclass(frozen=True)
class Component:
    """A factory, and the parameters that the config gives it."""

    path: str  # where in the config: 'model', 'optimizer', …
    name: str
    factory: Callable[..., Any]
    parameters: Mapping[str, Any]

    def make(self, *first: Any, **offered: Any) -> Any:
        """Call the factory with `first`, its parameters, and those of `offered` that it has and the config left out."""
        known = _keyword_parameters(self.factory, len(first))
        if known is None:
            return self._call(first, dict(self.parameters))
        filled = {**{key: value for key, value in offered.items() if key in known}, **self.parameters}
        self._check(known, filled)
        return self._call(first, {**filled, **self.read()})

    def read(self) -> dict[str, Any]:
        """The config's parameters as the factory takes them: a reference may stand for a number."""
        known = _keyword_parameters(self.factory, 0) or {}
        return {key: self._read(value, known[key]) if key in known else value for key, value in self.parameters.items()}

    def _read(self, value: Any, parameter: inspect.Parameter) -> Any:
        try:
            return as_expected(value, parameter)
        except ValueError as error:
            place = f"{self.path}.{parameter.name}"
            raise ConfigError(place, f"{error}, {got(value)}") from None

    def _check(self, known: Mapping[str, inspect.Parameter], filled: Mapping[str, Any]) -> None:
        """Say which parameter is wrong before Python's own TypeError does."""
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
        names = [key for key, parameter in known.items() if _takes_one(parameter)]
        for key in filled:
            if key not in names and not open_ended:
                raise ConfigError(f"{self.path}.{key}", f"{self.name} has no such parameter; {nearest(key, names, 40)}")
        for key in names:
            if known[key].default is inspect.Parameter.empty and key not in filled:
                raise ConfigError(f"{self.path}.{key}", f"is missing; {self.name} needs it")

    def _call(self, first: tuple[Any, ...], parameters: dict[str, Any]) -> Any:
        try:
            return self.factory(*first, **parameters)
        except HooklineError as error:
            raise ConfigError(self.path, str(error)) from error
        except (RuntimeError, TypeError, ValueError) as error:  # what torch and Python say of a value they cannot use
            given = _listed({**parameters, **self.parameters})
            raise ConfigError(self.path, f"{self.name} cannot be made with {given}: {error}") from error


def check_name(name: str, names: Names, gate: Gate, path: str) -> None:
    """Refuse a name that is not registered and a dotted path that is not allowed, without importing anything."""
    if name in names:
        return
    if "." not in name:
        close = nearest(name, names.names(), 40)
        raise ConfigError(path, f"there is no {names.noun} named {name!r}; {close}; {OWN_PARTS}")
    gate.check(name, path)


def find_factory(name: str, names: Names, path: str) -> Callable[..., Any]:
    """The factory of a name that has been checked."""
    try:
        found: Callable[..., Any] = names.find(name) if name in names else import_dotted(name)
    except HooklineError as error:
        raise ConfigError(f"{path}.name", str(error)) from error
    return found


def _keyword_parameters(factory: Callable[..., Any], taken: int) -> dict[str, inspect.Parameter] | None:
    """What may be given by keyword once `taken` values are given by position; None when that cannot be read."""
    try:
        return dict(list(inspect.signature(factory).parameters.items())[taken:])
    except (TypeError, ValueError):
        return None


def _listed(parameters: Mapping[str, Any]) -> str:
    """Parameters for an error message; of a resolved reference, the reference."""
    return ", ".join(f"{key}={written(value)}" for key, value in parameters.items()) or "its defaults"


def _takes_one(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
