"""Read the config that a run has recorded, from which the run can be built again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.errors import ConfigError, HooklineError
from hookline.record.labels import LABEL_OPTIONS
from hookline.runs.config import is_whole


def read_recorded(run: Path, call: str) -> dict[str, Any]:
    """Return the config of a run. It counts as read from a file, wherever the run comes from.

    Args:
        run: The run's directory.
        call: The remedy in the code that created a run without a config, for the message.

    Raises:
        HooklineError: If the run was created in code.
    """
    from hookline.config.load import load_config
    from hookline.record.format import CONFIG_FILE
    from hookline.record.record import refuse_links

    refuse_links(run)
    recorded, _ = load_config(run / CONFIG_FILE)
    check_whole(recorded, str(run), call)
    return recorded


def check_secrets(config: Mapping[str, Any]) -> None:
    """Raise an error for a secret that was not recorded and is not passed again; a run keeps its labels."""
    for secret in _redacted(config, ""):
        if not secret.startswith(LABEL_OPTIONS):
            remedy = f"pass it again: {secret}=value, or as ${{env:NAME}}"
            raise ConfigError(secret, f"was a secret and was not recorded; {remedy}")


def check_whole(config: Mapping[str, Any], where: str, call: str) -> None:
    """Raise an error unless a run can be built from this config alone, without objects that were created in code.

    Args:
        config: The config in a run's record.
        where: The place of the record, for the message.
        call: The remedy in code, for the message.
    """
    if not is_whole(config):
        raise HooklineError(f"{where}: that run was created in code; build the same trainer there and call {call}")


def _redacted(tree: Any, path: str) -> Iterator[str]:
    """Yield the dotted paths of redacted values; an entry in a list of hooks is identified by its name."""
    from hookline.record.redaction import REDACTED

    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _redacted(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            named = value.get("as", value.get("name")) if isinstance(value, dict) else None
            yield from _redacted(value, f"hooks.{named}" if named and path.startswith("hooks.") else f"{path}.{index}")
    elif isinstance(tree, str) and REDACTED in tree:
        yield path
