"""Walk over nested structures of tensors, and determine what kind a tensor is and what can be done with it.

Batches, module inputs and outputs nest tensors in tuples, lists, mappings, dataclasses and the attention caches of
Hugging Face models. Every part of Hookline that looks into such a structure uses these functions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import ref

import torch

PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
"""The types whose memory holds their values, unless a tensor is sparse or complex."""

_functorch: Any = getattr(torch._C, "_functorch", None)
is_wrapped: Callable[[torch.Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
"""Returns whether `torch.func` is transforming a tensor: vmapped, or tracked for a gradient."""
inside_transform: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", lambda: None)
"""Returns something other than None inside a transformed function, whose results can be read only afterwards."""
unwrap: Callable[[torch.Tensor], torch.Tensor] = torch.func.debug_unwrap
"""Unwraps a transformed tensor into the plain one, which other code can read; for `vmap`, the whole batch."""
_DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# Two float4 numbers are packed into one byte, and torch can neither read nor convert them.
_FLOATS = {dtype for dtype in _DTYPES if dtype.is_floating_point and "float4" not in str(dtype)}
_DTYPE, _DEVICE, _LAYOUT, _IS_COMPLEX = map(attrgetter, ("dtype", "device", "layout", "is_complex"))
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_NOT_LAZY = (RuntimeError, AttributeError, NotImplementedError)  # what torch raises where it has no lazy clone
# Classes of these modules keep keys and values of attention in attributes, possibly nested.
_CACHE_MODULES = ("transformers.cache_utils",)


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return every tensor in a nested structure, in order."""
    return (tensor for _, tensor in tensors_with_keys(value))


