"""`OwnLoop`: the run of a loop of the user's own, which fires its events by hand on a `HookManager`.

A value that an event carries is taken as it is: step, batch_idx, epoch, tokens_seen and the loader. What no event says
is counted: a micro-batch begins with the first inner event or forward pass after the last one ended, by
on_train_batch_end or on_step_end; each is a step, unless the loop fires on_step_end, which then ends the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hookline._names import plain_parameters
from hookline.activations.forward_hooks import NoRun
from hookline.core.catalog import Event
from hookline.errors import MissingArgument
from hookline.run.engine import Engine
from hookline.run.run import Run

if TYPE_CHECKING:
    from hookline.run.manager import HookManager

ENDS = ("on_train_batch_end", "on_step_end")
"""Events that end a micro-batch. They come in either order, and each once."""
PHASES = {
    "on_train_start": "train",
    "on_epoch_start": "train",
    "on_validation_start": "validation",
    "on_train_end": "inference",
    "on_exception": "inference",
}
"""The phases that begin with events; an inner event is one of training."""
NUMBERS = ("step", "epoch", "batch_idx")
"""What is the same at all events of a micro-batch that carry it."""
ALWAYS_KNOWN = {
    "trainer", "step", "epoch", "batch_idx", "dataloader_idx", "dataloader_name", "tokens_seen", "phase", "resumed",
    "state", "request_stop", "clipped", "skip_requested_at",
}  # fmt: skip
OF_MODEL, OF_OPTIMIZER = {"model", "device", "grads"}, {"optimizer", "optimizer_idx", "optimizer_lr", "lr"}
OF_LOSS = {"loss", "live_loss", "window_loss", "metrics"}


class OwnLoop(Run):
    """The run of a user's own loop: its events say where it is, and hooks get it as `trainer`.

    Its model and its optimizers are known once an event, `state`, `ctx` or `watch` passed them.

    Args:
        hooks: The manager on which the loop fires its events.
    """

    stops_itself = False
    can_validate = has_validation = validates_on_schedule = True  # if the loop fires the events of one
    warn_above = None

    def __init__(self, hooks: HookManager) -> None:
        self.hooks = hooks
        self._model: torch.nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._trained: tuple[Any, int] = None, 0  # what `params` belong to: the model, and how many optimizers
        self._followed: Any = None  # the object that `watch` was given as the run
        self._followed_step: int | None = None  # the last step that a forward pass found in it
        self._fires_step_end = False  # else each micro-batch is a step
        self._step_is_over = True
        self._first_step = 0  # the step after which the loop began
        self._ended = set(ENDS)  # those that have ended the micro-batch; none while it runs
        self._said: dict[str, Any] = {}  # what the events of the micro-batch have carried
        self._decided: tuple[Any, ...] | None = None  # where the loop was when it was decided which hooks are due
        self._outer_phase = "inference"  # in which the last validation began
        super().__init__(torch.nn.Module(), [], hooks, engine=Engine(torch.device("cpu")), ranks=hooks.ranks)
        self.event_args.phase = self._outer_phase
        self.run_status.begin()
        self._unsubscribe = hooks.failures.subscribe(self._record_incident)

    def connect_hooks(self) -> None:
        """Let forward hooks read where the loop is; an update chain is made with the first gradients."""
        dispatcher = self.hooks.dispatcher
        dispatcher.begin_batch = self.begin_forward
        if isinstance(dispatcher.run, NoRun):
            dispatcher.run = self.event_args
        self.hooks.dispatch_table.reset()

    def release_hooks(self) -> None:
        """Leave the hooks to a trainer."""
        super().release_hooks()
        self._unsubscribe()

    def fires(self, event: Event) -> bool:
        """Return True: the loop fires what it likes."""
        return True

    def follow(self, other: Any) -> None:
        """Let forward hooks read an object of the user's, whose step is the loop's."""
        super().follow(other)
        self._followed, self._followed_step = other, None

    # ---- what the loop has passed ------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The model that an event has passed, or that the manager watches."""
        model = self.hooks.dispatcher.model if self._model is None else self._model
        if model is None:
            raise MissingArgument("the model of this loop is not known; pass model=… with an event, or watch(model)")
        return model

    @model.setter
    def model(self, model: torch.nn.Module) -> None:
        self._model = None  # the base class has none to give

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that events have passed."""
        if not self._optimizers:
            raise MissingArgument("the optimizer of this loop is not known; pass optimizer=… with an event")
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((param.device for param in self.model.parameters()), self.engine.device)

    def knows_model(self) -> bool:
        """Return whether something has passed a model."""
        return self._model is not None or self.hooks.dispatcher.model is not None

    def parts(self) -> dict[str, Any]:
        """Return the objects of the run that are known."""
        model = {"model": self.model, "device": self.device} if self.knows_model() else {}
        return model | ({"optimizer": self._optimizers[0]} if self._optimizers else {})

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the optimizers own, or all if none are known."""
        params = plain_parameters(self.model) if self.knows_model() else {}
        owned = {
            id(param) for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]
        }
        return {name: param for name, param in params.items() if id(param) in owned or not owned}

    def read_groups(self) -> None:
        """Do nothing: the loop clears its gradients."""

    def knows(self, name: str) -> bool:
        """Return whether the run can tell an event argument that the loop does not pass."""
        args = self.event_args
        return (
            name in ALWAYS_KNOWN
            or (name in OF_MODEL and self.knows_model())
            or (name in OF_OPTIMIZER and bool(self._optimizers))
            or (name in OF_LOSS and args.live_loss is not None)
            or (name in ("batch", "exception", "reason") and getattr(args, name) is not None)
            or (name == "config" and self.config is not None)
            or (name == "clipped_norm" and args.norm_before_clipping() is not None)
        )

    def skip_step(self, reason: str) -> None:
        """Refuse to skip the step.

        Raises:
            MissingArgument: Always: only the loop's owner can leave a step out.
        """
        by = self.hooks.calling_hook()
        problem = f"on_update: {by} asks to skip the step ({reason}), which only your loop can do"
        raise MissingArgument(f"{problem}; pass trainer=… with skip_step")

    # ---- events ------------------------------------------------------------------------------------------------------

    def fire(self, event: Event, values: Mapping[str, Any]) -> None:
        """Read from an event where the loop is, and call its hooks."""
        self._learn(values)
        self._begin(event, values)
        try:
            super().fire(event, values)
        finally:
            self._finish(event)

    def _learn(self, values: Mapping[str, Any]) -> None:
        """Keep what an event passes that later ones may leave out."""
        model, optimizer = values.get("model"), values.get("optimizer")
        if isinstance(model, torch.nn.Module):
            self._model = model
        if isinstance(optimizer, torch.optim.Optimizer) and all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        trained = self.hooks.dispatcher.model if self._model is None else self._model, len(self._optimizers)
        if trained != self._trained:
            self._trained = trained
            self.params.clear()
            self.params.update(self.trained_parameters())
        if values.get("config") is not None:
            self.config = values["config"]

    def _begin(self, event: Event, values: Mapping[str, Any]) -> None:
        """Begin what begins with an event, and read where the loop is."""
        given = {name: values[name] for name in ("step", "epoch", "tokens_seen") if isinstance(values.get(name), int)}
        if event.inner:
            self.event_args.phase = "train"
            self._begin_inner(event, given, values)
            return
        self._enter_phase(event.name)
        if event.name == "on_train_start":
            self._fires_step_end = False
            self.run_status.begin()
            self.event_args.begin_run()
        elif event.name == "on_epoch_start":
            self.progress.epoch_over = self.progress.epoch_over or self.progress.batch_idx >= 0
            self._begin_epoch()
        elif event.name == "on_exception":
            self.run_status.close(failed=True)
            self.event_args.exception = values.get("exception")
        elif event.name == "on_train_end":
            outcome, reason = self.decide_outcome(self.event_args.exception)
            self.run_status.close(failed=self.status == "error")
            self.event_args.reason = reason or outcome
        self._take(given)

    def _enter_phase(self, name: str) -> None:
        args = self.event_args
        if name == "on_validation_start":
            self._outer_phase = args.phase
        args.phase = self._outer_phase if name == "on_validation_end" else PHASES.get(name, args.phase)

    def _begin_inner(self, event: Event, given: dict[str, int], values: Mapping[str, Any]) -> None:
        """Read an event of a micro-batch; it may be the first of another one."""
        progress, args, name, said = self.progress, self.event_args, event.name, self._said
        if isinstance(values.get("batch_idx"), int):
            given["batch_idx"] = values["batch_idx"]
        is_over = name in self._ended if name in ENDS else bool(self._ended) or name == "on_train_batch_start"
        contradicts = any(said.get(number, given[number]) != given[number] for number in given if number in NUMBERS)
        if is_over or contradicts:  # then it is about another one
            self._begin_batch(given)
        self._said.update(given)
        self._take(given)
        if name == "on_step_end" and not self._fires_step_end:
            self._fires_step_end = True
            if "step" not in self._said:
                progress.step = self._first_step + 1  # the micro-batches so far were all of one step
        if "dataloader_name" in values and "loader" not in self._said:
            self._said["loader"] = values["dataloader_name"]
            progress.enter_loader(int(values.get("dataloader_idx", 0)), str(values["dataloader_name"]))
        if "batch" in values:
            args.batch = values["batch"]
        if (loss := _tensor(values.get("loss"))) is not None:
            args.live_loss = loss
        if name == "on_step_end":
            self._record_step()
        self._decide()

    def _take(self, given: Mapping[str, int]) -> None:
        """Take over the numbers that an event carries."""
        progress = self.progress
        if given.get("epoch", progress.epoch) != progress.epoch:
            if progress.batch_idx >= 0:
                self._begin_epoch()
            progress.epoch = given["epoch"]
        progress.step = given.get("step", progress.step)
        progress.batch_idx = given.get("batch_idx", progress.batch_idx)
        progress.tokens_seen = given.get("tokens_seen", progress.tokens_seen)

    def _begin_epoch(self) -> None:
        self.progress.begin_epoch()
        self.stats = self.stats.next_epoch(self.progress.step)

    def _begin_batch(self, given: Mapping[str, int]) -> None:
        """Begin a micro-batch, and a step if the last one is over."""
        progress, args = self.progress, self.event_args
        if progress.epoch_over or given.get("epoch", progress.epoch) != progress.epoch:
            self._begin_epoch()
            progress.epoch = given.get("epoch", progress.epoch)
        elif given.get("batch_idx", progress.batch_idx + 1) <= progress.batch_idx:
            self._begin_epoch()  # which no event has announced
        progress.step += self._step_is_over or not self._fires_step_end
        progress.batch_idx += 1
        self._ended, self._said, self._step_is_over = set(), {}, False
        args.batch = args.live_loss = args.used_lr = None

    def _decide(self) -> None:
        """Decide which hooks are due, if the loop is at another place than when that was last decided."""
        progress, scheduler = self.progress, self.hooks.scheduler
        place = progress.step, progress.batches, progress.epoch, progress.dataloader_name
        # Its steps need not be consecutive, so that schedules cannot be counted down.
        if place != self._decided and (scheduler.groups is None or scheduler.groups):
            self.hooks.decide_due_hooks(progress, counts_down=False)
        self._decided = place

    def begin_forward(self) -> bool:
        """Begin the micro-batch that a forward pass is the first of; return whether it is."""
        if not self._ended and self._followed is None:
            return False  # as for most calls of modules
        with self.hooks.lock:  # several threads may run the model
            if not self._awaits_forward():
                return False
            given: dict[str, int] = {}
            if self._followed is not None:
                self._followed_step = self._followed.step
                given = {name: getattr(self._followed, name) for name in NUMBERS if hasattr(self._followed, name)}
            self._begin_batch(given)
            self._take(given)
            self._decide()
            return True

    def _awaits_forward(self) -> bool:
        """Return whether a forward pass that comes now is the first of a micro-batch."""
        if self._followed is not None:
            return bool(self._followed.step != self._followed_step)
        return bool(self._ended) and self.event_args.phase == "train"

    def _finish(self, event: Event) -> None:
        """End what ends with the event, once its hooks were called."""
        progress = self.progress
        if event.name == "on_epoch_end":
            progress.end_epoch()
        elif event.name == "on_train_start":
            self._ended, self._step_is_over = set(ENDS), True
            self._first_step = progress.steps_done = progress.step
        elif event.name in ENDS:
            self._ended.add(event.name)
            loss = self.event_args.live_loss
            if event.name == "on_step_end":
                self._step_is_over = True
            elif loss is not None:
                self.stats.pending_losses.append(loss)
            if self._step_is_over or not self._fires_step_end:
                self._record_step()
                self.step_log.flush_if_due()
        elif event.name == "on_train_end" and self.running:
            self.step_log.flush(wait=True)
            self.run_status.end()

    def _record_step(self) -> None:
        """Record the loss of a step, once."""
        progress, loss = self.progress, self.event_args.live_loss
        if progress.steps_done != progress.step and loss is not None:
            self.step_log.add_loss(loss)
        progress.steps_done = progress.step


def _tensor(loss: Any) -> torch.Tensor | None:
    """Return a loss that an event carries as a tensor without its graph; None if it is not one number."""
    if isinstance(loss, torch.Tensor):
        return loss.detach().reshape(()) if loss.numel() == 1 else None
    return torch.tensor(float(loss)) if isinstance(loss, (int, float)) else None
