"""Models whose activations hooks get without a trainer."""

from typing import Any

from torch import nn

from hookline import HookManager


def watch(model: nn.Module, *hooks: Any, **options: Any) -> HookManager:
    """Return a manager that watches a model with these hooks; `options` are those of the manager."""
    manager = HookManager(**options)
    manager.watch(model)
    for hook in hooks:
        manager.register(hook)
    return manager