def tensors_with_keys(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield every tensor in a nested structure with the keys that lead to it, outermost first."""
    if isinstance(value, torch.Tensor):
        yield keys, value
        return
    for key, item in _children(value):
        yield from tensors_with_keys(item, (*keys, key))


def count_samples(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor; 1 if there is none."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if type(first) is torch.Tensor:  # The most common case.
        return first.size(0) if first.dim() else 1
    tensor = next(iter_tensors(batch), None)
    return int(tensor.size(0)) if tensor is not None and tensor.dim() else 1  # A nested tensor has no `shape`.


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the same structure with every tensor replaced with ``function(tensor)``.

    Dict subclasses keep their other state (a default factory, the attributes of a model output). A container whose
    class cannot be rebuilt from its items becomes a plain one.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is tuple:  # positional inputs are tuples, by far the most common case
        return tuple([map_tensors(function, item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _rebuild(lambda items: type(value)(*items), tuple(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        plain = tuple if isinstance(value, tuple) else list
        return _rebuild(type(value), plain(map_tensors(function, item) for item in value))
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        make: Any = partial(_updated, value) if isinstance(value, dict) else type(value)
        return _rebuild(make, items)
    attributes = _children(value)
    if not attributes:
        return value
    # Copied without its constructor, which may require other arguments or do more than store them.
    copied = copy.copy(value)
    for key, item in attributes:
        object.__setattr__(copied, key, map_tensors(function, item))
    return copied


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    kind = type(value)
    is_cache = kind.__module__ != "builtins" and any(base.__module__ in _CACHE_MODULES for base in kind.__mro__)
    return list(vars(value).items()) if is_cache else []


def _updated(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    copied = copy.copy(value)
    for key, item in items.items():
        copied[key] = item  # not `update`, which skips a subclass's own `__setitem__`
    return copied


def _rebuild(make: Callable[[Any], Any], items: Any) -> Any:
    try:
        return make(items)
    except Exception:  # the class's constructor takes something else
        return items


# ---- kinds of tensors ------------------------------------------------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds one value per element, in any dtype that torch can compute with."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized or is_wrapped(tensor))
    )


def kind_of(tensor: torch.Tensor) -> str:
    """Return one word for how a tensor differs from a dense tensor of real numbers.

    It is the class of a subclass (``DTensor``), the layout (``sparse_coo``, ``mkldnn``), ``nested``, ``vmapped``,
    ``functional`` (the other wrappers of `torch.func`), ``quantized`` or ``meta``, otherwise the dtype (``int64``).
    """
    if tensor.is_nested:
        return "nested"
    if type(tensor) not in PLAIN_TYPES:
        return type(tensor).__name__
    if is_wrapped(tensor):
        return "vmapped" if _functorch.is_batchedtensor(tensor) else "functional"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").removeprefix("_")
    if tensor.is_quantized:
        return "quantized"
    return "meta" if tensor.is_meta else str(tensor.dtype).removeprefix("torch.")


def measurable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the dense real numbers whose statistics describe a tensor; None if there are none.

    That is the tensor itself if it is dense and floating-point. It is the whole batch under `vmap`, this rank's part of
    a DTensor, and pairs of real numbers for a complex tensor. Integers have no statistics, and neither do sparse,
    nested, quantized and meta tensors, partial sums over ranks, and subclasses that compute for themselves; `kind_of`
    names them.
    """
    plain = tensor if is_dense(tensor) else _plain(tensor)
    if plain is None or not (plain is tensor or is_dense(plain)):
        return None
    if plain.dtype in _FLOATS:
        return plain
    return torch.view_as_real(plain.detach().resolve_conj()) if plain.is_complex() else None


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which takes longer than all of Hookline."""
    return hasattr(type(tensor), "to_local")


def _plain(tensor: Any) -> torch.Tensor | None:
    """Return the plain tensor without a graph that another one stands for, on this rank; None if there is none."""
    if type(tensor) in PLAIN_TYPES:
        # A copy, because writes by a function under a transform do not increment the version of the inner tensor.
        return unwrap(tensor.detach().clone()) if is_wrapped(tensor) else None
    if tensor.is_nested:
        return None
    try:
        tensor = tensor.detach()
        if is_sharded(tensor):
            ranks = tensor.device_mesh.shape
            if any(place.is_partial() and size > 1 for place, size in zip(tensor.placements, ranks, strict=True)):
                return None
            tensor = tensor.to_local()
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # It has memory, and modifies functions.
            plain: torch.Tensor = tensor.as_subclass(torch.Tensor)
            return plain
        cloned = tensor.clone()  # This unwraps the result of a collective that may still be running.
    except Exception as error:
        if not is_unsupported(tensor, error):
            raise
        return None
    return cloned if type(cloned) in PLAIN_TYPES else None


def is_unsupported(tensor: torch.Tensor, error: Exception) -> bool:
    """Return whether an operation on a tensor failed because it does not exist for this kind."""
    # A subclass may raise any exception for this. For a dense tensor of some dtype, torch raises this one.
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, NotImplementedError) or not is_dense(tensor)


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a detached copy of a tensor of any kind; None for one that cannot be copied."""
    try:
        cloned = tensor.detach().clone()
    except Exception as error:
        if not is_unsupported(tensor, error):
            raise
        return None
    return cloned if isinstance(cloned, torch.Tensor) else None


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a detached view that becomes a copy at the first write on either side.

    It is a clone at once where torch cannot do that, and None for a tensor that cannot be copied.
    """
    # For a quantized tensor, torch makes a lazy clone without a quantizer, and reading that crashes the process. Under
    # `vmap` it makes one of each sample and warns. A subclass need not support it.
    if type(tensor) is torch.Tensor and not tensor.is_quantized and not is_wrapped(tensor):
        try:
            # In grad mode the clone itself would become a node of the graph and keep it alive.
            return (tensor.detach() if torch.is_grad_enabled() else tensor)._lazy_clone()
        except _NOT_LAZY:
            pass
    return clone_tensor(tensor)


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a sparse tensor stores, each element once; any other tensor is returned unchanged."""
    if tensor.layout not in _SPARSE:
        return tensor
    values: torch.Tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
    return values


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor of any kind; -1 for the sizes that vary inside a nested tensor."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    sizes = []
    for dim in range(tensor.dim()):
        try:
            size = tensor.size(dim)
        except RuntimeError:
            size = -1
        sizes.append(size if type(size) is int else -1)  # A jagged one has a symbol there.
    return tuple(sizes)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; for a sparse tensor, those of the values that it stores."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return tensor.nbytes


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was modified in place; 0 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class TensorVersions:
    """The identities and versions of tensors, without keeping them alive.

    Writes that do not increment a version, such as those through `.data` or into a DTensor's shard, are missed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.versions = _versions(tensors)
        """None if one is an inference tensor: writes to those cannot be detected."""
        self._refs = list(map(ref, tensors))

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the same tensors, in order, and no version has changed."""
        alive = [reference() for reference in self._refs]
        same = len(alive) == len(tensors) and all(map(is_, alive, tensors))
        return same and self.versions is not None and _versions(tensors) == self.versions


def _versions(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return None


# ---- many tensors at once --------------------------------------------------------------------------------------------


class TensorMeta(NamedTuple):
    """Facts about a list of tensors."""

    plain: bool
    """Whether none of them is sharded, sparse, complex or an instance of another subclass."""
    uniform: bool
    """Whether all are plain and share one dtype and one device."""
    devices: set[torch.device]


def tensor_meta(tensors: Sequence[torch.Tensor]) -> TensorMeta:
    """Return the facts about the tensors."""
    # Reading one attribute of 500 tensors takes 25 to 45 µs, so only those that every caller needs are read. Few
    # different dtypes, types and devices occur, so sets of them are examined.
    dtypes, devices = set(map(_DTYPE, tensors)), set(map(_DEVICE, tensors))
    strided, real = set(map(_LAYOUT, tensors)) <= {torch.strided}, not any(map(_IS_COMPLEX, dtypes))
    plain = strided and real and PLAIN_TYPES.issuperset(map(type, tensors))
    return TensorMeta(plain, plain and len(dtypes) == len(devices) == 1, devices)


SHAPE_AND_DTYPE: Callable[[torch.Tensor], Hashable] = attrgetter("shape", "dtype")
DEVICE_AND_DTYPE: Callable[[torch.Tensor], Hashable] = attrgetter("device", "dtype")


def indices_by(kind: Callable[[torch.Tensor], Hashable], tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each kind, in the order in which the kinds first appear."""
    groups: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(kind(tensor), []).append(index)
    return list(groups.values())
