"""A safetensors file as the parts it is written of: the tensors' own memory, which is not copied."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from hookline.checkpoints.disk import Part

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
}  # fmt: skip
"""The dtypes that such a file can hold, and how it calls them."""

_ALIGNMENT = 8


def file_parts(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """The header and then the bytes of every tensor; tensors of another device are brought over."""
    # The widest dtypes come first: each tensor then begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in ordered}
    return [_header(host), *(_bytes_of(tensor) for tensor in host.values() if tensor.numel())]


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
