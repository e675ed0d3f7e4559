"""What a configuration may hold, whoever wrote it: bounded in size, harmless to print, numbers that can be counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hookline.errors import ConfigError, shown

MAX_DEPTH = 50
MAX_NODES = 10_000  # reading so many takes half a second in YAML; the longest real configs have some hundred
MAX_KEY = 200  # characters
LARGEST = 2**63  # what fits into 64 bits; torch takes no larger number either

# A terminal obeys control characters, a file's name cannot hold a NUL, and half a surrogate pair cannot be written.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain_copy(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy that overrides may change; aliases in it are written out, so that a change reaches one place only.

    `where` names the source when it is too large as a whole; any other problem names the value by its dotted path.
    """
    count = 0

    def copy(value: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        if len(path) > MAX_DEPTH or count > MAX_NODES:
            raise ConfigError(where, f"is too large: more than {MAX_DEPTH} levels deep, or than {MAX_NODES} values")
        if isinstance(value, Mapping):
            return {_checked_key(key, path): copy(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copy(item, (*path, str(index))) for index, item in enumerate(value)]
        return _checked(value, path)

    return {_checked_key(key, ()): copy(item, (key,)) for key, item in tree.items()}


def _checked_key(key: Any, path: tuple[str, ...]) -> str:
    if not isinstance(key, str):
        raise ConfigError(".".join(path), f"expected a key that is a word, got {shown(key)}; put it in quotes")
    if not key.isprintable() or len(key) > MAX_KEY:
        problem = f"a key is no word: {shown(key)}; keys have at most {MAX_KEY} characters, all printable"
        raise ConfigError(".".join(path), problem)
    return key


def _checked(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, str) and (odd := _UNPRINTABLE.search(value)):
        raise ConfigError(".".join(path), f"holds {odd[0]!r}; text in a config is printable, lines and tabs aside")
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ConfigError(".".join(path), "is a whole number of more than 64 bits, which nothing here can count with")
    return value
