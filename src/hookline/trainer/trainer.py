"""`Trainer`: what users train with, and the first host of `Run`. `hookline.build` puts it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hookline._console import logger, print_line
from hookline.core.registry import Handle
from hookline.core.schedule import Quantity
from hookline.errors import CheckpointError, TrainingError
from hookline.ranks import find_ranks
from hookline.record.record import Record
from hookline.run.agreement import Agreement, SaveName
from hookline.run.engine import Engine
from hookline.run.parameters import unowned_parameters
from hookline.run.rng import preserve_rng, restore_rng
from hookline.run.run import Run
from hookline.run.window import Window
from hookline.trainer.agreement import RankAgreement
from hookline.trainer.checkpointing import Checkpointer
from hookline.trainer.data.loaders import (
    Loaders,
    epoch_length,
    first_batches,
    make_train_loaders,
    named_loaders,
)
from hookline.trainer.epochs import Epochs
from hookline.trainer.forward import ForwardPass
from hookline.trainer.loop import train, train_batch
from hookline.trainer.metrics import check_metrics
from hookline.trainer.options import TrainerOptions
from hookline.trainer.relaunch import continued_run, describe_launch
from hookline.trainer.signals import SignalHandler
from hookline.trainer.step_fn import StepFunction, count_tokens, loss_and_metrics, make_step
from hookline.trainer.training import add_console, opening_line, prepare_training, training, unfinished_runs
from hookline.trainer.validation import validate
from hookline.trainer.window import AccumulationWindow

if TYPE_CHECKING:
    from hookline._keywords import CheckpointKeywords, ConsoleLogKeywords, HookKeywords, JSONLogKeywords
    from hookline.run.manager import HookManager


@dataclass
class Components:
    """What a trainer is made of, checked by `hookline.build`; None: a component is absent or has a default."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    hooks: HookManager
    engine: Engine
    options: TrainerOptions
    schedulers: list[Any] = field(default_factory=list)
    train_loaders: Loaders = None
    val_loaders: Loaders = None
    step_fn: StepFunction | None = None
    loss_fn: Callable[..., Any] | None = None
    optimizer_step: Callable[[torch.optim.Optimizer], Any] | None = None
    metrics: Mapping[str, Any] | None = None
    count_tokens: Callable[[Any], int] | None = None
    config: Any = None
    """What hooks see as `trainer.config`."""
    resolved: Mapping[str, Any] | None = None
    """The run's configuration for the record; without one the trainer describes its components."""


