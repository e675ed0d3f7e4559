"""Construct a config's component: import it if that is allowed, check its parameters, and call it.

Parameters are checked against the factory's signature: an unknown or missing one raises a `ConfigError`. Only string
values are checked against the annotation. A string where only numbers are valid would fail much later, in the middle of
a run, and the value of a reference (``${env:NAME}``) is a string that may stand for a number. All other values are left
to the factory, which often accepts more than its annotations say.
"""

from __future__ import annotations

import inspect
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, get_args

from hookline._console import logger
from hookline._fs import current_directory
from hookline._parameters import ParameterError, alternatives, names, parameters_of, type_adapter, type_hint
from hookline._words import nearest
from hookline.core.base import is_built_in
from hookline.core.plugins import DATA, HOOKS, LOSSES, MODELS, OPTIMIZERS, SCHEDULERS, PluginTable
from hookline.errors import ConfigError, HooklineError, RegistrationError, got, written

# The components of a run, in the order in which they are created: the key of the config, and the names valid there.
COMPONENTS = {"data": DATA, "model": MODELS, "optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "loss": LOSSES}
OWN_CODE_HINT = "register your own first by importing its module (on the command line: --import MODULE)"


class ImportPolicy:
    """Decides which dotted paths may be imported: any path named in code, but only allowed prefixes in files."""

    def __init__(self, allow: Iterable[str] = (), from_file: bool = False) -> None:
        self.allow, self.from_file = names(allow, "allow"), from_file

    def check_name(self, name: str, table: PluginTable, path: str) -> None:
        """Raise a ConfigError unless a name is registered or a dotted path that may be imported; import nothing.

        `path` is the name's place in the config, for messages.
        """
        if name in table:
            return
        if "." not in name:
            raise ConfigError(path, f"{table.unknown(name)}; {OWN_CODE_HINT}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(path, f"{name!r} is not a dotted path")
        # An import runs code, so a file, which may come from elsewhere, reaches only what the user has allowed.
        if self.from_file and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in self.allow):
            raise ConfigError(
                path,
                f"{name!r} is not allowed: a config file names registered {table.plural}; to import from a package of "
                f"yours, allow it in code (allow=[…]) or on the command line (--allow {name.split('.')[0]})",
            )


def find_factory(name: str, table: PluginTable) -> Any:
    """Return the class or function that a registered name or a dotted path stands for.

    A dotted path, ``package.module.Class``, is imported. Its target must be callable and defined under that package.
    """
    if name in table.built_in and (refused := table.refused(name)):
        logger.warning("%s", refused)
    if name in table or "." not in name:
        return table.find(name)
    module_name, _, attribute = name.rpartition(".")
    try:
        module = import_module(module_name)
    except ImportError as error:
        hint = search_path_hint(error, module_name)
        raise RegistrationError(f"{name!r}: cannot import {module_name!r} ({error}){hint}") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise RegistrationError(f"{name!r}: {module_name} has no {attribute!r}; {nearest(attribute, vars(module))}")
    # A prefix allows a package, but not what its modules import, such as subprocess.run.
    home = getattr(factory, "__module__", None) or ""  # None for bound methods of C objects such as random.random
    if not callable(factory) or home.split(".")[0] != name.split(".")[0]:
        kind = type(factory).__name__
        raise RegistrationError(f"{name!r} is not a class or function of that package (it is {kind} from {home!r})")
    return factory


def search_path_hint(error: Exception, module: str) -> str:
    """Say where Python searches, if this module was not found; return "" if it failed while being imported."""
    if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
        return ""
    here = current_directory()
    return f"; a `hookline` command looks in the current directory ({here}), then among installed packages"


@dataclass(frozen=True)
class Factory:
    """A class or function that a config names, and its parameters in the config."""

    path: str  # the place in the config: 'model', 'optimizer', …; "" if the caller adds it to messages
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    label: str = ""  # the function in messages about single parameters; its own name by default
    options: Sequence[str] = ()  # keys that are valid besides the parameters, for the choices in messages

    def make(self, *positional: Any, **defaults: Any) -> Any:
        """Check the parameters and call the function.

        Args:
            *positional: Values to pass by position.
            **defaults: Values for parameters that the config leaves out; ignored if the function has no such parameter.

        Raises:
            ConfigError: If a parameter is unknown, missing or of the wrong type, or the call fails.
        """
        signature = parameters_of(self.function) or {}
        filled = {key: value for key, value in defaults.items() if key in signature}
        checked = self.check(skip=[*signature][: len(positional)], filled=filled)
        try:
            return self.function(*positional, **{**filled, **checked})
        except (HooklineError, RuntimeError, TypeError, ValueError) as error:  # torch and Python raise these, too
            if self.path and isinstance(error, HooklineError):  # already says what is wrong
                raise ConfigError(self.path, str(error)) from error
            if isinstance(error, ParameterError):  # names the hook and the parameter
                reference = getattr(self.parameters.get(error.path.rpartition(".")[2]), "reference", "")
                source = f", from {reference}" if reference and reference not in error.problem else ""
                raise ParameterError(error.path, f"{error.problem}{source}") from None
            if isinstance(error, RegistrationError):  # a hook whose parameters are secret raises this
                raise
            given = {**filled, **self.parameters}.items()
            shown = ", ".join(f"{key}={written(value)}" for key, value in given) or "its defaults"
            raise ConfigError(self.path, f"{self.name} cannot be created with {shown}: {error}") from error

    def check(self, skip: Collection[str] = (), filled: Collection[str] = ()) -> dict[str, Any]:
        """Check the parameters by name and type, and return them as the function takes them.

        Args:
            skip: Parameters of the function that a config cannot give.
            filled: Parameters that get a value from elsewhere.

        Raises:
            ConfigError: If a parameter is unknown, missing or of the wrong type.
        """
        signature = parameters_of(self.function)
        if signature is None:
            return dict(self.parameters)
        label, above = self.label or self.name, f"{self.path}." if self.path else ""
        known = {key: parameter for key, parameter in signature.items() if key not in skip}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [key for key, parameter in known.items() if parameter.kind in by_name]
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        for key in self.parameters:
            if key not in named and not is_open:
                is_listed = self.name in HOOKS and HOOKS.origin(self.name) != "registered"
                see = f"`hookline hooks {self.name}`" if is_listed else ""
                problem = f"{label} has no parameter {key!r}; {nearest(key, [*named, *self.options], see)}"
                raise ConfigError(above and above + key, problem)
        for key in named:
            if known[key].default is known[key].empty and key not in self.parameters and key not in filled:
                raise ConfigError(above and above + key, f"{label} needs the parameter {key!r}")
        return {
            key: read_value(value, known[key], self.function, f"{self.path or label}.{key}") if key in named else value
            for key, value in self.parameters.items()
        }

    def read(self, key: str) -> Any:
        """Return one of the parameters, as a number if it is a reference to one; None if the config leaves it out."""
        parameter, value = (parameters_of(self.function) or {}).get(key), self.parameters.get(key)
        return value if parameter is None else read_value(value, parameter, self.function, f"{self.path}.{key}")


def read_value(value: Any, parameter: inspect.Parameter, function: Callable[..., Any], path: str) -> Any:
    """Convert a value for a parameter: a reference becomes the number it stands for where strings are not valid.

    Args:
        value: The value in the config. Only strings, and lists that contain references, are checked.
        parameter: The parameter that takes it.
        function: The function that has the parameter; its module resolves annotations.
        path: The place in the config, for messages.

    Raises:
        ConfigError: If the parameter takes numbers only, and the value is something else.
    """
    listed = isinstance(value, (list, tuple)) and any(map(_is_reference, value))
    if not listed and not isinstance(value, str):
        return value
    hint = type_hint(parameter, function)
    if (hint is Any and not listed) or str in (hint, *get_args(hint)):
        return value  # the usual cases, without pydantic
    accepts = partial(_accepts, hint)
    plain = [_read(item) for item in value] if listed else _read(value)
    if accepts(value):
        # Where any list is valid, a reference among numbers stands for a number.
        others = [item for item in value if not _is_reference(item)] if listed and accepts([{}]) else []
        return plain if others and _is_numeric(others) and _is_numeric(plain) else value
    if _is_numeric(plain) and accepts(plain):
        return plain
    # A parameter that takes a list often also takes a single string, and a default says little about the type.
    if listed:
        takes_numbers = any(accepts([number] * len(value)) for number in (1, 0.5, True))
    else:
        takes_numbers = not {int, float, bool}.isdisjoint(alternatives(hint)) and not accepts([])
    if takes_numbers and parameter.annotation is not parameter.empty and not is_built_in(function):
        annotation = parameter.annotation
        expected = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        raise ConfigError(path, f"expected {expected}, {got(value)}")
    return value


def _accepts(hint: Any, value: Any) -> bool:
    """Return whether a type accepts a value, as pydantic validates JSON in strict mode; True if it cannot tell.

    In JSON mode, lists are valid where tuples are, and strings where paths are, as in a config.
    """
    from pydantic import ValidationError  # imported late: most hooks are created without strings to check

    try:
        # Without strict mode, pydantic would take the string "12" for the number 12.
        validated = type_adapter(hint).validate_json(json.dumps(value), strict=True)
        if isinstance(validated, Iterator):  # an Iterable is validated while it is consumed
            deque(validated, maxlen=0)
    except ValidationError:
        return False
    except Exception:  # a type that pydantic does not support, or an object that was put into a config in code
        return True
    return True


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and hasattr(value, "read")


def _read(value: Any) -> Any:
    return value.read() if _is_reference(value) else value


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return value is None or isinstance(value, (bool, int, float))
