"""Copy a checkpoint's state to host memory, so that it can be written while training changes the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline import _device
from hookline._host_copy import HostCopy
from hookline.checkpoints.format import Section, encode_section
from hookline.errors import CheckpointError


class HostMemory:
    """Host memory for one snapshot, reused by the next.

    Memory that is new to the process costs about three times as much as the copying, and pinned memory more. A snapshot
    is therefore valid only until the next one is taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def snapshot(self, sections: Mapping[str, Any]) -> dict[str, Section]:
        """Copy sections as they are now, for `write_checkpoint`; returns when every copy is complete.

        Encoding copies everything but tensors, finds tied tensors, and rejects what cannot be saved.

        Raises:
            CheckpointError: If a value has no exact form, memory is missing or a device failed.
        """
        try:
            encoded = {name: encode_section(name, tree) for name, tree in sections.items()}
            # All copies run on each device's current stream: after the step that computed the values, before the next.
            copies: dict[tuple[str, str], HostCopy] = {}
            for section, parts in encoded.items():
                for name, tensor in parts.tensors.items():
                    buffer = self._buffers.get((section, name))
                    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                        # A copy from a device makes its own buffer, in pinned memory.
                        on_host = not _device.is_accelerator(tensor.device)
                        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if on_host else None
                    copies[section, name] = HostCopy(tensor, into=buffer)
            self._buffers = {key: copy.wait() for key, copy in copies.items()}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot copy the state to the host's memory: {error}") from error
        return {
            name: Section(parts.value, {tensor: self._buffers[name, tensor] for tensor in parts.tensors}, parts.shards)
            for name, parts in encoded.items()
        }
