"""State as JSON and tensors, exactly, without pickle: `encode` takes a tree apart, `decode` is the way back.

JSON's own values stand for themselves. Everything else is a tagged object, ``{"!": kind, "v": value}``; the
key "!" marks it, so a dict with a key that begins with it is written as a tagged list of pairs.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from hookline.checkpoints.tensors import TensorTable, dtype_named, tensor_from
from hookline.errors import CheckpointError

TAG = "!"

_LARGEST_PLAIN_INT = 2**63
_SCALARS = (str, int, float, bool, type(None), bytes)
_DAMAGE = (
    KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError, struct.error,
)  # fmt: skip # what decoding a file raises that nobody's `encode` has written; RecursionError is a RuntimeError


def encode(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree as a JSON value and its tensors, named by their dotted paths, detached and contiguous.

    A tensor that appears twice (also as another view of the same memory with the same shape) is stored once.
    Raises `CheckpointError` with the dotted path of the first value that has no exact form.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(tree, ()), encoder.table.tensors
    except RecursionError:
        raise CheckpointError("the state is nested too deeply to be saved; flatten it") from None


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `encode` took apart; places that shared a tensor get the same tensor object again."""
    try:
        return _Decoder(tensors).decode(skeleton)
    except _DAMAGE as error:
        raise CheckpointError(f"the saved state is damaged or from a newer version: {error!r}") from error


class _Encoder:
    """One walk over a tree; knows the way to the value at hand, for tensor names and error messages."""

    def __init__(self) -> None:
        self.table = TensorTable()
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Enum):
            raise _refusal(value, path, "save its .value")
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", **self.table.add(value, path)}
        if type(value).__module__ == "numpy":
            return self._encode_numpy(value, path)
        if isinstance(value, (dict, list, tuple)):
            return self._encode_container(value, path)
        return _encode_scalar(value, path)

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self._open:
            raise _refusal(value, path, "it contains itself; save a tree")
        self._open.add(id(value))
        try:
            walk = self._encode_dict if isinstance(value, dict) else self._encode_sequence
            return walk(value, path)
        finally:
            self._open.discard(id(value))

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        if type(value) is not Counter and all(map(_is_plain_key, value)):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [self._encode_key(key, path), self.encode(item, (*path, _key_name(key)))] for key, item in value.items()
        ]
        return {TAG: "counter" if isinstance(value, Counter) else "dict", "v": pairs}

    def _encode_key(self, key: Any, path: tuple[str, ...]) -> Any:
        if isinstance(key, Enum) or not isinstance(key, (*_SCALARS, tuple)):
            raise _refusal(key, (*path, "(key)"), "use strings, numbers or tuples of them as keys")
        return self.encode(key, (*path, "(key)"))

    def _encode_sequence(self, value: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Size):
            return {TAG: "size", "v": list(value)}
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
            return {TAG: "namedtuple", "name": type(value).__name__, "fields": list(fields), "v": items}
        return {TAG: "tuple", "v": items} if isinstance(value, tuple) else items

    def _encode_numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Arrays as their bytes among the tensors, scalars as their bytes in hex; the dtype restores them."""
        dtype = getattr(value, "dtype", None)
        if dtype is None or dtype.hasobject or dtype.names or type(value).__name__ in ("matrix", "memmap"):
            raise _refusal(value, path, "save a plain array of numbers, strings or dates, or a list")
        if type(value).__name__ != "ndarray":
            return {TAG: "numpy", "dtype": dtype.str, "v": value.tobytes().hex()}
        name = self.table.add_bytes(value.tobytes(), path)
        return {TAG: "ndarray", "dtype": dtype.str, "shape": list(value.shape), "v": name}


def _encode_scalar(value: Any, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encode_text(str.__str__(value))
    if isinstance(value, int):
        plain = -_LARGEST_PLAIN_INT <= value < _LARGEST_PLAIN_INT
        return int(value) if plain else {TAG: "int", "v": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}
    if type(value) is bytes:
        return {TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (torch.dtype, torch.device)):
        return {TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    raise _refusal(value, path, "save numbers, text, lists, dicts or tensors that it can be rebuilt from")


def _encode_text(text: str) -> Any:
    """JSON joins two halves of a surrogate pair into one character, so text with halves goes as bytes."""
    if _has_no_surrogates(text):
        return text
    return {TAG: "str", "v": text.encode("utf-8", "surrogatepass").hex()}


def _has_no_surrogates(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _is_plain_key(key: Any) -> bool:
    return type(key) is str and not key.startswith(TAG) and _has_no_surrogates(key)


def _key_name(key: Any) -> str:
    try:
        return str(key)
    except ValueError:  # Python refuses to write out thousands of digits
        return f"<{type(key).__name__}>"


def _refusal(value: Any, path: Iterable[str], remedy: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    where = ".".join(path) or "the state itself"
    return CheckpointError(f"cannot save {where}: a {kind} has no exact form without pickle; {remedy}")


class _Decoder:
    """The way back. Each kind has one rule; an unknown kind is refused, never guessed."""

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
        return self._decode_tagged(node)

    def _decode_tagged(self, node: dict[str, Any]) -> Any:
        kind, value = node[TAG], node["v"]
        if kind in _SIMPLE_KINDS:
            return _SIMPLE_KINDS[kind](value)
        if kind == "tensor":
            return self._tensor(node)
        if kind == "tuple":
            return tuple(self.decode(item) for item in value)
        if kind == "namedtuple":  # of the same names, not of the same class: a file shall import nothing
            return namedtuple(node["name"], node["fields"])(*map(self.decode, value))
        if kind in ("dict", "counter"):
            pairs = {self.decode(key): self.decode(item) for key, item in value}
            return Counter(pairs) if kind == "counter" else pairs
        if kind in ("numpy", "ndarray"):
            return self._numpy(node)
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, node: dict[str, Any]) -> torch.Tensor:
        """The same object for every place that named it; tensors kept as bytes are given their dtype once."""
        name = node["v"]
        if name not in self._views:
            self._views[name] = tensor_from(self._tensors[name], node)
        return self._views[name]

    def _numpy(self, node: dict[str, Any]) -> Any:
        numpy = _import_numpy()
        if node[TAG] == "numpy":
            return _array(numpy, bytes.fromhex(node["v"]), node["dtype"], [])[()]
        data = self._tensors[node["v"]].cpu().numpy().tobytes()
        return _array(numpy, data, node["dtype"], node["shape"])


def _array(numpy: Any, data: bytes, dtype: str, shape: list[int]) -> Any:
    """A writable array of these bytes; NumPy reads neither an empty buffer nor strings of no length."""
    kind, size = numpy.dtype(dtype), math.prod(shape)
    fits = size * kind.itemsize == len(data) if kind.itemsize else size <= 1
    if kind.hasobject or not fits:  # before memory is asked for: a file may claim any shape
        raise ValueError(f"{len(data)} bytes are no {dtype} array of shape {shape}")
    if not data or not kind.itemsize:
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _import_numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("this state holds NumPy values; install numpy to load it") from error
    return numpy


_SIMPLE_KINDS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "device": torch.device,
    "dtype": dtype_named,
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    "int": lambda value: int(value, 16),
    "size": torch.Size,
    "str": lambda value: bytes.fromhex(value).decode("utf-8", "surrogatepass"),
}
