"""`HookManager`: the registry of hooks that users make. It fires events for a user's own loop, and watches models.

`HookRegistry` is another name for it. `HookRunner` differs only in the order of positional values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from hookline._text import counted
from hookline.activations.capture_store import CaptureStore
from hookline.activations.forward_hooks import ForwardDispatcher
from hookline.activations.registry import ModelRegistry
from hookline.core.base import StepContext
from hookline.core.catalog import ARGUMENT_ALIASES, CATALOG, SPELLINGS, Event, Events
from hookline.errors import HooklineError
from hookline.gradients.by_hand import UpdateByHand

if TYPE_CHECKING:
    from hookline.run.run import Run

STATE_KEYS = {
    "model": "model",
    "optimizer": "optimizer",
    "device": "device",
    "epoch": "current_epoch",
    "batch_idx": "current_batch_idx",
    "loss": "latest_loss",
}
"""Arguments that are read from `state` if that is passed."""


class HookManager(ModelRegistry, Events):
    """Registers hooks, orders them, attaches forward hooks to a model, and fires events.

    It has the same events as a hook: ``manager.on_epoch_end(epoch, state)`` calls every hook that listens to the event.
    Without hooks, this costs a branch. A trainer fires its events itself; your own loop fires them here, and hooks then
    get `run` as `trainer`.

    >>> manager = HookManager(max_captured_states=100, memory_limit_mb=512)
    >>> manager.register_capture_hook(model.encoder.layers[4], "encoder_layer_4", layer_idx=4)

    As a context manager it removes its hooks at the end of the block:

    >>> with HookManager(model) as manager:
    ...     hook_id = manager.register_capture_hook("encoder.layers.4")
    """

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Positional orders by spelling, where they are not those of the catalog."""

    def __init__(
        self,
        hooks: Any = None,
        *,
        max_captured_states: int | None = 100,
        memory_limit_mb: float | None = None,
        cleanup_interval: int = 1000,
        max_age_seconds: float | None = None,
        enable_intervention: bool = False,
        allow: Iterable[str] = (),
        from_file: bool = False,
    ) -> None:
        """Make a manager, with hooks if some are given.

        Args:
            hooks: A list of hooks, as `register` takes them; a config, as `load` takes it; or a model to `watch`.
            max_captured_states: How many states each capture hook keeps; None for no limit.
            memory_limit_mb: How much memory the states of all capture hooks may use; None for no limit.
            cleanup_interval: The number of module calls after which states that are too old are dropped.
            max_age_seconds: How long states are kept; None for no limit.
            enable_intervention: Whether hooks with `intervene = True` are accepted.
            allow: Prefixes under which a config from a file may name dotted paths.
            from_file: Whether the config comes from a file.

        Raises:
            ConfigError: If a parameter has an invalid value.
        """
        super().__init__(
            CaptureStore(max_captured_states, memory_limit_mb, max_age_seconds),
            cleanup_interval=cleanup_interval,
            enable_intervention=enable_intervention,
        )
        self._run: Run | None = None
        self._by_hand: UpdateByHand | None = None  # created for the first gradients that are passed by hand
        if isinstance(hooks, (list, tuple, Iterator)):
            for hook in hooks:
                self.register(hook)
        elif isinstance(hooks, torch.nn.Module):
            self.watch(hooks)
        elif hooks is not None:
            self.load(hooks, allow=allow, from_file=from_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, trace: TracebackType | None) -> None:
        self.remove_all()

    @property
    def run(self) -> Run:
        """The run that the hooks live in: a trainer, or this manager's own run, which its events drive.

        In your own loop, ``manager.run.stop_reason`` says whether a hook has asked to stop; its record is in
        memory, unless you assign another one to ``manager.run.record``.
        """
        if self._run is None:
            from hookline.run.own_loop import OwnLoop  # a run, which has a manager

            with self.lock:  # several threads may fire the first event
                self._run = self._run or OwnLoop(self)
        return self._run

    # ---- watching --------------------------------------------------------------------------------------------------

    def watch(self, model: torch.nn.Module, run: Any = None) -> ForwardDispatcher:
        """Resolve module patterns against this model from now on.

        Args:
            model: The model.
            run: Where hooks read `step`, and `epoch`, `phase`, `trainer` and `model` if it has them. By default, they
                come from the events that your loop fires on this manager.

        Returns:
            The dispatcher of the forward hooks.

        Raises:
            HooklineError: If a pattern matches nothing in the model, or `run` has no `step`.
        """
        if run is not None and not hasattr(run, "step"):
            expected = "expected an object with `step`, and `phase` and `epoch` if the loop has them"
            raise HooklineError(f"run: {expected}, got {type(run).__name__}")
        dispatcher = super().watch(model)
        if run is not None:
            self.run.follow(run)
        return dispatcher

    def watch_for_trainer(self, model: torch.nn.Module, args: Any) -> None:
        """Watch a model for a trainer, in whose run the hooks live from now on."""
        super().watch_for_trainer(model, args)
        before, self._run = self._run, args.trainer
        if before is not None:  # the user's own loop, or another trainer
            before.lose_hooks()

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_update(self, *args: Any, **values: Any) -> Any:
        """Run the update hooks over gradients by parameter name, and return the gradients for the optimizer.

        Hooks that write in place write into the passed tensors. With `model`, the model's parameters get the
        new gradients, too.

        >>> grads = runner.on_update({name: param.grad for name, param in model.named_parameters()}, model=model)

        Args:
            *args: The gradients, and `state`.
            **values: More arguments of the event: `model`, `step`, `epoch`, `trainer`.

        Returns:
            A dict with every name that was passed; None for a gradient that a hook removed.
        """
        if not self._entries:
            return args[0] if args else values.get("grads")
        event = CATALOG["on_update"]
        named = name_values(event, event.order, args, values)
        self._by_hand = self._by_hand or UpdateByHand(self)
        return self._by_hand.update(named, lambda: self.run.fire(event, named))


