"""`Trainer`: what users train with. `hookline.build` puts it together; it runs the one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hookline._console import logger
from hookline._names import unwrap_module
from hookline.core.change_audit import ChangeAudit
from hookline.core.registry import Handle
from hookline.core.run_control import MicroBatch, SharedPart
from hookline.errors import CheckpointError, HooklineError, TrainingError, nearest
from hookline.gradients.chain import UpdateChain
from hookline.gradients.view import Gradients
from hookline.ranks import OneProcess, add_up, find_ranks, host
from hookline.record.labels import Labels
from hookline.record.metrics import REDUCTIONS
from hookline.record.record import Record
from hookline.record.shared import SharedRecord
from hookline.trainer.agreement import Agreement
from hookline.trainer.checkpointing import Checkpointer, SaveName
from hookline.trainer.data.loaders import Loaders, epoch_length, first_batches, make_train_loaders, named_loaders
from hookline.trainer.engine import Engine
from hookline.trainer.event_args import EventArgs, RankEventArgs
from hookline.trainer.loop import Loop, steps_of_run
from hookline.trainer.metrics import TrainingMetrics, check_metrics
from hookline.trainer.options import TrainerOptions
from hookline.trainer.parameters import trained_parameters
from hookline.trainer.relaunch import continued_run, describe_launch
from hookline.trainer.rng import preserve_rng, restore_rng, rng_state
from hookline.trainer.run import keep_stop_iteration, run_context, unfinished_steppers
from hookline.trainer.run_state import SIGNAL, Progress, RunStatus, Stop
from hookline.trainer.step_fn import StepFunction, count_tokens, loss_and_metrics, make_step
from hookline.trainer.validation import eval_batches, validate

if TYPE_CHECKING:
    from hookline.activations.manager import HookManager
    from hookline.core.entry import HookKeywords
    from hookline.core.run_control import RunControl
    from hookline.hooks.checkpoint import CheckpointKeywords
    from hookline.hooks.console_log import ConsoleLogKeywords
    from hookline.hooks.json_log import JSONLogKeywords


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


def _attribute(path: str, doc: str) -> Any:
    """Return a property that reads an attribute of one of the trainer's objects; it costs no Python call."""
    return property(attrgetter(path), doc=doc)


