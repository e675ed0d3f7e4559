"""The default link."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hookline.registry.base import UpdateHook, passes_through


class Identity(UpdateHook):
    """Passes the gradients through unchanged. The default: it is listed, and while it is alone it costs nothing."""

    built_in = True
    intervenes = False
    name = "identity"

    @passes_through
    def on_update(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return grads
