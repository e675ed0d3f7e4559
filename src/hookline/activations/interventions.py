"""Interventions: forward hooks that change the output of modules.

Each works on the first floating-point tensor of the output; tuples, dicts, dataclasses and model outputs keep their
structure. Nothing is written in place, gradients flow through the result, and the result shares no memory with the
values that a hook was given. A manager rejects them unless interventions are enabled. Configs use their attribute
`name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline._console import logger
from hookline._tensors import iter_tensors, map_tensors
from hookline._words import nearest
from hookline.activations.capture import Cache
from hookline.activations.capture_store import CapturedState, load_outputs
from hookline.activations.hooked_modules import weak_selection
from hookline.core.base import ForwardHook
from hookline.errors import HooklineError, with_article

Indices = int | slice | Sequence[int]


class Intervention(ForwardHook):
    """Base class of interventions: override `change`.

    The default policy is ``"raise"``, because a run without its intervention would be a different run.
    """

    intervene = True
    intervenes = True
    on_error = "raise"

    def __init__(self, modules: Any) -> None:
        self.modules = weak_selection(modules)
        self._warned: set[str | None] = set()  # module names; None stands for all

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor that replaces `tensor`, which is live: never write into it."""
        raise NotImplementedError(f"{type(self).__name__} must define change(name, tensor)")

    def on_forward(self, name: str, output: Any, live_output: Any) -> Any:
        """Return the output with its first floating-point tensor changed; None if it has none."""
        tensor = first_floating(live_output)
        if tensor is None:
            self._warn(name, f"the output of {name!r} has no floating-point tensor; it is not changed")
            return None
        if first_floating(output) is not tensor:  # without interventions enabled, a hook gets copies
            remedy = "create the manager with HookManager(enable_intervention=True)"
            self._warn(None, f"hook {self._label!r} changes nothing, because interventions are disabled; {remedy}")
            return None
        changed = self.change(name, tensor)
        return map_tensors(lambda other: changed if other is tensor else other, output)

    @property
    def _label(self) -> str:
        return self.name or type(self).__name__

    def _warn(self, key: str | None, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)

    def _error(self, problem: str) -> HooklineError:
        return HooklineError(f"{self._label}: {problem}")

    def _broadcast(self, value: Any, tensor: Tensor, what: str, name: str) -> Tensor:
        """Return a value with the shape, dtype and device of a module's output.

        It may be the user's own tensor: clone it before the model gets it, because an in-place ReLU would change it.
        """
        given = torch.as_tensor(value).to(tensor)
        try:
            return given.broadcast_to(tensor.shape)
        except RuntimeError:
            raise self._error(
                f"{what} has shape {tuple(given.shape)}, but the output of {name!r} has shape {tuple(tensor.shape)}; "
                "pass one that broadcasts to it"
            ) from None

    def _operand(self, value: Any, tensor: Tensor, what: str, name: str) -> Tensor | float:
        # A number is not converted: with a half-precision output it would lose digits.
        return value if isinstance(value, (int, float)) else self._broadcast(value, tensor, what, name)

    def _merge(
        self, indices: Indices | None, changed: Tensor, tensor: Tensor, dim: int, what: str, name: str
    ) -> Tensor:
        """Use `changed` at the given indices of one dimension and `tensor` elsewhere; None uses all of `changed`."""
        if indices is None:
            return changed
        shape = tuple(tensor.shape)
        if not -tensor.dim() <= dim < tensor.dim():
            raise self._error(f"{what}: the output of {name!r} has shape {shape} and no dimension {dim}")
        # The mask is created on the CPU, where a wrong index raises instead of corrupting the device.
        mask = torch.zeros(shape[dim], dtype=torch.bool)
        try:
            mask[indices if isinstance(indices, (int, slice)) else [int(index) for index in indices]] = True
        except IndexError:
            raise self._error(
                f"{what} {indices!r} exceed the size {len(mask)} of dimension {dim} in the output of {name!r}, "
                f"which has shape {shape}"
            ) from None
        aligned = [1] * tensor.dim()
        aligned[dim] = -1
        return torch.where(mask.reshape(aligned).to(tensor.device), changed, tensor)


class Replace(Intervention):
    """Replaces the output with a value that broadcasts to it, or with the result of a function of it.

    >>> Replace("blocks.3", lambda output: output.clamp(max=5.0))

    Args:
        modules: The modules whose output is replaced.
        value: A number, a tensor that broadcasts to the output, or in code a function of the output that returns a
            tensor of the same shape.
    """

    built_in = True
    name = "replace_activation"

    def __init__(self, modules: Any, value: Tensor | float | Sequence[Any] | Callable[[Tensor], Tensor]) -> None:
        super().__init__(modules)
        self.value = value

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the value, or the function's result, in the output's shape."""
        if not callable(self.value):
            return self._broadcast(self.value, tensor, "value", name).clone()
        result = self.value(tensor)
        if not isinstance(result, Tensor) or result.shape != tensor.shape:
            shown = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            expected = f"return a tensor of shape {tuple(tensor.shape)}"
            raise self._error(f"the function returned {shown} for {name!r}; {expected}")
        return result.to(tensor).clone()


class ScaleActivation(Intervention):
    """Multiplies the output by a number, or by a tensor that broadcasts to it.

    Args:
        modules: The modules whose output is multiplied.
        factor: The number or the tensor.
    """

    built_in = True
    name = "scale_activation"

    def __init__(self, modules: Any, factor: Tensor | float | Sequence[Any]) -> None:
        super().__init__(modules)
        self.factor = factor

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the product."""
        return tensor * self._operand(self.factor, tensor, "factor", name)


