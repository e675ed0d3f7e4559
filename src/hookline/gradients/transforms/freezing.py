"""Leaving parameters, or parts of them, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.errors import GradientError, HooklineError
from hookline.gradients.numbers import is_sharded
from hookline.gradients.transforms.base import Transform, dense
from hookline.gradients.view import Gradients
from hookline.registry.select import select


class Freeze(Transform):
    """Sets the gradients of `params` to None, so that the optimizer leaves these parameters alone.

    A gradient of zeros would not do: AdamW moves on by momentum and weight decay. With `stop: 1000` they thaw.
    """

    built_in = True
    name = "freeze"
    inplace = False

    def __init__(self, params: Any) -> None:
        if params is None:
            raise HooklineError("freeze: params=None would freeze everything; say which, or '*' if you mean it")
        super().__init__(params)

    def on_update(self, grads: Gradients) -> dict[str, None]:
        return dict.fromkeys(grads)


class Mask(Transform):
    """Zeroes gradients: those of `params` altogether, or, with `masks`, the elements that a mask does not keep.

    `masks` maps patterns of parameter names to tensors of true and false (or 1 and 0) that broadcast to the parameter;
    parameters without a mask stay as they are. Momentum and weight decay still move what is masked: see `freeze`.
    """

    built_in = True
    name = "mask"

    def __init__(self, params: Any = None, masks: Mapping[str, Tensor] | None = None) -> None:
        if params is None and masks is None:
            raise HooklineError("mask: give params= to zero whole gradients, or masks= for some of their elements")
        super().__init__(params if masks is None or params is not None else list(masks))
        self.masks = masks
        self._dropped: dict[str, Tensor] = {}  # by parameter: true where the gradient becomes zero

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        """Nothing to save; but masks that do not fit are refused when the link is registered."""
        for pattern, mask in (self.masks or {}).items():
            for name, param in select(pattern, params, "parameter").items():
                self._dropped[name] = _dropped(name, param, mask)
        return {}

    def on_update(self, grads: Gradients) -> None:
        if self.masks is None:
            for alike in grads.groups():
                torch._foreach_zero_(alike)
            return
        for name, gradient in zip(grads, dense("mask", grads), strict=True):
            if (dropped := self._dropped.get(name)) is not None:
                gradient.masked_fill_(dropped, 0.0)


def _dropped(name: str, param: Tensor, mask: Any) -> Tensor:
    try:
        keep = torch.as_tensor(mask, device=param.device).bool().expand(param.shape)
    except (RuntimeError, TypeError) as error:
        shape = tuple(param.shape)
        raise GradientError(f"mask: the mask of {name!r} does not fit its shape {shape}: {error}") from error
    return _cut_like(name, param, ~keep) if is_sharded(param) else ~keep


def _cut_like(name: str, param: Any, whole: Tensor) -> Tensor:
    """This rank's part of what every rank holds as a whole; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor  # only now: importing it takes a second

    try:
        part: Tensor = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        places = param.placements
        raise GradientError(f"mask: the mask of {name!r} cannot be cut as it is cut ({places}): {error}") from error
    return part
