"""Load a config from a YAML, TOML or JSON file, or from a dict, and apply overrides to it.

An override is written ``path=value``. A path consists of keys and, in lists, indices. Below `hooks`, the name of a hook
stands for its entry, whichever list it is in: ``hooks.clip_norm.max_norm=0.5``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hookline._fs import NotAPlainFile, TooLarge, read_whole
from hookline._limits import MAX_DEPTH, MAX_YAML, TOO_DEEP
from hookline._parameters import names
from hookline._words import nearest
from hookline.config.schema import HOOKS_PAGE, HooksConfig, RunConfig
from hookline.config.values import plain_copy, read_yaml
from hookline.core.entry import numbered
from hookline.errors import ConfigError, shown
from hookline.trainer.options import OPTIONS_PAGE, TrainerOptions

FORMATS = (".yaml", ".yml", ".toml", ".json")

# A key with many parts, `a.b.c…`: tomllib takes quadratic time to parse one, minutes for a file full of them.
_PART = r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|[\w-]++)"""
_LONG_TOML_KEY = re.compile(rf"(?<![\w\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH}}}")

_NOT_YAML = tuple("*&!@%`#|>")  # a single value has no anchors, tags or blocks, so that `data.pattern=*.txt` is text


class FileConfig(dict[str, Any]):
    """A mapping that was read from a file, and is marked as such: dotted paths in it must be allowed."""

    from_file = True


def load_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> tuple[dict[str, Any], bool]:
    """Load a config and apply overrides to it.

    References (``${env:NAME}``) stay as they are written. The keys are checked later, against the schema.

    Args:
        source: A file (.yaml, .yml, .toml or .json) or a mapping.
        overrides: Changes of single values, each written as ``"a.b=value"``.

    Returns:
        The config, and whether it was read from a file.

    Raises:
        ConfigError: If the file cannot be read, is not a mapping, or an override does not fit it.
    """
    from_file = not isinstance(source, Mapping)
    tree = _read_file(Path(source)) if isinstance(source, str | Path) else source
    if not isinstance(tree, Mapping):
        where = str(source) if isinstance(source, str | Path) else ""
        got = "nothing: it is empty" if tree is None else shown(tree)
        raise ConfigError(where, f"expected a mapping with {', '.join(RunConfig.model_fields)}, got {got}")
    mapping: type[dict[str, Any]] = FileConfig if from_file else dict
    config = plain_copy(tree, str(source) if from_file else "config", mapping)
    if changes := names(overrides, "overrides"):
        for override in changes:
            apply_override(config, override)
        config = plain_copy(config, "the config with its overrides", mapping)  # checks what the overrides added
    return config, from_file


def _read_file(path: Path) -> Any:
    suffix, where = path.suffix.lower(), str(path)
    if suffix not in FORMATS:
        raise ConfigError(where, f"is not the name of a config file, which ends in {', '.join(FORMATS)}")
    try:
        content = read_whole(Path(os.path.realpath(path)), MAX_YAML)  # a link is fine here; opening a pipe would block
        text = content.decode("utf-8-sig")  # editors on Windows begin files with a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(where, f"is not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        remedy = "`hookline example` prints a config to start from"
        raise ConfigError(where, f"cannot be read: it does not exist; {remedy}") from None
    except OSError as error:
        remedies = {TooLarge: "; move large data into files that the config names", NotAPlainFile: "; copy it into one"}
        problem = f"cannot be read: {error.strerror or error}{remedies.get(type(error), '')}"
        raise ConfigError(where, problem) from None
    except ValueError as error:  # a NUL in the file's name
        raise ConfigError(repr(where), f"cannot be read: {error}") from None
    try:
        if suffix != ".toml":
            # JSON is YAML, except that it may be indented with tabs; its strings have none.
            return read_yaml(text.replace("\t", " ") if suffix == ".json" else text, where)
        if long_key := _LONG_TOML_KEY.search(text):
            line = text.count("\n", 0, long_key.start()) + 1
            raise ConfigError(where, f"{TOO_DEEP} (line {line})")
        return tomllib.loads(text)
    except ValueError as error:  # the parser's own errors, and the one for a number with thousands of digits
        raise ConfigError(where, f"is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(where, TOO_DEEP) from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Change one value of a config in place.

    Raises:
        ConfigError: If the override has no path or value, or its path does not exist; the nearest one is named.
    """
    path, equals, text = (part.strip() for part in override.partition("="))
    parts = path.split(".")
    section, inner = parts[0], parts[1] if len(parts) > 1 else None
    if not equals or not all(parts):
        raise ConfigError("", f"invalid override {override!r}; write a.b=value, for instance trainer.max_steps=100")
    if not text:
        raise ConfigError(path, f"missing value after '='; write {path}=null for no value")
    value = text if text.startswith(_NOT_YAML) else read_yaml(text, path)
    if section not in RunConfig.model_fields:
        raise ConfigError(section, f"unknown key; {nearest(section, RunConfig.model_fields)}")
    options = [option.name for option in fields(TrainerOptions)]
    if section == "trainer" and inner is not None and inner not in options:
        raise ConfigError(f"trainer.{inner}", f"unknown option; {nearest(inner, options, OPTIONS_PAGE)}")
    is_list_key = section == "hooks" and inner in HooksConfig.model_fields
    is_index = section == "trackers" and inner is not None and inner.isdecimal()
    if section in ("hooks", "trackers") and inner is not None and not is_list_key and not is_index:
        parts = _entry_path(tree, parts)
    container: Any = tree
    for depth, part in enumerate(parts[:-1]):
        key = _key(container, part, parts[:depth])
        inside = container[key] if isinstance(container, list) else container.get(key)
        # A bare name is short for a mapping with that name, for a component and for a hook in a list.
        if isinstance(inside, str) and depth in (0, {"hooks": 2, "trackers": 1}.get(parts[0])):
            inside = {"name": inside}
        container[key] = {} if inside is None else inside
        container = container[key]
    container[_key(container, parts[-1], parts[:-1])] = value


def _entry_path(tree: dict[str, Any], parts: list[str]) -> list[str]:
    """Replace a hook's name in a path with the list and the index of its entry."""
    hooks, (section, name) = tree.get("hooks"), parts[:2]
    lists: dict[tuple[str, ...], Any] = {}
    if isinstance(hooks, dict):
        lists = {("hooks", kind): hooks.get(kind) for kind in ("lifecycle", "forward", "update")}
    places: dict[str, tuple[str, ...]] = {}
    for place, entries in {**lists, ("trackers",): tree.get("trackers")}.items():
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            given = entry if isinstance(entry, dict) else {"name": entry}
            instance = given["as"] if "as" in given else numbered(str(given.get("name")), places)
            # If several hooks have one chosen name, which a registry rejects, the path means the first.
            places.setdefault(str(instance), (*place, str(index)))
    if name not in places:
        close = nearest(name, places) if places else nearest(name, HooksConfig.model_fields, HOOKS_PAGE)
        raise ConfigError(f"{section}.{name}", f"no hook of this config has that name; {close}")
    if len(parts) == 2:
        raise ConfigError(f"{section}.{name}", f"name one of its parameters: {section}.{name}.PARAMETER=value")
    return [*places[name], *parts[2:]]


def _key(container: Any, part: str, above: list[str]) -> Any:
    """Return a part of a path as the key of a dict or the index of a list."""
    where = ".".join(above)
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise ConfigError(where, f"is {shown(container)}, so it has no {part!r}")
    if not part.isdecimal() or int(part) >= len(container):
        raise ConfigError(f"{where}.{part}", f"expected an index into a list of {len(container)}, counted from 0")
    return int(part)
