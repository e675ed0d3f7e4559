"""`ModelCall`: a call of a model as a loop made it, to repeat it where nothing knows how the loss is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass
class ModelCall:
    """The arguments of a call, and how it was made."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    """The dtype of the autocast that the call was made in, if it was."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Self:
        """Return the call that is being made."""
        is_on = torch.is_autocast_enabled(device.type)
        return cls(args, kwargs, torch.get_autocast_dtype(device.type) if is_on else None)

    def repeat(self, model: torch.nn.Module, device: torch.device) -> Any:
        """Call a model in the same way, and return its output."""
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            return model(*self.args, **self.kwargs)
