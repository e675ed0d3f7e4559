"""Read what the model returned for a batch, and what that is compared with, for metrics and hooks that name them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

UNKNOWN: Final = object()
"""Stands for an output or a target that nothing tells."""
OUTPUT_AND_TARGET = {"model_output", "target"}
"""Event arguments for which the model's output is kept."""


class OutputReader:
    """Reads the model's output of a step; if the step calls the model several times, the last one counts."""

    def __init__(self) -> None:
        self._output: Any = UNKNOWN

    def attached(self, model: Any) -> AbstractContextManager[Any]:
        """Read the outputs of the model inside the block."""

        def store_output(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        return model.register_forward_hook(store_output)  # type: ignore[no-any-return]

    def take(self, result: Any) -> Any:
        """Return what the step returned as 'output', else the model's output, or `UNKNOWN`; it is not kept.

        Args:
            result: What the step returned.
        """
        output, self._output = self._output, UNKNOWN
        return result.get("output", output) if isinstance(result, Mapping) else output


def find_target(result: Any, batch: Any) -> Any:
    """Return the step's 'target', else the second item of a tuple batch or the 'labels' of a dict, else `UNKNOWN`."""
    if isinstance(result, Mapping) and "target" in result:
        return result["target"]
    if isinstance(batch, (tuple, list)):
        return batch[1] if len(batch) > 1 else UNKNOWN
    return batch.get("labels", UNKNOWN) if isinstance(batch, Mapping) else UNKNOWN
