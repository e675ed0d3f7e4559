"""The base classes that hooks inherit. None of them needs `super().__init__()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.events.catalog import Events
from hookline.events.schedule import Schedule

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function")


class Hook(Events):
    """What all hooks share. Everything here is optional and may be set on the class or on the instance."""

    name: str | None = None
    """The instance's unique name; the class name in snake case when not given."""
    on_error: str = "warn"
    """Failure policy: 'warn', 'disable' or 'raise'."""
    schedule: Schedule | None = None
    """When the repeating inner events reach this hook; `every=` and its like at registration override it."""
    always_hears: tuple[str, ...] = ()
    """Inner events that reach it whether it is due or not: to pick up what a device has computed meanwhile, say."""
    hears_sanity_check: bool = False
    """Whether the validation that is tried before the first step reaches it: to look after the run, say."""
    saves: tuple[str, ...] = ()
    """Attributes saved with the run's checkpoints and restored from them."""
    intervenes: bool | None = None
    """Whether the hook changes training on purpose; listed as such. None: if it hears on_update, or has `intervene`."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Called once, when the hook is attached; may name `registry` and `name` (the hook's own in it)."""

    def close(self) -> None:
        """Called once, when the hook is removed or the run ends."""


class TrainingHook(Hook):
    """A lifecycle hook: override the events you need, naming the arguments you need."""


TrainerHooks = TrainingHook


class ForwardHook(Hook):
    """Sees the activations of the modules it selects, while the model runs; changes nothing.

    `modules` selects by exact name, glob (``"blocks.*.mlp"``), regex (``"re:blocks\\.\\d+"``), class, predicate
    ``(name, module) -> bool``, or a list of these.
    """

    modules: Any = "*"
    intervene: bool = False
    """Whether what `on_forward` returns replaces the output (needs interventions enabled too)."""


class UpdateHook(Hook):
    """Transforms the gradients once per optimizer step: complete, unscaled, reduced over ranks.

    `params` selects parameters as `ForwardHook.modules` selects modules; a class (or ``"class:Linear"``) selects the
    parameters of its modules. None means all.
    """

    params: Any = None
    inplace: bool = False
    """Whether `on_update` writes into the gradients it gets; it is then given a backup to fall back to."""
    clips: bool = False
    """Whether it clips: it then sets `clipped_norm` at each call, and on_gradient_clip follows it."""
    norm_type: float = 2.0
    """Which norm `clipped_norm` is."""
    clipped_norm: Any = None
    """The norm before the last clipping, of what `params` selects; best left on the device."""
    check_finite: bool | None = None
    """Whether making finite gradients non-finite is its failure. None: where that needs no wait, so not on a GPU."""
    intervenes = True

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        """Make the state that `on_update` gets as `state` and that is saved with the run."""
        return {}


def not_an_event(function: Function) -> Function:
    """Mark a method whose name begins with ``on_`` but which is no event."""
    function.__hookline_not_an_event__ = True  # type: ignore[attr-defined]
    return function


def passes_through(function: Function) -> Function:
    """Mark an `on_update` that returns what it gets: a chain of nothing else is not run at all."""
    function.__hookline_passes_through__ = True  # type: ignore[attr-defined]
    return function
