"""Resolve ``${env:NAME}`` in a config when the run is built; records and messages show the reference, not the value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hookline.config.values import plain_copy, read_yaml
from hookline.errors import ConfigError
from hookline.record.secrets import SHORTEST_SECRET, replace_secrets

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_ENVIRONMENT = "env:"
_references: dict[str, str] = {}  # value -> reference, for every value that this process has read


class Resolved(str):
    """The value of a reference; the record writes the reference in its place."""

    __slots__ = ("reference",)

    reference: str

    def __new__(cls, text: str, reference: str) -> Resolved:
        made = super().__new__(cls, text)
        made.reference = reference
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copies keep the reference
        return str.__str__(self), self.reference  # a plain str: it must not contain the object that is copied

    def read(self) -> Any:
        """Return the value as YAML reads it (a number, say), or the string itself if it is one.

        Text around the reference makes the value a string. An empty value stays a string, because a variable set to
        nothing is more often a mistake than a null.
        """
        if not self.strip() or not _REFERENCE.fullmatch(self.reference):
            return self
        try:
            plain = plain_copy({"value": read_yaml(str.__str__(self), self.reference)}, self.reference)["value"]
        except ConfigError:
            return self
        return self if isinstance(plain, str) else plain


def resolve_references(tree: Any, environment: Mapping[str, str] | None = None, path: str = "") -> Any:
    """Copy a config, replacing every reference with its value.

    >>> resolve_references({"url": "${env:HOST}/x"}, {"HOST": "example.org"})
    {'url': 'example.org/x'}

    Args:
        tree: The config, or a part of it.
        environment: The variables that references may name; the process's environment by default.
        path: The dotted path of `tree`, for error messages.

    Raises:
        ConfigError: If a reference is malformed or its variable is not set.
    """
    variables = os.environ if environment is None else environment
    if isinstance(tree, str):
        if "${" in _REFERENCE.sub("", tree):
            raise ConfigError(
                path, "'${' starts a reference that is never closed, or that contains another; write ${env:NAME}"
            )
        if not _REFERENCE.search(tree):
            return tree
        return Resolved(_REFERENCE.sub(lambda match: _variable(match[1], path, variables), tree), tree)
    above = f"{path}." if path else ""
    if isinstance(tree, Mapping):
        return {key: resolve_references(value, variables, f"{above}{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [resolve_references(value, variables, f"{above}{index}") for index, value in enumerate(tree)]
    return tree


def without_values(text: str) -> str:
    """Replace the values of references with the references, wherever a message quotes them."""
    return replace_secrets(text, _references)


def restore_references(resolved: Any, written: Any) -> Any:
    """Copy `resolved`, marking its strings with the references in `written` that they came from."""
    if isinstance(written, str) and _REFERENCE.search(written):
        # pydantic returns plain text and numbers; a number cannot carry its reference, so the reference replaces it.
        return Resolved(resolved, written) if isinstance(resolved, str) else written
    if isinstance(resolved, Mapping) and isinstance(written, Mapping):
        return {key: restore_references(value, written.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list | tuple) and isinstance(written, list | tuple) and len(resolved) == len(written):
        return [restore_references(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved


def _variable(inner: str, path: str, variables: Mapping[str, str]) -> str:
    if not inner.startswith(_ENVIRONMENT):
        raise ConfigError(path, f"${{{inner}}} is not a reference; write ${{env:NAME}} for an environment variable")
    name = inner.removeprefix(_ENVIRONMENT)
    if name not in variables:
        close = get_close_matches(name, variables, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(path, f"the environment variable {name!r} is not set{hint}")
    # Messages of other libraries may quote the value; `without_values` finds it there.
    if len(variables[name]) >= SHORTEST_SECRET:
        _references.setdefault(variables[name], f"${{{inner}}}")
    return variables[name]
