"""Encode state as JSON and safetensors, and decode it, exactly and without pickle.

JSON's own values stand for themselves. Any other value is a tagged object ``{"!": kind, "v": value}``. The key "!"
marks it, so a dict with a key that begins with "!" is written as a tagged list of pairs.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import ChainMap, Counter, namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy
import torch

from hookline._fs import Part
from hookline._limits import MAX_DEPTH, TOO_DEEP
from hookline._tensors import is_sharded
from hookline.checkpoints.errors import inside
from hookline.checkpoints.shards import DTYPE_CODES, LocalPart, Shard, header, local_part
from hookline.errors import CheckpointError, with_article
from hookline.record.strict_json import free_name

TAG = "!"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_RESERVED_NAME = "__metadata__"  # safetensors uses this name itself
_ALIGNMENT = 8
_MAX_PLAIN_INT = 2**63  # an integer of more than 64 bits is written in hex
_SCALARS = (str, int, float, bool, type(None), bytes)


@dataclass(frozen=True)
class Section:
    """One encoded section of a checkpoint: its JSON value, its tensors by name, and which of them are shards."""

    value: Any
    tensors: dict[str, torch.Tensor]
    shards: dict[str, Shard] = field(default_factory=dict)


def encode(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree of state into a JSON value and its tensors, named by their dotted paths, detached and contiguous.

    A tensor that appears twice (also as another view of the same memory with the same shape) is stored once.

    Raises:
        CheckpointError: If a value cannot be saved exactly; names the dotted path of the first one.
    """
    encoder = Encoder()
    return encoder.encode(tree, ()), encoder.tensors


