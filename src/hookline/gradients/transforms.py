"""Ready links for the update chain."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hookline.errors import HooklineError
from hookline.gradients.view import Gradients
from hookline.registry.base import UpdateHook, passes_through


class Identity(UpdateHook):
    """Passes the gradients through unchanged. The default: it is listed, and while it is alone it costs nothing."""

    built_in = True
    intervenes = False
    name = "identity"

    @passes_through
    def on_update(self, grads: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return grads


class ClipNorm(UpdateHook):
    """Scales all gradients so that their global norm is at most `max_norm`: bit for bit what `clip_grad_norm_` does.

    A run without its clipping would be another run, so a failure here ends it.
    """

    built_in = True
    name = "clip_norm"
    inplace = True
    clips = True
    on_error = "raise"

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        if not max_norm > 0:
            raise HooklineError(f"clip_norm: max_norm must be above 0, got {max_norm!r}")
        self.max_norm = float(max_norm)
        self.norm_type = float(norm_type)
        self.clipped_norm: torch.Tensor | None = None
        """The global norm before the last clipping, on the device."""

    def on_update(self, grads: Gradients) -> None:
        tensors = grads.tensors()
        self.clipped_norm = torch.nn.utils.get_total_norm(tensors, self.norm_type)
        scale = torch.clamp(self.max_norm / (self.clipped_norm + 1e-6), max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        for device, group in by_device.items():
            torch._foreach_mul_(group, scale.to(device))
