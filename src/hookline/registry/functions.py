"""A plain function that a config names as an update hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hookline.registry.base import UpdateHook


class FunctionHook(UpdateHook):
    """Calls a function with the arguments of `on_update` that it names; its others are parameters that a config gives.

    Attributes that are set on the function count as those of a class do: `params`, `inplace`, `on_error`.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
        vars(self).update({"name": function.__name__, **vars(function)})
        self.on_update = partial(function, **parameters)  # type: ignore[method-assign]


def is_update_function(given: Any) -> bool:
    """Whether something is a function of gradients itself, rather than one that makes a hook."""
    return inspect.isfunction(given) and "grads" in inspect.signature(given).parameters
