"""Read the config that a command line names: a file or the default job, and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file
from typing import Any

from hookline.cli.command_lines import is_file, overrides_among
from hookline.cli.example import DEFAULT
from hookline.config.factory import OWN_CODE_HINT
from hookline.config.hooks import KINDS
from hookline.config.load import FORMATS, load_config
from hookline.config.schema import RunConfig
from hookline.core.plugins import HOOKS
from hookline.errors import ConfigError, HooklineError


def read_config(words: list[str], more: Sequence[str] = (), hooks: Sequence[str] = ()) -> tuple[dict[str, Any], bool]:
    """Load the config file among the words (or the default job), and apply the overrides among them.

    Args:
        words: The positional arguments of a command.
        more: Further overrides, applied last.
        hooks: Names of hooks to add before overrides are applied, which may therefore set their parameters.

    Returns:
        The config, and whether it was read from a file.
    """
    changes = overrides_among(words)
    sources = [word for word in words if word not in changes]
    for word in sources:
        begins_like_a_path = word.split(".")[0] in RunConfig.model_fields
        if begins_like_a_path and not word.endswith(FORMATS) and not is_file(word):
            raise ConfigError(word, f"an override needs a value: {word}=value (and a config file ends in {FORMATS[0]})")
    overrides = [*changes, *more]
    if len(sources) > 1:
        raise ConfigError("", f"one config at a time, got {' and '.join(sources)}; overrides look like a.b=value")
    with as_file(DEFAULT) as default:
        source = sources[0] if sources else default
        if not hooks:
            return load_config(source, overrides)
        config, from_file = load_config(source)
    for name in hooks:
        add_hook(config, name)
    return load_config(config, overrides)[0], from_file


def add_hook(config: dict[str, Any], name: str) -> None:
    """Add a registered hook with its default parameters to the list of its kind in a config."""
    from hookline.cli.hooks import kind_of  # takes seconds

    hooks = config["hooks"] = config.get("hooks") or {}
    try:
        kind = kind_of(HOOKS.find(name)).split(" and ")[0]
    except HooklineError as error:
        raise HooklineError(f"--hook {name}: {error}; {OWN_CODE_HINT}") from None
    if kind not in KINDS:
        raise HooklineError(f"--hook {name}: its kind is known only once it is created; list it in the config")
    if not isinstance(hooks, dict) or not isinstance(hooks.get(kind) or [], list):
        return  # the config is wrong, and is rejected where it is checked
    entries = hooks[kind] = hooks.get(kind) or []
    if name in [entry.get("as") or entry.get("name") if isinstance(entry, dict) else entry for entry in entries]:
        raise HooklineError(f"--hook {name}: the config already has it; hooks.{name}.key=value changes it")
    entries.append({"name": name})
