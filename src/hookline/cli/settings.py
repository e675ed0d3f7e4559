"""The configuration that a command line asks for."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hookline.config.loading import load_config
from hookline.errors import ConfigError


def read_settings(words: list[str], more: list[str] | None = None) -> tuple[dict[str, Any], bool]:
    """The config file among the words (or the default job), with the overrides among them applied."""
    sources, overrides = _sort(words)
    if len(sources) > 1:
        raise ConfigError("", f"one config at a time, got {' and '.join(sources)}; overrides look like a.b=value")
    if sources:
        return load_config(sources[0], [*overrides, *(more or [])])
    with as_file(files("hookline.jobs") / "default.yaml") as default:
        return load_config(default, [*overrides, *(more or [])])


def _sort(words: list[str]) -> tuple[list[str], list[str]]:
    """Files and overrides; a word with '=' in it is a file only if there is one of that name."""
    sources = [word for word in words if "=" not in word or Path(word).is_file()]
    return sources, [word for word in words if word not in sources]
