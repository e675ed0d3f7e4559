"""`Trainer`: what users train with, and the first host of `Run`. `hookline.build` puts it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Unpack

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline._console import logger, print_line
from hookline._fs import relative_to_here
from hookline._text import counted
from hookline._words import meant, nearest
from hookline.checkpoints.find import Found
from hookline.core.handle import Handle
from hookline.core.plugins import load_reference
from hookline.core.provided import PROVIDED
from hookline.errors import TrainingError
from hookline.ranks import find_ranks
from hookline.record.record import Record
from hookline.run.agreement import Agreement
from hookline.run.engine import Engine
from hookline.run.parameters import unowned_parameters
from hookline.run.step_log import LR
from hookline.run.window import Window
from hookline.trainer.agreement import RankAgreement
from hookline.trainer.checkpointing import CheckpointedRun
from hookline.trainer.counting import count_tokens
from hookline.trainer.data.loaders import Loaders, TrainLoaders, first_batches, named_loaders
from hookline.trainer.loop import train, train_batch
from hookline.trainer.metrics import check_metrics
from hookline.trainer.options import TrainerOptions
from hookline.trainer.schedules import settings_of
from hookline.trainer.step_fn import ForwardPass, StepFunction, loss_and_metrics
from hookline.trainer.training import opening_line, prepare_training, training, unfinished_runs
from hookline.trainer.validation import validate
from hookline.trainer.window import AccumulationWindow

if TYPE_CHECKING:
    from hookline._keywords import CheckpointKeywords, ConsoleLogKeywords, HookKeywords, JSONLogKeywords
    from hookline.run.manager import HookManager


@dataclass
class Components:
    """The components of a trainer, checked by `hookline.build`; None means that one is absent or has a default."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    hooks: HookManager
    engine: Engine
    options: TrainerOptions
    schedulers: list[Any] = field(default_factory=list)
    train_loaders: Loaders = None
    """One loader of training batches, or several by name."""
    val_loaders: Loaders = None
    """One loader of validation batches, or several by name."""
    step_fn: StepFunction | None = None
    """``(model, batch) -> loss``, instead of `loss_fn` and of the loss that the model returns."""
    loss_fn: Callable[..., Any] | None = None
    """``(output, target) -> loss``; without it the model's output has the loss."""
    optimizer_step: Callable[[torch.optim.Optimizer], Any] | None = None
    """Steps an optimizer, instead of its `step()`."""
    metrics: Mapping[str, Any] | None = None
    """Metrics of validations, and of training if they are means over samples."""
    count_tokens: Callable[[Any], int] | None = None
    """Returns the number of tokens in a batch, without padding."""
    config: Any = None
    """The object that hooks see as `trainer.config`."""
    resolved: Mapping[str, Any] | None = None
    """The run's configuration for the record; without one the trainer describes its components."""