def encode_section(name: str, tree: Any, with_shards: bool = False) -> Section:
    """Encode a section without copying its tensors; a `Section` is returned as it is.

    Args:
        name: The section's name, for messages.
        tree: The tree of state.
        with_shards: Whether it may contain DTensors, of which every rank saves its shard.
    """
    if isinstance(tree, Section):
        return tree
    encoder = Encoder(with_shards)
    with inside(f"section {name!r}"):
        return Section(encoder.encode(tree, ()), encoder.tensors, encoder.shards)


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the tree that `encode` split; places that shared a tensor share one tensor object again."""
    try:
        return _Decoder(tensors).decode(skeleton)
    except CheckpointError:
        raise
    except Exception as error:  # A file that `encode` did not write can cause any type of error.
        raise CheckpointError(f"the saved state is damaged or from a newer version: {error!r}") from error


def safetensors_parts(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard] | None = None) -> list[Part]:
    """Return the header and the tensors' own memory, uncopied, that together are the bytes of a safetensors file.

    Args:
        tensors: The tensors by name.
        shards: Those that are parts of larger ones.
    """
    # The widest dtypes come first: every tensor then begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in ordered}
    entries, start = dict[str, Any](), 0
    if metadata := header(host, shards or {}):
        entries[_RESERVED_NAME] = metadata
    for name, tensor in host.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    memory = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in host.values() if tensor.numel()]
    return [len(text).to_bytes(8, "little") + text, *memory]


# ---- encoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    """A value that the same encoder has already encoded."""

    value: Any


class Encoder:
    """Walk over a tree once; the path to the current value gives tensor names and error messages.

    Each tensor is stored once, under a readable name, in a dtype that safetensors has.

    Args:
        with_shards: Whether to accept DTensors. Their parts on this rank are stored, and listed in `shards`; a part
            that another rank saves is only listed there.
    """

    def __init__(self, with_shards: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, Shard] = {}
        self._with_shards = with_shards
        self._entries: dict[Any, dict[str, Any]] = {}  # The entries of stored tensors, by their identity.
        self._alive: list[torch.Tensor] = []  # An address identifies memory only while the memory is in use.
        self._parents: set[int] = set()
        self.items: dict[str, Any] = {}

    def add(self, name: str, read: Callable[[], Any]) -> Any:
        """Add what a function returns to a section, unless that is None, and return it.

        A value that cannot be saved leaves nothing behind.
        """
        tree, before = read(), (dict(self.tensors), dict(self.shards), dict(self._entries))
        try:
            if tree is not None:
                self.items[name] = _Encoded(self.encode(tree, (name,)))
        except Exception:
            self.tensors, self.shards, self._entries = before
            raise
        return tree

    def section(self) -> Section:
        """Return the section of the values that were added."""
        return Section(self.encode(self.items, ()), self.tensors, self.shards)

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return the JSON value of a tree or a part of it."""
        if isinstance(value, Enum):
            raise _refusal(value, path, "save its .value")
        if self._with_shards and (is_sharded(value) or isinstance(value, LocalPart)):
            return self._encode_shard(value, path)
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if type(value).__module__ == "numpy":
            return self._encode_numpy(value, path)
        if not isinstance(value, (dict, list, tuple)):
            return _encode_scalar(value, path)
        if id(value) in self._parents:
            raise _refusal(value, path, "it contains itself; save a tree")
        if len(path) >= MAX_DEPTH:
            raise CheckpointError(f"cannot save {'.'.join(path[:4])}.…: the state {TOO_DEEP}; flatten it")
        self._parents.add(id(value))
        try:
            return self._encode_dict(value, path) if isinstance(value, dict) else self._encode_sequence(value, path)
        finally:
            self._parents.discard(id(value))

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        plain = all(type(key) is str and not key.startswith(TAG) and not _has_surrogates(key) for key in value)
        if plain and type(value) is not Counter:
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if isinstance(key, Enum) or not isinstance(key, (*_SCALARS, tuple)):
                raise _refusal(key, (*path, "(key)"), "use strings, numbers or tuples of them as keys")
            try:
                name = str(key)
            except ValueError:  # Python refuses to print integers of thousands of digits
                name = f"<{type(key).__name__}>"
            pairs.append([self.encode(key, (*path, "(key)")), self.encode(item, (*path, name))])
        return {TAG: "counter" if isinstance(value, Counter) else "dict", "v": pairs}

    def _encode_sequence(self, value: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Size):
            return {TAG: "size", "v": list(value)}
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
            return {TAG: "namedtuple", "name": type(value).__name__, "fields": list(fields), "v": items}
        return {TAG: "tuple", "v": items} if isinstance(value, tuple) else items

    def _encode_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """Store a tensor unless it is stored already, and return the entry that names it."""
        if problem := problem_with(tensor):
            raise CheckpointError(f"cannot save {_where(path)}: {problem}")
        key = _identity(tensor)
        if key not in self._entries:
            self._alive.append(tensor)
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if plain.dtype in DTYPE_CODES:
                self._entries[key] = {TAG: "tensor", "v": self._store(plain, path)}
            else:
                name = self._store(plain.reshape(-1).view(torch.uint8), path)
                dtype = str(plain.dtype).removeprefix("torch.")
                self._entries[key] = {TAG: "tensor", "v": name, "dtype": dtype, "shape": list(plain.shape)}
        return dict(self._entries[key])

    def _encode_shard(self, value: Any, path: tuple[str, ...]) -> dict[str, Any]:
        """Store the part of a DTensor that this rank saves, and return the entry that names the DTensor."""
        if not isinstance(value, LocalPart) and value.device_mesh.size() == 1:
            return self._encode_tensor(value.detach().to_local(), path)
        with inside(f"cannot save {_where(path)}"):
            part = value if isinstance(value, LocalPart) else local_part(value)
            if part.tensor.dtype not in DTYPE_CODES:
                why = f"a DTensor of {part.tensor.dtype} cannot be stored in safetensors; save its full_tensor()"
                raise CheckpointError(why)
            if problem := problem_with(part.tensor):
                raise CheckpointError(problem)
        key = _identity(part.tensor)
        if key not in self._entries:
            self._alive.append(part.tensor)
            name = self._store(part.tensor.contiguous(), path)
            self._entries[key] = {TAG: "tensor", "v": name}
            self.shards[name] = part.shard
            if not part.is_saved or (not part.tensor.numel() and 0 not in part.shard.shape):
                del self.tensors[name]
        return dict(self._entries[key])

    def _encode_numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Encode arrays as bytes among the tensors and scalars as bytes in hex; the dtype restores both."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject or dtype.names or type(value).__name__ in ("matrix", "memmap"):
            raise _refusal(value, path, "save a plain array of numbers, strings or dates, or a list")
        if type(value).__name__ != "ndarray":
            return {TAG: "numpy", "dtype": dtype.str, "v": value.tobytes().hex()}
        name = self._store(torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu"), path)
        return {TAG: "ndarray", "dtype": dtype.str, "shape": list(value.shape), "v": name}

    def _store(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        """Store a tensor under its dotted path, as in a state dict, and return its name.

        ``a.b`` and ``b`` inside ``a`` collide, so one gets a number.
        """
        name = ".".join(path).encode("utf-8", "backslashreplace").decode("utf-8") or "tensor"
        unique = free_name(name, ChainMap(self.tensors, self.shards, {_RESERVED_NAME: None}))
        self.tensors[unique] = tensor
        return unique


def _identity(tensor: torch.Tensor) -> Any:
    """Return what two views of the same memory with the same layout have in common; empty tensors share no memory."""
    if not tensor.numel():
        return id(tensor)
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _encode_scalar(value: Any, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        # JSON joins two halves of a surrogate pair into one character, so text with halves is stored as bytes.
        return {TAG: "str", "v": text.encode("utf-8", "surrogatepass").hex()} if _has_surrogates(text) else text
    if isinstance(value, int):
        plain = -_MAX_PLAIN_INT <= value < _MAX_PLAIN_INT
        return int(value) if plain else {TAG: "int", "v": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}
    if type(value) is bytes:
        return {TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (torch.dtype, torch.device)):
        return {TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    if isinstance(value, _Encoded):
        return value.value
    raise _refusal(value, path, "save numbers, strings, lists, dicts or tensors from which it can be rebuilt")


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _where(path: Iterable[str]) -> str:
    return ".".join(path) or "the state itself"


def _refusal(value: Any, path: Iterable[str], remedy: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    problem = f"{with_article(kind)} cannot be saved exactly without pickle; {remedy}"
    return CheckpointError(f"cannot save {_where(path)}: {problem}")


def problem_with(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be saved, or None if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
        return f"{kind} is a tensor subclass; save a plain tensor (for a DTensor, its full_tensor())"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; save its to_dense(), or its indices and values"
    if tensor.is_quantized:
        return "it is quantized; save its int_repr() with scale and zero point"
    if tensor.is_meta:
        return "it is on the meta device and has no values; materialize it first"
    return None


# ---- decoding --------------------------------------------------------------------------------------------------------


class _Decoder:
    """Rebuild a tree by one rule per kind; an unknown kind raises an error, so a file never chooses code."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._views: dict[str, torch.Tensor] = {}

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.decode(item) for key, item in node.items()}
        kind, value = node[TAG], node["v"]
        if kind in _SIMPLE_KINDS:
            return _SIMPLE_KINDS[kind](value)
        if kind == "tensor":
            # One object for every place that refers to it; the dtype and shape of stored bytes are restored once.
            if value not in self._views:
                stored = self._tensors[value]
                is_bytes = "dtype" in node
                self._views[value] = stored.view(_dtype(node["dtype"])).reshape(node["shape"]) if is_bytes else stored
            return self._views[value]
        if kind == "tuple":
            return tuple(self.decode(item) for item in value)
        if kind == "namedtuple":  # a new class with the same names, because a file must not import anything
            return namedtuple(node["name"], node["fields"])(*map(self.decode, value))
        if kind in ("dict", "counter"):
            pairs = {self.decode(key): self.decode(item) for key, item in value}
            return Counter(pairs) if kind == "counter" else pairs
        if kind == "numpy":
            return _array(bytes.fromhex(value), node["dtype"], [])[()]
        if kind == "ndarray":
            return _array(self._tensors[value].cpu().numpy().tobytes(), node["dtype"], node["shape"])
        raise ValueError(f"unknown kind {kind!r}")


def _array(data: bytes, dtype: str, shape: list[int]) -> Any:
    """Make a writable array from these bytes."""
    kind, size = numpy.dtype(dtype), math.prod(shape)
    fits = size * kind.itemsize == len(data) if kind.itemsize else size <= 1
    if kind.hasobject or not fits:  # checked before memory is allocated, because a file may claim any shape
        raise ValueError(f"{len(data)} bytes are not a {dtype} array of shape {shape}")
    if not data or not kind.itemsize:  # NumPy reads neither an empty buffer nor strings of length 0
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    """Look a dtype up in a fixed table: a file's text never reads an attribute of a module."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


_SIMPLE_KINDS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "device": torch.device,
    "dtype": _dtype,
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    "int": lambda value: int(value, 16),
    "size": torch.Size,
    "str": lambda value: bytes.fromhex(value).decode("utf-8", "surrogatepass"),
}
