"""Leave parameters, or elements of them, unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline._tensors import is_sharded
from hookline.core.patterns import select
from hookline.errors import GradientError, HooklineError
from hookline.gradients.view import Gradients, Transform


class Freeze(Transform):
    """Set the gradients of `params` to None, so that the optimizer does not update these parameters.

    A zero gradient does not freeze a parameter: AdamW still moves it by momentum and weight decay. With `stop: 1000`,
    the parameters train from step 1001 on.

    Args:
        params: The parameters to freeze; `"*"` freezes all of them.
    """

    built_in = True
    name = "freeze"
    inplace = False

    def __init__(self, params: Any) -> None:
        if params is None:
            raise HooklineError(
                "freeze: params=None would freeze everything; select parameters, or pass '*' to freeze them all"
            )
        super().__init__(params)

    def on_update(self, grads: Gradients) -> dict[str, None]:
        return dict.fromkeys(grads)


class Mask(Transform):
    """Zero gradients: those of `params` entirely or, with `masks`, the elements that a mask does not keep.

    Momentum and weight decay still move masked parameters; to stop that, use `freeze`.

    Args:
        params: The parameters whose gradients become zero. With `masks`, the parameters to which the masks may apply.
        masks: A mapping from patterns of parameter names to tensors of true and false (or 1 and 0) that broadcast to
            the parameter; false sets an element to zero. Parameters without a mask keep their gradients. Only in code.
    """

    built_in = True
    name = "mask"

    def __init__(self, params: Any = None, masks: Mapping[str, Tensor] | None = None) -> None:
        if params is None and masks is None:
            raise HooklineError("mask: pass params= to zero whole gradients, or masks= for some of their elements")
        super().__init__(params if masks is None or params is not None else list(masks))
        self.masks = masks
        self._dropped: dict[str, Tensor] = {}  # by parameter: true where the gradient becomes zero

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        """Check that the masks fit; nothing is saved."""
        for pattern, mask in (self.masks or {}).items():
            for name, param in select(pattern, params, "parameter").items():
                self._dropped[name] = _dropped_elements(name, param, mask)
        return {}

    def on_update(self, grads: Gradients) -> None:
        if self.masks is None:
            for tensors in grads.writable().groups:
                torch._foreach_zero_(tensors)
            return
        for name, gradient in zip(grads, grads.dense("mask"), strict=True):
            if (dropped := self._dropped.get(name)) is not None:
                gradient.masked_fill_(dropped, 0.0)


def _dropped_elements(name: str, param: Any, mask: Any) -> Tensor:
    """Return this rank's part of the elements that a mask drops."""
    try:
        dropped = ~torch.as_tensor(mask, device=param.device).bool().expand(param.shape)
    except (RuntimeError, TypeError) as error:
        shape = tuple(param.shape)
        raise GradientError(f"mask: the mask of {name!r} does not fit its shape {shape}: {error}") from error
    if not is_sharded(param):
        return dropped
    from torch.distributed.tensor import distribute_tensor  # importing it takes a second

    try:
        # Every rank holds the whole mask, so nothing is sent.
        part = distribute_tensor(dropped, param.device_mesh, param.placements, src_data_rank=None)
        local: Tensor = part.to_local()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        placements = param.placements
        raise GradientError(f"mask: the mask of {name!r} cannot be sharded like it ({placements}): {error}") from error
    return local
