"""`Gradients`: the gradients by parameter name, as update hooks see them, and what a chain caches about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hookline.errors import GradientError, nearest
from hookline.gradients.local_storage import group_by_kind, is_sharded, local_tensor
from hookline.gradients.norms import norms_of, norms_of_one_kind
from hookline.stats.tensor_meta import TensorMeta, tensor_meta

Parameters = Mapping[str, torch.nn.Parameter]

_GRAD = attrgetter("grad")


class GradientList:
    """Some gradients in order, with what is true of all of them, computed when first read. Do not modify the list."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._norms: Tensor | None = None
        self._norms_are_exact = False
        self._generation = -1  # of the cache, when the norms were computed

    @cached_property
    def meta(self) -> TensorMeta:
        """Dtypes, shapes and devices."""
        return tensor_meta(self.tensors)

    @property
    def is_plain(self) -> bool:
        """Whether none of them is sharded, sparse or complex."""
        return self.meta.plain

    @property
    def is_one_kind(self) -> bool:
        """Whether all have one dtype and are on one device."""
        return self.meta.alike

    @cached_property
    def local(self) -> list[Tensor]:
        """The memory of each; see `local_storage`."""
        return self.tensors if self.is_plain else [local_tensor(tensor) for tensor in self.tensors]

    @cached_property
    def groups(self) -> list[list[Tensor]]:
        """Their memory by device and dtype, as foreach operations take it."""
        return [self.local] if self.tensors and self.is_plain and self.is_one_kind else group_by_kind(self.local)

    def norms(self, generation: int | None, exact: bool = False) -> Tensor:
        """Return one L2 norm per gradient; reads them only if something may have written since the last time.

        Args:
            generation: The cache's generation; None reads always.
            exact: Whether norms that a transform computed from others, instead of reading them, are not enough.
        """
        stale = self._norms is None or generation is None or generation != self._generation
        if stale or (exact and not self._norms_are_exact):
            # Asking hundreds of tensors for their kind again would take a tenth of a millisecond.
            simple = self.is_plain and self.is_one_kind
            norms = norms_of_one_kind(self.tensors) if simple else norms_of(self.tensors, self.local)
            self.set_norms(norms, -1 if generation is None else generation)
        assert self._norms is not None
        return self._norms

    def set_norms(self, norms: Tensor, generation: int, exact: bool = True) -> None:
        """Store norms that are known without reading the gradients again."""
        self._norms, self._generation, self._norms_are_exact = norms, generation, exact


