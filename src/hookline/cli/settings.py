"""The configuration that a command line asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hookline.config.loading import FORMATS, load_config
from hookline.config.schemas import RunConfig
from hookline.errors import ConfigError
from hookline.trainer.options import TrainerOptions

DEFAULT = files("hookline.jobs") / "default.yaml"


def read_settings(words: list[str], more: list[str] | None = None) -> tuple[dict[str, Any], bool]:
    """The config file among the words (or the default job), with the overrides among them applied."""
    sources, overrides = _sort(words)
    if len(sources) > 1:
        raise ConfigError("", f"one config at a time, got {' and '.join(sources)}; overrides look like a.b=value")
    if sources:
        return load_config(sources[0], [*overrides, *(more or [])])
    with as_file(DEFAULT) as default:
        return load_config(default, [*overrides, *(more or [])])


def _sort(words: list[str]) -> tuple[list[str], list[str]]:
    """Files and overrides; a word with '=' in it is a file only if there is one of that name."""
    sources = [word for word in words if "=" not in word or _is_file(word)]
    for word in sources:
        _refuse_half_override(word)
    return sources, [word for word in words if word not in sources]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # too long for a name, as an override may well be
        return False


def _refuse_half_override(word: str) -> None:
    """`trainer.max_steps` is no file that cannot be read, but an override that lacks its value."""
    begins_like_a_path = word.split(".")[0] in RunConfig.model_fields
    if begins_like_a_path and not word.endswith(FORMATS) and not _is_file(word):
        raise ConfigError(word, f"an override needs a value: {word}=value (and a config file ends in {FORMATS[0]})")


def meant_override(option: str, arguments: Sequence[str]) -> str:
    """What to write in place of an unknown option: `--max-steps 3` → 'trainer.max_steps=3'."""
    name, equals, value = option.lstrip("-").partition("=")
    if not equals and option in arguments:
        value = next(iter(arguments[arguments.index(option) + 1 :]), "")
    close = get_close_matches(name.replace("-", "_"), [one.name for one in fields(TrainerOptions)], n=1, cutoff=0.7)
    if not close:
        return "a.b=value, for instance trainer.max_steps=100 or optimizer.lr=1e-3"
    return f"trainer.{close[0]}={value if value and not value.startswith('-') else 'value'}"
