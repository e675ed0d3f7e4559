"""Apply overrides such as ``trainer.max_steps=30`` to a config.

A path consists of keys and, in lists, indices. Below `hooks`, the name of a hook stands for its entry, whichever list
it is in: ``hooks.clip_norm.max_norm=0.5``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hookline.config.schema import HooksConfig, RunConfig
from hookline.config.values import read_yaml
from hookline.errors import ConfigError, nearest, shown
from hookline.trainer.options import TrainerOptions

_KINDS = ("lifecycle", "forward", "update")
_NOT_YAML = tuple("*&!@%`#|>")  # a single value has no anchors, tags or blocks, so that `data.pattern=*.txt` is text


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Change one value of a config in place.

    Raises:
        ConfigError: If the override has no path or value, or its path does not exist; the nearest one is named.
    """
    path, equals, text = (part.strip() for part in override.partition("="))
    parts = path.split(".")
    if not equals or not all(parts):
        raise ConfigError("", f"invalid override {override!r}; write a.b=value, for instance trainer.max_steps=100")
    if not text:
        raise ConfigError(path, f"missing value after '='; write {path}=null for no value")
    value = text if text.startswith(_NOT_YAML) else read_yaml(text, path)
    _check_section(parts)
    if parts[0] == "hooks" and len(parts) > 1 and parts[1] not in HooksConfig.model_fields:
        parts = _entry_path(tree, parts)
    _set(tree, parts, value)


def _check_section(parts: list[str]) -> None:
    """Reject a misspelt section or trainer option under the name that the user gave it."""
    if parts[0] not in RunConfig.model_fields:
        raise ConfigError(parts[0], f"unknown key; {nearest(parts[0], RunConfig.model_fields)}")
    options = [option.name for option in fields(TrainerOptions)]
    if parts[0] == "trainer" and len(parts) > 1 and parts[1] not in options:
        raise ConfigError(f"trainer.{parts[1]}", f"unknown option; {nearest(parts[1], options, 40)}")


def _entry_path(tree: dict[str, Any], parts: list[str]) -> list[str]:
    """Replace a hook's name in a path by the list and the index of its entry."""
    hooks, name = tree.get("hooks"), parts[1]
    places: dict[str, tuple[str, str]] = {}
    for kind in _KINDS:
        entries = hooks.get(kind) if isinstance(hooks, dict) else None
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            instance = entry.get("as", entry.get("name")) if isinstance(entry, dict) else entry
            places.setdefault(str(instance), (kind, str(index)))
    if name not in places:
        close = nearest(name, places or HooksConfig.model_fields, 40)
        raise ConfigError(f"hooks.{name}", f"no hook of this config has that name; {close}")
    if len(parts) == 2:
        raise ConfigError(f"hooks.{name}", f"name one of its parameters: hooks.{name}.PARAMETER=value")
    return ["hooks", *places[name], *parts[2:]]


def _set(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    container: Any = tree
    for depth, part in enumerate(parts[:-1]):
        key = _key(container, part, parts[:depth])
        inner = container[key] if isinstance(container, list) else container.get(key)
        if inner is None:
            inner = {}
        # A bare name is short for a mapping with that name, for a component and for a hook in a list.
        if isinstance(inner, str) and (depth == 0 or (parts[0] == "hooks" and depth == 2)):
            inner = {"name": inner}
        container[key] = inner
        container = inner
    container[_key(container, parts[-1], parts[:-1])] = value


def _key(container: Any, part: str, above: list[str]) -> Any:
    where = ".".join(above)
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise ConfigError(where, f"is {shown(container)}, so it has no {part!r}")
    if not part.isdecimal() or int(part) >= len(container):
        raise ConfigError(f"{where}.{part}", f"expected an index into a list of {len(container)}, counted from 0")
    return int(part)
