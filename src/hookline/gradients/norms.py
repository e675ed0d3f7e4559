"""Norms of gradients: read in one pass, and not read again until somebody has written to them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.gradients.numbers import any_sharded, are_alike, by_kind, is_sharded, numbers_of
from hookline.stats.columns import wide_dtype
from hookline.stats.shards import find_shards


class _Kept(NamedTuple):
    """A norm, with the memory it is of and how often that had been written to."""

    memory: Tensor
    version: int
    norm: Tensor


class Norms:
    """L2 norms of gradients, on their device, kept while the gradients stay as they are.

    Whether a gradient was written to is told by its version counter, so nobody needs to say so. Two rules make a run
    the same whether or not somebody measures: what is kept by reading is what reading again would give, and what is
    kept without reading (`keep`) is kept by links that change gradients, always.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._latest: tuple[list[Tensor], list[int], Tensor] | None = None

    def of(self, tensors: list[Tensor]) -> Tensor:
        """One norm per gradient, of the whole gradient where it is sharded; float32 for half precision."""
        memory = numbers_of(tensors)
        versions = [one._version for one in memory]
        if self._latest is not None and _same(self._latest, memory, versions):
            return self._latest[2]
        self._spread()
        kept = [self._kept.get(id(one)) for one in memory]
        stale = [i for i, one in enumerate(kept) if one is None or one.version != versions[i]]
        found = _read([tensors[i] for i in stale], [memory[i] for i in stale])
        if len(stale) < len(memory):
            fresh = dict(zip(stale, found, strict=True))
            found = [fresh[i] if one is None or i in fresh else one.norm for i, one in enumerate(kept)]
        if len({norm.device for norm in found}) > 1:
            found = [norm.to(memory[0].device) for norm in found]
        self._latest = (memory, versions, torch.stack(found))
        return self._latest[2]

    def keep(self, tensors: list[Tensor], norms: Tensor) -> None:
        """Norms that a link knows after having written, without reading what it wrote."""
        self._spread()
        memory = numbers_of(tensors)
        self._latest = (memory, [one._version for one in memory], norms)

    def clear(self) -> None:
        """Let go of everything; the step is over."""
        self._kept.clear()
        self._latest = None

    def _spread(self) -> None:
        """The latest row becomes single norms, to be put together differently."""
        if self._latest is not None:
            for memory, version, norm in zip(*self._latest[:2], self._latest[2].unbind(), strict=True):
                self._kept[id(memory)] = _Kept(memory, version, norm)
            self._latest = None


def _read(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, over all its shards."""
    norms = read_norms(memory)
    if any_sharded(tensors):
        norms = list(_over_shards(tensors, torch.stack(norms)).unbind())
    return norms


def _over_shards(tensors: list[Tensor], norms: Tensor) -> Tensor:
    """From the norms of what is here to those of the whole gradients; one reduction for all of a mesh."""
    for shards in find_shards(tensors, [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]):
        norms = shards.sums(norms.square()).sqrt()
    return norms


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, as torch's `get_total_norm` has it; sparse and sharded ones too."""
    if norm_type == 2.0 and any_sharded(tensors):
        norm: Tensor = torch.linalg.vector_norm(Norms().of(tensors))
        return norm
    groups: dict[Any, list[Tensor]] = {}
    for tensor, memory in zip(tensors, numbers_of(tensors), strict=True):
        mesh = getattr(tensor, "device_mesh", None)
        groups.setdefault(mesh, []).append(memory if mesh is None else tensor)
    norms = [_whole(torch.nn.utils.get_total_norm(group, norm_type)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)


def _whole(norm: Any) -> Tensor:
    """A norm as a plain number: torch leaves that of DTensors to be put together over their mesh."""
    full: Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return full


def read_norms(memory: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each of these plain tensors, one launch for those of a kind: the operation that torch clips by.

    (`hookline.stats.norms` is more exact, and would clip differently in the last bit.)
    """
    if are_alike(memory):
        return list(_norms_alike(memory))
    found: dict[int, Tensor] = {}
    for alike in by_kind(memory):
        found.update(zip(map(id, alike), _norms_alike(alike), strict=True))
    return [found[id(one)] for one in memory]


def _norms_alike(memory: list[Tensor]) -> Sequence[Tensor]:
    if not memory:
        return []
    dtype = memory[0].dtype
    return torch._foreach_norm(memory, 2.0, dtype=None if wide_dtype(dtype) is dtype else wide_dtype(dtype))


def _same(latest: tuple[list[Tensor], list[int], Tensor], memory: list[Tensor], versions: list[int]) -> bool:
    known, at, _ = latest
    return at == versions and len(known) == len(memory) and all(map(is_, known, memory))
