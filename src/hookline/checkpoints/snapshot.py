"""A checkpoint's sections as they are at one moment, in memory of their own: training goes on, they stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hookline.checkpoints.codec import encode
from hookline.errors import CheckpointError


@dataclass(frozen=True)
class Encoded:
    """A section taken apart: its JSON value and its tensors, by name."""

    value: Any
    tensors: dict[str, torch.Tensor]


def encode_section(name: str, tree: Any) -> Encoded:
    """Take a section apart; its tensors are the live ones. One that is `Encoded` stays as it is."""
    if isinstance(tree, Encoded):
        return tree
    try:
        return Encoded(*encode(tree))
    except CheckpointError as error:
        raise CheckpointError(f"section {name!r}: {error}") from error


class HostMemory:
    """Room on the host for one snapshot after the other.

    It is kept from one to the next: memory that is new to the process costs about three times as much as the copying,
    and pinned memory more. So a snapshot is good until the next one is taken.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, str], torch.Tensor] = {}

    def snapshot(self, sections: Mapping[str, Any]) -> dict[str, Encoded]:
        """The sections as they are now, copied before this returns, for `write_checkpoint`.

        Taking them apart copies everything but tensors, finds those that are tied, and refuses what cannot be saved.
        """
        before, self._rooms = self._rooms, {}
        try:
            encoded = {name: encode_section(name, tree) for name, tree in sections.items()}
            copies = {name: self._copied(name, parts, before) for name, parts in encoded.items()}
            _wait_for_devices(encoded)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot copy the state to the host's memory: {error}") from error
        return copies

    def _copied(self, section: str, parts: Encoded, before: Mapping[tuple[str, str], torch.Tensor]) -> Encoded:
        for name, tensor in parts.tensors.items():
            room = _room_for(tensor, before.get((section, name)))
            self._rooms[section, name] = room.copy_(tensor, non_blocking=tensor.is_cuda)
        return Encoded(parts.value, {name: self._rooms[section, name] for name in parts.tensors})


def _room_for(tensor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The last snapshot's room for this tensor if it still fits; from pinned memory a device's copies are quickest."""
    if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
        return before
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _wait_for_devices(sections: Mapping[str, Encoded]) -> None:
    """Copies travel on each device's current stream, behind the step that made the values and before the next one."""
    devices = {tensor.device for parts in sections.values() for tensor in parts.tensors.values() if tensor.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