def name_values(event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an event that is fired by hand, by name.

    Args:
        event: The event.
        order: The names of values that are passed by position.
        args: Values that were passed by position.
        values: Values that were passed by name.

    Returns:
        All values, with those that `ctx` and `state` contain.

    Raises:
        TypeError: If there are too many values, one is given twice, or the event has no such argument.
    """
    if len(args) > len(order):
        count = counted(len(order), "value")
        raise TypeError(f"{event.name} takes {count} by position ({', '.join(order)}), got {len(args)}")
    for name, value in zip(order, args, strict=False):
        if name in values:
            raise TypeError(f"{event.name} got {name!r} twice")
        values[name] = value
    unknown = [name for name in values if ARGUMENT_ALIASES.get(name, name) not in event.attributes]
    if unknown:
        raise TypeError(event.unknown_argument(unknown[0]))
    named = {ARGUMENT_ALIASES.get(name, name): value for name, value in values.items()}
    contained: dict[str, Any] = {}
    state, ctx = named.get("state"), named.get("ctx")
    if isinstance(state, Mapping):
        contained.update({name: state[key] for name, key in STATE_KEYS.items() if key in state})
    if ctx is not None:
        # A user's own loop may pass any object with some of the fields.
        contained.update(
            {item.name: getattr(ctx, item.name) for item in fields(StepContext) if hasattr(ctx, item.name)}
        )
    if "loss" in named and "metrics" not in named:
        contained["metrics"] = {"loss": named["loss"]}
    if "output" in named and "live_output" in event.attributes:
        contained["live_output"] = named["output"]
    return {**contained, **named}


def _event_method(spelling: str) -> Callable[..., None]:
    """Make the method that fires one event from a user's own loop; without hooks it costs one branch."""
    event = SPELLINGS[spelling]

    def fire(self: HookManager, *args: Any, **values: Any) -> None:
        if self._entries:
            self.run.fire(event, name_values(event, self._orders.get(spelling, event.order), args, values))

    fire.__name__, fire.__doc__ = spelling, event.doc
    return fire


for _spelling in SPELLINGS.keys() - vars(HookManager).keys():
    setattr(HookManager, _spelling, _event_method(_spelling))

HookRegistry = HookManager


class HookRunner(HookManager):
    """A `HookManager` whose events take positional values in the order of a plain loop."""

    _orders: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "on_train_begin": ("config",),
        "on_step_end": ("ctx",),
        "on_eval_end": ("metrics", "step"),
        "on_checkpoint_save": ("step", "path"),
        "on_train_end": ("step", "tokens_seen"),
    }
