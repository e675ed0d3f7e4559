"""Add gradient noise that is annealed over the run."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from hookline._parameters import NonNegativeFloat
from hookline._tensors import is_sharded
from hookline.errors import GradientError
from hookline.gradients.view import Gradients, Transform
from hookline.ranks import find_ranks


class Noise(Transform):
    """Add Gaussian noise of variance eta / (1 + t)^gamma, t counting updates from 0 (Neelakantan et al., 2015).

    It draws from one generator per device, separate from training's. Their state is saved with the run.

    Args:
        eta: The variance of the noise at the first update.
        gamma: The speed at which the variance falls; 0 keeps it constant.
        seed: The seed of the generators, combined with the hook's name; the run's seed by default.
        params: The parameters whose gradients it changes; all of them by default.
    """

    built_in = True
    name = "noise"

    def __init__(
        self, eta: NonNegativeFloat = 0.01, gamma: NonNegativeFloat = 0.55, seed: int | None = None, params: Any = None
    ) -> None:
        super().__init__(params)
        self.eta, self.gamma, self.seed = eta, gamma, seed

    def setup(self, name: str) -> None:
        """Derive the generators' seeds from the name it was registered under."""
        self._salt = zlib.crc32(name.encode())

    def init(self, params: Any) -> dict[str, Any]:
        """Make the count of updates and the generators' states.

        Raises:
            GradientError: If a parameter is sharded.
        """
        for name, param in params.items():
            if is_sharded(param):
                raise GradientError(
                    f"noise: {name!r} is sharded over processes, which have no common generator; use parallel='ddp', "
                    "or leave it out with params="
                )
        return {"count": 0, "streams": {}}

    def on_update(self, grads: Gradients, state: dict[str, Any]) -> None:
        deviation = (self.eta / (1 + state["count"]) ** self.gamma) ** 0.5
        state["count"] += 1
        generators: dict[torch.device, torch.Generator] = {}
        for gradient in grads.dense("noise"):
            device = gradient.device
            if device not in generators:
                generators[device] = self._generator(device, state["streams"].get(str(device)))
            drawn = torch.randn(gradient.shape, generator=generators[device], dtype=gradient.dtype, device=device)
            gradient.add_(drawn, alpha=deviation)
        state["streams"] = {str(device): generator.get_state() for device, generator in generators.items()}

    def _generator(self, device: torch.device, saved: Tensor | None) -> torch.Generator:
        """Return the device's generator in the state after the last update, or a new one."""
        generator = torch.Generator(device)
        if saved is not None:
            return generator.set_state(saved.cpu())
        # The seed of rank 0, because otherwise the ranks' models would drift apart.
        seed = find_ranks().first(torch.initial_seed) if self.seed is None else self.seed
        return generator.manual_seed((seed * 0x9E3779B1 + self._salt) % 2**63)
