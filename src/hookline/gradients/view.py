"""`Gradients`: the gradients by parameter name, as update hooks see them, and what a chain knows about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hookline._tensors import is_sharded
from hookline._words import nearest
from hookline.errors import GradientError
from hookline.gradients.local_storage import group_by_kind, local_tensor, norms_of
from hookline.stats.tensor_meta import tensor_meta

Parameters = Mapping[str, torch.nn.Parameter]

_GRAD = attrgetter("grad")


class GradientList:
    """Some gradients in order, with what is known about them. Do not modify the lists."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.is_uniform = tensor_meta(tensors).uniform
        """Whether all are plain, not sharded, sparse or complex, and have one dtype and device."""
        self.known_norms: Tensor | None = None
        self.norms_are_exact = False  # They were read, not computed from other norms.
        self.norms_after: Tensor | None = None
        """The norms after a transform's writes, which it may set so that no hook must read them."""

    @cached_property
    def local(self) -> list[Tensor]:
        """The memory of each; see `local_storage`."""
        return self.tensors if self.is_uniform else list(map(local_tensor, self.tensors))

    @cached_property
    def groups(self) -> list[list[Tensor]]:
        """Their memory by device and dtype, as foreach operations take it."""
        return [self.tensors] if self.is_uniform else group_by_kind(self.local)

    def norms(self, exact: bool = False) -> Tensor:
        """Return one L2 norm per gradient, on the device, of the whole gradient where it is sharded.

        Args:
            exact: Whether to read the gradients if a transform computed their norms from those it knew.
        """
        if self.known_norms is None or (exact and not self.norms_are_exact):
            if not self.tensors:
                self.known_norms = torch.zeros(0)
            elif self.is_uniform:
                # The operation that torch clips by. `hookline.stats` computes norms more exactly, and would clip
                # differently in the last bit.
                dtype = torch.float32 if self.tensors[0].dtype.itemsize < 4 else None
                self.known_norms = torch.stack(torch._foreach_norm(self.tensors, 2.0, dtype=dtype))
            else:
                self.known_norms = norms_of(self.tensors, self.local)
            self.norms_are_exact = True
        return self.known_norms


GradientLists = dict[int, GradientList]
"""What the hooks of a chain share during a step, by the id of a mapping of parameters, which the chain keeps alive.

Asking hundreds of gradients what they have in common takes longer than launching work on them, and reading their norms
is a pass over all memory.
"""


