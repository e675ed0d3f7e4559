"""`Gradients`: the gradients by parameter name, as update hooks see them, and the chain's knowledge about them.

`Transform` is the base of the built-in update hooks that change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hookline._tensors import DEVICE_AND_DTYPE, indices_by, is_sharded, kind_of, stored_values, tensor_meta
from hookline._words import nearest
from hookline.core.base import UpdateHook
from hookline.errors import GradientError
from hookline.stats.distributed import group_by_mesh
from hookline.stats.rows import wide_dtype

Parameters = Mapping[str, torch.nn.Parameter]

_GRAD = attrgetter("grad")
_LEAVE_OUT = "leave it out with params= (a list of patterns, or a predicate)"


class GradientList:
    """Some gradients in order, or tensors like them, with what is known about them. Do not modify the lists.

    Their memory is plain tensors that can be read and written in place: the shard on this rank for a DTensor, the
    values of a sparse gradient, pairs of real numbers for a complex one. An elementwise function that maps zero to zero
    can be applied to them directly; sums over them must also be taken over the shards.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.is_uniform = tensor_meta(tensors).uniform
        """Whether all are plain, not sharded, sparse or complex, and have one dtype and device."""

    @cached_property
    def local(self) -> list[Tensor]:
        """The memory of each."""
        return self.tensors if self.is_uniform else list(map(local_tensor, self.tensors))

    @cached_property
    def _indices(self) -> list[list[int]]:
        """The indices of the tensors of each group."""
        return indices_by(DEVICE_AND_DTYPE, self.local)

    @cached_property
    def groups(self) -> list[list[Tensor]]:
        """Their memory by device and dtype, because foreach operations are fused only for a single kind."""
        if self.is_uniform:
            return [self.tensors]
        return [[self.local[index] for index in indices] for indices in self._indices]

    def multiply_(self, factor: Tensor | float) -> None:
        """Multiply them in place by one number, which may be on a device."""
        for tensors in self.groups:
            like = tensors[0]
            if isinstance(factor, Tensor):
                exact: Tensor | float = factor.to(like.device)
            elif like.is_cpu:
                # On the CPU a foreach operation would round a Python number to bf16 or fp16 first.
                exact = torch.tensor(factor, dtype=wide_dtype(like.dtype))
            else:
                exact = factor
            torch._foreach_mul_(tensors, exact)

    @cached_property
    def norms(self) -> Tensor:
        """One L2 norm per gradient, on the first one's device; for a sharded gradient, the norm of the whole.

        Half precision is added up in float32.
        """
        if not self.tensors:
            return torch.zeros(0)
        by_group = []
        for tensors in self.groups:
            # The operation that torch clips by. `hookline.stats` computes norms more exactly, and would clip
            # differently in the last bit.
            dtype = torch.float32 if tensors[0].dtype.itemsize < 4 else None
            by_group.append(torch.stack(torch._foreach_norm(tensors, 2.0, dtype=dtype)))
        norms = by_group[0]
        if len(by_group) > 1:
            in_groups = [norm for of_group in by_group for norm in of_group.to(norms.device).unbind()]
            by_index = dict(zip(chain(*self._indices), in_groups, strict=True))
            norms = torch.stack([by_index[index] for index in range(len(in_groups))])
        for shards in [] if self.is_uniform else group_by_mesh(self.tensors):
            norms = shards.sums(norms.square()).sqrt()  # one reduction for all gradients of a mesh
        return norms

    def forget_norms(self) -> None:
        """Read the norms again when they are next needed, because the gradients were written to."""
        vars(self).pop("norms", None)

    def total_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of all as one vector, like torch's `get_total_norm`; also of sparse and sharded ones."""
        if self.is_uniform:
            return torch.nn.utils.get_total_norm(self.tensors, norm_type)
        if norm_type == 2.0 and any(map(is_sharded, self.tensors)):
            norm: Tensor = torch.linalg.vector_norm(self.norms)
            return norm
        meshes: dict[Any, list[Tensor]] = {}
        for tensor, memory in zip(self.tensors, self.local, strict=True):
            mesh = getattr(tensor, "device_mesh", None)
            meshes.setdefault(mesh, []).append(memory if mesh is None and not tensor.is_complex() else tensor)
        norms: list[Any] = [torch.nn.utils.get_total_norm(group, norm_type) for group in meshes.values()]
        # torch leaves the norm of DTensors to be reduced over their mesh.
        norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
        return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the memory of one gradient; for an uncoalesced sparse one, a coalesced copy."""
    if is_sharded(tensor):
        placements = tensor.placements  # type: ignore[attr-defined]
        if any(place.is_partial() for place in placements):
            raise GradientError(
                f"a gradient of shape {tuple(tensor.shape)} is not reduced over its mesh yet ({placements}); "
                "redistribute it"
            )
        with torch.no_grad():  # otherwise every call would return a new view
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    tensor = stored_values(tensor)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


GradientLists = dict[int, GradientList]
"""What the hooks of a chain share during a step, by the id of a mapping of parameters, which the chain keeps alive.