Scale = ScaleActivation
"""The original name of the class, which the gradient transform `hookline.gradients.transforms.Scale` shares."""


class Add(Intervention):
    """Adds a number, or a tensor that broadcasts to the output.

    Args:
        modules: The modules to whose output it is added.
        value: The number or the tensor.
    """

    built_in = True
    name = "add_activation"

    def __init__(self, modules: Any, value: Tensor | float | Sequence[Any]) -> None:
        super().__init__(modules)
        self.value = value

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum."""
        return tensor + self._operand(self.value, tensor, "value", name)


class Ablate(Intervention):
    """Removes a module's contribution by setting its output to zero or to a mean.

    Args:
        modules: The modules to ablate.
        to: ``"zero"``, ``"mean"`` (over dimension 0, the batch), or a tensor with a reference mean.
        units: Indices in the last dimension; None ablates all of them.

    Raises:
        HooklineError: If `to` is unknown.
    """

    built_in = True
    name = "ablate"

    def __init__(self, modules: Any, to: str | Tensor = "zero", units: Indices | None = None) -> None:
        super().__init__(modules)
        if isinstance(to, str) and to not in ("zero", "mean"):
            raise self._error(f"to={to!r} is unknown; {nearest(to, ('zero', 'mean'))}, or a tensor")
        self.to, self.units = to, units

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the output with the ablated units at zero or at their mean."""
        if isinstance(self.to, Tensor):
            value = self._broadcast(self.to, tensor, "the mean", name).clone()
        elif self.to == "zero":
            value = torch.zeros_like(tensor)
        else:
            value = tensor.mean(dim=0, keepdim=True).expand_as(tensor).clone()
        return self._merge(self.units, value, tensor, -1, "units", name)


class Patch(Intervention):
    """Replaces the output with the module's output in another run (activation patching).

    Args:
        modules: The modules to patch.
        source: A captured state, a tensor, a mapping or cache of these by module name, or the path of a file that
            `Cache.save` or a capture hook with `save` wrote; the last captured call of each module is used.
        positions: The indices of dimension `dim` to patch; None patches all.
        dim: By default the last but one, which holds the positions of ``(batch, position, feature)``; use 0 for modules
            whose first dimension is the position.

    Raises:
        HooklineError: If the source has another type, or the file cannot be read or has no outputs.
    """

    built_in = True
    name = "patch"

    def __init__(
        self,
        modules: Any,
        source: CapturedState | Tensor | Mapping[str, Any] | Cache | str | Path,
        positions: Indices | None = None,
        dim: int = -2,
    ) -> None:
        super().__init__(modules)
        if not isinstance(source, (CapturedState, Tensor, Mapping, Cache, str, Path)):
            remedy = "pass one captured state (of a list, for example the last), a tensor, or a mapping by module name"
            raise self._error(f"cannot take activations from {with_article(type(source).__name__)}; {remedy}")
        self.source, self.positions, self.dim = source, positions, dim
        self._source = load_outputs(source) if isinstance(source, (str, Path)) else source

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the source's tensor, wholly or at the selected positions."""
        source: Any = self._source
        if isinstance(source, Mapping) and name not in source:
            raise self._error(f"the source has no entry {name!r}; {nearest(name, source)}")
        if isinstance(source, (Mapping, Cache)):
            source = source[name]
        if isinstance(source, CapturedState):
            source = source.outputs
        replacement = first_floating(source)
        if replacement is None:
            raise self._error(f"the source has no floating-point output of {name!r}; capture outputs")
        value = self._broadcast(replacement, tensor, "the source", name).clone()
        return self._merge(self.positions, value, tensor, self.dim, "positions", name)


class Steer(Intervention):
    """Adds a multiple of a vector to the output.

    Args:
        modules: The modules to steer.
        vector: One number per element of the output's last dimension.
        strength: The number that multiplies the vector.
        positions: The indices of dimension `dim` to steer; None steers all.
        dim: The dimension of the positions; by default the last but one, as in ``(batch, position, feature)``.

    Raises:
        HooklineError: If the vector has more than one dimension.
    """

    built_in = True
    name = "steer"

    def __init__(
        self,
        modules: Any,
        vector: Tensor | Sequence[float],
        strength: float | Tensor = 1.0,
        positions: Indices | None = None,
        dim: int = -2,
    ) -> None:
        super().__init__(modules)
        if (given := torch.as_tensor(vector)).dim() != 1:
            raise self._error(f"vector has shape {tuple(given.shape)}; pass one with a single dimension")
        self.vector, self.strength, self.positions, self.dim = vector, strength, positions, dim

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """Return the output moved along the vector."""
        vector = torch.as_tensor(self.vector)
        if tensor.dim() == 0 or vector.shape[0] != tensor.shape[-1]:
            raise self._error(
                f"vector has {vector.shape[0]} elements, but the output of {name!r} has shape "
                f"{tuple(tensor.shape)}; pass one per element of its last dimension"
            )
        moved = tensor + self.strength * vector.to(tensor)
        return self._merge(self.positions, moved, tensor, self.dim, "positions", name)


def first_floating(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of a nested value."""
    return next((tensor for tensor in iter_tensors(value) if tensor.is_floating_point()), None)
