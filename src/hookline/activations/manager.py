"""`HookManager`: the registry that can watch a model, with or without a trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hookline.activations.tap import Tap
from hookline.registry.registry import HookRegistry


class HookManager(HookRegistry):
    """A hook registry bound to a model: its forward hooks fire whenever the model runs.

    >>> manager = HookManager()
    >>> manager.watch(model)
    >>> manager.register(MyForwardHook())
    """

    def __init__(self, config: Any = None, *, enable_intervention: bool = False, **loading: Any) -> None:
        self.enable_intervention = enable_intervention
        self.tap: Tap | None = None
        super().__init__(config, **loading)

    def watch(self, model: torch.nn.Module, run: Any = None) -> Tap:
        """Attach forward hooks to this model from now on; `run` is the moment they read step and phase from."""
        if self.tap is None or self.tap.model is not model:
            if self.tap is not None:
                self.tap.detach()
            self.tap = Tap(self, model, self.enable_intervention)
        if run is not None:
            self.tap.run = run
        return self.tap

    def silenced(self) -> AbstractContextManager[None]:
        return self.tap.silenced() if self.tap else nullcontext()
