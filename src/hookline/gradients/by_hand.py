"""Run the update hooks over gradients from a user's own loop, and return the gradients for the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hookline._names import plain_name, plain_parameters
from hookline._tensors import is_sharded
from hookline._words import nearest
from hookline.core.registry import Registry
from hookline.errors import GradientError, HooklineError, MissingArgument
from hookline.gradients.chain import UpdateChain
from hookline.gradients.view import Parameters, is_like


class UpdateByHand:
    """The update chain of a registry for gradients that are passed by hand: a run's chain, or a new one without a run.

    Args:
        registry: The registry whose update hooks run.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._chain: UpdateChain | None = None  # its own one
        self._stand_ins: dict[str, torch.nn.Parameter] = {}

    def update(self, values: Mapping[str, Any], fire: Callable[[], None]) -> dict[str, Any]:
        """Run the update hooks over gradients, and return the gradients for the optimizer.

        Args:
            values: The arguments of the event by name: `grads`, and `model` if hooks select modules or read weights.
            fire: Fires the event.

        Returns:
            The gradients by name; None for one that a hook removed.

        Raises:
            MissingArgument: If `grads`, or a `model` that a hook needs, was not passed.
            GradientError: If `grads` is not a mapping of names to tensors.
        """
        model, grads = values.get("model"), values.get("grads")
        plain: dict[str, str] = {}
        if model is not None and isinstance(grads, Mapping):
            known = plain_parameters(model, remove_duplicate=False)
            plain = {name: name if name in known else plain_name(model, str(name)) for name in grads}
            grads = {plain[name]: grads[name] for name in grads}
        chain = self._registry.update_chain
        if chain is None or chain is self._chain:
            chain = self._use(grads, model)
        grads, params = grads or {}, chain.params
        for name, gradient in grads.items():
            if gradient is not None:
                _check_name(name, params)
            if name in params:
                params[name].grad = gradient
        try:
            fire()
            updated = {name: params[name].grad if name in params else None for name in grads or params}
        finally:
            for param in self._stand_ins.values():
                param.grad = None  # These must not keep the gradients alive.
        return {name: updated[plain[name]] for name in plain} if plain else updated

    def _use(self, grads: Any, model: torch.nn.Module | None) -> UpdateChain:
        """Return the registry's own chain, for the parameters that these gradients belong to."""
        if grads is None:
            raise MissingArgument("on_update: pass the gradients by parameter name, as in on_update({'weight': …})")
        params = self._parameters(grads, model)
        if self._chain is None:
            self._chain = UpdateChain(self._registry, params, model)
        elif self._chain.model is not model or not _same(self._chain.params, params):
            self._chain.params, self._chain.model = params, model
            try:
                self._chain.reselect_parameters()
            except HooklineError:
                self._chain.params = {}  # The next call selects again.
                raise
        return self._chain

    def _parameters(self, grads: Any, model: torch.nn.Module | None) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters that have a gradient here, or one stand-in for each gradient."""
        if not isinstance(grads, Mapping) or not all(isinstance(grad, torch.Tensor | None) for grad in grads.values()):
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


def _same(before: Parameters, now: Parameters) -> bool:
    return list(before) == list(now) and all(param is now[name] for name, param in before.items())


def _check_name(name: str, params: Parameters) -> None:
    if name not in params:
        raise GradientError(f"on_update: {name!r} is not a parameter here; {nearest(name, params)}")
