"""`identity`: the update hook of a chain without any other; returns the gradients unchanged."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hookline.core.base import UpdateHook, passes_through


class Identity(UpdateHook):
    """Return the gradients unchanged. It is listed and, while it is the only update hook, costs nothing."""

    built_in = True
    intervenes = False
    name = "identity"

    @passes_through
    def on_update(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return grads
