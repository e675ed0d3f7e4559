"""Read and flatten config.yaml, the resolved config of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hookline._nesting import MAX_DEPTH
from hookline.errors import RecordError
from hookline.record import strict_json

_MAX_VALUES, _MAX_KEY_LENGTH = 10_000, 200  # of a config that is flattened
_CUT = "…"  # stands for what is beyond these
REST = "… (compared in part)"
"""The key of a flattened config that tells that something was cut."""


def read_config(content: bytes, path: Path) -> Any:
    """Return what a config.yaml contains. Raises `RecordError`, which names the path, if it cannot be read."""
    try:
        return json.loads(content)  # what the record writes where PyYAML is missing; YAML would read 1e-05 as text
    except (ValueError, RecursionError):
        pass
    try:
        import yaml
    except ImportError as error:
        raise RecordError(f"cannot read {path} without PyYAML; pip install pyyaml") from error

    class Loader(yaml.SafeLoader):
        """Reads what `yaml.safe_dump` writes. That has no merges (<<), which can take exponential time."""

        def flatten_mapping(self, node: Any) -> None:
            """Merge nothing, so that a merge is an unknown tag."""

    try:
        return yaml.load(content, Loader)
    except Exception as error:  # also ValueError for impossible dates, and what else a damaged file causes
        reason = " ".join(str(error).split())
        raise RecordError(f"{path} is damaged or was not written by Hookline: {reason}") from error


def flatten_config(config: Any) -> dict[str, Any]:
    """Return the values of a config by their dotted keys; a list is one value unless it has mappings in it.

    >>> flatten_config({"optimizers": [{"lr": 0.1}], "betas": [0.9, 0.99]})
    {'optimizers.0.lr': 0.1, 'betas': [0.9, 0.99]}

    A few lines of YAML from elsewhere can stand for more values than fit into memory, because an alias may repeat a
    part that has aliases itself. So at most 10,000 values are visited, where 100 characters of a text count as one, and
    50 levels; "…" stands for the rest, and the key `REST` tells that there is one.
    """
    left, is_cut = _MAX_VALUES, False

    def copy(value: Any, depth: int) -> Any:
        nonlocal left, is_cut
        size = len(value) if isinstance(value, (str, bytes, set, frozenset)) else 0
        left -= 1 + (size // 100 if isinstance(value, (str, bytes)) else size)
        if left < 0 or depth > MAX_DEPTH:
            is_cut = True
            return _CUT
        if isinstance(value, Mapping):
            items = islice(value.items(), left + 1)
            return {strict_json.key_text(key)[:_MAX_KEY_LENGTH]: copy(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [copy(item, depth + 1) for item in islice(value, left + 1)]
        return strict_json.simplify(value)

    flat = dict(_dotted(copy(config, 0))) if isinstance(config, Mapping) else {}
    return {**flat, REST: _CUT} if is_cut else flat


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