class Trainer(CheckpointedRun):
    """Runs the training loop and holds the hooks. Hooks get it as `trainer`, and may set attributes on it.

    The state of a run is in three objects: `progress` (saved counters), `run_status` (how the run ends, and trouble)
    and `event_args` (the values that hooks name). Its most frequently used values are also properties of the trainer.
    """

    can_validate = knows_validation_batches = can_rerun = True

    def __init__(self, parts: Components) -> None:
        self.options = options = parts.options
        self.warn_above, self.writes_report = options.warn_above, options.report
        self.stops_without_checkpoint = options.on_save_error == "stop"
        ranks = find_ranks()
        logger.rank = ranks.rank
        if parts.optimizer_step is not None and parts.engine.scaler is not None:
            raise TrainingError(
                "optimizer_step cannot be combined with precision='fp16': with loss scaling, the trainer calls "
                "optimizer.step() itself"
            )
        self.train_loaders = TrainLoaders(parts.train_loaders, self.options)
        self.val_loaders = named_loaders(parts.val_loaders, "val")
        super().__init__(
            parts.model, parts.optimizers, parts.hooks, engine=parts.engine, ranks=ranks, config=parts.config,
            seed=self.options.seed,
        )  # fmt: skip
        self.schedulers, self.optimizer_step = parts.schedulers, parts.optimizer_step
        self.optimizer_settings = settings_of(self.optimizers)
        self.count_tokens = parts.count_tokens or count_tokens  # type: ignore[method-assign]
        self.best_accuracy = -math.inf
        self._components = parts
        self._step_fn, self._loss_fn = parts.step_fn, parts.loss_fn
        self.progress.set_loaders(list(self.train_loaders))
        self.hooks.failures.debug = self.hooks.failures.debug or self.options.debug
        metrics = check_metrics(parts.metrics, self.train_loaders)
        self.validation_metrics = metrics["validation"]
        self.forward = ForwardPass(self, metrics["train"])
        self.optional_metrics = self.forward.metrics.optional
        self.resume_from: Path | Found | None = None
        self.loaded_from: Path | None = None
        """The run whose weights `load` has loaded."""
        self.reset_steps()

    @classmethod
    def load(
        cls,
        run: str | Path,
        overrides: Iterable[str] = (),
        *,
        checkpoint: str | int | Path | None = None,
        allow: Iterable[str] = (),
        device: Any = None,
    ) -> Trainer:
        """Make a trainer from the config of a run, with the weights of a checkpoint, to validate and predict.

        Only the run's hooks that change activations are created. If the run has averaged its weights (`ema`), the
        trainer uses the average, which the run's validations measured. Nothing is written, and your random streams stay
        unchanged. It does not train, because it has neither the run's other hooks nor the state of its optimizers.

        >>> metrics = Trainer.load("latest").validate()

        Args:
            run: A run or a checkpoint, by its path or name.
            overrides: Changes of single values of the config, each written as ``"a.b=value"``.
            checkpoint: "best", "last", a step, or a checkpoint's name or path; by default the best one, if a hook has
                ranked them, otherwise the last.
            allow: Prefixes under which the config may name dotted paths.
            device: Device to run on (default: cuda if available, otherwise cpu).

        Raises:
            HooklineError: If there is no such run or checkpoint, or the run was created in code.
        """
        trainer: Trainer = load_reference(PROVIDED["load_trainer"])(run, overrides, checkpoint, allow, device)[0]
        return trainer

    # ---- running ---------------------------------------------------------------------------------------------------

    def train(self, **unknown: Never) -> dict[str, Any]:
        """Train with the trainer's own loaders, and return the final state."""
        _refuse_arguments("train", unknown)
        return self.fit()

    def fit(
        self,
        train_loaders: Loaders = None,
        val_loaders: Loaders = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        resume: str | Path | None = None,
        fork: bool = False,
        **unknown: Never,
    ) -> dict[str, Any]:
        """Train; arguments replace the trainer's own, unless the run fails before its first step.

        Args:
            train_loaders: A loader, or a list or dict of loaders; `loader_schedule` says how several are mixed.
            val_loaders: The same for validation.
            max_epochs: The maximum number of epochs.
            max_steps: The maximum number of optimizer steps.
            resume: A run or a checkpoint, by its path or name. The run continues in its directory. With "auto" the
                newest unfinished run of this config continues, or a new one begins.
            fork: Whether to resume as a new run, which names the old one in its lineage.

        Returns:
            The final state, as hooks get it as `state`.
        """
        _refuse_arguments("fit", unknown)
        self._check_can_begin()  # before anything in the run in progress is changed
        self.options.make({"max_epochs": max_epochs, "max_steps": max_steps})  # rejects what the constructor rejects
        options, step, loaders = self.options, self.step, (self.train_loaders, self.val_loaders)
        length = options.max_epochs, options.max_steps
        try:
            if train_loaders is not None:
                self._set_train_loaders(train_loaders)
            if val_loaders is not None:
                self.val_loaders = named_loaders(val_loaders, "val")
            if max_epochs is not None:
                options.max_epochs = max_epochs
            if max_steps is not None:
                options.max_steps = max_steps
            if resume is None and step > 0 and not self.has_steps_left():
                done = f"{counted(self.progress.epochs_done, 'epoch')}, {counted(self.progress.steps_done, 'step')}"
                words = "nothing is left to train (%s are done); to continue, raise max_epochs or max_steps"
                logger.warning(words, done)
            else:
                for _ in self.stepper(resume, fork):
                    pass
            return self.refresh_state()
        except BaseException:
            if self.step == step:  # the run failed before a step, and the arguments were meant for it
                self.train_loaders, self.val_loaders = loaders
                self.progress.set_loaders(list(self.train_loaders))
                options.max_epochs, options.max_steps = length
            raise

    def _check_can_begin(self) -> None:
        """Raise TrainingError also for a trainer that `load` has made."""
        super()._check_can_begin()
        if self.loaded_from is not None:
            run = str(relative_to_here(self.loaded_from))
            why = "Trainer.load makes a trainer to validate and predict, without the run's hooks and optimizer states"
            remedy = (
                f"to continue the run, use `hookline resume {run}`, or fit(resume={run!r}) of a trainer built as it was"
            )
            raise TrainingError(f"{why}; {remedy}; to train a new run from its weights, pass init_from={run!r}")

    def stepper(self, resume: str | Path | None = None, fork: bool = False) -> Iterator[torch.Tensor]:
        """Return the run as an iterator: each `next` runs one micro-batch of the training loop and returns its loss."""
        self._check_can_begin()
        if not self.train_loaders:
            raise TrainingError(
                "there is nothing to train on: pass a dataloader to the trainer, or train_loaders to fit()"
            )
        if count := self.options.overfit_batches:
            self._set_train_loaders(first_batches(self.train_loaders, count, self.options.seed))
        if resume is None and not self.step:
            resume = self.options.resume
        steps = train(self, training(self, resume, fork))
        unfinished_runs().add(steps)
        return steps

    def _set_train_loaders(self, loaders: Loaders) -> None:
        self.train_loaders = TrainLoaders(loaders, self.options)
        self.progress.set_loaders(list(self.train_loaders))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Run one micro-batch, with the optimizer step if its window is complete, and return its detached loss."""
        if self.running:
            raise TrainingError("training_step() cannot be called inside an event or while the trainer runs")
        self._check_can_begin()
        if self.run_status.run_ended:  # The run's record is closed, and this step belongs to no run.
            before, self.record = self.record, Record.in_memory()
            self.record.share_sinks(before)
            self.reset_steps()
        if self.reader is not None:  # the run that it read for may be continued where it stopped
            self.progress.position, self.reader = self.position(), None
        if not self.run_status.by_hand:  # the model may have changed since the trainer was created
            self.unowned_params = unowned_parameters(self.model, self.params)
        self.load_initial_weights()
        self.hooks.attach()  # They stay attached, because detaching them at every step would cost more than the hooks.
        with self.run_status.manual_step():
            loss = train_batch(self, batch)
            self.at_boundary()
            return loss

    def validate(self, loaders: Loaders = None, **unknown: Never) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""
        _refuse_arguments("validate", unknown)
        chosen = named_loaders(loaders, "val") or self.val_loaders
        if not chosen:
            raise TrainingError("there is nothing to validate on: pass val_loaders")
        self.load_initial_weights()
        with self.hooks.attached(), self.hooks.collectives.allow("validate()"):
            if self.running:
                self.agreement.average_stats()
            return validate(self, chosen, self.options.validation_limit)

    def predict(self, loaders: Loaders = None, **unknown: Never) -> list[Any]:
        """Return the model's outputs for every batch, in eval mode; the input is the first item of a tuple batch.

        Args:
            loaders: A loader, or a list or dict of loaders; by default, the validation loaders.
        """
        _refuse_arguments("predict", unknown)
        chosen = named_loaders(loaders, "predict") or self.val_loaders
        if not chosen:
            raise TrainingError("there is nothing to predict: pass loaders")
        self.load_initial_weights()
        outputs, model = [], self.engine.eval_model(self.model)
        with self.other_batches("inference"), self.hooks.attached(), self.engine.autocast():
            for loader in chosen.values():
                for batch in loader:
                    placed = self.engine.place(batch)
                    first = placed[0] if isinstance(placed, (tuple, list)) else placed
                    outputs.append(model(**first) if isinstance(first, Mapping) else model(first))
        return outputs

    def compute_again(self, model: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
        """Return what computes the loss of a batch with a model, for `rerunning`."""
        compute = self.forward.compute_with(model)
        return lambda batch: loss_and_metrics(compute(batch))[0]

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
        """Clear the gradients, even of parameters that no optimizer owns."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for param in self.unowned_params:
            param.grad = None

    def end_optimizers(self) -> None:
        """Record losses by loader and the rate, and step the schedulers of the optimizers that were not skipped."""
        super().end_optimizers()
        self.record_loader_losses()
        if self.schedulers and self.options.scheduler_interval == "step":
            self.step_log.add(LR, self.event_args.used_lr)
            self.step_schedulers([optimizer for optimizer in self.optimizers if optimizer not in self._skipped])

    def step_schedulers(self, stepped: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Step the schedulers of the optimizers that stepped (all by default), except those that need a metric."""
        for scheduler in self.schedulers:
            optimizer = getattr(scheduler, "optimizer", None)
            if not isinstance(scheduler, ReduceLROnPlateau) and (stepped is None or optimizer in (None, *stepped)):
                scheduler.step()

    def step_plateau_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that need the validation loss."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics["val/loss"])

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def work_at_boundary(self) -> None:
        """Write the record, validate, agree with the other ranks, save."""
        step = self.progress.step
        self.agreement.end_step()
        self.record.commit()
        self._poll_save()
        self.step_log.flush_if_due()
        if (every := self._validates_every("steps")) and step % every == 0:
            self.step_plateau_schedulers(self.validate())
        self.agreement.after_step(step)
        if not self._is_at_last_batch:  # otherwise the end of the epoch saves, as the start of the next one
            self.save_requested()

    def finish_epoch(self, all_read: bool) -> None:
        """Check what was read; if the epoch is over, validate if due, fire on_epoch_end, then save.

        Schedulers step after the validation: a run that resumes after a failed one repeats the end of the epoch. After
        a hook that fails in on_epoch_end the epoch is over: schedulers have stepped, and other hooks were called. The
        position in a checkpoint that is saved here is the start of the next epoch.

        Args:
            all_read: Whether the loaders yielded all their batches, and the loop did not leave them earlier.
        """
        self._check_epoch(all_read)
        if not (all_read or self._is_at_last_batch):
            return
        metrics = None
        if (every := self._validates_every("epochs")) and self.progress.epochs % every == 0:
            metrics = self.validate()  # This averages the statistics over the ranks, too.
        else:
            self.agreement.average_stats()
        if self.options.scheduler_interval == "epoch":
            self.step_schedulers()
        if metrics is not None:
            self.step_plateau_schedulers(metrics)
        self.end_epoch()
        self.save_requested()

    def next_boundaries(self) -> list[float]:
        """Return steps after which `work_at_boundary` must run."""
        step, steps = self.progress.step, [*super().next_boundaries(), self.agreement.next_step()]
        if self.options.max_steps is not None:
            steps.append(self.options.max_steps)
        if every := self._validates_every("steps"):
            steps.append(step - step % every + every)
        if self.saving:  # poll until the checkpoint is durable
            steps.append(step + 1)
        return steps

    def _validates_every(self, unit: str) -> int:
        """Return after how many steps or epochs the run validates; 0 if it counts the other unit or does not."""
        period = self.options.validation_period if self.val_loaders else None
        return int(period.amount) if period and period.unit == unit else 0

    # ---- the beginning and the end of a run --------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any] | None:
        """Clear gradients, load weights, resume, warn, and try a validation, whose metrics are returned."""
        return prepare_training(self, self.resume_from)

    def announce(self) -> None:
        """Print the line before the first step."""
        if self.prints:
            print_line(opening_line(self))

    # ---- the run as hooks see it -------------------------------------------------------------------------------------

    def describe(self) -> Mapping[str, Any]:
        """Return the run's configuration as the record stores it."""
        resolved, options = self._components.resolved, asdict(self.options)
        del options["resume"]  # how the run was started; a run with the same config may be started differently
        if resolved is not None:
            return {**resolved, "trainer": options}
        described = dict(super().describe())
        hooks = described.pop("hooks")
        return {**described, "trainer": options, "hooks": hooks}

    @property
    def prints(self) -> bool:
        """Whether this process prints what the run does."""
        return self.options.console and self.ranks.rank == 0

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
        return self.has_validation and self.options.validate_every is not None

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def add_hook(self, hook: Any, name: str | None = None, **options: Any) -> Handle:
        """Register a hook: an object, a class, a registered name or a dotted path; like `Registry.register`."""
        return self.hooks.register(hook, name, **options)

    def on(
        self, event: str, *, name: str | None = None, **options: Unpack[HookKeywords]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function to make it a hook of one event."""
        return self.hooks.on(event, name=name, **options)

    def get_hook(self, name: str) -> Any:
        """Return a hook by its name."""
        return self.hooks.get(name)

    def remove_hook(self, name: str = "", *, hook_id: str = "") -> Any:
        """Remove a hook and return it; `hook_id` is its name in the methods for captures."""
        return self.hooks.remove_hook(name, hook_id=hook_id)

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


def _refuse_arguments(method: str, unknown: Iterable[str]) -> None:
    """Reject arguments that a method does not have, and suggest the nearest one; `train` takes those of `fit`."""
    takes = Trainer.fit if method == "train" else getattr(Trainer, method)
    accepted = [name for name in signature(takes).parameters if name not in ("self", "unknown")]
    for name in unknown:
        remedy = f"call fit({name}=…)" if name in accepted else nearest(name, accepted)
        if takes is not Trainer.fit and meant(name, ()) == "fit(resume=…)":
            remedy = "call load_checkpoint(…) before"
        raise TrainingError(f"{method}() has no argument {name!r}; {remedy}")


def _name_of(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)
