"""What a forward hook can name while a module has just run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hookline.activations.copies import Copies, holds_tensors, version_of

LIVE = ("inputs", "kwargs", "output")


class Measured(NamedTuple):
    """What a call cost: wall-clock seconds on the host, and bytes it left allocated on the device."""

    seconds: float
    memory: int


class ForwardMoment:
    """One call of one module; tensors become copy-on-write views when they are read."""

    def __init__(
        self,
        run: Any,
        name: str,
        module: torch.nn.Module,
        inputs: Any,
        kwargs: Any,
        output: Any,
        measured: Measured | None,
    ) -> None:
        self._run = run
        self._measured = measured
        self.name = name
        self.module = module
        self.live_inputs, self.live_kwargs, self.live_output = inputs, kwargs, output
        self.made_copies = False
        self._versions: list[tuple[torch.Tensor, int]] = []

    @cached_property
    def copies(self) -> Copies:
        self.made_copies = True
        return Copies()

    @property
    def inputs(self) -> Any:
        return self.copies.of(self.live_inputs)

    @property
    def kwargs(self) -> Any:
        return self.copies.of(self.live_kwargs)

    @property
    def output(self) -> Any:
        return self.copies.of(self.live_output)

    @property
    def seconds(self) -> float:
        return self._measured.seconds if self._measured else float("nan")

    @property
    def memory(self) -> int:
        """On CUDA what the call left allocated; elsewhere the bytes of its output."""
        if self._measured is not None and self._measured.memory >= 0:
            return self._measured.memory
        return sum(tensor.nbytes for tensor in tensors_in(self.live_output))

    def live_values(self, wanted: Sequence[str]) -> dict[str, Any]:
        """What an intervention gets: the tensors themselves."""
        return {name: getattr(self, f"live_{name}" if name in LIVE else name) for name in wanted}

    def remember_versions(self) -> None:
        """An observer gets the live output: note how often it has been written to."""
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors_in(self.live_output)]

    def live_written(self) -> bool:
        """Whether an observer that got the live output has written into it."""
        return any(version_of(tensor) != version for tensor, version in self._versions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)  # step, epoch, phase, trainer, model: the run's


class NoRun:
    """Stands for the run when there is none; `step` is whoever drives the model's to set."""

    epoch, phase, trainer, model = 0, "inference", None, None

    def __init__(self) -> None:
        self.step = 0


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        items = value
    elif hasattr(value, "values") and callable(value.values):
        items = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name) for name in value.__dataclass_fields__]
    elif holds_tensors(value):
        items = list(vars(value).values())
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item)]


def first_floating(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor of a nested value: of an output, what statistics are about."""
    if isinstance(value, torch.Tensor):  # as nearly always
        return value if value.is_floating_point() else None
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)
