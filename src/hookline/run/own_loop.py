"""`OwnLoop`: the run of a user's own loop, which fires its events by hand on a `HookManager`.

A value that an event carries is taken as it is: step, batch_idx, epoch, tokens_seen and the loader. Anything that no
event states is counted: a micro-batch begins with the first inner event or forward pass after the last one ended, by
on_train_batch_end or on_step_end; each is a step, unless the loop fires on_step_end, which then ends the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hookline._names import plain_parameters
from hookline.core.catalog import Event
from hookline.errors import MissingArgument
from hookline.run.engine import Engine
from hookline.run.run import Run
from hookline.run.step_log import LOSS

if TYPE_CHECKING:
    from hookline.run.manager import HookManager

ENDS = ("on_train_batch_end", "on_step_end")
"""Events that end a micro-batch. They come in either order, once each."""
PHASES = {
    "on_train_start": "train",
    "on_epoch_start": "train",
    "on_validation_start": "validation",
    "on_train_end": "inference",
    "on_exception": "inference",
}
"""The phases that begin with events; an inner event is one of training."""
NUMBERS = ("step", "epoch", "batch_idx")
"""Values that are the same at all events of a micro-batch that carry them."""
ALWAYS_KNOWN = {
    "trainer", "step", "epoch", "batch_idx", "dataloader_idx", "dataloader_name", "tokens_seen", "phase", "resumed",
    "state", "request_stop", "set_clipped_norm", "skip_reason", "note_metric",
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
    # True if the loop fires the events of a validation:
    can_validate = knows_validation_batches = has_validation = validates_on_schedule = True
    warn_above = None

    def __init__(self, hooks: HookManager) -> None:
        self.hooks = hooks
        self._trained: tuple[Any, int] = None, 0  # where `params` come from: the model, and the number of optimizers
        self._followed: Any = None  # the object that `watch` was given as the run
        self._followed_step: int | None = None  # the last step that a forward pass found in it
        self._fires_step_end = False  # otherwise each micro-batch is a step
        self._first_step = 0  # the step after which the loop began
        self._ended_by = set(ENDS)  # the events that have ended the micro-batch; none while it runs
        self._carried: dict[str, Any] = {}  # numbers, and the loader, that events of the micro-batch have carried
        self._decided: tuple[Any, ...] | None = None  # where the loop was when it was decided which hooks are due
        self._is_updating = False  # whether the event that is fired is on_update
        self._outer_phase = "inference"  # the phase in which the last validation began
        super().__init__(None, [], hooks, engine=Engine(torch.device("cpu")), ranks=hooks.ranks)  # type: ignore[arg-type]
        self.event_args.phase = self._outer_phase
        self.run_status.begin()
        self.connection.callback(hooks.failures.subscribe(self._record_incident))

    def connect_hooks(self) -> None:
        """Let forward hooks read where the loop is; an update chain is created with the first gradients."""
        dispatcher = self.hooks.dispatcher
        dispatcher.begin_batch = self.begin_forward
        dispatcher.run = self.event_args
        self.hooks.dispatch_table.reset()

    def lose_hooks(self) -> None:
        """Let a run take over the hooks at any time: the events of this loop are then fired in that run."""
        self.connection.close()

    def fires(self, event: Event) -> bool:
        """Return True: the loop fires any events it likes."""
        return True

    def follow(self, other: Any) -> None:
        """Let forward hooks read an object of the user's, whose step is the loop's."""
        super().follow(other)
        self._followed, self._followed_step = other, None

    # ---- what the loop has passed ------------------------------------------------------------------------------------

    @property
    def known_model(self) -> torch.nn.Module | None:
        """The model that an event has passed, or that the manager watches."""
        return self.hooks.dispatcher.model if self._model is None else self._model

    @property
    def model(self) -> torch.nn.Module:
        """The model; reading it raises MissingArgument if none is known."""
        if self.known_model is None:
            raise MissingArgument("the model of this loop is not known; pass model=… with an event, or watch(model)")
        return self.known_model

    @model.setter
    def model(self, model: torch.nn.Module | None) -> None:
        self._model = model

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

    def parts(self) -> dict[str, Any]:
        """Return the objects of the run that are known."""
        model = {} if self.known_model is None else {"model": self.known_model, "device": self.device}
        return model | ({"optimizer": self._optimizers[0]} if self._optimizers else {})

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the optimizers own, or all if none are known."""
        params = {} if self.known_model is None else plain_parameters(self.known_model)
        owned = {
            id(param) for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]
        }
        return {name: param for name, param in params.items() if id(param) in owned or not owned}

    def read_groups(self) -> None:
        """Do nothing: the loop clears its gradients."""

    def knows(self, name: str) -> bool:
        """Return whether the run knows an event argument that the loop does not pass."""
        args = self.event_args
        return (
            name in ALWAYS_KNOWN
            or (name in OF_MODEL and self.known_model is not None)
            or (name in OF_OPTIMIZER and bool(self._optimizers))
            or (name in OF_LOSS and args.live_loss is not None)
            or (name in ("batch", "exception", "reason") and getattr(args, name) is not None)
            or (name == "config" and self.config is not None)
            or (name == "clipped_norm" and args.norm_before_clipping() is not None)
        )

    def skip_step(self, reason: str) -> None:
        """Skip the step: `on_update` then returns None for every gradient, and no optimizer moves a parameter.

        Raises:
            MissingArgument: At another event, because the loop does not look at what that event returns.
        """
        if not self._is_updating:
            by = self.hooks.calling_hook()
            problem = f"{by} asks to skip the step ({reason}), but your loop can skip a step only in on_update"
            raise MissingArgument(f"{problem}; ask for it there, or pass trainer=… with skip_step")
        self.event_args.skip_reason = reason
        self.run_status.skipped_steps += 1
        self.record.event("step_skipped", self.progress.step, reason=reason)

    # ---- events ------------------------------------------------------------------------------------------------------

    def fire(self, event: Event, values: Mapping[str, Any]) -> None:
        """Read from an event where the loop is, and call its hooks."""
        self._keep_objects(values)
        self._is_updating, self.event_args.skip_reason = event.name == "on_update", None
        carried = {name: values[name] for name in ("step", "epoch", "tokens_seen") if isinstance(values.get(name), int)}
        if event.inner:
            self._before_inner_event(event.name, carried, values)
        else:
            self._before_event(event.name, values)
            self._set_counters(carried)
        try:
            super().fire(event, values)
            if self.event_args.skip_reason is not None and self.hooks.update_chain is not None:
                for param in self.hooks.update_chain.params.values():
                    param.grad = None
        finally:
            self._after_event(event.name)

    def _keep_objects(self, values: Mapping[str, Any]) -> None:
        """Keep what an event passes that later ones may leave out: model, optimizer and config."""
        model, optimizer = values.get("model"), values.get("optimizer")
        if isinstance(model, torch.nn.Module):
            self.model = model
        if isinstance(optimizer, torch.optim.Optimizer) and all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        trained = self.known_model, len(self._optimizers)
        if trained != self._trained:
            self._trained = trained
            self.params.clear()
            self.params.update(self.trained_parameters())
        if values.get("config") is not None:
            self.config = values["config"]

    def _before_event(self, name: str, values: Mapping[str, Any]) -> None:
        """Begin or end the run, epoch or validation that begins or ends with an event."""
        progress, args = self.progress, self.event_args
        if name == "on_train_start":
            self._fires_step_end = False
            self.run_status.begin()
            args.begin_run()
        elif name == "on_epoch_start":
            progress.epoch_over = progress.epoch_over or progress.batch_idx >= 0
            self._begin_epoch()
        elif name == "on_validation_start":
            self._outer_phase = args.phase
        elif name == "on_exception":
            self.run_status.close(failed=True)
            args.exception = values.get("exception")
        elif name == "on_train_end":
            outcome, reason = self.decide_outcome(args.exception)
            self.run_status.close(failed=self.status == "error")
            args.reason = reason or outcome
        args.phase = self._outer_phase if name == "on_validation_end" else PHASES.get(name, args.phase)

    def _before_inner_event(self, name: str, carried: dict[str, int], values: Mapping[str, Any]) -> None:
        """Read an event of a micro-batch, which may be the first of another one."""
        args, args.phase = self.event_args, "train"
        if isinstance(values.get("batch_idx"), int):
            carried["batch_idx"] = values["batch_idx"]
        is_over = name in self._ended_by if name in ENDS else bool(self._ended_by) or name == "on_train_batch_start"
        known = [number for number in NUMBERS if number in carried and number in self._carried]
        if is_over or any(carried[number] != self._carried[number] for number in known):
            self._begin_batch(carried)
        self._carried.update(carried)
        self._set_counters(carried)
        if name == "on_step_end" and not self._fires_step_end:
            self._fires_step_end = True
            if "step" not in self._carried:
                self.progress.step = self._first_step + 1  # so far, all micro-batches belonged to one step
        if "dataloader_name" in values and "loader" not in self._carried:
            self._carried["loader"] = values["dataloader_name"]
            self.progress.enter_loader(int(values.get("dataloader_idx", 0)), str(values["dataloader_name"]))
        if "batch" in values:
            args.batch = values["batch"]
        if (loss := _tensor(values.get("loss"))) is not None:
            args.set_loss(loss)
        if name == "on_step_end":
            self._record_step()
        self._decide_due_hooks()

    def _set_counters(self, carried: Mapping[str, int]) -> None:
        """Take over the numbers that an event carries."""
        progress = self.progress
        if carried.get("epoch", progress.epoch) != progress.epoch and progress.batch_idx >= 0:
            self._begin_epoch()
        for name, number in carried.items():
            setattr(progress, name, number)

    def _begin_epoch(self) -> None:
        self.progress.begin_epoch()
        self.stats = self.stats.next_epoch(self.progress.step)

    def _begin_batch(self, carried: Mapping[str, int]) -> None:
        """Begin a micro-batch, and a step or an epoch if the last one is over."""
        progress = self.progress
        is_new = carried.get("epoch", progress.epoch) != progress.epoch
        starts_again = carried.get("batch_idx", progress.batch_idx + 1) <= progress.batch_idx
        if progress.epoch_over or is_new or starts_again:  # No event need have announced it.
            self._begin_epoch()
            progress.epoch = carried.get("epoch", progress.epoch)
        progress.step += self._step_is_over
        progress.batch_idx += 1
        self._ended_by, self._carried = set(), {}
        self.event_args.batch = self.event_args.used_lr = None
        self.event_args.forget_loss()
        self.event_args.forget_step()

    def _decide_due_hooks(self) -> None:
        """Decide which hooks are due, if the loop has moved since that was last decided."""
        progress, scheduler = self.progress, self.hooks.scheduler
        place = progress.step, progress.batches, progress.epoch, progress.dataloader_name
        # Its steps need not be consecutive, so schedules cannot be counted down.
        if place != self._decided and (scheduler.groups is None or scheduler.groups):
            self.hooks.decide_due_hooks(progress, counts_down=False)
        self._decided = place

    def begin_forward(self) -> bool:
        """Begin the micro-batch that a forward pass is the first of; return whether it is."""
        if not self._ended_by and self._followed is None:
            return False  # as is true of most module calls
        with self.hooks.lock:  # several threads may run the model
            other = self._followed
            if other is None:
                is_first = bool(self._ended_by) and self.event_args.phase == "train"
            else:
                is_first = other.step != self._followed_step
            if is_first:
                self._followed_step = getattr(other, "step", None)
                carried = {name: getattr(other, name) for name in NUMBERS if hasattr(other, name)}
                self._begin_batch(carried)
                self._set_counters(carried)
                self._decide_due_hooks()
            return is_first

    def _after_event(self, name: str) -> None:
        """End whatever ends with an event, once its hooks were called."""
        progress = self.progress
        if name == "on_epoch_end":
            progress.end_epoch()
        elif name == "on_train_start":
            self._ended_by = set(ENDS)
            self._first_step = progress.steps_done = progress.step
        elif name in ENDS:
            self._ended_by.add(name)
            if name == "on_train_batch_end" and (loss := self.event_args.detached_loss) is not None:
                self.stats.add(LOSS, loss)
            if self._step_is_over:
                self._record_step()
                self.step_log.flush_if_due()
        elif name == "on_train_end" and self.running:
            self.step_log.flush(wait=True)
            self.run_status.end()

    @property
    def _step_is_over(self) -> bool:
        """Whether the step of the last micro-batch is over, once that one is."""
        return "on_step_end" in self._ended_by or not self._fires_step_end

    def _record_step(self) -> None:
        """Record the loss of a step, once."""
        progress, loss = self.progress, self.event_args.detached_loss
        if progress.steps_done != progress.step and loss is not None:
            self.step_log.add_loss(loss)
        progress.steps_done = progress.step


def _tensor(loss: Any) -> torch.Tensor | None:
    """Return a loss that an event carries as a tensor without its graph; None if it is not one number."""
    if isinstance(loss, torch.Tensor):
        return loss.detach().reshape(()) if loss.numel() == 1 else None
    return torch.tensor(float(loss)) if isinstance(loss, (int, float)) else None
