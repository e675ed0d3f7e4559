"""`HookRunner`: the registry for a user's own loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hookline.core.registry import HookRegistry


class HookRunner(HookRegistry):
    """A registry whose events are fired from a user's own loop; without hooks it costs a branch per call site."""

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "on_train_begin": ("config",),
        "on_step_end": ("ctx",),
        "on_eval_end": ("metrics", "step"),
        "on_checkpoint_save": ("step", "path"),
        "on_train_end": ("step", "tokens_seen"),
    }

    def __init__(self, hooks: Iterable[Any] = ()) -> None:
        super().__init__()
        for hook in hooks:
            self.register(hook)
