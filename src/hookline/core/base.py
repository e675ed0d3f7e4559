"""The base classes of the three kinds of hook, and `StepContext`. None of them needs `super().__init__()`.

They declare everything that Hookline reads from a hook; any other object, such as a function, has the
defaults (`hook_attribute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from hookline._parameters import with_checks
from hookline.core.catalog import Events
from hookline.core.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from hookline.run.control import RunControl

Function = TypeVar("Function")


class Hook(Events):
    """The attributes of all hooks. Each is optional, and may be set on the class or on the instance."""

    name: str | None = None
    """The instance's unique name; the class name in snake case when not given."""
    on_error: str | None = None
    """Failure policy: 'warn', 'disable' or 'raise'.

    None: 'raise' if it has `on_update` or sets `intervene`, unless `intervenes` is False; otherwise
    'warn'. Without its changes to gradients or activations, the run would be a different run.
    """
    schedule: Schedule | None = None
    """When the hook is called at inner events; `every=` and `at=` at registration override it, `start=` limits it."""
    every_aliases: tuple[str, ...] = ()
    """Constructor parameters that are other names for `every`; you can pass only one of them."""
    events_when_not_due: tuple[str, ...] = ()
    """Inner events at which the hook is called even when it is not due, for example to fetch results from a device."""
    runs_in_sanity_check: bool = False
    """Whether it is called during the sanity check, the validation before the first step."""
    saves: tuple[str, ...] = ()
    """Attributes saved with the run's checkpoints and restored from them."""
    ranks: str | int | Iterable[int] | None = None
    """The ranks on which it is called: 'all' (None), 'zero', 'local-zero' (the first of each machine), or numbers."""
    collective: bool = False
    """Whether it uses collectives: it then runs on all ranks or on none, and its failure ends the run."""
    same_on_all_ranks: bool = False
    """Whether it behaves identically on all ranks, because it depends only on numbers that all ranks agree on.

    Its requests then take effect at once, and all ranks draw the same numbers. With several ranks, its failure ends
    the run.
    """
    may_skip: bool = False
    """Whether it may call `skip_step` on only some ranks; at every step, the ranks then wait and decide together."""
    needs_all_ranks: bool = False
    """Whether all ranks produce its result together; with several ranks it rejects the `ranks` option."""
    intervenes: bool | None = None
    """Whether the hook changes training on purpose. None: yes if it has `on_update` or sets `intervene`."""
    isolate_rng: bool = True
    """Whether it is kept from training's random streams. False: it seeds training, and is listed as intervening."""
    needs: tuple[str, ...] = ()
    """Capabilities that a run needs, such as "can_save"; other runs reject the hook (`hookline help events`)."""
    runs_last: bool = False
    """Whether it is called after all hooks of its kind that do not set this, even those registered later."""
    shows_progress: bool = False
    """Whether it shows the run's progress: a run then prints no progress by default."""
    explains_non_finite: bool = False
    """Whether it reports where a non-finite loss comes from; the run then does not suggest how to find out.

    A run that it stops has the outcome `non_finite`.
    """
    unsaved_hint: str = ""
    """How to make it save the end of the run, too; printed if a run ends with steps that no checkpoint has."""
    states: Any = None
    """The states it has collected, oldest first, as `get_captured_states` returns them; None if it collects none."""
    state_dict: Callable[[], Any]
    """A method that returns the state to save with the run's checkpoints, instead of the attributes in `saves`."""
    load_state_dict: Callable[[Any], Any]
    """A method that restores what `state_dict` returned."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Foreign code may accept more than its annotations say.
        if "__init__" in vars(cls) and cls.__module__.startswith("hookline."):
            cls.__init__ = with_checks(cls)  # type: ignore[method-assign]

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Called once, when the hook is attached; may name `registry` and `name` (the hook's own in it)."""

    def check_run(self, trainer: RunControl) -> None:
        """Called before the run has a directory and a name. An exception refuses the run, on all ranks."""

    def before_first_step(self, trainer: RunControl, measured: Mapping[str, float] | None) -> None:
        """Called before on_train_start, once weights are loaded. An exception ends the run before its first step.

        Args:
            trainer: The run.
            measured: The metrics of the sanity check; None if there was none.
        """

    def after_last_step(self, trainer: RunControl) -> None:
        """Called after the last step of a run that has not failed; checkpoints requested here are still written.

        At `on_train_end` other hooks may have restored the weights of another step.
        """

    def clear_states(self) -> None:
        """Called by `clear_captured_states`: drop the collected `states`."""

    def close(self) -> None:
        """Called once, when the hook is removed or the run ends."""