class Trainer(Run):
    """Runs the training loop and holds the hooks. Hooks get it as `trainer`, and may set attributes on it.

    The state of a run is in three objects: `progress` (saved counters), `run_status` (how the run ends, and trouble)
    and `event_args` (the values that hooks name). Its most used values are properties of the trainer.
    """

    can_save = can_validate = can_rerun = True

    def __init__(self, parts: Components) -> None:
        self.options = parts.options
        ranks = find_ranks()
        logger.rank = ranks.rank
        if parts.optimizer_step is not None and parts.engine.scaler is not None:
            raise TrainingError(
                "optimizer_step cannot be combined with precision='fp16': with loss scaling, the trainer calls "
                "optimizer.step() itself"
            )
        self.train_loaders = make_train_loaders(parts.train_loaders, self.options)
        self.val_loaders = named_loaders(parts.val_loaders, "val")
        super().__init__(
            parts.model, parts.optimizers, parts.hooks, engine=parts.engine, ranks=ranks, config=parts.config,
            seed=self.options.seed,
        )  # fmt: skip
        self.schedulers, self.optimizer_step = parts.schedulers, parts.optimizer_step
        self.count_tokens = parts.count_tokens or count_tokens  # type: ignore[method-assign]
        self.launch: dict[str, Any] | None = None  # that the run belongs to, if a launcher starts failed runs again
        self.best_accuracy = -math.inf
        self._components = parts
        self._step_fn, self._loss_fn = parts.step_fn, parts.loss_fn
        self.progress.set_loaders(list(self.train_loaders))
        self.hooks.failures.debug = self.hooks.failures.debug or self.options.debug
        metrics = check_metrics(parts.metrics, self.train_loaders)
        self.validation_metrics = {
            name: entry.metric for name, entry in metrics.items() if "validation" in entry.phases
        }
        in_training = {name: entry.metric for name, entry in metrics.items() if "train" in entry.phases}
        self.forward = ForwardPass(self, in_training)
        self.optional_metrics = self.forward.metrics.optional
        self.checkpointer = Checkpointer(self)
        self.epochs = Epochs(self)
        self.signals = SignalHandler(self.stop_on_signal)  # replaced by that of the run in progress
        self.until_last_step = ExitStack()  # what ends before the closing events of the run in progress
        self.resume_from: Path | None = None
        self.reset_steps()

    # ---- running ---------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train with the loaders that the trainer was made with, and return the final state."""
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
        """Train; arguments replace what the trainer was made with, unless the run fails before its first step.

        Args:
            train_loaders: A loader, a list or a dict of them; `loader_schedule` says how several are mixed.
            val_loaders: The same for validation.
            max_epochs: The most epochs.
            max_steps: The most optimizer steps.
            resume: The directory of a run or of a checkpoint. The run continues in its directory.
            fork: Whether to resume as a new run, which names the old one in its lineage.

        Returns:
            The final state, as hooks get it as `state`.
        """
        self._check_not_running()  # before anything of the run in progress is changed
        self.options.make({"max_epochs": max_epochs, "max_steps": max_steps})  # rejects what the constructor rejects
        with self._restore_if_refused():
            if train_loaders is not None:
                self._set_train_loaders(train_loaders)
            if val_loaders is not None:
                self.val_loaders = named_loaders(val_loaders, "val")
            if max_epochs is not None:
                self.options.max_epochs = max_epochs
            if max_steps is not None:
                self.options.max_steps = max_steps
            if resume is None and self.progress.step > 0 and self._nothing_is_left():
                done = f"{self.progress.epochs_done} epochs, {self.progress.steps_done} steps"
                words = "nothing is left to train (%s are done); raise max_epochs or max_steps to continue"
                logger.warning(words, done)
            else:
                for _ in self.stepper(resume, fork):
                    pass
            return self.refresh_state()

    def _nothing_is_left(self) -> bool:
        epochs, steps = self.options.epochs, self.options.max_steps
        by_epochs = epochs is not None and self.progress.epochs_done >= epochs
        return by_epochs or (steps is not None and self.progress.steps_done >= steps)

    @contextmanager
    def _restore_if_refused(self) -> Iterator[None]:
        """Restore the loaders and the length of runs if the block fails before a step: they were meant for that run."""
        step, options, train_loaders, val_loaders = self.step, self.options, self.train_loaders, self.val_loaders
        length = options.max_epochs, options.max_steps
        try:
            yield
        except BaseException:
            if self.step == step:
                self.train_loaders, self.val_loaders = train_loaders, val_loaders
                self.progress.set_loaders(list(train_loaders))
                options.max_epochs, options.max_steps = length
            raise

    def stepper(self, resume: str | Path | None = None, fork: bool = False) -> Iterator[torch.Tensor]:
        """Return the run as an iterator: each `next` runs one micro-batch of the loop of `train`, and is its loss."""
        self._check_not_running()
        if not self.train_loaders:
            raise TrainingError(
                "there is nothing to train on: give a dataloader to the trainer, or train_loaders to fit()"
            )
        if count := self.options.overfit_batches:
            self._set_train_loaders(first_batches(self.train_loaders, count, self.options.seed))
        self.launch = describe_launch()
        if (run := continued_run(self, resume)) is not None:
            resume, fork = run, False
        steps = train(self, training(self, None if resume is None else Path(resume), fork))
        unfinished_runs().add(steps)
        return steps

    def _check_not_running(self) -> None:
        if self.running:
            raise TrainingError("this trainer is running already; a hook cannot start another run of it")

    def _set_train_loaders(self, loaders: Loaders) -> None:
        self.train_loaders = make_train_loaders(loaders, self.options)
        self.progress.set_loaders(list(self.train_loaders))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Run one micro-batch, with the optimizer step if its window is complete, and return its detached loss."""
        if self.running:
            raise TrainingError("training_step() cannot be called inside an event or while the trainer runs")
        if self.run_status.run_ended:  # that run's record is closed; this step belongs to no run
            before, self.record = self.record, Record.in_memory()
            self.record.share_sinks(before)
            self.reset_steps()
        self.epochs.reader = None
        if not self.run_status.by_hand:  # the model may have changed since the trainer was made
            self.unowned_params = unowned_parameters(self.model, self.params)
        self.hooks.attach()  # and not off again: at every step that would cost more than the hooks themselves
        with self.run_status.manual_step():
            loss = train_batch(self, batch)
            self.at_boundary()
            return loss

    def validate(self, loaders: Loaders = None) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""
        chosen = named_loaders(loaders, "val") or self.val_loaders
        if not chosen:
            raise TrainingError("there is nothing to validate on: give val_loaders")
        with self.hooks.attached(), self.hooks.collectives.allow("validate()"):
            if self.running:
                self.agreement.share_stats()
            return validate(self, chosen, self.options.validation_limit)

    def predict(self, loaders: Loaders) -> list[Any]:
        """Return the model's outputs for every batch, in eval mode; of a tuple batch the first item is the input."""
        outputs, model = [], self.engine.eval_model(self.model)
        with self.other_batches("inference"), self.hooks.attached(), self.engine.autocast():
            for loader in named_loaders(loaders, "predict").values():
                for batch in loader:
                    placed = self.engine.place(batch)
                    first = placed[0] if isinstance(placed, (tuple, list)) else placed
                    outputs.append(model(**first) if isinstance(first, Mapping) else model(first))
        return outputs

    @contextmanager
    def rerunning(self, random_state: dict[str, Any]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """Run a batch again as training ran it, with the same weights and random streams, and leave no trace.

        Modules stay in their modes and the model runs eagerly, so that foreign hooks on any module fire; the run's own
        hooks do not. Buffers that the forward pass updates (running means) are restored afterwards.

        >>> with trainer.rerunning(state) as forward:
        ...     loss = forward(batch)  # with its graph

        Args:
            random_state: The random streams that every call starts from, as `random_state` returned them.
        """
        model = self.model
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module  # the wrapper would wait for ranks that do not run this batch
        compute = make_step(model, self.step_fn, self.loss_fn)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

        def forward(batch: Any) -> torch.Tensor:
            restore_rng(random_state)
            with torch.enable_grad(), self.engine.autocast():
                return loss_and_metrics(compute(self.engine.place(batch)))[0]

        with self.event_args.preserve_train_batch("train"), preserve_rng(), self.hooks.silenced():
            try:
                yield forward
            finally:
                self.reruns += 1
                self.engine.free_whole_weights(model)
                with torch.no_grad():
                    for buffer, copy in buffers:
                        buffer.copy_(copy)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def make_agreement(self) -> Agreement:
        """Return what decides for all ranks of the run."""
        return RankAgreement(self) if self.ranks.act_together else super().make_agreement()

    def make_window(self) -> Window:
        """Return the window in which this run accumulates the gradients of a step."""
        options = self.options
        is_plain = options.accumulate == 1 and options.loss_weight == "batches" and self.engine.scaler is None
        return super().make_window() if is_plain else AccumulationWindow(self)

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """Run the forward pass of a micro-batch, in which forward hooks are called, and return the loss."""
        return self.forward.compute_loss(batch)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function; assigning another one takes effect at the next batch and is recorded."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, function: Callable[..., Any] | None) -> None:
        old, self._loss_fn = self._loss_fn, function
        self._step_changed("loss_fn", old, function)

    @property
    def step_fn(self) -> StepFunction | None:
        """The user's forward pass; assigning another one takes effect at the next batch and is recorded."""
        return self._step_fn

    @step_fn.setter
    def step_fn(self, function: StepFunction | None) -> None:
        old, self._step_fn = self._step_fn, function
        self._step_changed("step_fn", old, function)

    def _step_changed(self, name: str, old: Any, new: Any) -> None:
        self.forward.make_step()
        by = self.hooks.calling_hook()
        self.note(f"{name}_changed", by=by, old=_name_of(old), new=_name_of(new))
        self.agreement.note_assignment(name, _name_of(new), by)

    def zero_grad(self) -> None:
        """Clear the gradients, also those of parameters that no optimizer owns."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for param in self.unowned_params:
            param.grad = None

    def step_schedulers_after(self, skipped: Sequence[torch.optim.Optimizer]) -> None:
        """Step the schedulers by steps, except those of optimizers that were skipped, and record the rate."""
        if self.options.scheduler_interval == "step":
            self.step_log.add("train/lr", self.event_args.used_lr)
            self.step_schedulers([optimizer for optimizer in self.optimizers if optimizer not in skipped])

    def step_schedulers(self, stepped: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Step the schedulers of the optimizers that stepped (all by default), except those that need a metric."""
        for scheduler in self.schedulers:
            optimizer = getattr(scheduler, "optimizer", None)
            if not _needs_metric(scheduler) and (stepped is None or optimizer in (None, *stepped)):
                scheduler.step()

    def step_plateau_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that need the validation loss."""
        for scheduler in self.schedulers:
            if _needs_metric(scheduler):
                scheduler.step(metrics["val/loss"])

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def has_more_batches(self) -> bool:
        """Return whether a batch of this epoch follows; the next one is read if that is the only way to know."""
        return self.epochs.has_more_batches()

    def stop_reading(self) -> None:
        """Let loaders know that the run reads no more batches."""
        self.is_reading = True
        self.epochs.stop_reading()

    def boundary(self) -> None:
        """Write the record, validate, agree with the other ranks, save."""
        step = self.progress.step
        self.agreement.end_step()
        self.checkpointer.poll()
        self.step_log.flush_if_due()
        if (every := self._validation_steps) and step % every == 0:
            self.step_plateau_schedulers(self.validate())
        self.agreement.after_step(step)
        if not self.epochs.is_at_last_batch:  # else the end of the epoch saves, as the start of the next one
            self.checkpointer.save_requested()

    def next_boundaries(self) -> list[int]:
        """Return steps after which `boundary` must run."""
        step, found = self.progress.step, super().next_boundaries()
        if self.options.max_steps is not None:
            found.append(self.options.max_steps)
        if every := self._validation_steps:
            found.append(step - step % every + every)
        if self.saving:  # poll until the checkpoint is durable
            found.append(step + 1)
        if (exchange := self.agreement.next_exchange(step)) is not None:
            found.append(exchange)
        return found

    @property
    def validation_period(self) -> Quantity | None:
        """How often the run validates by itself; None if it does not."""
        return self.options.validation_period if self.val_loaders else None

    @property
    def _validation_steps(self) -> int:
        """After how many steps the run validates; 0 if it does so by epochs or not at all."""
        period = self.validation_period
        return int(period.amount) if period and period.unit == "steps" else 0

    def is_finished(self) -> bool:
        """Return whether a stop was requested or the last step is done."""
        steps = self.options.max_steps
        return super().is_finished() or (steps is not None and self.progress.step >= steps)

    def position(self) -> dict[str, Any] | None:
        """Return where the loaders are inside an epoch, None between two epochs."""
        return self.epochs.position

    # ---- the beginning and the end of a run --------------------------------------------------------------------------

    def add_default_hooks(self) -> None:
        """Print progress, unless the user has a hook for it."""
        self.at_end(add_console(self))

    def prepare(self) -> dict[str, Any] | None:
        """Clear gradients, load weights, resume, warn, and try a validation, whose metrics are returned."""
        return prepare_training(self, self.resume_from)

    def announce(self) -> None:
        """Print the line before the first step."""
        if self.prints:
            print_line(opening_line(self))

    def finish(self) -> None:
        """Save what has to be saved of a run that has made its last step."""
        self.agreement.settle()
        self.checkpointer.finish()  # so that checkpoint hooks know what is saved
        self.after_last_step()
        self.checkpointer.save_requested()
        self.checkpointer.finish()

    def after_exception(self, error: BaseException) -> None:
        """Finish the checkpoint that is being written."""
        self.checkpointer.finish_after(error)

    def after_train_end(self) -> None:
        """Write what hooks of several ranks have asked to save in on_train_end, once all ranks know of it."""
        if self.status != "error":
            self.agreement.after_train_end()

    def release(self) -> None:
        """Release the memory of background saves."""
        self.checkpointer.close()

    # ---- the run as hooks see it -------------------------------------------------------------------------------------

    def describe(self) -> Mapping[str, Any]:
        """Return the run's configuration as the record stores it."""
        resolved, options = self._components.resolved, asdict(self.options)
        if resolved is not None:
            return {**resolved, "trainer": {**resolved.get("trainer", {}), **options}}
        described = dict(super().describe())
        hooks = described.pop("hooks")
        return {**described, "trainer": options, "hooks": hooks}

    @property
    def prints(self) -> bool:
        """Whether this process prints what the run does."""
        return self.options.console and self.ranks.rank == 0

    @property
    def writes_report(self) -> bool:
        """Whether a run with a directory gets a report.html."""
        return self.options.report

    @property
    def warn_above(self) -> float | None:
        """The share of the run's time above which a hook is reported as costly; None reports none."""
        return self.options.warn_above

    @property
    def is_trial_run(self) -> bool:
        """Whether the run only checks that everything works (`fast_dev_run`)."""
        return bool(self.options.fast_dev_run)

    @property
    def has_validation(self) -> bool:
        """Whether there is data to validate on."""
        return bool(self.val_loaders)

    @property
    def validates_on_schedule(self) -> bool:
        """Whether the run validates by itself, rather than only when a hook calls `validate`."""
        return self.validation_period is not None

    @property
    def has_loader_losses(self) -> bool:
        """Whether the losses of each of several loaders are recorded: not for steps by hand, which have no loader."""
        return len(self.train_loaders) > 1 and self.epochs.reader is not None

    @property
    def loader_names(self) -> list[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""
        return list(self.train_loaders) if len(self.train_loaders) > 1 else []

    @property
    def total_epochs(self) -> int | None:
        """The number of epochs after which the run ends, if it does so by epochs."""
        return self.options.epochs

    @property
    def epoch_batches(self) -> int | None:
        """The number of micro-batches of an epoch, if it can be known."""
        return epoch_length(self.train_loaders)

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps the run will make, if it can be known."""
        length, epochs = self.epoch_batches, self.total_epochs
        by_epochs = None if length is None or epochs is None else -(-length // self.options.accumulate) * epochs
        known = [steps for steps in (self.options.max_steps, by_epochs) if steps is not None]
        return min(known) if known else None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written in the background (`async_save`), if any."""
        return self.checkpointer.saving

    @property
    def pending_save(self) -> str | None:
        """Why the next step boundary writes a checkpoint: "signal", "request", or None if it writes none."""
        return "signal" if self.checkpointer.needs_save else "request" if self.checkpointer.requests else None

    @property
    def requested_checkpoints(self) -> AbstractSet[str]:
        """Names of checkpoints that were requested by `save`, which no retention policy may delete."""
        return self.checkpointer.requested_names

    @property
    def last_saved_step(self) -> int | None:
        """The step of the checkpoint that was written or loaded last in this run."""
        return self.checkpointer.last_step

    def unsaved_parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Return shape, dtype and sum of bits of the frozen parameters that checkpoints leave out; often none."""
        return self.checkpointer.unsaved_parameters()

    def save(self, name: SaveName = None) -> None:
        """Write a checkpoint at the next step boundary; if the run is closing, at once, or with several ranks soon.

        Args:
            name: Its name; by default that of its step. A function is called for the name when the checkpoint is
                written. A name that is requested twice is written once.
        """
        at_once = self.agreement.request_save(name)
        self.request_boundary()
        if at_once and self.status != "training" and self.running:
            self.checkpointer.save_requested()

    def save_at_boundary(self, name: SaveName) -> None:
        """Write a checkpoint at the next boundary."""
        self.checkpointer.request(name)

    def end_on_signal(self, name: str, rank: int = 0) -> None:
        """Save and end the run now, because of a signal that a rank received."""
        if rank != self.ranks.rank and self.prints:
            logger.warning("rank %d has received %s: all ranks end after this step", rank, name)
        super().end_on_signal(name, rank)
        if self.checkpoint_dir is not None:
            self.checkpointer.request_unless_saved()

    def save_checkpoint(self, name: str | None = None) -> Path:
        """Write a checkpoint now, between two steps or after a failure; fires on_checkpoint_save once it is durable."""
        with self.hooks.collectives.allow("save_checkpoint()"):
            return self.checkpointer.save_now(name)

    def load_checkpoint(self, path: str | Path | None) -> Path:
        """Restore the trainer from a checkpoint, or the newest one of a run, and fire on_checkpoint_load.

        Raises:
            CheckpointError: If there is none, or it does not fit; also for None, the `run_dir` of a run without one.
            TrainingError: Inside a run: its data and its record would not go back with the weights.
        """
        if self.running:
            raise TrainingError(
                "load_checkpoint() cannot be called inside an event or while the trainer runs: call it between two "
                "runs, or stop (trainer.request_stop) and continue with fit(resume=…)"
            )
        if path is None:
            raise CheckpointError("the path is None: a run with record=False, or that has not begun, has no directory")
        return self.checkpointer.load(path)

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def add_hook(self, hook: Any, name: str | None = None, **options: Any) -> Handle:
        """Register a hook: an object, a class, a registered name or a dotted path; as `Registry.register`."""
        return self.hooks.register(hook, name, **options)

    def on(
        self, event: str, *, name: str | None = None, **options: Unpack[HookKeywords]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function to make it a hook of one event."""
        return self.hooks.on(event, name=name, **options)

    def get_hook(self, name: str) -> Any:
        """Return a hook by its name."""
        return self.hooks.get(name)

    def remove_hook(self, name: str) -> Any:
        """Remove a hook and return it."""
        return self.hooks.remove(name)

    def enable_hook(self, name: str) -> None:
        """Enable a hook."""
        self.hooks.enable(name)

    def disable_hook(self, name: str) -> None:
        """Disable a hook without removing it."""
        self.hooks.disable(name)

    def add_console_logging(self, log_every_n_batches: int = 10, **parameters: Unpack[ConsoleLogKeywords]) -> Handle:
        """Print progress (the hook 'console_log'); replaces the hook if there is one."""
        return self._add_built_in("console_log", parameters, log_every_n_batches=(log_every_n_batches, 10))

    def add_json_logging(self, log_every_n_batches: int = 100, **parameters: Unpack[JSONLogKeywords]) -> Handle:
        """Write progress as JSON lines (the hook 'json_log'); replaces the hook if there is one."""
        return self._add_built_in("json_log", parameters, log_every_n_batches=(log_every_n_batches, 100))

    def add_checkpointing(
        self, save_every_n_epochs: int | None = 1, **parameters: Unpack[CheckpointKeywords]
    ) -> Handle:
        """Save checkpoints (the hook 'checkpoint'); replaces the hook if there is one."""
        return self._add_built_in("checkpoint", parameters, save_every_n_epochs=(save_every_n_epochs, 1))

    def _add_built_in(self, name: str, parameters: Mapping[str, Any], **aliases: tuple[Any, Any]) -> Handle:
        """Register a built-in hook; `aliases` of `every` are passed on if they differ from the hook's default."""
        given = {alias: value for alias, (value, default) in aliases.items() if value != default}
        if name in self.hooks:
            self.hooks.remove(name)
        return self.hooks.register(name, **given, **parameters)


BaseTrainer = Trainer


def _name_of(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _needs_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
