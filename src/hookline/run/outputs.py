"""Read what a step returns: the model's output and its target, for metrics and hooks that name them, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

UNKNOWN: Final = object()
"""Stands for an output or a target that is unknown."""
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
        """Return the first that exists: the step's 'output', the model's output, or `UNKNOWN`; it is not stored.

        Args:
            result: The result of the step.
        """
        output, self._output = self._output, UNKNOWN
        return result.get("output", output) if isinstance(result, Mapping) else output


def find_target(result: Any, batch: Any) -> Any:
    """Return the step's 'target', otherwise a tuple batch's second item or a dict's 'labels', or `UNKNOWN`."""
    if isinstance(result, Mapping) and "target" in result:
        return result["target"]
    if isinstance(batch, (tuple, list)):
        return batch[1] if len(batch) > 1 else UNKNOWN
    return batch.get("labels", UNKNOWN) if isinstance(batch, Mapping) else UNKNOWN


# ---- numbers beside the loss ----------------------------------------------------------------------------------------


def single_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are one number: hooks may exchange anything, but a record contains only numbers."""
    return {key: value for key, value in metrics.items() if is_number(value)}


def is_number(value: Any) -> bool:
    """Return whether a value is one number: Python's, NumPy's or a tensor."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or is_numpy_number(value)


def is_numpy_number(value: Any) -> bool:
    """Return whether a value is a real NumPy scalar or an array with one element; does not import NumPy."""
    return type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 and value.dtype.kind in "biuf"


def as_python_number(value: Any) -> Any:
    """Convert a NumPy number to Python's; return other values, tensors among them, as they are."""
    if not is_numpy_number(value):
        return value
    number = value.item()
    return number if isinstance(number, int) else float(number)  # the item of a longdouble is again a longdouble


def detached_copy(value: Any) -> Any:
    """Return a number without its graph that nothing else can write to: Python's own, or a copy on the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()
