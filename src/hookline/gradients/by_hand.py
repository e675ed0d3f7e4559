"""Run the update hooks of a registry without a trainer, over gradients that the caller's own loop passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hookline._names import plain_name, plain_parameters
from hookline._tensors import is_sharded
from hookline._words import nearest
from hookline.core.base import hook_attribute
from hookline.core.dispatch import BoundHook, Dispatch
from hookline.core.entry import Entry
from hookline.core.registry import HookRegistry
from hookline.errors import GradientError, HooklineError, MissingArgument
from hookline.gradients.chain import UpdateChain
from hookline.gradients.view import Parameters, is_like


def update_by_hand(registry: HookRegistry, values: Mapping[str, Any], fire: Callable[[], None]) -> dict[str, Any]:
    """Run the update hooks over gradients, and return those that the optimizer is to use.

    Args:
        registry: The registry; that of a trainer uses the trainer's parameters.
        values: The arguments of the event by name: `grads`, and `model` if hooks select modules or read weights.
        fire: Fires the event.

    Returns:
        The gradients by name; None for one that a hook removed.

    Raises:
        MissingArgument: If `grads`, or a `model` that a hook needs, was not passed.
        GradientError: If `grads` is not a mapping of names to tensors.
    """
    model, grads = values.get("model"), values.get("grads")
    if model is None or not isinstance(grads, Mapping):
        return _update(registry, values, fire)
    params = plain_parameters(model, remove_duplicate=False)
    plain = {name: name if name in params else plain_name(model, str(name)) for name in grads}
    changed = _update(registry, {**values, "grads": {plain[name]: grads[name] for name in grads}}, fire)
    return {name: changed[plain[name]] for name in grads} if grads else changed


def _update(registry: HookRegistry, values: Mapping[str, Any], fire: Callable[[], None]) -> dict[str, Any]:
    chain = registry.update_chain
    if chain is not None and not isinstance(chain, ManualChain):
        return _run(chain.params, values.get("grads", {}), fire)
    if "grads" not in values:
        raise MissingArgument("on_update: pass the gradients by parameter name, as in on_update({'weight': …})")
    if chain is None:
        chain = ManualChain(registry, values)
    else:
        chain.update(values)
    try:
        return _run(chain.params, values["grads"], fire)
    finally:
        if values.get("model") is None:
            for param in chain.params.values():
                param.grad = None  # The stand-ins must not keep the gradients alive.


def _run(params: Parameters, grads: Mapping[str, Any], fire: Callable[[], None]) -> dict[str, Any]:
    """Give parameters their gradients, fire the event, and return the gradients of these parameters."""
    for name, gradient in grads.items():
        if gradient is not None:
            _check_name(name, params)
        if name in params:
            params[name].grad = gradient
    fire()
    return {name: params[name].grad if name in params else None for name in grads or params}


def _check_name(name: str, params: Parameters) -> None:
    if name not in params:
        raise GradientError(f"on_update: {name!r} is not a parameter here; {nearest(name, params)}")


class ManualChain(UpdateChain):
    """The chain of a registry without a trainer: its parameters are a model's, or stand-ins with the gradients' shapes.

    Args:
        registry: The registry whose update hooks it runs.
        values: The arguments of the first event.
    """

    def __init__(self, registry: HookRegistry, values: Mapping[str, Any]) -> None:
        self._stand_ins: dict[str, torch.nn.Parameter] = {}
        self._take(values)
        super().__init__(registry, lambda: self._current, self._model)

    def update(self, values: Mapping[str, Any]) -> None:
        """Take over the arguments of another event."""
        before = self._passed, list(map(id, self._current.values())), list(self._current)
        self._take(values)
        if before != (self._passed, list(map(id, self._current.values())), list(self._current)):
            self.reselect_parameters()

    def _take(self, values: Mapping[str, Any]) -> None:
        model = values.get("model")
        self._has_model, self._model = model is not None, torch.nn.Module() if model is None else model
        self._passed, self._current = frozenset(values), self._parameters(values["grads"], model)

    def _parameters(self, grads: Any, model: torch.nn.Module | None) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters that have a gradient here, or one stand-in for each gradient."""
        if not isinstance(grads, Mapping) or not all(isinstance(one, torch.Tensor | None) for one in grads.values()):
            raise GradientError("on_update: expected the gradients as a mapping of parameter name to tensor")
        if model is not None:
            params = plain_parameters(model, remove_duplicate=False)
            for name in grads:
                _check_name(name, params)
            return {name: params[name] for name in grads}
        # Those without a gradient this time stay, because hooks may have a state about them.
        for name, gradient in grads.items():
            stand_in = self._stand_ins.get(name)
            if gradient is not None and (stand_in is None or not is_like(gradient, stand_in)):
                # One element for the whole shape: nothing reads a stand-in's values.
                blank = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
                data = gradient.detach() if is_sharded(gradient) else blank
                self._stand_ins[name] = torch.nn.Parameter(data, requires_grad=False)
        return dict(self._stand_ins)

    def make_dispatch(self, bound: list[BoundHook]) -> Dispatch | None:
        """Return the callable; hooks keep their defaults for what the call does not pass."""
        # The chain itself provides the gradients and the hook's state.
        has = self._passed | {"grads", "own_state"}
        hooks = [replace(one, listener=one.listener.without(set(one.listener.wanted) - has)) for one in bound]
        return super().make_dispatch(hooks)

    def _check(self, entry: Entry) -> None:
        if self.registry.update_chain is self:  # A trainer may have taken over the registry.
            super()._check(entry)

    def _select(self, name: str, hook: Any) -> Parameters:
        if hook_attribute(hook, "reads_weights") and not self._has_model:
            raise MissingArgument(f"on_update: {name!r} reads weights, which the call did not pass; pass model=…")
        try:
            return super()._select(name, hook)
        except HooklineError as error:
            if self._has_model:
                raise
            raise HooklineError(f"{error}. To select parameters by their modules, pass model=…") from None
