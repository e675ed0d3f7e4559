"""The tensors of one encoded state: each stored once, under a readable name, in a dtype safetensors has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.checkpoints.tensor_file import CODES
from hookline.errors import CheckpointError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_RESERVED = "__metadata__"  # safetensors keeps this name for itself


class TensorTable:
    """Names and stores tensors while a tree is walked; tied ones share an entry."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._entries: dict[Any, dict[str, Any]] = {}
        self._alive: list[torch.Tensor] = []  # an address identifies memory only as long as it is in use

    def add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """The entry that refers to the tensor: its name; dtype and shape too, where it is kept as bytes."""
        _check(tensor, path)
        key = _identity(tensor)
        if key not in self._entries:
            self._alive.append(tensor)
            self._entries[key] = self._store(tensor.detach().resolve_conj().resolve_neg(), path)
        return dict(self._entries[key])

    def add_bytes(self, data: bytes, path: tuple[str, ...]) -> str:
        """Store raw bytes; the name they got."""
        name = self._free_name(path)
        self.tensors[name] = torch.tensor(bytearray(data), dtype=torch.uint8, device="cpu")
        return name

    def _store(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        name = self._free_name(path)
        if tensor.dtype in CODES:
            self.tensors[name] = tensor.contiguous()
            return {"v": name}
        self.tensors[name] = tensor.contiguous().reshape(-1).view(torch.uint8)
        return {"v": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    def _free_name(self, path: tuple[str, ...]) -> str:
        """The dotted path, as a state dict would call it; ``a.b`` and ``b`` inside ``a`` may collide."""
        name = ".".join(path).encode("utf-8", "backslashreplace").decode("utf-8") or "tensor"
        unique, count = name, 2
        while unique in self.tensors or unique == _RESERVED:
            unique, count = f"{name}#{count}", count + 1
        return unique


def tensor_from(stored: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """The tensor as it was: raw bytes get their dtype and shape back."""
    if "dtype" not in entry:
        return stored
    return stored.view(dtype_named(entry["dtype"])).reshape(entry["shape"])


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name, from a fixed table: a file's text never looks anything up in a module."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are the same memory seen the same way. Empty ones have none to share."""
    if tensor.numel() == 0:
        return id(tensor)
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _check(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    problem = _problem(tensor)
    if problem:
        raise CheckpointError(f"cannot save {'.'.join(path) or 'the state itself'}: {problem}")


def _problem(tensor: torch.Tensor) -> str | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
        return f"{kind} is a tensor subclass; save a plain tensor (of a DTensor, its full_tensor())"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; save its to_dense(), or its indices and values"
    if tensor.is_quantized:
        return "it is quantized; save its int_repr() with scale and zero point"
    if tensor.is_meta:
        return "it is on the meta device and has no values; materialise it first"
    return None