class GradientCache:
    """What the hooks of a chain share during a step: the gradient lists, and their norms until something writes.

    Asking hundreds of gradients what they have in common takes longer than launching work on them, and reading their
    norms is a pass over all memory. `generation` counts the writes: norms of an earlier generation are read again.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lists: dict[int, GradientList] = {}  # by the id of the mapping of parameters, which the chain keeps alive

    def list_of(self, params: Parameters) -> GradientList:
        """Return the gradients that these parameters have."""
        if id(params) not in self._lists:
            self._lists[id(params)] = GradientList([grad for grad in map(_GRAD, params.values()) if grad is not None])
        return self._lists[id(params)]

    def written(self) -> None:
        """Note that gradients may have been written in place."""
        self.generation += 1

    def replaced(self) -> None:
        """Note that parameters may have other gradients; also lets go of the tensors."""
        self.generation += 1
        self._lists.clear()


class Gradients(MutableMapping[str, Tensor]):
    """A live view of the gradients of some parameters, by name. Nothing is copied, or written before `commit`.

    Assigning to a name stores the new gradient until `commit`; parameters without a gradient are not listed.

    Args:
        params: The parameters by name.
        cache: The chain's cache, for hooks that are known not to replace gradients behind its back.
    """

    def __init__(self, params: Parameters, cache: GradientCache | None = None) -> None:
        self.params = params
        self.assigned: dict[str, Any] = {}  # and not committed yet
        self._cache = cache
        self._norms_found: tuple[Tensor, bool] | None = None

    def __getitem__(self, name: str) -> Tensor:
        found = self.assigned[name] if name in self.assigned else self.params[name].grad
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, gradient: Tensor) -> None:
        if name not in self.params:
            raise KeyError(f"{name!r} is not a parameter here; {nearest(name, self.params)}")
        self.assigned[name] = gradient

    def __delitem__(self, name: str) -> None:
        self[name]  # raises KeyError if it is not there
        self.assigned[name] = None

    def __iter__(self) -> Iterator[str]:
        for name, param in self.params.items():
            if self.assigned.get(name, param.grad) is not None:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Gradients({len(self)} of {len(self.params)} parameters)"

    def tensors(self) -> list[Tensor]:
        """Return the gradients that exist, in the order of the parameters."""
        if self.assigned:
            return [self[name] for name in self]
        return [grad for grad in map(_GRAD, self.params.values()) if grad is not None]

    def as_list(self) -> GradientList:
        """Return the gradients with what is true of all of them; cached during a step of the chain."""
        if self._cache is None or self.assigned:
            return GradientList(self.tensors())
        return self._cache.list_of(self.params)

    def local_tensors(self) -> list[Tensor]:
        """Return the gradients' memory, to be written in place: of a DTensor its shard, of a sparse one its values."""
        return list(self._writable().local)

    def groups(self) -> list[list[Tensor]]:
        """Return the `local_tensors` by device and dtype, as foreach operations take them."""
        return self._writable().groups

    def _writable(self) -> GradientList:
        found = self.as_list()
        if found.is_plain:
            return found
        for name, grad in self.items():
            if grad.is_sparse:  # coalescing makes a copy, so a write into it would not reach the parameter
                self.params[name].grad = grad.coalesce()
        if self._cache is not None:
            self._cache.replaced()
        return self.as_list()

    def norms(self, exact: bool = False) -> Tensor:
        """Return one L2 norm per gradient, on the device, of the whole gradient where it is sharded.

        `exact` reads them even if the transform before computed them from those it knew.
        """
        found = self.as_list()
        generation = None if self._cache is None or self.assigned else self._cache.generation
        return found.norms(generation, exact) if found.tensors else torch.zeros(0)

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients together, on the device; zero if there are none."""
        norm: Tensor = torch.linalg.vector_norm(self.norms())
        return norm

    def set_norms_after(self, norms: Tensor, exact: bool) -> None:
        """Set the norms that the gradients have after this transform's writes, so that no hook must read them."""
        self._norms_found = norms, exact

    def finish_write(self) -> None:
        """Invalidate cached norms after a transform wrote in place, except for those of `set_norms_after`."""
        found, self._norms_found = self._norms_found, None
        if self._cache is not None:
            self._cache.written()
            if found is not None:
                self.as_list().set_norms(found[0], self._cache.generation, exact=found[1])

    def discard(self) -> None:
        """Drop what was assigned and not committed."""
        self.assigned.clear()
        if self._cache is not None:
            self._cache.replaced()

    def commit(self, returned: Any) -> None:
        """Take over what a hook returned, all or nothing; None for a name removes its gradient.

        Raises:
            GradientError: If it is not a complete mapping of gradients that fit their parameters.
        """
        if returned is None:
            raise GradientError("returned None; return the gradients (the mapping you got, or a new one)")
        if returned is not self and not isinstance(returned, Mapping):
            raise GradientError(f"returned {type(returned).__name__}; return a mapping of parameter name to gradient")
        new = dict(self.assigned if returned is self else returned)
        missing = [] if returned is self else [name for name in self if name not in new]
        if missing:
            count = f" ({len(missing)} in all)" if len(missing) > 1 else ""
            raise GradientError(f"dropped {missing[0]!r}{count}; return every gradient, None to remove one")
        for name, gradient in new.items():
            if name not in self.params:
                remedy = nearest(str(name), self.params)
                raise GradientError(f"returned {name!r}, which is not a parameter here; {remedy}")
            if gradient is not None:
                _check_fits(name, self.params[name], gradient)
        for name, gradient in new.items():
            # Cloned, because later transforms write into it and the hook may have kept what it returned.
            same = gradient is None or gradient is self.params[name].grad
            self.params[name].grad = gradient if same else gradient.clone()
        self.discard()


def _check_fits(name: str, param: torch.nn.Parameter, gradient: Any) -> None:
    """Check that a gradient has the parameter's shape, dtype, device, layout and sharding, and no graph."""
    if not isinstance(gradient, Tensor):
        raise GradientError(f"{name!r}: returned {type(gradient).__name__}, not a tensor")
    for fact in ("shape", "dtype", "device"):
        expected, actual = getattr(param, fact), getattr(gradient, fact)
        if expected != actual:
            shown = [tuple(one) if fact == "shape" else one for one in (actual, expected)]
            raise GradientError(f"{name!r}: returned {fact} {shown[0]}, the parameter has {shown[1]}")
    if gradient.requires_grad:
        raise GradientError(f"{name!r}: returned a gradient that still has a graph; detach it")
    if type(gradient) is Tensor and type(param) is torch.nn.Parameter and gradient.layout is param.layout:
        return  # nearly always, and faster than what follows
    layouts = {param.layout} if param.grad is None else {param.layout, param.grad.layout}
    if gradient.layout not in layouts:
        expected = " or ".join(sorted(map(str, layouts)))
        raise GradientError(f"{name!r}: returned layout {gradient.layout}, the gradient has {expected}")
    if is_sharded(gradient) != is_sharded(param):
        kinds = ("a DTensor", "plain") if is_sharded(gradient) else ("a plain tensor", "a DTensor")
        raise GradientError(f"{name!r}: returned {kinds[0]}, the parameter is {kinds[1]}")
    for fact in ("device_mesh", "placements"):
        expected, actual = getattr(param, fact, None), getattr(gradient, fact, None)
        if expected != actual:
            raise GradientError(f"{name!r}: returned {fact} {actual}, the parameter has {expected}")
