"""A plain function that a config names as an update hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hookline.errors import RegistrationError, nearest
from hookline.registry.base import UpdateHook


class FunctionHook(UpdateHook):
    """Calls a function with the arguments of `on_update` that it names; its others are parameters that a config gives.

    Attributes that are set on the function count as those of a class do: `params`, `inplace`, `on_error`.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
        known = inspect.signature(function).parameters
        for key in parameters:
            if key not in known:
                raise RegistrationError(f"{function.__name__} has no parameter {key!r}; {nearest(key, known, 40)}")
        vars(self).update({"name": function.__name__, **vars(function)})
        self.on_update = partial(function, **parameters)  # type: ignore[method-assign]


def is_update_function(given: Any) -> bool:
    """Whether something is a function of gradients itself, rather than one that makes a hook."""
    return inspect.isfunction(given) and "grads" in inspect.signature(given).parameters
