"""Tensors that the ranks of a run hold in shards: the part that a rank saves, and how to read any part of them.

The shards of a tensor lie under one name in several safetensors files. The header of each file says where its parts
begin, as torch's `HuggingFaceStorageWriter` writes it, so `HuggingFaceStorageReader` reads the files, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hookline._tensors import is_sharded
from hookline.checkpoints.errors import failing_as
from hookline.errors import CheckpointError

# The keys of torch's own writer.
SHARDING, OFFSETS, VERSION = "DCP_SHARDING_INFO", "saved_offsets", {"DCP_VERSION": "1.0", "format": "pt"}
SHAPE = "shape"  # The shape of the whole tensor. Only shards have it; torch's reader ignores it.

# The dtypes that safetensors files can contain, with the names used there. Other tensors are stored as bytes.
DTYPE_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

Region = tuple[range, ...]
"""A block of a tensor: its indices in each dimension."""


@dataclass(frozen=True)
class Shard:
    """Where a shard begins in its whole tensor, and the shape of that."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LocalPart:
    """The part of a DTensor that this rank holds, as a plain tensor; a checkpoint saves it like the DTensor."""

    tensor: torch.Tensor
    shard: Shard
    is_saved: bool
    """Whether this rank saves it. If several ranks hold copies, the first of them saves the block."""


def local_part(tensor: Any) -> LocalPart:
    """Return this rank's part of a DTensor. Raises `CheckpointError` for a partial sum."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("it is a partial sum over ranks; redistribute() it first")
    coordinate, shape = tensor.device_mesh.get_coordinate(), tuple(tensor.shape)
    local = tensor.detach().to_local()
    if coordinate is None:  # this rank is not part of the mesh
        return LocalPart(local, Shard((0,) * len(shape), shape), is_saved=False)
    region = _region(tensor)
    if tuple(local.shape) != tuple(map(len, region)):
        raise CheckpointError(f"its placements {tensor.placements} are not supported; redistribute() it first")
    copies = zip(tensor.placements, coordinate, strict=True)
    is_first = all(index == 0 for placement, index in copies if placement.is_replicate())
    return LocalPart(local, Shard(tuple(indices.start for indices in region), shape), is_saved=is_first)


def copy_to_host(value: Any) -> Any:
    """Return a host copy of a state_dict entry; for a DTensor, of this rank's part."""
    if is_sharded(value):
        part = local_part(value)
        return replace(part, tensor=part.tensor.to("cpu", copy=True))
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)


def like(value: Any, target: Any) -> Any:
    """Return a loaded or copied tensor in the form that a tensor of the model has now: whole, or this rank's shard.

    Args:
        value: A whole tensor, a DTensor or a `LocalPart`.
        target: The tensor of the model. A value with a different shape is returned unchanged.
    """
    if not is_sharded(target) or is_sharded(value):
        return value
    if isinstance(value, LocalPart):
        return _from_local(value.tensor, target)
    if not isinstance(value, torch.Tensor) or value.shape != target.shape:
        return value
    return _from_local(value[_slices(_region(target))].clone(), target)


def _from_local(local: torch.Tensor, target: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    device = target.to_local().device
    made: torch.Tensor = DTensor.from_local(
        local.to(device), target.device_mesh, target.placements,
        run_check=False, shape=target.shape, stride=target.stride(),
    )  # fmt: skip
    return made


def _region(tensor: Any) -> Region:
    """Return which block of a DTensor this rank holds; torch's planner of checkpoints knows every kind of placement."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"": tensor.detach()}, is_coordinator=False)
    items = planner.create_local_plan().items
    if not items:
        return tuple(range(0) for _ in tensor.shape)
    data = items[0].tensor_data
    if data is None or len(items) > 1:
        raise CheckpointError(f"its placements {tensor.placements} are not supported; redistribute() it first")
    return _block(data.chunk.offsets, data.chunk.sizes)


def _block(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple(range(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _slices(region: Region, inside: Region | None = None) -> tuple[slice, ...]:
    """Return what selects a region in the whole tensor, or in a larger region of it."""
    starts = [0] * len(region) if inside is None else [indices.start for indices in inside]
    pairs = zip(region, starts, strict=True)
    return tuple(slice(indices.start - start, indices.stop - start) for indices, start in pairs)


# ---- files -----------------------------------------------------------------------------------------------------------


def header(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return the metadata of a safetensors file that holds shards; a file without any has none."""
    if not shards:
        return {}
    places: dict[str, dict[str, list[int]]] = {name: {OFFSETS: [0] * tensor.dim()} for name, tensor in tensors.items()}
    places |= {name: {OFFSETS: list(shard.offsets), SHAPE: list(shard.shape)} for name, shard in shards.items()}
    return {SHARDING: json.dumps({name: places[name] for name in tensors}), **VERSION}


@dataclass(frozen=True)
class _Piece:
    """A tensor in one file: a whole one, or a shard."""

    file: Path
    opened: Any
    region: Region
    shape: torch.Size
    """The shape of the whole tensor."""
    is_shard: bool


Like = Callable[[str, bool], torch.Tensor | None]
"""Returns the tensor whose layout a saved one takes, given its name and whether it was saved in shards."""


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a section, from one or several files; each is read when it is needed.

    Args:
        files: The safetensors files.
        like: Returns the tensor whose sharding a saved one takes; without it, all are read whole.
    """

    def __init__(self, files: Sequence[Path], like: Like | None = None) -> None:
        self._like = like
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            with failing_as(f"cannot load {file}"):
                self._open(file)

    def _open(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        places = json.loads((opened.metadata() or {}).get(SHARDING, "{}"))
        for name in opened.keys():  # noqa: SIM118 - it is not a dict
            size, place = opened.get_slice(name).get_shape(), places.get(name, {})
            region, shape = _block(place.get(OFFSETS, [0] * len(size)), size), torch.Size(place.get(SHAPE, size))
            self._pieces.setdefault(name, []).append(_Piece(file, opened, region, shape, SHAPE in place))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def is_sharded(self, name: str) -> bool:
        """Return whether a tensor was saved in shards."""
        return self._pieces[name][0].is_shard

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._pieces[name][0].shape
        target = None if self._like is None else self._like(name, self.is_sharded(name))
        if target is None or not is_sharded(target) or target.shape != shape:
            return self._read(name, tuple(map(range, shape)))
        return _from_local(self._read(name, _region(target)), target)

    def _read(self, name: str, region: Region) -> torch.Tensor:
        """Read a block of a tensor from the pieces that overlap it."""
        pieces = self._pieces[name]
        with failing_as(f"cannot load {name!r} of {pieces[0].file}"):
            if pieces[0].region == region:
                whole: torch.Tensor = pieces[0].opened.get_tensor(name)
                return whole
            dtype = _DTYPES[pieces[0].opened.get_slice(name).get_dtype()]
            block, elements = torch.empty([*map(len, region)], dtype=dtype, device="cpu"), 0
            for piece in pieces:
                both = zip(region, piece.region, strict=True)
                overlap = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both)
                if all(overlap):  # none of the ranges is empty
                    part = piece.opened.get_slice(name)[_slices(overlap, piece.region)]
                    block[_slices(overlap, region)] = part
                    elements += part.numel()
        if elements != block.numel():
            raise CheckpointError(f"{name!r}: {block.numel() - elements} of its elements are in no shard")
        return block
