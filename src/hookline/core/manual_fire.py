"""The values and the clock of events that a user's own loop fires: ``registry.on_epoch_end(epoch, state)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from time import monotonic
from types import SimpleNamespace
from typing import Any

from hookline.core.base import StepContext
from hookline.core.catalog import ARGUMENT_ALIASES, Event
from hookline.core.dispatch import BoundHook
from hookline.core.schedule import Reading
from hookline.errors import MissingArgument

STATE_KEYS = {
    "model": "model",
    "optimizer": "optimizer",
    "device": "device",
    "epoch": "current_epoch",
    "batch_idx": "current_batch_idx",
    "loss": "latest_loss",
}
"""Arguments that are read from `state` if it is passed."""


class ManualArgs:
    """The arguments of a manually fired event; naming one that the call did not pass is the caller's error."""

    skip_requested_at: int | None = None  # Only the owner of the loop knows whether it skips a step.

    def __init__(self, event: Event, values: Mapping[str, Any], listeners: Callable[[], Sequence[BoundHook]]) -> None:
        # A `ctx` or a `state` may contain more than the event has.
        self.__dict__.update({event.attributes[name]: values[name] for name in event.attributes if name in values})
        for sources in event.respelled.values():
            self.__dict__.update({sources[name]: values[name] for name in sources if name in values})
        self._event, self._listeners = event, listeners

    def clipped(self, norm: Any, is_global: bool) -> None:
        """Store the norm that a clipping hook found, for on_gradient_clip."""
        self._clipped = norm

    def __getattr__(self, name: str) -> Any:
        if name == "clipped_norm" and "_clipped" in vars(self):
            return float(self._clipped)
        if name.startswith("_"):
            raise AttributeError(name)
        named = next((key for key, source in self._event.attributes.items() if source == name), name)
        hooks = ", ".join(repr(hook.hook) for hook in self._listeners() if name in hook.listener.wanted) or "a hook"
        raise MissingArgument(
            f"{self._event.name}: {hooks} names {named!r}, which the call did not pass; pass {named}=… when you fire it"
        )


def name_values(event: Event, order: tuple[str, ...], args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a manually fired event by name.

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
        raise TypeError(f"{event.name} takes {len(order)} values by position ({', '.join(order)}), got {len(args)}")
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
        # A user's own loop may pass any object that has some of the fields.
        contained.update({one.name: getattr(ctx, one.name) for one in fields(StepContext) if hasattr(ctx, one.name)})
    if "loss" in named and "metrics" not in named:
        contained["metrics"] = {"loss": named["loss"]}
    return {**contained, **named}


BEFORE_A_BATCH = ("on_train_start", "on_train_batch_end", "on_step_end")
"""Events after which a forward pass belongs to the next micro-batch."""
PHASES = {
    "on_train_start": "train",
    "on_validation_start": "validation",
    "on_train_end": "inference",
    "on_exception": "inference",
}
"""The phases that begin with events; an inner event is one of training."""


class ManualClock:
    """Reads from the arguments of manually fired events where the loop is; what an event omits stays as it was."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(step=0, epoch=0, phase="inference", trainer=None, model=None)
        """Where forward hooks without a trainer read step, epoch and phase; code that fires no events may set them."""
        self._phase_before = self.run.phase  # The phase in which the last validation began.
        self.batch_is_over = False
        """Whether a forward pass that comes now belongs to a micro-batch of which no event was fired yet."""
        self._fires_step_end = False  # Else each micro-batch is a step.
        self._finished_step = 0
        self._step_of_event = 0  # The last that an event said; a forward pass may have begun another one since.
        self._batches_of: Counter[str] = Counter()  # By loader.
        self.now = Reading(by_loader=self._batches_of)
        self._started = monotonic()
        self._position: tuple[int, int, int, str] | None = None  # At the last inner event.

    def read(self, event: Event, values: Mapping[str, Any]) -> bool:
        """Read where the loop is; return True if an inner event is the first of a new micro-batch."""
        given = {name: value for name, value in values.items() if isinstance(value, int)}
        # The batches of a validation are counted separately.
        now, batch = self.now, given["batch_idx"] + 1 if event.inner and "batch_idx" in given else None
        if batch is not None and not self._fires_step_end:
            now.steps = batch
        elif batch not in (None, now.batches) and now.steps == self._finished_step:
            now.steps += 1  # Its first micro-batch.
        now.steps = given.get("step", now.steps)
        if batch is not None:
            now.batches = batch
        elif event.name == "on_train_start" or now.steps < self._step_of_event:
            now.batches = now.steps
        else:  # With accumulation there were more micro-batches than steps.
            now.batches = max(now.batches, now.steps)
        self._step_of_event = now.steps
        now.epochs = given["epoch"] + 1 if "epoch" in given else max(now.epochs, 1)
        now.tokens = given.get("tokens_seen", now.tokens)
        now.seconds = monotonic() - self._started
        now.loader = str(values.get("dataloader_name", now.loader))
        if event.name == "on_validation_end":
            self.run.phase = self._phase_before
        else:
            if event.name == "on_validation_start":
                self._phase_before = self.run.phase
            self.run.phase = PHASES.get(event.name, "train" if event.inner else self.run.phase)
        if event.name in BEFORE_A_BATCH:
            self.batch_is_over = True
        elif event.inner or self.run.phase == "inference":
            self.batch_is_over = False
        if event.name in ("on_train_start", "on_step_end"):
            self._fires_step_end = event.name == "on_step_end"
            self._finished_step = now.steps
        position = now.steps, now.batches, now.epochs, now.loader
        begins = event.inner and position != self._position
        if begins:
            self._position = position
            if now.loader:
                self._batches_of[now.loader] += 1
        self.run.step, self.run.epoch = now.steps, max(now.epochs - 1, 0)
        return begins

    def begin_next_batch(self) -> None:
        """Begin a micro-batch whose forward pass comes before its first event."""
        begins_step = not self._fires_step_end or self.now.steps == self._finished_step
        self._begin_batch(self.now.steps + begins_step)
        self.batch_is_over = False
        self.run.step = self.now.steps

    def follow(self, run: Any) -> bool:
        """Begin the step that a user's `run` is in; return False if it is the one that was read last."""
        now = self.now
        if run.step == now.steps and now.epochs:
            return False
        now.epochs = max(now.epochs, run.epoch + 1)
        self._begin_batch(run.step)
        return True

    def _begin_batch(self, step: int) -> None:
        now = self.now
        now.steps, now.batches, now.seconds = step, max(now.batches + 1, step), monotonic() - self._started
        self._position = now.steps, now.batches, now.epochs, now.loader
