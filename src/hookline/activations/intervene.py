"""Ready interventions: hooks that change what a module gives on.

Each works on the first floating tensor of the output; tuples, dicts, dataclasses and model outputs keep their
structure. Nothing is written in place, and gradients flow through what is returned, which shares no memory with what
the hook was given. They need a manager with interventions enabled; without it they change nothing, and say so.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.activations.cache import Cache
from hookline.activations.captured import CapturedState
from hookline.activations.moment import first_floating, tensors_in
from hookline.activations.sites import weakly
from hookline.errors import HooklineError, nearest
from hookline.registry.base import ForwardHook

Indices = int | slice | Sequence[int]
REMEDY = "make the manager with HookManager(enable_intervention=True)"
logger = logging.getLogger("hookline")


class Intervention(ForwardHook):
    """Base of interventions: override `change`. A failure ends the run: without its change it would be another one."""

    intervene = True
    intervenes = True
    on_error = "raise"

    def __init__(self, modules: Any) -> None:
        self.modules = weakly(modules)
        self._told: set[str] = set()

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """What goes on in the place of `tensor`, which is live: never write into it."""
        raise NotImplementedError(f"{type(self).__name__} must define change(name, tensor)")

    def on_forward(self, name: str, output: Any, live_output: Any) -> Any:
        """The output with its first floating tensor changed; None, which changes nothing, where that cannot be."""
        tensor = first_floating(live_output)
        if tensor is None:
            self._tell(name, f"the output of {name!r} holds no floating tensor; nothing is changed there")
            return None
        if first_floating(output) is not tensor:  # observers get copies: interventions are off
            self._tell("disabled", f"hook {self._known_as!r} changes nothing, because interventions are off; {REMEDY}")
            return None
        return with_replaced(output, tensor, self.change(name, tensor))

    @property
    def _known_as(self) -> str:
        return self.name or type(self).__name__

    def _tell(self, about: str, message: str) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning(message)


class Replace(Intervention):
    """Puts another value in the output's place: one that broadcasts to it, or what a function makes of it.

    >>> Replace("blocks.3", lambda output: output.clamp(max=5.0))
    """

    built_in = True
    name = "replace"

    def __init__(self, modules: Any, value: Tensor | float | Sequence[Any] | Callable[[Tensor], Tensor]) -> None:
        super().__init__(modules)
        self.value = value

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The function's result, of the same shape; or the value, broadcast to it."""
        if not callable(self.value):
            return fitted(self.value, tensor, f"{self._known_as}: value", name)
        made = self.value(tensor)
        if not isinstance(made, Tensor) or made.shape != tensor.shape:
            raise HooklineError(
                f"{self._known_as}: the function returned {_shown(made)} for {name!r}; "
                f"return a tensor of shape {tuple(tensor.shape)}"
            )
        return made.to(tensor).clone()


class Scale(Intervention):
    """Multiplies the output by a number, or by a tensor that broadcasts to it."""

    built_in = True
    name = "scale"

    def __init__(self, modules: Any, factor: Tensor | float | Sequence[Any]) -> None:
        super().__init__(modules)
        self.factor = factor

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The product."""
        return tensor * operand(self.factor, tensor, f"{self._known_as}: factor", name)


class Add(Intervention):
    """Adds a number, or a tensor that broadcasts to the output."""

    built_in = True
    name = "add"

    def __init__(self, modules: Any, value: Tensor | float | Sequence[Any]) -> None:
        super().__init__(modules)
        self.value = value

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The sum."""
        return tensor + operand(self.value, tensor, f"{self._known_as}: value", name)


class Ablate(Intervention):
    """Takes what a module says away: ``to="zero"``, ``"mean"`` (over dimension 0, the batch), or a reference mean.

    `units` are indices in the last dimension; None ablates all of them.
    """

    built_in = True
    name = "ablate"

    def __init__(self, modules: Any, to: str | Tensor = "zero", units: Indices | None = None) -> None:
        super().__init__(modules)
        if isinstance(to, str) and to not in ("zero", "mean"):
            raise HooklineError(f"ablate: to={to!r} is unknown; {nearest(to, ('zero', 'mean'))}, or a tensor")
        self.to, self.units = to, units

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The output, with the ablated units at zero or at their mean."""
        return only_at(self.units, self._instead(name, tensor), tensor, -1, f"{self._known_as}: units", name)

    def _instead(self, name: str, tensor: Tensor) -> Tensor:
        if isinstance(self.to, Tensor):
            return fitted(self.to, tensor, f"{self._known_as}: the mean", name)
        if self.to == "zero":
            return torch.zeros_like(tensor)
        return tensor.mean(dim=0, keepdim=True).expand_as(tensor).clone()


class Patch(Intervention):
    """Puts in what the module gave in another run: a captured state, a tensor, or a mapping or cache by module name.

    With `positions`, only these indices of dimension `dim` come from there: by default the last but one, which holds
    the positions of ``(batch, position, feature)``; modules that put the position first want ``dim=0``.
    """

    built_in = True
    name = "patch"

    def __init__(
        self,
        modules: Any,
        source: CapturedState | Tensor | Mapping[str, Any] | Cache,
        positions: Indices | None = None,
        dim: int = -2,
    ) -> None:
        super().__init__(modules)
        if not isinstance(source, (CapturedState, Tensor, Mapping, Cache)):
            remedy = "give one captured state (of a list, say the last), a tensor, or a mapping by module name"
            raise HooklineError(f"patch: cannot take activations from a {type(source).__name__}; {remedy}")
        self.source, self.positions, self.dim = source, positions, dim

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The source's tensor, wholly or at the chosen positions."""
        taken = fitted(self._source_of(name), tensor, f"{self._known_as}: the source", name)
        return only_at(self.positions, taken, tensor, self.dim, f"{self._known_as}: positions", name)

    def _source_of(self, name: str) -> Tensor:
        source: Any = self.source
        if isinstance(source, Mapping) and name not in source:
            raise HooklineError(f"{self._known_as}: the source has nothing of {name!r}; {nearest(name, source)}")
        if isinstance(source, (Mapping, Cache)):
            source = source[name]
        if isinstance(source, CapturedState):
            source = source.outputs
        found = first_floating(source)
        if found is None:
            raise HooklineError(f"{self._known_as}: the source holds no floating output of {name!r}; capture outputs")
        return found


