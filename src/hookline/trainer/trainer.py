"""`Trainer`: what users hold in their hands. It is put together by `hookline.build` and runs the one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from hookline.core.run_control import MicroBatch
from hookline.errors import HooklineError, TrainingError
from hookline.events.policy import logger
from hookline.gradients.chain import OVERFLOWED, UpdateChain
from hookline.gradients.view import Gradients
from hookline.record.memory_record import MemoryRecord
from hookline.record.run_record import Record
from hookline.registry.handle import Handle
from hookline.registry.registry import HookRegistry
from hookline.trainer import checkpointing
from hookline.trainer.async_saves import BackgroundSaves
from hookline.trainer.forward import StepFunction, count_samples, make_step
from hookline.trainer.lifecycle import running
from hookline.trainer.loaders import Loaders, epoch_length, held, named_loaders, to_train_on
from hookline.trainer.loop import Loop, steps_of_run
from hookline.trainer.moment import RunMoment
from hookline.trainer.parameters import trained_parameters
from hookline.trainer.parts import Parts
from hookline.trainer.rerun import Forward, rerunning
from hookline.trainer.rng import rng_state, rng_untouched
from hookline.trainer.run_state import RunState
from hookline.trainer.steering import Steering
from hookline.trainer.user_metrics import UserMetrics
from hookline.trainer.validation import evaluation, set_aside, validate

SaveName = str | Callable[[], str] | None


class Trainer:
    """Runs the training loop and carries the hooks. Hooks get it as `trainer`; they may set attributes on it."""

    def __init__(self, parts: Parts) -> None:
        self.options, self.engine, self.hooks = parts.options, parts.engine, parts.hooks
        self.model = parts.model
        self.optimizers, self.schedulers = parts.optimizers, parts.schedulers
        self.train_loaders = to_train_on(parts.train_loaders, self.options)
        self.val_loaders = named_loaders(parts.val_loaders, "val")
        self.optimizer_step = parts.optimizer_step
        self.count_tokens = parts.count_tokens
        self.config = parts.config
        self.describe, self.make_record = parts.describe, parts.make_record
        self.record: Record = MemoryRecord()
        self.hook_data: dict[str, Any] = {}
        self.best_accuracy = -math.inf
        self.status = "training"
        self.stop_reason: str | None = None
        self.stopped_by: str | None = None
        self.save_asked: list[SaveName] = []  # the names of the checkpoints to write at the next boundary
        self.saved_by_hand: set[str] = set()  # those that no hook may take for its own alone
        self.skipped_steps = self.non_finite_losses = self.failed_saves = self.lr_changes = self.hook_failures = 0
        self.running = self.run_ended = self.named_stateless = self.told_non_finite = False
        self.refresh_state = RunState(self).refresh
        self._step_fn, self._loss_fn = parts.step_fn, parts.loss_fn
        if next(self.model.parameters(), None) is None:
            raise TrainingError(f"the model ({type(self.model).__name__}) has no parameters: there is nothing to train")
        self.params = trained_parameters(self.model, self.optimizers)
        self.moment = RunMoment(self, Gradients(self.params))
        self.chain = UpdateChain(self.hooks, lambda: self.params, self.model)
        self.hooks.tables.dress_with(Steering(self).dress)
        self.hooks.desk.rank = self.engine.rank
        self.hooks.desk.debug = self.hooks.desk.debug or self.options.debug
        self._callable: Any = torch.compile(self.model) if self.options.compile else self.model
        self.user_metrics = UserMetrics(parts.metrics, self._callable)
        self.compute = self._make_step()  # batch -> what step_fn, loss_fn or the model returns
        self.background = BackgroundSaves(self)
        self.loop = Loop(self)

    # ---- running ---------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train with the loaders the trainer was made with; returns the final state."""
        return self.fit()

    def fit(
        self,
        train_loaders: Loaders = None,
        val_loaders: Loaders = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        resume: str | Path | None = None,
        fork: bool = False,
    ) -> dict[str, Any]:
        """Train; what is given here replaces what the trainer was made with. Returns the final state.

        Loaders are one, a list or a dict of them; `loader_schedule` says how several to train on take turns.
        `resume` is a run's directory or a checkpoint's: the run goes on in its own directory, or, with `fork=True`, as
        a new run that names the old one in its lineage.
        """
        self.options.make({"max_epochs": max_epochs, "max_steps": max_steps})  # refuses what the constructor refuses
        if train_loaders is not None:
            self.train_loaders = to_train_on(train_loaders, self.options)
        if val_loaders is not None:
            self.val_loaders = named_loaders(val_loaders, "val")
        if max_epochs is not None:
            self.options.max_epochs = max_epochs
        if max_steps is not None:
            self.options.max_steps = max_steps
        if resume is None and self.loop.all_done():
            done = f"{self.moment.epoch + self.moment.epoch_over} epochs, {self.moment.steps_done} steps"
            logger.warning("nothing is left to train (%s are done); raise max_epochs or max_steps to go on", done)
            return self.refresh_state()
        for _ in self.stepper(resume, fork):
            pass
        return self.refresh_state()

    def stepper(self, resume: str | Path | None = None, fork: bool = False) -> Iterator[torch.Tensor]:
        """The run as an iterator: each `next` is one micro-batch of the very loop that `train` runs, and its loss."""
        if self.running:
            raise TrainingError("this trainer is running already; a hook cannot start another run of it")
        if not self.train_loaders:
            raise TrainingError(
                "there is nothing to train on: give a dataloader to the trainer, or train_loaders to fit()"
            )
        if count := self.options.overfit_batches:
            self.train_loaders = to_train_on(held(self.train_loaders, count, self.options.seed), self.options)
        return steps_of_run(self, running(self, resume, fork))

    def training_step(self, batch: Any) -> torch.Tensor:
        """One micro-batch, with the optimizer step if its window is complete; returns the detached loss."""
        if self.running:
            raise TrainingError("training_step() cannot be called inside an event or while the trainer runs")
        if self.run_ended:  # that run's record is closed; what comes now belongs to none
            self.record, self.run_ended = MemoryRecord(), False
            self.loop = Loop(self)
        self.running = True  # its own events must not call it either
        try:
            return self.loop.by_hand(batch)
        finally:
            self.running = False

    def validate(self, loaders: Loaders = None) -> dict[str, float]:
        """Validate now, with the validation events; returns the metrics."""
        chosen = named_loaders(loaders, "val") or self.val_loaders
        if not chosen:
            raise TrainingError("there is nothing to validate on: give val_loaders")
        return validate(self, chosen, self.options.validation_limit)

    def predict(self, loaders: Loaders) -> list[Any]:
        """The model's outputs for every batch, in eval mode; of a tuple batch the first item goes in."""
        outputs = []
        with set_aside(self, "inference"), rng_untouched(), evaluation(self.model), self.engine.autocast():
            for loader in named_loaders(loaders, "predict").values():
                for batch in loader:
                    placed = self.engine.place(batch)
                    first = placed[0] if isinstance(placed, (tuple, list)) else placed
                    outputs.append(self.model(**first) if isinstance(first, Mapping) else self.model(first))
        return outputs

    @contextmanager
    def inference(self) -> Iterator[torch.nn.Module]:
        """Run the model from a hook: eval mode, no grad, random streams and forward hooks set aside.

        >>> with trainer.inference() as model:
        ...     model(batch)
        """
        apart = set_aside(self, "inference")
        with apart, rng_untouched(), evaluation(self.model), self.hooks.silenced(), self.engine.autocast():
            yield self.model

    def random_state(self) -> dict[str, Any]:
        """Every random stream that training draws from, as it is now."""
        return rng_state()

    def rerunning(self, random_state: dict[str, Any]) -> AbstractContextManager[Forward]:
        """Run a batch again as training ran it, from these random streams; the run goes on as if nothing had been.

        >>> with trainer.rerunning(state) as forward:
        ...     loss = forward(batch)
        """
        return rerunning(self, random_state)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def find_parameters(self) -> None:
        """Look again which parameters the optimizers own; links choose among them anew."""
        before = set(self.params)
        found = trained_parameters(self.model, self.optimizers)
        self.params.clear()
        self.params.update(found)
        self.chain.choose_again()
        self.note("parameters_changed", added=sorted(set(found) - before), gone=sorted(before - set(found)))

    def _make_step(self) -> Callable[[Any], Any]:
        """The forward pass of one batch, in the run's precision."""
        plain = make_step(self._callable, self._step_fn, self._loss_fn)
        if self.options.precision == "fp32":
            return plain

        def in_precision(batch: Any) -> Any:
            with self.engine.autocast():
                return plain(batch)

        return in_precision

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function; assigning another one in mid-run takes effect at the next batch and is recorded."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, function: Callable[..., Any] | None) -> None:
        old, self._loss_fn = self._loss_fn, function
        self.compute, self.loop.bare_loss = self._make_step(), False
        self.note("loss_fn_changed", by=self.hooks.who_is_calling(), old=_name_of(old), new=_name_of(function))

    @property
    def step_fn(self) -> StepFunction | None:
        """The user's forward pass; assigning another one in mid-run takes effect at the next batch and is recorded."""
        return self._step_fn

    @step_fn.setter
    def step_fn(self, function: StepFunction | None) -> None:
        old, self._step_fn = self._step_fn, function
        self.compute, self.loop.bare_loss = self._make_step(), False
        self.note("step_fn_changed", by=self.hooks.who_is_calling(), old=_name_of(old), new=_name_of(function))

    def weigh(self, batch: Any) -> int:
        """A micro-batch's weight in its window."""
        return self.count_tokens(batch) if self.options.loss_weight == "tokens" else count_samples(batch)

    def step_schedulers(self, stepped: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Move the schedulers of the optimizers that stepped (all by default); those that wait for a metric wait."""
        for scheduler in self.schedulers:
            if not _wants_metric(scheduler) and (stepped is None or _optimizer_of(scheduler) in (None, *stepped)):
                scheduler.step()

    def step_plateau(self, metrics: Mapping[str, float]) -> None:
        """Tell the schedulers that wait for the validation loss."""
        for scheduler in self.schedulers:
            if _wants_metric(scheduler):
                scheduler.step(metrics["val/loss"])

    # ---- what hooks use --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.moment.step

    @property
    def epoch(self) -> int:
        return self.moment.epoch

    @property
    def wants_attention(self) -> bool:
        """Whether something was asked for that happens at the next step boundary; assigning True asks."""
        return self.loop.next_boundary == 0

    @wants_attention.setter
    def wants_attention(self, wanted: bool) -> None:
        if wanted:
            self.loop.next_boundary = 0

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written while training goes on (`async_save`), if there is one."""
        return self.background.name

    @property
    def requested_checkpoints(self) -> set[str]:
        """Names of checkpoints that were requested by `save`, which no retention policy may delete."""
        return self.saved_by_hand

    @property
    def is_trial_run(self) -> bool:
        """Whether the run only checks that everything works (`fast_dev_run`)."""
        return bool(self.options.fast_dev_run)

    @property
    def validations_in_progress(self) -> int:
        """How many validations are in progress: 2 inside a validation that a hook starts during another one."""
        return len(self.moment.validating)

    @property
    def has_validation(self) -> bool:
        """Whether there is data to validate on."""
        return bool(self.val_loaders)

    @property
    def validates_on_schedule(self) -> bool:
        """Whether the run validates by itself, rather than only when a hook calls `validate`."""
        return bool(self.val_loaders) and self.options.validation_period is not None

    @property
    def uses_grad_scaler(self) -> bool:
        """Whether a GradScaler decides if the optimizer steps."""
        return self.engine.scaler is not None

    @property
    def gradients_overflowed(self) -> bool:
        """Whether the GradScaler found non-finite gradients in the current step, which is therefore skipped."""
        return self.moment.skip_asked_at == self.moment.step and self.moment.skip_reason == OVERFLOWED

    @property
    def loader_names(self) -> list[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""
        return self.loop.loader_names()

    def window(self) -> list[MicroBatch]:
        """Return the micro-batches of the current step; empty if a step is one micro-batch."""
        return self.moment.window

    def step_metrics(self) -> dict[str, Any]:
        """Return the step's means of what `step_fn` returned beside the loss."""
        return self.moment.step_means()

    def step_loss(self) -> float:
        """Return the loss of the last step as it is recorded, the mean over its window; waits for the device."""
        return self.moment.window_loss

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means of the current epoch so far, by recorded name; waits for the device."""
        return self.loop.epoch_metrics()

    def latest_metrics(self, since: int | None = None) -> dict[str, float]:
        """Return the newest value of each training metric, of steps after `since` or else of this epoch."""
        return self.loop.newest_metrics(since)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def run_id(self) -> str | None:
        return self.record.run_id if self.running or self.record.path is not None else None

    @property
    def checkpoint_dir(self) -> Path | None:
        return self.record.checkpoint_dir

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None when the record is kept in memory."""
        return self.record.path

    @property
    def total_steps(self) -> int | None:
        """How many optimizer steps the run will make, if that can be known."""
        length, epochs = epoch_length(self.train_loaders), self.options.epochs
        by_epochs = None if length is None or epochs is None else -(-length // self.options.accumulate) * epochs
        known = [steps for steps in (self.options.max_steps, by_epochs) if steps is not None]
        return min(known) if known else None

    @property
    def loader_batches(self) -> dict[str, int]:
        """Micro-batches of each training loader so far."""
        return dict(self.moment.by_loader)

    @property
    def hook_manager(self) -> HookRegistry:
        return self.hooks

    @property
    def lr(self) -> float:
        """Learning rate of the first group; assigning scales every group of every optimizer alike."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.note("lr_changed", by=self.hooks.who_is_calling(), old=self.lr, new=value)
        self.lr_changes += 1
        ratio = value / self.lr if self.lr else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = value if ratio is None else group["lr"] * ratio

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Record a number or a one-element tensor, at this step unless told another; never waits for the device."""
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise HooklineError(f"log({name!r}): expected one number, got a tensor of shape {tuple(value.shape)}")
        self.record.log(self.moment.step if step is None else step, self.moment.epoch, name, value)

    def log_layers(
        self, series: str, names: Sequence[str], columns: Sequence[str], values: torch.Tensor, step: int | None = None
    ) -> None:
        """Record numbers per layer, [names, columns] or [names, columns, bins]; never waits for the device."""
        self.record.layers(series, self.moment.step if step is None else step, names, columns, values)

    def note(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write a decision into the record, if a run is on; at this step unless told another."""
        if self.running:
            self.record.event(kind, self.moment.step if step is None else step, **fields)

    def request_stop(self, reason: str, by: str | None = None) -> None:
        """End the run in order once this step is complete; the first reason is kept."""
        by = by or self.hooks.who_is_calling()
        self.note("stop_requested", reason=reason, by=by)
        if self.stop_reason is None:
            self.stop_reason, self.stopped_by = reason, by
            self.wants_attention = True

    def skip_step(self, reason: str) -> None:
        """Leave this window's optimizer step out (for guards in the update chain)."""
        self.moment.skip_reason, self.moment.skip_asked_at = reason, self.moment.step

    def save(self, name: SaveName = None) -> None:
        """Write a checkpoint at the next step boundary; when the run is closing, at once.

        It goes by its step unless it gets a name; a function is asked for the name when it is written. What is asked
        for twice is written once.
        """
        self.save_asked.append(name)
        self.wants_attention = True
        if self.status != "training" and self.running:
            self.save_if_asked()

    def save_if_asked(self) -> None:
        """Write the checkpoints that somebody asked for; fast_dev_run writes nothing."""
        asked, self.save_asked = self.save_asked, []
        if asked and not self.options.fast_dev_run:
            self.background.finish()  # before names are asked for: whoever gives one knows what is on disk by then
            unnamed = checkpointing.name_of_step(self)
            for name in dict.fromkeys((one() if callable(one) else one) or unnamed for one in asked):
                checkpointing.save_as_told(self, name)
            self.saved_by_hand.update(one or unnamed for one in asked if not callable(one))

    def save_checkpoint(self, name: str | None = None) -> Path:
        """Write a checkpoint now, between two steps or after a failure, and tell the hooks once it is durable."""
        path = checkpointing.draft_checkpoint(self, name).write()
        checkpointing.tell_saved(self, path, self.moment)
        return path

    def load_checkpoint(self, path: str | Path) -> Path:
        """Put the trainer back to a checkpoint and tell the hooks."""
        self.background.make_way()  # it may be the one that is meant
        found = checkpointing.load_checkpoint(self, path)
        self.moment.checkpoint_path, self.moment.resumed = str(found), True
        self.note("checkpoint_loaded", path=str(found))
        if self.running:
            self.record.resumed(self.moment.step, self.moment.epoch)
        if heard := self.hooks.fire.on_checkpoint_load:
            heard(self.moment)
        return found

    def saw_non_finite_loss(self, value: float) -> None:
        """A loss that somebody read was NaN or infinite: never hidden."""
        if self.moment.phase == "train" and not self.told_non_finite:  # an epoch's first; all are counted at its end
            self.told_non_finite = True
            self.note("non_finite_loss", batch_idx=self.moment.batch_idx, value=value)

    def note_non_finite(self, count: int) -> None:
        """So many losses of an epoch were NaN or infinite."""
        self.told_non_finite = False
        if count:
            self.non_finite_losses += count
            self.record.event("non_finite_losses", self.moment.step, epoch=self.moment.epoch, count=count)

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def add_hook(self, hook: Any, name: str | None = None, **options: Any) -> Handle:
        """Attach a hook: an object, a class, a registered name or a dotted path; as `HookRegistry.register`."""
        return self.hooks.register(hook, name, **options)

    def on(self, event: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: make a plain function a hook of one event."""
        return self.hooks.on(event, **options)

    def remove_hook(self, name: str) -> Any:
        """Detach a hook and return it."""
        return self.hooks.remove(name)

    def enable_hook(self, name: str) -> None:
        """Switch a hook on again."""
        self.hooks.enable(name)

    def disable_hook(self, name: str) -> None:
        """Switch a hook off without removing it."""
        self.hooks.disable(name)

    def add_console_logging(self, log_every_n_batches: int = 10, **parameters: Any) -> Handle:
        """Print progress (the hook 'console_log'); reconfigures it if it is there already."""
        return self._built_in("console_log", log_every_n_batches=log_every_n_batches, **parameters)

    def add_json_logging(self, log_every_n_batches: int = 100, **parameters: Any) -> Handle:
        """Write progress as JSON lines (the hook 'json_log'); reconfigures it if it is there already."""
        return self._built_in("json_log", log_every_n_batches=log_every_n_batches, **parameters)

    def add_checkpointing(self, save_every_n_epochs: int | None = 1, **parameters: Any) -> Handle:
        """Save checkpoints (the hook 'checkpoint'); reconfigures it if it is there already."""
        return self._built_in("checkpoint", save_every_n_epochs=save_every_n_epochs, **parameters)

    def _built_in(self, name: str, **parameters: Any) -> Handle:
        if name in self.hooks:
            self.hooks.remove(name)
        return self.hooks.register(name, **parameters)


BaseTrainer = Trainer


def _name_of(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _optimizer_of(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None)


def _wants_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