class Trainer:
    """Runs the training loop and holds the hooks. Hooks get it as `trainer`, and may set attributes on it.

    The state of a run is in three objects: `progress` (saved counters), `run_status` (how the run ends, and trouble)
    and `event_args` (the values that hooks name). Its most used values are properties of the trainer.
    """

    def __init__(self, parts: Components) -> None:
        self.options, self.engine, self.hooks = parts.options, parts.engine, parts.hooks
        self.ranks: OneProcess = find_ranks()
        logger.rank = self.ranks.rank
        self.model = parts.model
        self.optimizers, self.schedulers = parts.optimizers, parts.schedulers
        self.train_loaders = make_train_loaders(parts.train_loaders, self.options)
        self.val_loaders = named_loaders(parts.val_loaders, "val")
        self.optimizer_step = parts.optimizer_step
        self.count_tokens = parts.count_tokens or count_tokens
        self.config = parts.config
        self.hook_data: dict[str, Any] = {}
        self.launch: dict[str, Any] | None = None  # that the run belongs to, if a launcher starts failed runs again
        self.best_accuracy = -math.inf
        self.find_nan_by = 'trainer.add_hook("nan_forensics")'  # what to do about a NaN; a command has its own words
        self._components = parts
        self._step_fn, self._loss_fn = parts.step_fn, parts.loss_fn
        if next(self.model.parameters(), None) is None:
            raise TrainingError(f"the model ({type(self.model).__name__}) has no parameters: there is nothing to train")
        self.params = trained_parameters(self.model, self.optimizers)
        self.progress, self.run_status = Progress(), RunStatus()
        self._reruns = 0
        self.progress.set_loaders(list(self.train_loaders))
        make_args = RankEventArgs if self.ranks.act_together else EventArgs
        self.event_args = make_args(self, self.progress, Gradients(self.params))
        self.progress.ranks = self.ranks
        self.chain = UpdateChain(self.hooks, lambda: self.params, self.model)
        self.change_audit = ChangeAudit(self, lambda: self.lr_changes, lambda: self._reruns)
        self.hooks.dispatch_table.audit_changes(self.change_audit)
        self.hooks.set_ranks(self.ranks)
        self.hooks.failures.current_step = lambda: self.progress.step
        self.hooks.failures.debug = self.hooks.failures.debug or self.options.debug
        # The model as the run calls it.
        self.called_model: Any = torch.compile(self.model) if self.options.compile else self.model
        # The same in eval mode: without a wrapper that would wait for other ranks.
        self.called_eval_model, inner = self.called_model, self.engine.eval_model(self.model)
        if inner is not self.model:
            self.called_eval_model = torch.compile(inner) if self.options.compile else inner
        metrics = check_metrics(parts.metrics, self.train_loaders)
        self.validation_metrics = {name: one.metric for name, one in metrics.items() if "validation" in one.phases}
        self.training_metrics = TrainingMetrics({n: one.metric for n, one in metrics.items() if "train" in one.phases})
        self.agreement = Agreement(self)
        # batch -> what step_fn, loss_fn or the model returns
        self.compute = self.agreement.times.measure(self._make_step())
        self.checkpointer = Checkpointer(self)
        self._loop: Loop | None = None

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
            epochs, progress = self.options.epochs, self.progress
            by_epochs = epochs is not None and progress.epoch + progress.epoch_over >= epochs
            by_steps = self.options.max_steps is not None and progress.steps_done >= self.options.max_steps
            if resume is None and progress.step > 0 and (by_epochs or by_steps):
                done = f"{progress.epoch + progress.epoch_over} epochs, {progress.steps_done} steps"
                words = "nothing is left to train (%s are done); raise max_epochs or max_steps to continue"
                logger.warning(words, done)
                return self.refresh_state()

            def run() -> None:
                for _ in self.stepper(resume, fork):
                    pass

            keep_stop_iteration(run)
            return self.refresh_state()

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
        steps = steps_of_run(self, run_context(self, resume, fork))
        unfinished_steppers().add(steps)
        return steps

    def _check_not_running(self) -> None:
        if self.running:
            raise TrainingError("this trainer is running already; a hook cannot start another run of it")

    def training_step(self, batch: Any) -> torch.Tensor:
        """Run one micro-batch, with the optimizer step if its window is complete, and return its detached loss."""
        if self.running:
            raise TrainingError("training_step() cannot be called inside an event or while the trainer runs")
        if self.run_status.run_ended:  # that run's record is closed; this step belongs to no run
            before = self.record
            self.record, self._loop = Record.in_memory(), None
            self.record.share_sinks(before)
        self.hooks.attach()  # and not off again: at every step that would cost more than the hooks themselves
        with self.run_status.manual_step():
            return keep_stop_iteration(lambda: self.loop.manual_step(batch))

    def validate(self, loaders: Loaders = None) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""
        chosen = named_loaders(loaders, "val") or self.val_loaders
        if not chosen:
            raise TrainingError("there is nothing to validate on: give val_loaders")
        with self.hooks.attached(), self.hooks.collectives.allow("validate()"):
            if self.running:
                self.loop.share_stats()
            return validate(self, chosen, self.options.validation_limit)

    def predict(self, loaders: Loaders) -> list[Any]:
        """Return the model's outputs for every batch, in eval mode; of a tuple batch the first item is the input."""
        outputs, model = [], self.engine.eval_model(self.model)
        with eval_batches(self, "inference"), self.hooks.attached(), self.engine.autocast():
            for loader in named_loaders(loaders, "predict").values():
                for batch in loader:
                    placed = self.engine.place(batch)
                    first = placed[0] if isinstance(placed, (tuple, list)) else placed
                    outputs.append(model(**first) if isinstance(first, Mapping) else model(first))
        return outputs

    @contextmanager
    def inference(self) -> Iterator[torch.nn.Module]:
        """Run the model from a hook in eval mode without grad; random streams are preserved, forward hooks are off.

        >>> with trainer.inference() as model:
        ...     model(batch)
        """
        allow = self.hooks.collectives.allow
        together = allow("inference() of a sharded model") if self.engine.forward_is_collective else nullcontext()
        with together, eval_batches(self, "inference"), self.hooks.silenced(), self.engine.autocast():
            yield self.engine.eval_model(self.model)

    def random_state(self) -> dict[str, Any]:
        """Return the state of every random stream that training draws from."""
        return rng_state()

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
                self._reruns += 1
                self.engine.free_whole_weights(model)
                with torch.no_grad():
                    for buffer, copy in buffers:
                        buffer.copy_(copy)

    # ---- the run's objects -----------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """The loop of the current run, or of steps outside of a run."""
        if self._loop is None:
            self._loop = Loop(self)
        return self._loop

    @cached_property
    def record(self) -> Record:
        """The record of the current or last run; before the first run a record in memory, made when it is needed."""
        return Record.in_memory()

    def begin_run(
        self, run_dir: Path | None, hooks: list[dict[str, Any]], lineage: Mapping[str, Any] | None, labels: Labels
    ) -> None:
        """Make record and loop of a run, and reset the state of the last one.

        Args:
            run_dir: The directory of a run that is resumed; None for a new run.
            hooks: The hooks as the record describes them.
            lineage: The run and checkpoint that a new run starts from.
            labels: Name, tags and notes of a new run.
        """
        before = vars(self).get("record")
        self.record = self._open_record(run_dir)
        if before is not None:
            self.record.share_sinks(before)  # those that were added before the run
        hosts = self.ranks.gather(host()) if self.ranks.act_together else None
        self.record.start(hooks=hooks, lineage=lineage, hosts=hosts, launch=self.launch, labels=labels)
        # The last run may have stopped inside an epoch; this one continues there.
        self.progress.begin_run(self.progress.position if self._loop is None else self._loop.position())
        self.run_status.begin()
        self.event_args.begin_run()
        self.checkpointer.begin_run()
        self.agreement.begin_run()
        self._loop = Loop(self)

    def _open_record(self, run_dir: Path | None) -> Record:
        """Open the run's record: rank 0 writes its files, the others what happens to them alone."""
        options, config = self.options, self.describe()
        opened: list[Record] = []

        def open_first() -> list[Any]:
            if not options.record:
                opened.append(Record.in_memory(config=config, seed=options.seed))
            elif run_dir is not None:
                opened.append(Record.on_disk(run_dir.parent, config=config, seed=options.seed, run_id=run_dir.name))
            else:
                opened.append(Record.on_disk(options.output_dir, config=config, seed=options.seed))
            return [opened[0].run_id, None if opened[0].path is None else str(opened[0].path)]

        run_id, path = self.ranks.first(open_first)
        if not opened:
            opened.append(Record.of_rank(self.ranks.rank, run_id, path, config=config, seed=options.seed))
        return SharedRecord.of(opened[0], self.ranks) if self.ranks.act_together else opened[0]

    def describe(self) -> Mapping[str, Any]:
        """Return the run's configuration as the record stores it."""
        parts, options = self._components, asdict(self.options)
        if parts.resolved is not None:
            return {**parts.resolved, "trainer": {**parts.resolved.get("trainer", {}), **options}}
        optimizers = [
            {
                "class": type(one).__name__,
                **{k: v for k, v in getattr(one, "defaults", {}).items() if isinstance(v, (int, float, str, tuple))},
            }
            for one in self.optimizers
        ]
        hooks = [{"name": hook.name, "enabled": hook.enabled, **hook.parameters} for hook in self.hooks.list_hooks()]
        parameters = sum(param.numel() for param in self.model.parameters())
        model = {"class": type(unwrap_module(self.model)).__name__, "parameters": parameters}
        return {"model": model, "optimizers": optimizers, "trainer": options, "hooks": hooks}

    def _set_train_loaders(self, loaders: Loaders) -> None:
        self.train_loaders = make_train_loaders(loaders, self.options)
        self.progress.set_loaders(list(self.train_loaders))

    # ---- the step ----------------------------------------------------------------------------------------------------

    def find_parameters(self) -> None:
        """Find the parameters that the optimizers own again; transforms select among them again."""
        before = set(self.params)
        found = trained_parameters(self.model, self.optimizers)
        self.params.clear()
        self.params.update(found)
        self.chain.reselect_parameters()
        self.note("parameters_changed", added=sorted(set(found) - before), gone=sorted(before - set(found)))

    def eval_compute(self) -> Callable[[Any], Any]:
        """Return the function from a batch to its loss in eval mode."""
        same = self.called_eval_model is self.called_model
        return self.compute if same else self._make_step(self.called_eval_model)

    def _make_step(self, model: Any = None) -> Callable[[Any], Any]:
        """Return the forward pass of one batch, in the run's precision; of the model as the run calls it by default."""
        plain = make_step(self.called_model if model is None else model, self._step_fn, self._loss_fn)
        if self.options.precision == "fp32":
            return plain

        def in_precision(batch: Any) -> Any:
            with self.engine.autocast():
                return plain(batch)

        return in_precision

    def replace_compute(self, compute: Callable[[Any], Any]) -> None:
        """Replace the function from a batch to its loss, for observers that wrap it."""
        self.compute = compute

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
        self.compute = self.agreement.times.measure(self._make_step())
        if self._loop is not None:
            self._loop.step_changed()
        by = self.hooks.calling_hook()
        self.note(f"{name}_changed", by=by, old=_name_of(old), new=_name_of(new))
        self.agreement.note_assignment(name, _name_of(new), by)

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

    # ---- where the run is --------------------------------------------------------------------------------------------

    step: int = _attribute("progress.step", "The current optimizer step, from 1; the last one outside of a step.")
    epoch: int = _attribute("progress.epoch", "The current epoch, from 0.")
    running: bool = _attribute(
        "run_status.running", "Whether a run is in progress, from before on_train_start to after on_train_end."
    )
    run_ended: bool = _attribute("run_status.run_ended", "Whether a run has ended and nothing has begun since.")
    status: str = _attribute("run_status.status", "'training', 'completed' or 'error'.")
    stop_reason: str | None = _attribute("run_status.stop_reason", "Why the run was asked to stop, if it was.")
    stopped_by: str | None = _attribute("run_status.stopped_by", "The hook that asked the run to stop, or 'signal'.")
    skipped_steps: int = _attribute("run_status.skipped_steps", "Steps that an optimizer skipped.")
    non_finite_losses: int = _attribute(
        "run_status.non_finite_losses", "Losses that were NaN or infinite, counted at the end of each epoch."
    )
    failed_saves: int = _attribute("run_status.failed_saves", "Checkpoints that could not be written.")
    lr_changes: int = _attribute("run_status.lr_changes", "Assignments to `lr`.")
    hook_failures: int = _attribute("run_status.hook_failures", "Exceptions of hooks.")
    saving: str | None = _attribute(
        "checkpointer.saving",
        "The name of the checkpoint that is being written in the background (`async_save`), if any.",
    )
    requested_checkpoints: set[str] = _attribute(
        "checkpointer.requested_names",
        "Names of checkpoints that were requested by `save`, which no retention policy may delete.",
    )

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None if the record is in memory."""
        return self.record.path if "record" in vars(self) else None  # reading `record` would make one

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory that holds the run's checkpoints; None if the record is in memory."""
        return self.record.checkpoint_dir if "record" in vars(self) else None

    rank_tokens: int = _attribute("progress.tokens_seen", "The tokens in the batches of this rank so far.")

    @property
    def data_ranks(self) -> int:
        """How many ranks train on separate batches; with tensor parallelism alone all have the same one."""
        return self.ranks.world_size if self.engine.averages else 1

    @property
    def prints(self) -> bool:
        """Whether this process prints what the run does."""
        return self.options.console and self.ranks.rank == 0

    device: torch.device = _attribute("engine.device", "The device the model is trained on.")
    hook_manager: HookManager = _attribute("hooks", "The registry of the hooks; equal to `hooks`.")

    @property
    def is_trial_run(self) -> bool:
        """Whether the run only checks that everything works (`fast_dev_run`)."""
        return bool(self.options.fast_dev_run)

    @property
    def validations_in_progress(self) -> int:
        """How many validations are in progress: 2 inside a validation that a hook starts during another one."""
        return len(self.event_args.validating)

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
        """Whether the current step is skipped because its scaled gradients overflowed; no transform has seen them."""
        return self.event_args.overflowed_at == self.progress.step

    @property
    def loader_names(self) -> list[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""
        return list(self.train_loaders) if len(self.train_loaders) > 1 else []

    @property
    def loader_batches(self) -> dict[str, int]:
        """Micro-batches of each training loader so far."""
        return dict(self.progress.by_loader)

    @property
    def run_id(self) -> str | None:
        """The run's id, once it has begun."""
        return self.record.run_id if self.running or self.run_dir is not None else None

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

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group of the first optimizer; assigning scales every group by the same ratio."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        by = self.hooks.calling_hook()
        self.note("lr_changed", by=by, old=self.lr, new=value)
        self.agreement.note_assignment("lr", value, by)
        self.run_status.count("lr_changes")
        ratio = value / self.lr if self.lr else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = value if ratio is None else group["lr"] * ratio

    def refresh_state(self) -> dict[str, Any]:
        """Return the run as a dict, as hooks get it as `state`; waits for the device."""
        return self.event_args.state

    def window(self) -> list[MicroBatch]:
        """Return the micro-batches of the current step; empty if a step is one micro-batch."""
        return self.event_args.window

    def step_metrics(self) -> dict[str, Any]:
        """Return the step's means of what `step_fn` returned beside the loss."""
        return self.event_args.step_means()

    def step_loss(self) -> float:
        """Return the loss of the last step as it is recorded, the mean over its window; waits for the device."""
        shared = self.loop.stats.shared_loss(self.step) if self.ranks.act_together else None
        return self.event_args.window_loss if shared is None else shared

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means of the current epoch so far, by recorded name; waits for the device."""
        return self.loop.stats.means()

    def latest_metrics(self, since: int | None = None) -> dict[str, float]:
        """Return the newest value of each training metric, of steps after `since` or else of this epoch."""
        return self.loop.stats.latest(since)

    def log(self, name: str, value: Any, step: int | None = None, reduce: str | None = "mean") -> None:
        """Record a number or a one-element tensor; never waits for the device or for other ranks.

        Args:
            name: The metric.
            value: Its value.
            step: The step it belongs to, if it is not the current one.
            reduce: How the values of several ranks become one: 'mean', 'sum', 'max', 'min', or None for rank 0's own.
        """
        if reduce is not None and reduce not in REDUCTIONS:
            raise HooklineError(f"log({name!r}): reduce={reduce!r}; {nearest(str(reduce), REDUCTIONS)}, or None")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise HooklineError(f"log({name!r}): expected one number, got a tensor of shape {tuple(value.shape)}")
        self.record.log(self.progress.step if step is None else step, self.progress.epoch, name, value, reduce)

    def log_layers(
        self, series: str, names: Sequence[str], columns: Sequence[str], values: torch.Tensor, step: int | None = None
    ) -> None:
        """Record numbers per layer; never waits for the device.

        Args:
            series: The name of the series.
            names: The layers.
            columns: The statistics.
            values: The numbers, [names, columns] or [names, columns, bins].
            step: The step they belong to, if it is not the current one.
        """
        self.record.log_layers(series, self.progress.step if step is None else step, names, columns, values)

    def log_table(
        self,
        name: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        *,
        step: int | None = None,
        kind: str | None = None,
    ) -> None:
        """Record a table; of several ranks, rank 0's is recorded and the others' are ignored.

        Args:
            name: Its name.
            columns: The titles of its columns.
            rows: The cells of each row: texts (cut after 1,000 characters), numbers, booleans or None, at most 10,000
                in all. A two-dimensional tensor or array is read as it is, which waits for its device.
            step: The step it belongs to, if it is not the current one.
            kind: What the table shows, for viewers that draw it in another way, such as "confusion_matrix".

        Raises:
            RecordError: If a row or a cell does not fit, or there are too many.
        """
        self.record.log_table(
            self.progress.step if step is None else step, self.progress.epoch, name, columns, rows, kind
        )

    def log_image(self, name: str, image: Any, *, step: int | None = None) -> None:
        """Record an image; of several ranks, rank 0's is recorded and the others' are ignored.

        A tensor on a device is copied without waiting for it, and encoded when the record is written.

        Args:
            name: Its name.
            image: A tensor or NumPy array [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels, of uint8 or of floats
                from 0 to 1; a PIL image; or a matplotlib figure. At most 4096 x 4096 pixels.
            step: The step it belongs to, if it is not the current one.

        Raises:
            RecordError: If it is not an image, or is too large.
        """
        self.record.log_image(self.progress.step if step is None else step, self.progress.epoch, name, image)

    def share(self, part: SharedPart) -> None:
        """Hand in numbers of this rank that are recorded together with those of the other ranks."""
        self.record.share(part)

    def means_of_ranks(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the ranks of numbers of the current step, by name; waits for all of them."""
        if not self.ranks.act_together:
            return dict(metrics)
        window = self.loop.window
        own = {name: [window.share_of(value), window.share] for name, value in metrics.items()}
        return {name: total / weight for name, (total, weight) in add_up(self.ranks, own, width=2).items() if weight}

    def note(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write a decision into events.jsonl, if a run is in progress; at the current step unless given."""
        if self.running:
            self.record.event(kind, self.progress.step if step is None else step, **fields)

    # ---- control -----------------------------------------------------------------------------------------------------

    def request_boundary(self) -> None:
        """Run the loop's boundary after the current step: something was requested."""
        if self._loop is not None:
            self._loop.request_boundary()

    def request_stop(self, reason: str, by: str | None = None) -> None:
        """End the run in order once the current step is complete; the first reason counts."""
        by = by or self.hooks.calling_hook()
        self.note("stop_requested", reason=reason, by=by)
        self.agreement.request_stop(Stop(reason, by, self.ranks.rank))
        self.request_boundary()

    def stop_on_signal(self, name: str) -> None:
        """Save and end the run, once all ranks know of it. A signal handler calls this, so it only assigns."""
        self.agreement.request_end(name)
        self.request_boundary()

    def end_on_signal(self, name: str, rank: int = 0) -> None:
        """Save and end the run now, because of a signal that a rank received."""
        if rank != self.ranks.rank and self.prints:
            logger.warning("rank %d has received %s: all ranks end after this step", rank, name)
        self.run_status.stops.append(Stop(name, SIGNAL, rank))
        if self.checkpoint_dir is not None:
            self.checkpointer.request_unless_saved()
        self.request_boundary()

    def skip_step(self, reason: str) -> None:
        """Skip the optimizer step of the current window; for guards in the update chain.

        Raises:
            RankError: With several ranks, if the hook declares neither `may_skip` nor `same_on_all_ranks`.
        """
        self.agreement.request_skip(reason)

    def unsaved_parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Return shape, dtype and sum of bits of the frozen parameters that checkpoints leave out; often none."""
        return self.checkpointer.unsaved_parameters()

    def save(self, name: SaveName = None) -> None:
        """Write a checkpoint at the next step boundary; if the run is closing, at once, or with several ranks soon.

        Args:
            name: Its name; by default that of its step. A function is called for the name when the checkpoint is
                written. A name that is requested twice is written once.
        """
        if self.status == "error" and self.ranks.act_together:
            logger.warning("nothing is saved after a failure: the ranks may be at different steps", of_rank=True)
            return
        self.agreement.request_save(name)
        self.request_boundary()
        if self.status != "training" and self.running and not self.ranks.act_together:
            self.checkpointer.save_requested()

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
        """Register a hook: an object, a class, a registered name or a dotted path; as `HookRegistry.register`."""
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


if TYPE_CHECKING:

    def _as_run_control(trainer: Trainer) -> RunControl:
        """Check statically that the trainer is a `RunControl`."""
        return trainer