class Steer(Intervention):
    """Adds ``strength`` times a vector of the last dimension's size, everywhere or at `positions` (see `Patch`)."""

    built_in = True
    name = "steer"

    def __init__(
        self,
        modules: Any,
        vector: Tensor | Sequence[float],
        strength: float = 1.0,
        positions: Indices | None = None,
        dim: int = -2,
    ) -> None:
        super().__init__(modules)
        if (given := torch.as_tensor(vector)).dim() != 1:
            raise HooklineError(f"steer: vector has shape {tuple(given.shape)}; give one of a single dimension")
        self.vector, self.strength, self.positions, self.dim = vector, strength, positions, dim

    def change(self, name: str, tensor: Tensor) -> Tensor:
        """The output, moved along the vector."""
        vector = torch.as_tensor(self.vector)
        if tensor.dim() == 0 or vector.shape[0] != tensor.shape[-1]:
            raise HooklineError(
                f"{self._known_as}: vector has {vector.shape[0]} elements, but the output of {name!r} has shape "
                f"{tuple(tensor.shape)}; give one per element of its last dimension"
            )
        moved = tensor + self.strength * vector.to(tensor)
        return only_at(self.positions, moved, tensor, self.dim, f"{self._known_as}: positions", name)


def fitted(value: Any, like: Tensor, what: str, name: str) -> Tensor:
    """A copy of a value with the shape, dtype and device of a module's output.

    A copy, because the model may write into it: an in-place ReLU would reach the user's own tensor.
    """
    return _broadcast(value, like, what, name).clone()


def operand(value: Any, like: Tensor, what: str, name: str) -> Tensor | float:
    """A number as it is, which keeps its digits beside a half-precision output; anything else broadcast to it."""
    return value if isinstance(value, (int, float)) else _broadcast(value, like, what, name)


def _broadcast(value: Any, like: Tensor, what: str, name: str) -> Tensor:
    tensor = torch.as_tensor(value).to(like)
    try:
        return tensor.broadcast_to(like.shape)
    except RuntimeError:
        raise HooklineError(
            f"{what} has shape {tuple(tensor.shape)}, but the output of {name!r} has shape {tuple(like.shape)}; "
            "give one that broadcasts to it"
        ) from None


def only_at(indices: Indices | None, changed: Tensor, tensor: Tensor, dim: int, what: str, name: str) -> Tensor:
    """The changed output at the chosen indices of one dimension and the module's own elsewhere; None chooses all."""
    if indices is None:
        return changed
    if not -tensor.dim() <= dim < tensor.dim():
        raise HooklineError(f"{what}: the output of {name!r} has shape {tuple(tensor.shape)} and no dimension {dim}")
    shape = [1] * tensor.dim()
    shape[dim] = -1
    mask = _mask(indices, tensor, dim, what, name).reshape(shape)
    return torch.where(mask.to(tensor.device), changed, tensor)


def _mask(indices: Indices, tensor: Tensor, dim: int, what: str, name: str) -> Tensor:
    """Which indices are chosen; made on the CPU, where a wrong one raises instead of breaking the device."""
    mask = torch.zeros(tensor.shape[dim], dtype=torch.bool)
    try:
        mask[indices if isinstance(indices, (int, slice)) else [int(index) for index in indices]] = True
    except IndexError:
        raise HooklineError(
            f"{what} {indices!r} reach beyond the {len(mask)} of dimension {dim} in the output of {name!r}, "
            f"which has shape {tuple(tensor.shape)}"
        ) from None
    return mask


def with_replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    """A nested value with `new` wherever `old` stood; the containers around it are made anew, all else is kept."""
    if value is old:
        return new
    if not any(tensor is old for tensor in tensors_in(value)):
        return value
    if isinstance(value, (tuple, list)):
        return _remade_sequence(value, [with_replaced(item, old, new) for item in value])
    if isinstance(value, Mapping):
        return _remade_mapping(value, {key: with_replaced(item, old, new) for key, item in value.items()})
    made = copy.copy(value)  # without its constructor, which may ask for other things or do more than store them
    for name in _attributes(value):
        object.__setattr__(made, name, with_replaced(getattr(value, name), old, new))
    return made


def _attributes(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else [*vars(value)]


def _remade_sequence(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _remade_mapping(value: Any, items: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    made = copy.copy(value)  # keeps what else it has: a default factory, the attributes of a model output
    for key, item in items.items():
        if item is not value[key]:
            made[key] = item
    return made


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