class TrainingHook(Hook):
    """A lifecycle hook: override the events you need, naming the arguments you need."""


TrainerHooks = TrainingHook


class ForwardHook(Hook):
    """Observes the activations of the modules it selects while the model runs; it changes nothing.

    `modules` selects by exact name, glob (``"blocks.*.mlp"``), regex (``"re:blocks\\.\\d+"``), class, predicate
    ``(name, module) -> bool``, or a list of these.
    """

    modules: Any = "*"
    intervene: bool = False
    """Whether what `on_forward` returns replaces the output; interventions must be enabled, too."""
    watches_backward: bool = False
    """Whether it puts tensor hooks on `live_output`. Compiled graphs call none, so they are broken at its modules."""

    def bind_module(self, name: str, module: torch.nn.Module, run: Any) -> Callable[[Any, Any, Any], None] | None:
        """Return a function to call instead of `on_forward` after each call of a module; None to keep `on_forward`.

        It is called with the module's own inputs, keyword inputs and output, and must not write into them. A call takes
        4 µs instead of 6, because no arguments are looked up and no views are created. A hook that draws random numbers
        is still called through `on_forward`, so both must do the same.

        Args:
            name: The module's name, as `on_forward` gets it.
            module: The module; a function that keeps a reference to it keeps the model alive.
            run: Has `step`, `epoch` and `phase`, to be read at each call.
        """
        return None


class UpdateHook(Hook):
    """Transforms the gradients once per optimizer step: complete, unscaled, reduced over ranks.

    `params` selects parameters in the same way as `ForwardHook.modules` selects modules; a class (or
    ``"class:Linear"``) selects the parameters of its modules. None means all.
    """

    params: Any = None
    inplace: bool = False
    """Whether `on_update` modifies the gradients in place; they are then backed up in case it fails."""
    clips: bool = False
    """Whether it clips: it then sets `clipped_norm` at each call, and on_gradient_clip is fired after it."""
    norm_type: float = 2.0
    """The order of the norm in `clipped_norm`."""
    clipped_norm: Any = None
    """The norm of the selected gradients before the last clipping; preferably left on the device."""
    check_finite: bool | None = None
    """Whether turning finite gradients non-finite is a failure. None: only where that does not wait for a device."""
    reads_weights: bool = False
    """Whether it reads weights, not only gradients: fired by hand, `on_update` then needs `model`."""
    reports_norms: bool = False
    """Whether the norms before and after each update hook are logged while it is due."""
    passes_through: bool = False
    """Whether `on_update` changes nothing and is not called. A subclass with its own `on_update` is called."""
    intervenes: bool | None = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "on_update" in vars(cls) and "passes_through" not in vars(cls):
            cls.passes_through = False

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        """Return the state that `on_update` gets as `state` and that is saved with the run."""
        return {}


DEFAULTS = {
    name: value
    for kind in (ForwardHook, UpdateHook, Hook)
    for name, value in vars(kind).items()
    if not name.startswith("_")
}
"""Attributes that are read from a hook besides its events, with their defaults."""


def hook_attribute(hook: Any, name: str) -> Any:
    """Return an attribute that a hook declares, or the default; a missing `state_dict` or `load_state_dict` is None."""
    try:
        return getattr(hook, name)
    except AttributeError:
        default = DEFAULTS.get(name)
        return MethodType(default, hook) if isinstance(default, FunctionType) else default


@dataclass
class StepContext:
    """One finished optimizer step: the argument `ctx`. Model and optimizer are live; the gradients are already cleared.

    In a trainer's run `loss` and `grad_norm` are computed on first access, so a hook that reads only `ctx.step` does
    not wait for the device. A hook may keep the context: its numbers always belong to its step, no matter when they are
    read.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


def is_built_in(cls: Any) -> bool:
    """Return whether a class is that of a built-in hook: one that Hookline has defined and marked.

    It is not inherited, because a user's subclass of a built-in hook is not built in. An attribute of this name in a
    user's class means nothing.
    """
    return isinstance(cls, type) and cls.__module__.startswith("hookline.") and "built_in" in vars(cls)


def not_an_event(function: Function) -> Function:
    """Mark a method whose name begins with ``on_`` but which is not an event."""
    function.__hookline_not_an_event__ = True  # type: ignore[attr-defined]
    return function
