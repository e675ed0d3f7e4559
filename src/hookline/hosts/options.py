"""The options of `hookline run`, and how it passes them to the processes of the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

VARIABLE = "HOOKLINE_RUN"
"""The variable of the environment that has the options, as JSON."""


@dataclass(frozen=True)
class Options:
    """The options of `hookline run`."""

    hooks: str | None = None
    """A hooks config; None for the default hooks."""
    output: str = "runs"
    allow_changes: bool = False
    imports: list[str] = field(default_factory=list)
    allow: list[str] = field(default_factory=list)
    directory: str = ""
    """The directory in which the command was typed; modules to import are found there."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Return the options that an environment has."""
        return cls(**json.loads(environment[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """Return the variable with these options."""
        return {VARIABLE: json.dumps(asdict(self))}