class Gradients(MutableMapping[str, Tensor]):
    """A live view of the gradients of some parameters, by name. Nothing is copied, or written before `commit`.

    Assigning to a name stores the new gradient until `commit`; parameters without a gradient are not listed.

    Args:
        params: The parameters by name.
        known: The lists of the chain, for hooks that are known not to replace gradients behind its back; without them
            nothing is shared.
    """

    def __init__(self, params: Parameters, known: GradientLists | None = None) -> None:
        self.params = params
        self.assigned: dict[str, Any] = {}  # and not committed yet
        self._known = known

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
        """Return the gradients with what is known about them; the hooks of a chain share it during a step."""
        if self._known is None or self.assigned:
            return GradientList(self.tensors())
        found = self._known.get(id(self.params))
        if found is None:
            found = self._known[id(self.params)] = GradientList(self.tensors())
        return found

    def local_tensors(self) -> list[Tensor]:
        """Return the gradients' memory, to be written in place: of a DTensor its shard, of a sparse one its values."""
        return list(self.writable().local)

    def groups(self) -> list[list[Tensor]]:
        """Return the `local_tensors` by device and dtype, as foreach operations take them."""
        return self.writable().groups

    def writable(self) -> GradientList:
        """Return the gradients as `as_list` does, all of them with memory that can be written in place."""
        found = self.as_list()
        if found.is_uniform:
            return found
        for name, grad in self.items():
            if grad.is_sparse and not grad.is_coalesced():
                # Coalescing makes a copy, so a write into that would not reach the parameter.
                self.params[name].grad = grad.coalesce()
                self.forget()
        return self.as_list()

    def norms(self) -> Tensor:
        """Return one L2 norm per gradient, on the device, of the whole gradient where it is sharded."""
        return self.as_list().norms()

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients together, on the device; zero if there are none."""
        norm: Tensor = torch.linalg.vector_norm(self.norms())
        return norm

    def finish_write(self) -> None:
        """Note that a transform may have written in place: norms are read again, except for its `norms_after`."""
        for found in (self._known or {}).values():
            found.known_norms, found.norms_after, found.norms_are_exact = found.norms_after, None, False

    def forget(self) -> None:
        """Note that parameters may have other gradients."""
        if self._known is not None:
            self._known.clear()

    def discard(self) -> None:
        """Drop what was assigned and not committed."""
        self.assigned.clear()
        self.forget()

    def commit(self, returned: Any) -> None:
        """Take over what a hook assigned and returned, all or nothing; None for a name removes its gradient.

        Raises:
            GradientError: If it is not a complete mapping of gradients that fit their parameters.
        """
        if returned is None:
            raise GradientError("returned None; return the gradients (the mapping you got, or a new one)")
        if returned is not self:
            if not isinstance(returned, Mapping):
                kind = type(returned).__name__
                raise GradientError(f"returned {kind}; return a mapping of parameter name to gradient")
            self.assigned |= returned
            missing = [name for name in self if name not in self.assigned]
            if missing:
                count = f" ({len(missing)} in all)" if len(missing) > 1 else ""
                raise GradientError(f"dropped {missing[0]!r}{count}; return every gradient, None to remove one")
        for name, gradient in self.assigned.items():
            if name not in self.params:
                remedy = nearest(str(name), self.params)
                raise GradientError(f"returned {name!r}, which is not a parameter here; {remedy}")
            if gradient is not None:
                _check_fits(name, self.params[name], gradient)
        for name, gradient in self.assigned.items():
            # Cloned, because later transforms write into it and the hook may have kept what it returned.
            same = gradient is None or gradient is self.params[name].grad
            self.params[name].grad = gradient if same else gradient.clone()
        self.discard()


def is_like(gradient: Tensor, param: Tensor) -> bool:
    """Return whether a gradient has the shape, the dtype and the device of a parameter."""
    return gradient.shape == param.shape and gradient.dtype is param.dtype and gradient.device == param.device


def _check_fits(name: str, param: torch.nn.Parameter, gradient: Any) -> None:
    """Check that a gradient has the parameter's shape, dtype, device, layout and sharding, and no graph."""
    is_plain = type(gradient) is Tensor and type(param) is torch.nn.Parameter and gradient.layout is param.layout
    if is_plain and is_like(gradient, param) and not gradient.requires_grad:
        return  # nearly always, and faster than what follows
    if not isinstance(gradient, Tensor):
        raise GradientError(f"{name!r}: returned {type(gradient).__name__}, not a tensor")
    if gradient.requires_grad:
        raise GradientError(f"{name!r}: returned a gradient that still has a graph; detach it")
    if is_sharded(gradient) != is_sharded(param):
        kinds = ("a DTensor", "plain") if is_sharded(gradient) else ("a plain tensor", "a DTensor")
        raise GradientError(f"{name!r}: returned {kinds[0]}, the parameter is {kinds[1]}")
    for fact in ("shape", "dtype", "device", "device_mesh", "placements"):
        expected, actual = getattr(param, fact, None), getattr(gradient, fact, None)
        if expected != actual:
            shown = [tuple(value) if isinstance(value, torch.Size) else value for value in (actual, expected)]
            raise GradientError(f"{name!r}: returned {fact} {shown[0]}, the parameter has {shown[1]}")
    layouts = {param.layout} if param.grad is None else {param.layout, param.grad.layout}
    if gradient.layout not in layouts:
        allowed = " or ".join(sorted(map(str, layouts)))
        raise GradientError(f"{name!r}: returned layout {gradient.layout}, the gradient has {allowed}")
