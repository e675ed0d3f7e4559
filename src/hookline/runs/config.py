"""Read and flatten config.yaml, the resolved config of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline._limits import MAX_YAML
from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.json_lines import as_mapping


def read_config(content: bytes, path: Path) -> Any:
    """Return what a config.yaml contains. Raises `RecordError`, which names the path, if it cannot be read."""
    try:
        return json.loads(content)  # what the record writes for long configs; YAML would read 1e-05 as text
    except (ValueError, RecursionError):
        pass
    if len(content) > MAX_YAML:  # the record writes JSON beyond
        limit = f"it has {len(content):,} bytes of YAML, and {MAX_YAML:,} is the limit"
        raise RecordError(f"cannot read {path}: {limit}; write it as JSON, which is read faster")
    import yaml  # imported late: most records are read without their config

    class Loader(yaml.SafeLoader):
        """Refuses aliases, which no record has: a few lines with them stand for more values than fit into memory."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Parse a value and the values inside it."""
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has aliases")
            return super().compose_node(parent, index)

    try:
        return yaml.load(content, Loader)
    except Exception as error:  # Any error: an impossible date, for one, raises ValueError.
        reason = " ".join(str(error).split())
        raise RecordError(f"{path} is damaged or was not written by Hookline: {reason}") from error


def is_whole(config: Any) -> bool:
    """Return whether a run can be built from a config alone, without objects that were created in code."""
    return {"model", "data", "optimizer"} <= as_mapping(config).keys()


def flatten_config(config: Any) -> dict[str, Any]:
    """Return the values of a config by their dotted keys; a list is one value unless it has mappings in it.

    >>> flatten_config({"optimizers": [{"lr": 0.1}], "betas": [0.9, 0.99]})
    {'optimizers.0.lr': 0.1, 'betas': [0.9, 0.99]}
    """
    return dict(_dotted(strict_json.simplify(as_mapping(config))))


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
