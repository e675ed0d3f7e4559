"""Write and read config.yaml, the resolved config of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.json_lines import read_bytes


def as_yaml(config: Any) -> str:
    """Return readable YAML; without PyYAML, or for what it cannot express, JSON, which YAML readers read, too."""
    try:
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    except Exception:
        return strict_json.dumps(config, indent=2) + "\n"


def read_config(path: Path) -> Any:
    """Return what config.yaml contains. Raises `RecordError` if it cannot be read."""
    content = read_bytes(path)
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
