"""`Watched`: hooks in the training of a script that knows nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from hookline.activations.compile.detection import has_compiled
from hookline.errors import HooklineError
from hookline.hosts.attach import Attached
from hookline.hosts.options import Options
from hookline.hosts.search import Training
from hookline.hosts.truth import RUN

EVERY = 25


def default_hooks() -> dict[str, Any]:
    """Return the hooks of a run for which no others are named.

    Hooks in the modules of a model that is compiled already would have it compiled once more.
    """
    forward = [] if has_compiled() else [{"name": "activation_stats", "every": EVERY}]
    return {"lifecycle": [{"name": "gradient_monitor", "every": EVERY}], "forward": forward}


class Watched(Attached):
    """Hooks in the training of a script; a `Watch` reports its backward passes and its optimizers.

    Args:
        training: What is trained.
        optimizer: The optimizer that steps first.
        options: Which hooks, and what they may do.
        prints: Whether the closing line is printed.
        fail: Called with what goes wrong in a step; it may raise it.
    """

    def __init__(
        self,
        training: Training,
        optimizer: torch.optim.Optimizer,
        options: Options,
        prints: bool,
        fail: Callable[[Exception], None],
    ) -> None:
        model, scaler = training
        if any(hasattr(param, "device_mesh") for param in model.parameters()):
            # Statistics of sharded tensors need all ranks, and only rank 0 records.
            raise HooklineError("FSDP2 shards the model; call hookline.attach in the script, on all ranks")
        super().__init__(
            model, optimizer, scaler=scaler, output_dir=options.output, host=RUN, may_change=options.allow_changes,
            prints=prints,
        )  # fmt: skip
        self._fail = fail
        self.run.hooks.enable_intervention = options.allow_changes
        self._load(options)

    def _load(self, options: Options) -> None:
        """Load the hooks; modules of the directory in which the command was typed are found first."""
        sys.path.insert(0, options.directory)
        try:
            for name in options.imports:
                import_module(name)
            self.run.hooks.load(options.hooks or default_hooks(), allow=options.allow)
        finally:
            sys.path.remove(options.directory)

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Report a backward pass that begins. The loss is recorded unscaled."""
        if self._scaler is not None:
            loss = loss / self._scaler.scale(torch.ones_like(loss))
        self.run.forget_lost_step()
        self.run.backward_begins(loss)

    def notice_others(self) -> None:
        """Do nothing: the watch has such a hook, and torch does not let a hook add or remove others of its kind."""

    def keep_torch_hooks(self) -> Callable[[], None]:
        """Let the hooks on optimizers stay when the run ends, where they do nothing; return what takes them off.

        Torch may be going through them, and raises if one of them leaves.
        """
        return self._torch_hooks.pop_all().close

    def leave(self) -> None:
        """Take every hook off, in a process that was forked from the run's process, where the run continues."""
        self._torch_hooks.close()
        for hooked in self.run.hooks.dispatcher.modules:
            hooked.update(attached=False)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.run.running:
            return None
        try:
            return super()._before_step(optimizer, args, kwargs)
        except Exception as error:
            self._fail(error)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.run.running:
            return
        try:
            super()._after_step(optimizer, args, kwargs)
        except Exception as error:
            self._fail(error)
