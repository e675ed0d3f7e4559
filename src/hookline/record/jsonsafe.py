"""Strict JSON for anything: every value gets a text that any JSON parser reads, and nothing ever raises."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

_MAX_DEPTH = 48  # far deeper than any config, far from the interpreter's recursion limit
_FLAT_KEYS = frozenset({str})
_FLAT_VALUES = frozenset({int, float, str, bool, type(None)})
_ASTRAL_OR_LONE = "\\ud"  # how the encoder begins a surrogate: a rare character, or half of one
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _strict_encoder() -> Callable[[Any], str]:
    """json's own C encoder, made once: `JSONEncoder.encode` makes another one for every line."""
    plain = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    encode = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_encode_strictly = _strict_encoder()

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200


def dumps(value: Any, *, indent: int | None = None) -> str:
    """The value as strict JSON on one line (or indented); never raises, what JSON cannot say is a short repr.

    >>> dumps({"loss": float("nan"), "device": torch.device("cpu")})
    '{"loss":"NaN","device":"cpu"}'
    """
    if indent is None and _is_flat(value):
        try:
            text = _encode_strictly(value)
        except ValueError:  # a number that JSON has no word for
            pass
        else:
            if _ASTRAL_OR_LONE not in text:
                return text
    separators = (",", ":") if indent is None else None
    return json.dumps(simplify(value), indent=indent, separators=separators, allow_nan=False)


def simplify(value: Any) -> Any:
    """The value as plain dicts, lists, strings, numbers, booleans and None that JSON can write strictly."""
    return _simplify(value, ())


def shorten(value: Any) -> str:
    """A repr of at most some 200 characters, also of objects whose own repr fails."""
    try:
        return _without_lone_surrogates(_short.repr(value))
    except Exception:
        return f"<{type(value).__name__}>"


def is_dataclass_instance(value: Any) -> bool:
    """Whether the value is an instance (not the class itself) of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_values(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance by name; one that was never set is left out."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


def _is_flat(value: Any) -> bool:
    return (
        type(value) is dict
        and _FLAT_KEYS.issuperset(map(type, value))
        and _FLAT_VALUES.issuperset(map(type, value.values()))
    )


def _simplify(value: Any, parents: tuple[int, ...]) -> Any:
    try:
        return _simplify_container(value, parents) if _is_container(value) else _simplify_leaf(value)
    except Exception:  # a hostile property, a dict changed by another thread, a dead device
        return shorten(value)


def _is_container(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return True
    return is_dataclass_instance(value)


def _simplify_container(value: Any, parents: tuple[int, ...]) -> Any:
    if id(value) in parents or len(parents) >= _MAX_DEPTH:
        return shorten(value)
    inside = (*parents, id(value))
    if isinstance(value, Mapping):
        return _simplify_items(value.items(), inside)
    if isinstance(value, (list, tuple)):
        return [_simplify(item, inside) for item in value]
    if isinstance(value, (set, frozenset)):
        return _sorted([_simplify(item, inside) for item in value])
    return _simplify_items(field_values(value).items(), inside)


def _sorted(items: list[Any]) -> list[Any]:
    """Numbers by size, then everything else by its text."""
    numbers = [item for item in items if type(item) in (int, float)]
    others = [item for item in items if type(item) not in (int, float)]
    return sorted(numbers) + sorted(others, key=lambda item: json.dumps(item, sort_keys=True))


def _simplify_items(items: Iterable[tuple[Any, Any]], parents: tuple[int, ...]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in items:
        plain[free_name(key_text(key), plain)] = _simplify(value, parents)
    return plain


def key_text(key: Any) -> str:
    """A mapping's key as the string JSON needs: strings as they are, anything else as its JSON text."""
    plain = simplify(key)
    return plain if isinstance(plain, str) else json.dumps(plain, separators=(",", ":"))


def free_name(name: str, taken: dict[str, Any]) -> str:
    """``1`` and ``"1"`` are two keys in Python and one in JSON: the second gets a mark."""
    unique, count = name, 2
    while unique in taken:
        unique, count = f"{name}#{count}", count + 1
    return unique


def _simplify_leaf(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _simplify_enum(value)
    if isinstance(value, str):
        return _without_lone_surrogates(value)
    if isinstance(value, int):
        return _simplify_int(int(value))
    if isinstance(value, float):
        return _simplify_float(float(value))
    return _simplify_object(value)


def _simplify_object(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _simplify_tensor(value)
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, PurePath):
        return _without_lone_surrogates(str(value))
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if type(value).__module__ == "numpy":
        return _simplify_numpy(value)
    return shorten(value)


def _simplify_enum(value: Enum) -> str:
    text = value.value if isinstance(value.value, str) else value.name
    return _without_lone_surrogates(text or str(value))  # an unnamed combination of flags has no name


def _simplify_int(value: int) -> int | str:
    try:
        str(value)
    except ValueError:  # Python refuses to write out thousands of digits
        return hex(value)
    return value


def _simplify_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _simplify_tensor(value: torch.Tensor) -> Any:
    if value.dim() == 0 and not value.is_complex() and value.device.type != "meta":
        return _simplify_leaf(value.item())
    return {"tensor": {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}}


def _simplify_numpy(value: Any) -> Any:
    """Scalars as numbers, arrays as a description; known by their module, so NumPy is never imported."""
    if getattr(value, "ndim", None) != 0:
        return _describe_array(value)
    item = value.item()
    return shorten(value) if type(item) is type(value) else simplify(item)


def _describe_array(value: Any) -> Any:
    if not hasattr(value, "shape"):
        return shorten(value)
    return {"array": {"shape": list(value.shape), "dtype": str(value.dtype)}}


def _without_lone_surrogates(text: str) -> str:
    """The text as an exact ``str``; halves of surrogate pairs (undecodable names) become visible escapes."""
    if not _LONE_SURROGATE.search(text):
        return str.__str__(text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
