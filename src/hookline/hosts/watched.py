"""`Watched`: hooks in the training of a script that knows nothing about them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from hookline.activations.compile.detection import has_compiled
from hookline.activations.hooked_modules import HookedModule
from hookline.core.failures import Incident
from hookline.errors import HooklineError
from hookline.hosts.attach import Attached
from hookline.hosts.options import Options
from hookline.hosts.search import Training
from hookline.hosts.truth import RUN

SCHEDULE = {"every": 25, "at": [2, 10]}  # A short training is seen, too.


def default_hooks() -> dict[str, Any]:
    """Return the hooks of a run for which no others are named.

    Hooks in the modules of an already compiled model would make torch compile it again.
    """
    forward = [] if has_compiled() else [{"name": "activation_stats", **SCHEDULE}]
    return {"lifecycle": [{"name": "gradient_monitor", **SCHEDULE}], "forward": forward}


class ModuleCalls:
    """Has torch call the forward hooks of modules from one hook on all modules: none is on the modules themselves.

    So a script saves, copies, scripts and runs a model as it would without hooks; torch computes some modules
    differently in eval mode if they have any. The hook is attached only while a forward hook may be due.

    Args:
        with_kwargs: Whether hooks get keyword arguments. Torch remembers that it had such a hook, and warns about it
            when a module is compiled later.
    """

    def __init__(self, with_kwargs: bool) -> None:
        self._with_kwargs = with_kwargs
        self._hooked: dict[int, HookedModule] = {}  # by the ids of their modules
        self._handle: RemovableHandle | None = None

    def register(self, module: torch.nn.Module, hook: HookedModule) -> Any:
        """Have a hook called after the forward of a module; return the handle that ends it."""
        self._hooked[id(module)] = hook
        return SimpleNamespace(remove=partial(self._hooked.pop, id(module), None))

    @property
    def has_ended(self) -> bool:
        """Whether hooks are no longer called, because the script has compiled something."""
        return bool(self._hooked) and has_compiled()

    def listen(self, wanted: bool) -> None:
        """Start or stop listening to the calls of all modules: not if none has a hook, and not to compiled code."""
        wanted = wanted and bool(self._hooked) and not self.has_ended
        if wanted and self._handle is None:
            self._handle = register_module_forward_hook(self._call, with_kwargs=self._with_kwargs)
        elif not wanted and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _call(self, module: torch.nn.Module, args: Any, *given: Any) -> Any:
        """Call the hook of a module that has one. Compiled, exported or traced code stays as it would be without."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        hook = self._hooked.get(id(module))
        if hook is None or hook.module_ref() is not module:  # A module that no longer exists had the same id.
            return None
        return hook(module, args, given[0] if self._with_kwargs else {}, given[-1])


class Watched(Attached):
    """Hooks in the training of a script; a `Watch` reports its backward passes and its optimizers.

    Args:
        training: The model and its GradScaler.
        optimizer: The optimizer that steps first.
        options: Which hooks, and what they may do.
        prints: Whether the closing line is printed.
        fail: Called with what goes wrong in a step or a forward pass; it may raise it.
        is_elsewhere: Returns whether the work of this thread does not belong to the run.
    """

    def __init__(
        self,
        training: Training,
        optimizer: torch.optim.Optimizer,
        options: Options,
        prints: bool,
        fail: Callable[[Exception], None],
        is_elsewhere: Callable[[], bool],
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
        self._has_told = False  # whether it has named the forward hooks that no longer see modules
        self._module_calls = ModuleCalls(options.hooks is not None)
        dispatcher = self.run.hooks.dispatcher
        dispatcher.fail, dispatcher.is_elsewhere = fail, is_elsewhere  # Other threads may train models of the run, too.
        if not has_compiled():  # Models compiled later have no hooks, and need no preparation.
            dispatcher.register, dispatcher.compilable = self._module_calls.register, False
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
        self._is_always_due = any(entry.schedule.always for entry in self.run.hooks.entries("forward"))

    def _listen(self) -> None:
        """Listen to module calls if a forward hook may be due in the next micro-batch."""
        is_due = self._is_always_due or not self.run.hooks.scheduler.countdown
        self._module_calls.listen(is_due)
        if is_due and not self._has_told and self._module_calls.has_ended:
            self._has_told = True
            hooks, step = self.run.hooks, self.run.progress.step
            for entry in hooks.entries("forward"):
                message = "sees no modules from now on, because the script has compiled something"
                hooks.failures.report(Incident("passed_over", entry.name, "on_forward", step, message), True)

    def end(self, error: BaseException | None = None, signal: str | None = None) -> None:
        """End the run; no hook is called from now on."""
        self._module_calls.listen(False)
        super().end(error, signal)

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Report a backward pass that begins. The loss is recorded unscaled."""
        if self._scaler is not None:
            loss = loss / self._scaler.scale(torch.ones_like(loss))
        self.run.forget_lost_step()
        self.run.backward_begins(loss)

    def backward_ends(self) -> None:
        """Report its end."""
        self.run.backward_ends()
        self._listen()

    def notice_others(self) -> None:
        """Do nothing: the watch has such a hook, and torch does not let a hook add or remove others of its kind."""

    def keep_torch_hooks(self) -> Callable[[], None]:
        """Keep the hooks on optimizers when the run ends, where they do nothing; return the function that removes them.

        Torch may be iterating over them, and raises if one is removed.
        """
        return self._torch_hooks.pop_all().close

    def leave(self) -> None:
        """Remove every hook in a process that was forked from the run's process, where the run continues."""
        self._torch_hooks.close()
        self._module_calls.listen(False)
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
            self._listen()
        except Exception as error:
            self._fail(error)