Finding out what hundreds of gradients have in common takes longer than launching work on them, and reading their norms
is a pass over all memory.
"""


class Gradients(MutableMapping[str, Tensor]):
    """A live view of the gradients of given parameters, by name. Nothing is copied, or written before `commit`.

    Assigning to a name stores the new gradient until `commit`; parameters without a gradient are not listed.

    Args:
        params: The parameters by name.
        known: The lists of the chain, for hooks that are known not to replace gradients without the chain's knowledge;
            by default nothing is shared.
    """

    def __init__(self, params: Parameters, known: GradientLists | None = None) -> None:
        self.params = params
        self.assigned: dict[str, Any] = {}  # Gradients that were assigned and not committed yet.
        self._known = known

    def __getitem__(self, name: str) -> Tensor:
        gradient = self.assigned[name] if name in self.assigned else self.params[name].grad
        if gradient is None:
            raise KeyError(name)
        return gradient

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
        gradients = self._known.get(id(self.params))
        if gradients is None:
            gradients = self._known[id(self.params)] = GradientList(self.tensors())
        return gradients

    def writable(self) -> GradientList:
        """Return the gradients as `as_list` does, all of them with memory that can be written in place."""
        gradients = self.as_list()
        if gradients.is_uniform:
            return gradients
        for name, grad in self.items():
            if grad.is_sparse and not grad.is_coalesced():
                # Coalescing makes a copy, so a write into that would not reach the parameter.
                self.params[name].grad = grad.coalesce()
                if self._known is not None:
                    self._known.clear()
        return self.as_list()

    def dense(self, transform: str, whole_rows: bool = False) -> list[Tensor]:
        """Return the gradients' memory for a transform that does not map zero to zero.

        Args:
            transform: The transform's name.
            whole_rows: Whether it computes along rows.

        Raises:
            GradientError: If a gradient is sparse, complex or sharded within rows that it needs; it names the
                parameter.
        """
        gradients = self.as_list()
        for name, tensor in () if gradients.is_uniform else self.items():
            if tensor.layout is not torch.strided or tensor.is_complex():
                raise GradientError(f"{transform}: the gradient of {name!r} is {kind_of(tensor)}; {_LEAVE_OUT}")
            if whole_rows and is_sharded(tensor) and any(place.is_shard() and place.dim for place in tensor.placements):  # type: ignore[attr-defined]
                raise GradientError(f"{transform}: {name!r} is sharded within its rows; {_LEAVE_OUT}")
        return gradients.local

    def norms(self) -> Tensor:
        """Return one L2 norm per gradient, on the device; for a sharded gradient, the norm of the whole."""
        return self.as_list().norms

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients together, on the device; zero if there are none."""
        norm: Tensor = torch.linalg.vector_norm(self.norms())
        return norm

    def commit(self, returned: Any) -> None:
        """Apply the gradients that a hook assigned and returned, all or none; None for a name removes its gradient.

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
        self.assigned.clear()


def is_like(gradient: Tensor, param: Tensor) -> bool:
    """Return whether a gradient has the shape, the dtype and the device of a parameter."""
    return gradient.shape == param.shape and gradient.dtype is param.dtype and gradient.device == param.device


def _check_fits(name: str, param: torch.nn.Parameter, gradient: Any) -> None:
    """Check that a gradient has the parameter's shape, dtype, device, layout and sharding, and no graph."""
    is_plain = type(gradient) is Tensor and type(param) is torch.nn.Parameter and gradient.layout is param.layout
    if is_plain and is_like(gradient, param) and not gradient.requires_grad:
        return  # nearly always true, and faster than the code below
    if not isinstance(gradient, Tensor):
        raise GradientError(f"{name!r}: returned {type(gradient).__name__}, not a tensor")
    if gradient.requires_grad:
        raise GradientError(f"{name!r}: returned a gradient that still has a graph; detach it")
    if is_sharded(gradient) != is_sharded(param):
        kinds = ("a DTensor", "plain") if is_sharded(gradient) else ("a plain tensor", "a DTensor")
        raise GradientError(f"{name!r}: returned {kinds[0]}, but the parameter is {kinds[1]}")
    for fact in ("shape", "dtype", "device", "device_mesh", "placements"):
        expected, actual = getattr(param, fact, None), getattr(gradient, fact, None)
        if expected != actual:
            shown = [tuple(value) if isinstance(value, torch.Size) else value for value in (actual, expected)]
            raise GradientError(f"{name!r}: returned {fact} {shown[0]}, but the parameter has {shown[1]}")
    layouts = {param.layout} if param.grad is None else {param.layout, param.grad.layout}
    if gradient.layout not in layouts:
        allowed = " or ".join(sorted(map(str, layouts)))
        raise GradientError(f"{name!r}: returned layout {gradient.layout}, but the gradient has {allowed}")


class Transform(UpdateHook):
    """A built-in update hook; most of them write into the gradients they get.

    Without one of its transforms, a run would be a different run, so a failure ends it unless `on_error` says
    otherwise.
    """

    inplace = True
    on_error = "raise"

    def __init__(self, params: Any = None) -> None:
        self.params = params
