"""Load a config from a YAML, TOML or JSON file, or from a dict, and apply overrides to it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.config.overrides import apply_override
from hookline.config.schema import RunConfig
from hookline.config.values import MAX_DEPTH, plain_copy, read_yaml
from hookline.errors import ConfigError, shown

MAX_BYTES = 250_000

# A key of many parts, `a.b.c…`: tomllib takes quadratic time to parse one, minutes for a file full of them.
_PART = r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|[\w-]++)"""
_LONG_TOML_KEY = re.compile(rf"(?<![\w\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH}}}")


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
    copied = plain_copy(tree, str(source) if from_file else "config")
    for override in overrides:
        apply_override(copied, override)
    checked = plain_copy(copied, "the config with its overrides")
    return (_mark_as_file(checked) if from_file else checked), from_file


def _mark_as_file(tree: Any) -> Any:
    if isinstance(tree, dict):
        return FileConfig({key: _mark_as_file(value) for key, value in tree.items()})
    return [_mark_as_file(value) for value in tree] if isinstance(tree, list) else tree


def _read_file(path: Path) -> Any:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(str(path), f"cannot tell its format; use one of the suffixes {', '.join(_READERS)}")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(str(path), f"is larger than {MAX_BYTES // 1000} kB, the limit for a config")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the file's name
        raise ConfigError(repr(str(path)), f"cannot be read: {error}") from None
    try:
        return read(text, str(path))
    except RecursionError:
        raise ConfigError(str(path), f"is nested deeper than {MAX_DEPTH} levels") from None


def _read_toml(text: str, where: str) -> Any:
    if found := _LONG_TOML_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(where, f"is nested deeper than {MAX_DEPTH} levels (line {line})")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number with thousands of digits raises this rather than a TOMLDecodeError
        raise ConfigError(where, f"is not valid TOML: {error}") from None


def _read_json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ConfigError(where, f"the key {key!r} is there twice in one object")
            made[key] = value
        return made

    try:
        return json.loads(text, object_pairs_hook=unique)
    except ValueError as error:  # a number with thousands of digits raises this rather than a JSONDecodeError
        raise ConfigError(where, f"is not valid JSON: {error}") from None


_READERS: dict[str, Callable[[str, str], Any]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}
FORMATS = tuple(_READERS)
