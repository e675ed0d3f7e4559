"""The step methods of a run, which fire its events: when everything in a step happens, including the loss scale.

Epochs, validations, boundaries and checkpoints, which a loop may have, are here, too. Its host decides what is saved.

    begin_batch → compute the loss → backward → window_is_complete
    at the end of a window: gradients_ready → step_optimizer, for each optimizer → end_optimizers → clear gradients
    end_batch → at_boundary

An event without listeners is None in `hooks.slots`: it costs one branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline._console import logger
from hookline.core.costs import CostMonitor
from hookline.core.failures import hook_notes
from hookline.errors import CheckpointError, add_note, cut
from hookline.run.agreement import SaveName
from hookline.run.control import RunControl
from hookline.run.epoch_stats import EpochStats
from hookline.run.event_args import GivenArgs
from hookline.run.outputs import UNKNOWN, single_numbers
from hookline.run.parameters import group_sizes, trained_parameters, unowned_parameters
from hookline.run.saved_parts import missing_state
from hookline.run.step_log import GRAD_NORM, LOSS, StepLog
from hookline.run.window import Window

if TYPE_CHECKING:
    from hookline.core.dispatch import EventSlots
    from hookline.gradients.chain import UpdateChain

NEED_GRAD_NORM = {"grad_norm", "ctx"}
"""If a hook that is due at on_step_end names one of these, the norm is computed before the gradients are cleared."""


class Steps(RunControl):
    """The part of a `Run` that its loop drives. A host overrides the methods that it implements in its own way."""

    find_nan_by = 'trainer.add_hook("nan_forensics")'
    """What to do about a NaN; commands replace it with a command line."""
    chain: UpdateChain
    optimizer_step: Callable[[torch.optim.Optimizer], Any] | None
    """The user's replacement for ``optimizer.step()``; `step_optimizer` calls it."""

    def reset_steps(self) -> None:
        """Begin with no step in progress: a run begins, or steps outside of a run."""
        if self.progress.position is None:  # otherwise the run continues inside an epoch
            self.stats = EpochStats([f"train/{name}" for name in self.optional_metrics])
        self.step_log = StepLog(self)
        self.accumulation = self.make_window()  # the micro-batches of the current step
        self.cost_monitor = CostMonitor(self, self.warn_above)
        self._stepped: torch.optim.Optimizer | None = None  # the last that stepped in this step; None once it is over
        self._skipped: list[torch.optim.Optimizer] = []  # The optimizers skipped in this step.
        self._ended_at = 0  # the last step whose optimizers have ended
        self.read_groups()
        self._next_boundary: float = 0  # the next step after which `work_at_boundary` runs; 0: after this step
        self.is_reading = False  # whether the next batch is being read: an error is then the loader's

    # ---- one micro-batch ---------------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> Any:
        """Count a micro-batch, place it, decide which hooks are due, and fire on_train_batch_start."""
        progress, args = self.progress, self.event_args
        self.is_reading = False
        progress.batch_idx += 1
        if self.accumulation.begin(batch):
            progress.step += 1
            args.forget_step()
        args.used_lr = args.detached_loss = None
        args.batch = batch = self.engine.place(batch)
        progress.tokens_seen += self.count_tokens(batch)
        self.hooks.begin_batch(progress)
        if self.knows_batches and (handler := self.hooks.slots.on_train_batch_start):
            handler(args)
        return batch

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, with its share of the window, between on_before_backward and on_after_backward."""
        args, slots = self.event_args, self.hooks.slots
        # This releases the last batch's graph, which its backward pass emptied; releasing it earlier costs 4 µs more.
        args.set_loss(loss)
        if handler := slots.on_before_backward:
            handler(args)
        self.accumulation.backward(loss)
        if handler := slots.on_after_backward:
            handler(args)

    def window_is_complete(self) -> bool:
        """Return whether the optimizers step after this micro-batch, and note it for `end_batch` and `at_boundary`.

        If there is no other way to know, this reads the next micro-batch. A host must call this; otherwise no step
        ends.
        """
        window = self.accumulation
        window.is_complete = window.count >= window.size or not self.has_more_batches()
        return window.is_complete

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    def gradients_ready(self) -> bool:
        """Make the gradients those of the step, fire on_gradients_ready and run the update chain.

        The norm before clipping is recorded as `train/grad_norm`, if a hook of the chain clips.

        Returns:
            Whether the optimizers step. If a hook or an overflow skips the step, it is False, and
            on_before_optimizer_step and on_step_skipped have been fired for each optimizer.
        """
        args, slots, self._skipped = self.event_args, self.hooks.slots, []
        self.accumulation.finish_gradients()
        if handler := slots.on_gradients_ready:
            handler(args)
        self.agreement.before_update()
        if slots.on_update and args.skip_reason is None:
            self.find_new_parameters()
            if (handler := slots.on_update) is not None:  # The handler may have changed.
                handler(args)
            if (norm := args.norm_before_clipping()) is not None:
                self.step_log.add(GRAD_NORM, norm)
        if slots.on_step_end and not NEED_GRAD_NORM.isdisjoint(self.hooks.dispatch_table.named_at("on_step_end")):
            self.find_new_parameters()
            args.measure_norm()  # on its device: at on_step_end the gradients are gone
        if args.skip_reason is None:
            return True
        for optimizer in self.stepping_optimizers():
            self.before_optimizer_step(optimizer)
        return False

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer between its two events, unless the step is skipped."""
        if self.before_optimizer_step(optimizer):
            try:
                self.engine.step(optimizer, self.optimizer_step)
            except KeyError as error:
                if self.event_args.resumed:
                    add_note(error, missing_state(optimizer))
                raise
            self.after_optimizer_step(optimizer)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Fire on_before_optimizer_step and return whether the optimizer steps; if not, fire on_step_skipped."""
        args = self.event_args
        args.optimizer_idx = self.optimizers.index(optimizer)
        if handler := self.hooks.slots.on_before_optimizer_step:
            handler(args)
        self.agreement.before_optimizer()
        if args.skip_reason is None:
            return True
        self._skipped.append(optimizer)
        args.reason = args.skip_reason
        self.record.event("step_skipped", self.progress.step, reason=args.reason, optimizer_idx=args.optimizer_idx)
        if handler := self.hooks.slots.on_step_skipped:
            handler(args)
        return False

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, because the model now has its weights, and fire on_after_optimizer_step."""
        self.progress.steps_done, self._stepped = self.progress.step, optimizer
        if handler := self.hooks.slots.on_after_optimizer_step:
            self._note_lr()
            handler(self.event_args)

    def end_optimizers(self) -> None:
        """Count a skipped step and update the loss scale; the loop clears the gradients next."""
        self.event_args.optimizer_idx, self._ended_at = 0, self.progress.step
        if self._skipped:
            self.run_status.skipped_steps += 1
        self.engine.update_scale()
        self._note_lr()

    def end_failed_step(self) -> None:
        """Update loss scale and schedulers if a step failed after an optimizer stepped: they belong to its weights.

        The gradients stay, because hooks may look into them for what went wrong.
        """
        if self._stepped is not None and self._ended_at != self.progress.step:
            self._skipped = self.optimizers[self.optimizers.index(self._stepped) + 1 :]
            self.end_optimizers()

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and is not over."""
        return self._stepped is not None or self.progress.step != self.progress.steps_done

    def _note_lr(self) -> None:
        """Store the rate that this step used, before a hook or a scheduler may change it."""
        if self.event_args.used_lr is None:
            self.event_args.used_lr = self.lr

    def find_new_parameters(self) -> None:
        """Add to the chain and the norm the parameters of groups that an optimizer has received since the last step."""
        if group_sizes(self.optimizers) != self._group_sizes:
            before, now = self.params.copy(), self.trained_parameters()
            self.params.clear()
            self.params.update(now)
            self.chain.reselect_parameters()
            added, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
            self.note("parameters_changed", added=added, gone=gone)
            self.read_groups()

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return trained_parameters(self.model, self.optimizers)

    def read_groups(self) -> None:
        """Note which parameters the optimizers have."""
        self._group_sizes = group_sizes(self.optimizers)
        self.unowned_params = unowned_parameters(self.model, self.params)  # No optimizer clears their gradients.

    # ---- the end of a micro-batch ------------------------------------------------------------------------------------

    def end_batch(self) -> None:
        """Fire on_train_batch_end; if the window is complete, record the step's metrics and fire on_step_end, too."""
        args, window = self.event_args, self.accumulation
        if args.detached_loss is not None:
            window.add_to_means(self.stats, LOSS, args.detached_loss)
            if window.is_complete:
                args.last_loss = args.loss_of_step()
        if self.knows_batches and (handler := self.hooks.slots.on_train_batch_end):
            handler(args)
            for name, value in args.added_metrics().items():
                self.log(name, value)
        args.live_output = args.live_target = UNKNOWN  # they need not live until the next batch
        if window.is_complete:
            self.end_step()

    def end_step(self) -> None:
        """Record the metrics of the step and fire on_step_end; `end_batch` does so at the end of a window."""
        progress, args, window = self.progress, self.event_args, self.accumulation
        window.count = 0
        progress.steps_done, self._stepped = progress.step, None
        if window.has_weight and args.detached_loss is not None:  # a mean over nothing may be NaN
            self.step_log.add_loss(window.weigh(args.window_tensor()))
            for key, value in args.step_means().items() if args.step_metrics or args.micro_batches else ():
                name = f"train/{key}"
                self.agreement.record_mean(name, value, key in self.optional_metrics)
                self.stats.set_latest(progress.step, name, value)
        if handler := self.hooks.slots.on_step_end:
            handler(args)

    # ---- epochs and validations --------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin the first or the next epoch, and fire on_epoch_start; a loop without epochs need not call this."""
        self.progress.begin_epoch()
        self.stats = self.stats.next_epoch(self.progress.step)
        if handler := self.hooks.slots.on_epoch_start:
            handler(self.event_args)
        self.hooks.replan()

    def end_epoch(self) -> None:
        """Record the means of the epoch, and fire on_epoch_end; the epoch is over, even if a hook fails there."""
        self.record_non_finite_losses(self.stats.take_non_finite())
        args = self.event_args
        args.forget_epoch()
        for name, mean in self.epoch_metrics().items():
            self.log(name, mean, reduce=None)
        try:
            if handler := self.hooks.slots.on_epoch_end:
                handler(args)
        finally:
            for name, value in args.added_epoch_metrics().items():
                self.log(name, value)
            self.progress.end_epoch()
        self.agreement.end_epoch()

    def record_non_finite_losses(self, count_here: int) -> None:
        """Record how many losses were NaN or infinite, given how many this rank has; waits for all ranks."""
        if count := self.ranks.total([self.agreement.count_once(count_here)])[0]:
            self.run_status.non_finite_losses += count
            self.record.event("non_finite_losses", self.progress.step, epoch=self.progress.epoch, count=count)

    @contextmanager
    def validation(self) -> Iterator[dict[str, Any]]:
        """Fire the events around a validation, whose block runs in eval mode without grad; record its metrics.

        >>> with run.validation() as metrics:
        ...     metrics["val/loss"] = mean_loss(model, val_data)
        """
        args, slots, metrics = self.event_args, self.hooks.slots, dict[str, Any]()
        with args.validation(self.hooks.calling_hook()), self.other_batches("validation"):
            if handler := slots.on_validation_start:
                handler(args)
            yield metrics
            args.val_metrics, args.eval_metrics = metrics, {}
            args.mirror_metrics("val_metrics")
            try:
                if handler := slots.on_validation_end:
                    handler(args)
                args.mirror_metrics("eval_metrics")
            finally:  # what was measured is recorded, even if a hook ends the run here
                numbers = single_numbers(metrics)
                for key, value in numbers.items():
                    self.log(key, value)
                if self.validations_in_progress == 1:
                    args.validated = self.progress.step, numbers
        if self.running:
            self.agreement.after_validation()

    def begin_validation_batch(
        self, batch: Any, index: int, loader_index: int = 0, loader: str = "val", slots: EventSlots | None = None
    ) -> Any:
        """Place a batch of a validation, fire on_validation_batch_start, and return the batch.

        Args:
            batch: The batch.
            index: Its position among the batches of its loader.
            loader_index: The position of its loader among the loaders.
            loader: The name of its loader.
            slots: The events to fire instead of the run's own.
        """
        batch = self.engine.place(batch)
        args = self.event_args
        args.batch = batch
        args.source = SimpleNamespace(batch_idx=index, dataloader_idx=loader_index, dataloader_name=loader)
        if handler := (slots or self.hooks.slots).on_validation_batch_start:
            handler(args)
        return batch

    def end_validation_batch(
        self,
        loss: torch.Tensor,
        metrics: Mapping[str, Any] | None = None,
        output: Any = UNKNOWN,
        target: Any = UNKNOWN,
        slots: EventSlots | None = None,
    ) -> dict[str, Any]:
        """Fire on_validation_batch_end, and return the metrics of the batch, with those that hooks added.

        Args:
            loss: The loss of the batch.
            metrics: Other numbers of the batch.
            output: The model's output, if hooks may read it.
            target: Its target, if hooks may read it.
            slots: The events to fire instead of the run's own.
        """
        args = self.event_args
        args.set_loss(loss)
        args.step_metrics = dict(metrics or {})
        args.live_output, args.live_target = output, target
        if handler := (slots or self.hooks.slots).on_validation_batch_end:
            handler(args)
        args.live_output = args.live_target = UNKNOWN
        return {"loss": args.detached_loss, **args.step_metrics, **args.added_metrics()}

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def at_boundary(self) -> bool:
        """Do what is due after a step, and return whether the run ends.

        A plain run writes its record; the `work_at_boundary` of a trainer also validates, agrees and saves.
        """
        self.run_status.end_forked_process()
        is_over, is_due = False, self.progress.step >= self._next_boundary or time() >= self.step_log.flush_by
        if is_due and self.accumulation.is_complete:
            self.work_at_boundary()
            self._next_boundary = min(self.next_boundaries())
            is_over = self.is_finished()  # last: a signal that arrives in between has set `_next_boundary` back
            if is_over:
                self.stop_reading()
        self.is_reading = True
        return is_over

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    stops_without_checkpoint = False
    """Whether a checkpoint that cannot be written ends the run."""
    last_saved_step: int | None = None
    """The step of the checkpoint that was written or loaded last in this run."""

    def save_at_boundary(self, name: SaveName) -> None:
        """Write a checkpoint at the next boundary."""
        self._requests += (name,)

    def take_requests(self) -> tuple[SaveName, ...]:
        """Return the names that were requested, and forget the requests."""
        names, self._requests = self._requests, ()
        return names

    def requested_names(self, names: tuple[SaveName, ...]) -> list[str]:
        """Return the names for the checkpoints that were requested, each once."""
        unnamed = self.step_name()
        self.requested_checkpoints |= {given or unnamed for given in names if not callable(given)}
        return list(dict.fromkeys((given() if callable(given) else given) or unnamed for given in names))

    def step_name(self) -> str:
        """Return the default name of a checkpoint."""
        return f"step-{self.progress.steps_done:08d}"

    def report_saved(self, path: Path, step: int, **given: Any) -> None:
        """Record a durable checkpoint and fire on_checkpoint_save; `given` are more arguments of the saved step."""
        self.event_args.set_checkpoint(str(path))
        self.last_saved_step = step
        self.note("checkpoint_saved", step, path=str(path))
        if handler := self.hooks.slots.on_checkpoint_save:
            handler(GivenArgs(self.event_args, SimpleNamespace(step=step, **given)))

    @contextmanager
    def report_failed_save(self, step: int) -> Iterator[None]:
        """Count and record a save that fails in the block; `stops_without_checkpoint` decides whether the run ends."""
        try:
            yield
        except CheckpointError as error:
            if hook_notes(error):  # a hook's own failure, which its policy decides about
                raise
            self.run_status.failed_saves += 1
            self.note("checkpoint_failed", step, error=cut(str(error)))
            if self.stops_without_checkpoint:
                raise
            logger.warning("step %d has no checkpoint; training continues: %s", step, error)

    # ---- what a host does in its own way -----------------------------------------------------------------------------

    warn_above: float | None = 0.05
    """The share of the run's time above which a hook is reported as costly; None reports none."""

    optional_metrics: frozenset[str] = frozenset()
    """Metrics besides the loss for which a micro-batch may have no value; it is then NaN."""

    def make_window(self) -> Window:
        """Return the window in which this run accumulates the gradients of a step."""
        return Window(self.engine)

    def work_at_boundary(self) -> None:
        """Do what is due after this step."""
        self.step_log.flush_if_due()

    def has_more_batches(self) -> bool:
        """Return whether another micro-batch of this epoch follows, as far as the host can know."""
        return True

    def stop_reading(self) -> None:
        """Let loaders know that the run reads no more batches."""

    def next_boundaries(self) -> list[float]:
        """Return steps after which `work_at_boundary` must run."""
        return [self.step_log.flush_at]

    def is_finished(self) -> bool:
        """Return whether a stop was requested or the last step is done."""
        return bool(self.run_status.stops)
