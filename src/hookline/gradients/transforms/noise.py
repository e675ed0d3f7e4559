"""Gradient noise that is annealed over the run."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from hookline.errors import GradientError
from hookline.gradients.numbers import is_sharded
from hookline.gradients.transforms.base import Transform, at_least_zero, dense, seed_or_none
from hookline.gradients.view import Gradients


class Noise(Transform):
    """Adds Gaussian noise of variance eta / (1 + t)^gamma, t counting updates from 0 (Neelakantan and others, 2015).

    It draws from streams of its own, one per device, and so leaves training's alone. They are seeded with `seed`, or
    the run's, and with the link's name; their state is saved with the run.
    """

    built_in = True
    name = "noise"

    def __init__(self, eta: float = 0.01, gamma: float = 0.55, seed: int | None = None, params: Any = None) -> None:
        at_least_zero("noise", eta=eta, gamma=gamma)
        seed_or_none("noise", seed)
        super().__init__(params)
        self.eta = float(eta)
        self.gamma = float(gamma)
        self.seed = seed

    def setup(self, name: str) -> None:
        """Learn the name it goes by."""
        self._salt = zlib.crc32(name.encode())

    def init(self, params: Any) -> dict[str, Any]:
        """How often noise was added, and where the random streams are."""
        return {"count": 0, "streams": {}}

    def on_update(self, grads: Gradients, state: dict[str, Any]) -> None:
        deviation = (self.eta / (1 + state["count"]) ** self.gamma) ** 0.5
        state["count"] += 1
        _refuse_sharded(grads)
        streams: dict[torch.device, torch.Generator] = {}
        for gradient in dense("noise", grads):
            if gradient.device not in streams:
                streams[gradient.device] = self._stream(gradient.device, state["streams"])
            gradient.add_(_normal_like(gradient, streams[gradient.device]), alpha=deviation)
        state["streams"] = {str(device): stream.get_state() for device, stream in streams.items()}

    def _stream(self, device: torch.device, saved: dict[str, Tensor]) -> torch.Generator:
        """The device's stream where the last update left it, or a new one."""
        stream = torch.Generator(device)
        if (state := saved.get(str(device))) is not None:
            return stream.set_state(state.cpu())
        seed = self.seed if self.seed is not None else _agreed_seed()
        return stream.manual_seed((seed * 0x9E3779B1 + self._salt) % 2**63)


def _normal_like(tensor: Tensor, stream: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=stream, dtype=tensor.dtype, device=tensor.device)


def _agreed_seed() -> int:
    """The run's seed; of several processes, the first one's, or their models would drift apart."""
    seed = [torch.initial_seed()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(seed)
    return seed[0]


def _refuse_sharded(grads: Gradients) -> None:
    for name, tensor in grads.items():
        if is_sharded(tensor):
            raise GradientError(f"noise: {name!r} is sharded over processes, for which there is no common stream")
