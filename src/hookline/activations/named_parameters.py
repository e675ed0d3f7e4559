"""A model's parameters by name, without going through the model each time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch.nn import Module, Parameter


class NamedParameters:
    """What `named_parameters` says of a model; asked again when a module of it holds others than before.

    Asking takes five times as long as seeing that nothing has changed, and longer than reading all gradients' norms.
    """

    def __init__(self) -> None:
        self._model: Module | None = None
        self._modules: list[Module] = []
        self._held: list[Any] = []  # by all modules: names, parameters and modules, so that none gets another's id
        self._params: dict[str, Parameter] = {}

    def of(self, model: Module) -> dict[str, Parameter]:
        """The parameters as they are now. Nobody may change the dictionary."""
        held = list(chain.from_iterable(map(_held_by, self._modules)))
        if model is not self._model or len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._model, self._modules = model, list(model.modules())
            self._held = list(chain.from_iterable(map(_held_by, self._modules)))
            self._params = dict(model.named_parameters())
        return self._params


def _held_by(module: Module) -> Iterable[Any]:
    params, modules = module._parameters, module._modules
    return chain(params.keys(), params.values(), modules.keys(), modules.values())
