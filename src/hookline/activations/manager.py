"""`HookManager`: the registry that can watch a model, with or without a trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
        super().__init__()
        self.enable_intervention = enable_intervention
        self.tap = Tap(self, enable_intervention)
        if config is not None:
            self.load(config, **loading)

    def watch(self, model: torch.nn.Module, run: Any = None) -> Tap:
        """Resolve module patterns against this model from now on; `run` is what hooks read step and phase from."""
        self.tap.watch(model)
        if run is not None:
            self.tap.run = run
        return self.tap

    def silenced(self) -> AbstractContextManager[None]:
        return self.tap.silenced()
