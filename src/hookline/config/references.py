"""`${env:NAME}` in a configuration: read when the run is built, and written down as the reference, never the value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from hookline.config.plain_values import plain_copy
from hookline.config.yaml_text import read_yaml
from hookline.errors import SHORTEST_HIDDEN, ConfigError, hidden

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_ENVIRONMENT = "env:"
_references: dict[str, str] = {}  # of the values that this process has read


class Resolved(str):
    """A string that came from a reference; the record writes the reference in its place."""

    __slots__ = ("reference",)

    reference: str

    def __new__(cls, text: str, reference: str) -> Resolved:
        made = super().__new__(cls, text)
        made.reference = reference
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copies keep the reference
        return str.__str__(self), self.reference

    def read(self) -> Any:
        """What YAML reads in it, if the reference is all that was written: a number, say. Itself, if that is text.

        An empty text stays one: a variable that was set to nothing is a slip more often than a null.
        """
        if not self.strip() or not _REFERENCE.fullmatch(self.reference):
            return self
        try:
            plain = plain_copy({"value": read_yaml(str.__str__(self), self.reference)}, self.reference)["value"]
        except ConfigError:
            return self
        return self if isinstance(plain, str) else plain


def resolve_references(tree: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of a config in which every reference is replaced by what it stands for.

    >>> resolve_references({"url": "${env:HOST}/x"}, {"HOST": "example.org"})
    {'url': 'example.org/x'}
    """
    variables = os.environ if environment is None else environment
    return _each_string(tree, "", lambda text, path: _resolve(text, path, variables))


def without_values(text: str) -> str:
    """A text in which what references stood for is replaced by them, wherever somebody has quoted it."""
    return hidden(text, _references)


def restore_references(resolved: Any, written: Any) -> Any:
    """A copy of `resolved` whose texts know the references of `written` that they came from."""
    if isinstance(written, str) and _REFERENCE.search(written):
        return Resolved(resolved, written) if isinstance(resolved, str) else written
    if isinstance(resolved, Mapping) and isinstance(written, Mapping):
        return {key: restore_references(value, written.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list | tuple) and isinstance(written, list | tuple) and len(resolved) == len(written):
        return [restore_references(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved


def _each_string(tree: Any, path: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(tree, str):
        return change(tree, path)
    if isinstance(tree, Mapping):
        return {key: _each_string(value, f"{path}.{key}".lstrip("."), change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_each_string(value, f"{path}.{index}".lstrip("."), change) for index, value in enumerate(tree)]
    return tree


def _resolve(text: str, path: str, variables: Mapping[str, str]) -> str:
    if "${" in _REFERENCE.sub("", text):
        raise ConfigError(path, "'${' begins a reference that does not end, or holds another; write ${env:NAME}")
    if not _REFERENCE.search(text):
        return text
    return Resolved(_REFERENCE.sub(lambda match: _value(match[1], path, variables), text), text)


def _value(inner: str, path: str, variables: Mapping[str, str]) -> str:
    if not inner.startswith(_ENVIRONMENT):
        raise ConfigError(path, f"${{{inner}}} is no reference; write ${{env:NAME}} for an environment variable")
    name = inner.removeprefix(_ENVIRONMENT)
    if name not in variables:
        close = get_close_matches(name, variables, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(path, f"the environment variable {name!r} is not set{hint}")
    if len(variables[name]) >= SHORTEST_HIDDEN:
        _references.setdefault(variables[name], f"${{{inner}}}")
    return variables[name]
