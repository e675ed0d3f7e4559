"""Overrides: ``trainer.max_steps=30`` changes one value of a configuration.

A path walks through keys and, in lists, indices. Below `hooks`, a hook's name stands for its entry, whichever list it
is in: ``hooks.clip_norm.max_norm=0.5``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hookline.config.schemas import HooksConfig, RunConfig
from hookline.config.yaml_text import read_yaml
from hookline.errors import ConfigError, nearest, shown
from hookline.trainer.options import TrainerOptions

_KINDS = ("lifecycle", "forward", "update")
_NOT_YAML = tuple("*&!@%`#|>")  # one value has no anchors, tags or blocks: `data.pattern=*.txt` means what it says


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Change one value in place; a path that leads nowhere is refused with the nearest that does."""
    path, equals, text = (part.strip() for part in override.partition("="))
    parts = path.split(".")
    if not equals or not all(parts):
        raise ConfigError("", f"{override!r} is no override; write a.b=value, for instance trainer.max_steps=100")
    if not text:
        raise ConfigError(path, f"nothing stands behind '='; write {path}=null to mean nothing, or a value")
    value = _read_value(text, path)
    _check_start(tree, parts)
    if parts[0] == "hooks" and len(parts) > 1 and parts[1] not in HooksConfig.model_fields:
        parts = _find_instance(tree, parts)
    _set(tree, parts, value)


def _read_value(text: str, path: str) -> Any:
    return text if text.startswith(_NOT_YAML) else read_yaml(text, path)


def _check_start(tree: dict[str, Any], parts: list[str]) -> None:
    """Refuse a misspelt section or option here, under the name the user gave it."""
    if parts[0] not in RunConfig.model_fields:
        raise ConfigError(parts[0], f"unknown key; {nearest(parts[0], RunConfig.model_fields)}")
    options = [option.name for option in fields(TrainerOptions)]
    if parts[0] == "trainer" and len(parts) > 1 and parts[1] not in options:
        raise ConfigError(f"trainer.{parts[1]}", f"unknown option; {nearest(parts[1], options, 40)}")


def _find_instance(tree: dict[str, Any], parts: list[str]) -> list[str]:
    """The path of the entry that a hook's instance name stands for."""
    places = _instances(tree.get("hooks"))
    name = parts[1]
    if name not in places:
        raise ConfigError(
            f"hooks.{name}",
            f"no hook of this config has that name; {nearest(name, places or HooksConfig.model_fields, 40)}",
        )
    if len(parts) == 2:
        raise ConfigError(f"hooks.{name}", f"name one of its parameters: hooks.{name}.PARAMETER=value")
    return ["hooks", *places[name], *parts[2:]]


def _instances(hooks: Any) -> dict[str, tuple[str, str]]:
    """Where each hook of the lists stands: instance name → (list, index)."""
    places: dict[str, tuple[str, str]] = {}
    for kind in _KINDS:
        entries = hooks.get(kind) if isinstance(hooks, dict) else None
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            name = entry.get("as", entry.get("name")) if isinstance(entry, dict) else entry
            places.setdefault(str(name), (kind, str(index)))
    return places


def _set(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    holder: Any = tree
    for depth, part in enumerate(parts[:-1]):
        key = _key(holder, part, parts[:depth])
        inner = holder[key] if isinstance(holder, list) else holder.get(key)
        if inner is None:
            inner = {}
        if isinstance(inner, str) and _may_be_named(parts[: depth + 1]):
            inner = {"name": inner}
        holder[key] = inner
        holder = inner
    holder[_key(holder, parts[-1], parts[:-1])] = value


def _may_be_named(path: list[str]) -> bool:
    """Where a bare name is short for a mapping with that name: a component, or a hook in a list."""
    return len(path) == 1 or (path[0] == "hooks" and len(path) == 3)


def _key(holder: Any, part: str, above: list[str]) -> Any:
    where = ".".join(above)
    if isinstance(holder, dict):
        return part
    if not isinstance(holder, list):
        raise ConfigError(where, f"is {shown(holder)}, so it has no {part!r}")
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(f"{where}.{part}", f"expected the place in a list of {len(holder)}, counted from 0")
    return int(part)
