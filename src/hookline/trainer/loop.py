"""The training loop: the only one in the project.

    run → epoch → micro-batch → step → boundary (validation, checkpoint, stop)

Events of batches, steps and epochs fire here; those of the run's start and end, of a validation and of a checkpoint
fire in run.py, validation.py and checkpointing.py. An event without listeners is None in `slots`: it costs one branch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from math import isfinite
from time import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.core.costs import CostMonitor
from hookline.core.dispatch import Dispatch
from hookline.errors import TrainingError
from hookline.trainer.data.epoch_batches import MixedBatches, SequentialBatches, epoch_batches
from hookline.trainer.data.loader_state import set_epochs
from hookline.trainer.data.loaders import TrainLoaders, why_empty
from hookline.trainer.data.rank_checks import check_all_read, check_first_batch, check_lengths
from hookline.trainer.epoch_stats import EpochStats, detached_copy
from hookline.trainer.event_args import weighted_mean
from hookline.trainer.metrics import RankMean
from hookline.trainer.outputs import OUTPUT_AND_TARGET, OutputReader, find_target
from hookline.trainer.parameters import group_sizes, unowned_parameters
from hookline.trainer.step_fn import LOSS_SOURCES, count_tokens, loss_and_metrics
from hookline.trainer.window import Window

if TYPE_CHECKING:
    from hookline.trainer.signals import SignalHandler
    from hookline.trainer.trainer import Trainer

FLUSH_STEPS, FLUSH_SECONDS = 47, 2.0  # a prime: it seldom falls on the steps at which hooks are due
_NONE_SKIPPED: tuple[torch.optim.Optimizer, ...] = ()
LEADS_TO_NORM, LEADS_TO_LR = {"grad_norm", "ctx"}, {"lr", "ctx"}  # event arguments


def steps_of_run(trainer: Trainer, run: AbstractContextManager[SignalHandler]) -> Generator[Tensor, None, None]:
    """Run a whole run between its start and end, and yield the loss after each micro-batch."""
    with run as signals:
        loop, progress, epochs = trainer.loop, trainer.progress, trainer.options.epochs
        while not loop.finished() and (epochs is None or progress.epoch + progress.epoch_over < epochs):
            epoch = [loop.begin_epoch(trainer.train_loaders)]
            signals.hold_worker_errors()
            try:
                all_read = yield from micro_batches(loop, epoch)
            finally:
                loop.window.leave()
            loop.check_batches(all_read)
            if all_read or loop.is_last_of_epoch:
                loop.end_epoch()


def micro_batches(loop: Loop, epoch: list[Iterable[Any]]) -> Generator[Tensor, None, bool]:
    """Run forward, backward and, when a window is complete, the optimizer step; yield each micro-batch's loss.

    Python that runs once between two torch calls runs with cold caches: a call costs 1 to 2 µs there instead of 0.1,
    and an attribute more than a local variable. So everything that every step does is in this function, in the order
    in which it happens; what happens now and then is a method of the loop.

    Args:
        loop: The run's loop.
        epoch: A list with the batches, which are removed from it.

    Returns:
        Whether all batches were read.
    """
    trainer, progress, args, slots, table = loop.trainer, loop.progress, loop.args, loop.slots, loop.table
    scheduler = loop.hooks.scheduler
    optimizers, plain, steps_directly, more_to_do = trainer.optimizers, loop.plain, loop.steps_directly, loop.more_to_do
    agreement, window = loop.agreement, loop.window
    recent, unrecorded, unowned, several = loop.stats.recent, loop.unrecorded, loop.unowned, len(optimizers) > 1
    measures = bool(trainer.training_metrics)

    # No variable may hold the batches: if the run fails, the traceback would keep them, and the workers of a DataLoader
    # with them, beyond on_train_end.
    for batch in epoch.pop():
        # ---- the position of the run, and the hooks that are due
        loop.reading = False
        if plain or window.count == 0:
            progress.step += 1
        progress.batch_idx += 1
        args.used_lr = None
        if not plain:
            window.begin(batch)
        if loop.moves:
            batch = loop.engine.place(batch)
        args.batch = batch
        if loop.counts_tuples or type(batch) is not tuple:
            progress.tokens_seen += trainer.count_tokens(batch)
        if scheduler.countdown > 0:  # until a schedule may be due
            scheduler.countdown -= 1
        else:
            loop.hooks.decide_due_hooks(progress)
        if handler := slots.on_train_batch_start:
            handler(args)

        # ---- forward and backward
        named = table.named_at("on_train_batch_end")
        reads_output = measures or not OUTPUT_AND_TARGET.isdisjoint(named)
        # The model's forward hooks fire in here.
        result = loop.compute_and_read(batch) if reads_output else trainer.compute(batch)
        loss = result if loop.bare_loss and type(result) is Tensor else loop.find_loss(result)
        del result  # the rest of it (logits, for example) need not live until the next batch
        # This releases the last batch's graph, which its backward pass emptied; releasing it earlier costs 4 µs more.
        args.live_loss = loss
        if handler := slots.on_before_backward:
            handler(args)
        if plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            window.backward(loss)
        if handler := slots.on_after_backward:
            handler(args)
        if not plain and window.count < window.size and loop.has_more_batches():
            detached = loss.data
            if window.weight:
                recent.append(detached)
            if handler := slots.on_train_batch_end:
                named = table.named_at("on_train_batch_end")
                handler(args)
                if "metrics" in named:
                    loop.log_added_metrics()
            if reads_output:
                args.release_output()
            loop.reading = True
            yield detached
            continue

        # ---- the gradients are complete: update chain, optimizers, schedulers; then the gradients are cleared
        step, skipped, clear_and_keep = progress.step, _NONE_SKIPPED, False
        if not plain:
            window.complete()
        if handler := slots.on_gradients_ready:
            handler(args)
        if agreement.skips_together:
            agreement.decide_skip()
        if handler := slots.on_update:
            loop.update(handler)
        reads_norm = not LEADS_TO_NORM.isdisjoint(table.named_at("on_step_end"))
        if reads_norm:
            clear_and_keep = loop.keep_gradients()
        for optimizer in optimizers:
            if several:
                args.optimizer_idx = optimizers.index(optimizer)
            if handler := slots.on_before_optimizer_step:
                handler(args)
            if steps_directly and args.skip_requested_at != step:
                optimizer.step()
            elif not loop.step_or_skip(optimizer):
                skipped = (*skipped, optimizer)
                continue
            progress.steps_done, loop.stepped = step, optimizer  # from here on the weights are those of this step
            if handler := slots.on_after_optimizer_step:
                if more_to_do or not LEADS_TO_LR.isdisjoint(table.named_at("on_step_end")):
                    loop.note_rate()
                handler(args)
        if more_to_do or skipped:
            loop.after_optimizers(skipped)
        elif not LEADS_TO_LR.isdisjoint(table.named_at("on_step_end")):
            loop.note_rate()
        if clear_and_keep:
            args.take_gradients()
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        for param in unowned:  # no optimizer clears these
            param.grad = None
        detached = loss.data  # equal to detach(), and a microsecond faster
        if plain or window.weight:
            recent.append(detached)
        if handler := slots.on_train_batch_end:
            named = table.named_at("on_train_batch_end")
            handler(args)
            if "metrics" in named:
                loop.log_added_metrics()
        if reads_output:
            args.release_output()

        # ---- the step is over: its metrics, and now and then a boundary
        window.count = 0
        progress.steps_done, loop.stepped = step, None
        now = time()
        if plain:
            number: Tensor | float = detached
            if detached.is_cpu:  # reading it waits for nothing, and sharing the hooks' read would cost more than item()
                number = detached.item()
                if not isfinite(number):
                    loop.note_bad_loss()
            unrecorded.append((step, progress.epoch, "train/loss", number, now))
        if args.step_metrics or not plain:
            loop.log_step_metrics()
        if handler := slots.on_step_end:
            reads_norm |= not LEADS_TO_NORM.isdisjoint(table.named_at("on_step_end"))
            handler(args)
            if reads_norm:
                args.release_gradients()
        if step >= loop.next_boundary or now >= loop.flush_by:
            loop.boundary()
        loop.reading = True
        yield detached
        if loop.over:
            return False
    return True


class Loop:
    """One run of the loop: settings read from the options once, and what happens less often than every step."""

    def __init__(self, trainer: Trainer) -> None:
        options = trainer.options
        self.trainer, self.options = trainer, options
        self.hooks, self.slots, self.table = trainer.hooks, trainer.hooks.slots, trainer.hooks.dispatch_table
        self.progress, self.args, self.status = trainer.progress, trainer.event_args, trainer.run_status
        self.engine, self.record, self.agreement = trainer.engine, trainer.record, trainer.agreement
        self.record.reduce_as({"train/lr": None, "train/grad_norm": None})  # the same on all ranks
        self.stats = EpochStats([f"train/{name}" for name in trainer.training_metrics.optional])
        self.ranks = trainer.ranks
        # Most runs neither accumulate nor scale: for them a step is backward() and optimizer.step(), called directly.
        self.plain = options.accumulate == 1 and options.loss_weight == "batches" and self.engine.scaler is None
        self.moves = self.engine.moves
        self.counts_tuples = trainer.count_tokens is not count_tokens  # the default counts no tokens in a tuple
        self.schedules = bool(trainer.schedulers) and options.scheduler_interval == "step"
        period = options.validation_period if trainer.val_loaders else None
        self.validate_steps = int(period.amount) if period and period.unit == "steps" else 0
        self.validate_epochs = int(period.amount) if period and period.unit == "epochs" else 0
        self.by_loader = len(trainer.train_loaders) > 1  # losses are recorded for each loader
        self.more_to_do = not self.plain or self.schedules or len(trainer.optimizers) > 1 or self.by_loader
        self.steps_directly = self.plain and trainer.optimizer_step is None and not trainer.ranks.act_together
        # torch's own optimizers neither clear nor replace gradients in step(), and clear them in zero_grad().
        self._plain_zero_grad = trainer.optimizer_step is None and all(
            type(one).__module__.startswith("torch.optim.") and "zero_grad" not in vars(one)
            for one in trainer.optimizers
        )
        self.unowned = unowned_parameters(trainer.model, trainer.params)
        self._group_sizes = group_sizes(trainer.optimizers)
        self.batches: SequentialBatches | MixedBatches | None = None  # of the current epoch; None for manual steps
        self.window = Window(self)
        self.stepped: torch.optim.Optimizer | None = None  # the last that stepped in this step; None once it is over
        self._settled_at = 0  # the last step of which `after_optimizers` ran
        self.bare_loss = False  # whether the step returns the loss as a 0-dim tensor; known after the first batch
        self.unrecorded: list[tuple[int, int, str, Any, float]] = []
        # The record is written after this step, or after the first that ends at this time.
        self._flush_at, self.flush_by = self.progress.step + FLUSH_STEPS, time() + FLUSH_SECONDS
        self._costs = CostMonitor(trainer, trainer.options.warn_above)
        self.next_boundary = 0  # the next step after which `boundary` runs; 0: after this step
        self._compared = False  # whether the first batches of the ranks have been compared
        self.over = False  # a stop was requested, or the last step is done
        self.reading = False  # whether the next batch is being read: an error is then the loader's
        self._outputs = OutputReader()
        self._had_bad_loss = False  # whether a loss that was read was not finite

    # ---- epochs ----------------------------------------------------------------------------------------------------

    def begin_epoch(self, loaders: TrainLoaders) -> Iterable[Any]:
        """Return the epoch's batches; fires on_epoch_start unless the epoch is resumed in its middle."""
        progress = self.progress
        epoch = progress.epoch + progress.epoch_over
        if self.ranks.act_together:
            check_lengths(self.ranks, loaders, self.options)
            set_epochs(loaders, epoch)
        batches = self.batches = self.batches_of_epoch(epoch)
        if progress.position is not None:
            self.reading = True
            iterator = batches.resume(progress.position, progress.batch_idx + 1)
        else:
            progress.begin_epoch()
            self.stats = self.stats.next_epoch(progress.step)
            if handler := self.slots.on_epoch_start:
                handler(self.args)
            self.reading = True  # a DataLoader may ask workers that live longer than an epoch
            iterator = batches.start()
            progress.position = batches.start_position  # states are read when a checkpoint needs them
        self.hooks.replan()
        if self.engine.averages and self.ranks.act_together and not self._compared:
            self._compared, iterator = True, check_first_batch(self.ranks, iterator, loaders)
        # Cut off where the end is certain: asking for one more batch would move the random streams of some loaders.
        given = iterator if batches.length is None else islice(iterator, batches.length - batches.offset)
        return self.agreement.times.read(given) if self.ranks.act_together else given

    def batches_of_epoch(self, epoch: int) -> SequentialBatches | MixedBatches:
        """Return the batches of an epoch, to be started or resumed."""
        loaders, enter = self.trainer.train_loaders, self.progress.enter_loader
        return epoch_batches(loaders, self.window.size > 1, enter, epoch, self.ranks.world_size)

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether this micro-batch is known to be the epoch's last."""
        batches = self.batches
        return batches is not None and (batches.last or self.progress.batch_idx + 1 == batches.length)

    def has_more_batches(self) -> bool:
        """Return whether a batch of this epoch follows; the next one is read if that is the only way to know."""
        if self.batches is None:
            return True
        self.reading = True
        has_more = self.batches.has_more(self.progress.batch_idx + 1)
        self.reading = False
        return has_more

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and is not over."""
        return self.stepped is not None or self.progress.step != self.progress.steps_done

    def check_batches(self, all_read: bool) -> None:
        """Raise TrainingError if the loaders gave no batch, ended in the middle of a window, or nothing counted."""
        batches, read, self.reading = self.batches, self.progress.batch_idx + 1, False
        if batches is not None and not read:
            raise TrainingError(f"the training loader gave no batches{why_empty(self.trainer.train_loaders)}")
        if self.window.count and batches is not None and all_read:
            raise TrainingError(
                f"the training loader promised {batches.length} batches and gave {read}, which leaves "
                f"{self.window.count} micro-batches of a window of {self.window.size} without their step"
            )
        if self.ranks.act_together and all_read and isinstance(batches, SequentialBatches):
            check_all_read(self.ranks, read, batches.expected)
        self.window.check_trained()

    def end_epoch(self) -> None:
        """Validate if due, fire on_epoch_end, then save; the position in that checkpoint is the next epoch's start.

        Schedulers step after the validation: a run that resumes after a failed one repeats the end of the epoch. After
        a hook that fails in on_epoch_end the epoch is over: schedulers have stepped, and other hooks were called.
        """
        trainer, is_due = self.trainer, self.validate_epochs and (self.progress.epoch + 1) % self.validate_epochs == 0
        metrics = None
        if is_due:
            metrics = trainer.validate()  # which shares the statistics of the ranks, too
        else:
            self.share_stats()
        if self.options.scheduler_interval == "epoch":
            trainer.step_schedulers()
        if metrics is not None:
            trainer.step_plateau_schedulers(metrics)
        self.record_non_finite_losses(self.stats.take_non_finite())
        for name, mean in self.stats.means().items():
            trainer.log(name, mean, reduce=None)
        try:
            if handler := self.slots.on_epoch_end:
                handler(self.args)
        finally:
            self.progress.end_epoch()
        self.agreement.settle()
        self.agreement.times.share()
        self.flush(wait=self.ranks.act_together)  # ranks exchange what they have recorded
        trainer.checkpointer.save_requested()

    def share_stats(self) -> None:
        """Make means, latest values and the step's loss those of all ranks, where hooks decide by them.

        That is before a validation and at the end of an epoch: all ranks are there.
        """
        if self.trainer.ranks.act_together:
            self.stats.share(self.trainer.ranks, self.progress.step, self.args.window_loss, self.window)
            self.args.tokens_seen  # noqa: B018 - kept; a rank that has no validation batch would not ask for it

    def count_once(self, own: int) -> int:
        """Return what this rank adds to a count over all ranks: nothing if rank 0 has the same batches."""
        return own if self.engine.averages or self.ranks.rank == 0 else 0

    def record_non_finite_losses(self, own: int) -> None:
        """Record how many losses were NaN or infinite, given how many this rank has; waits for all ranks."""
        if count := self.ranks.total([self.count_once(own)])[0]:
            self.status.count("non_finite_losses", count)
            self.record.event("non_finite_losses", self.progress.step, epoch=self.progress.epoch, count=count)

    def position(self) -> dict[str, Any] | None:
        """Return where the loaders are inside an epoch, None between two epochs."""
        position = self.progress.position
        return position if self.batches is None or position is None else self.batches.position

    def restore(self, losses: Mapping[str, Any]) -> None:
        """Drop the current batches and restore the losses: the run was restored to another position."""
        self.batches = None
        self.stats.load_state_dict(losses)

    def finished(self) -> bool:
        """Return whether a stop was requested or the last step is done."""
        steps = self.options.max_steps
        return self.status.stop_reason is not None or (steps is not None and self.progress.step >= steps)

    # ---- one micro-batch -------------------------------------------------------------------------------------------

    def manual_step(self, batch: Any) -> Tensor:
        """Run one micro-batch outside of an epoch and return its detached loss."""
        self.batches = None
        return next(micro_batches(self, [[batch]]))

    def step_changed(self) -> None:
        """Look for the loss in the next result again: the step function was replaced."""
        self.bare_loss = False

    def log_added_metrics(self) -> None:
        """Record what hooks added to the metrics of a micro-batch."""
        for name, value in self.args.added_metrics().items():
            self.trainer.log(name, value)

    def compute_and_read(self, batch: Any) -> Any:
        """Run the forward pass of a batch, set its output and target for hooks that name them, and measure metrics.

        The metrics of the batch are returned beside the loss, as if `step_fn` had returned them.
        """
        trainer = self.trainer
        with self._outputs.attached(trainer.called_model):
            result = trainer.compute(batch)
        output = self._outputs.take(result)
        named = self.table.named_at("on_train_batch_end")
        if not OUTPUT_AND_TARGET.isdisjoint(named):  # its memory is then in use during the backward pass
            self.args.set_output(output, find_target(result, batch))
        if not trainer.training_metrics:
            return result
        loss, metrics = loss_and_metrics(result)
        return {"loss": loss, **metrics, **trainer.training_metrics.measure_batch(batch, result, output)}

    def find_loss(self, result: Any) -> Tensor:
        """Return the loss in the result of a step; the first one is checked."""
        loss, metrics = loss_and_metrics(result)
        found = {key: detached_copy(value) for key, value in metrics.items()}
        for key, value in found.items() if self.window.weight else ():
            self.stats.add(f"train/{key}", value)
        self.args.step_metrics = found
        if not self.bare_loss and not loss.requires_grad:
            raise TrainingError(
                "the loss does not require grad, so nothing would be trained: was it detached, made under no_grad, or "
                f"are all parameters frozen? ({LOSS_SOURCES})"
            )
        self.bare_loss = loss is result
        return loss

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def update(self, handler: Dispatch) -> None:
        """Run the update chain unless the step is skipped; if it clips, record the norm before clipping."""
        args, progress = self.args, self.progress
        if args.skip_requested_at == progress.step:
            return
        if self.plain:
            self.find_new_parameters()
            handler = self.slots.on_update or handler  # which may be another one now
        handler(args)
        if (norm := args.norm_before_clipping()) is not None:
            self.unrecorded.append((progress.step, progress.epoch, "train/grad_norm", norm, time()))

    def find_new_parameters(self) -> None:
        """Add the parameters of groups that an optimizer got since the last step to the chain and the norm."""
        sizes = group_sizes(self.trainer.optimizers)
        if sizes != self._group_sizes:
            self.trainer.find_parameters()
            self.unowned[:] = unowned_parameters(self.trainer.model, self.trainer.params)
            self._group_sizes = sizes

    def keep_gradients(self) -> bool:
        """Keep the step's gradients, because a hook may read their norm in on_step_end.

        Collecting the gradients of 600 parameters takes 40 to 70 µs, which a hook that names `ctx` for its step alone
        should not cost. So if nothing can clear or replace gradients before zero_grad, the walk that clears them
        collects them, too: that is not slower than zero_grad.

        Returns:
            Whether the gradients are to be kept when they are cleared, and not now.
        """
        self.find_new_parameters()
        slots = self.slots
        between = slots.on_before_optimizer_step or slots.on_after_optimizer_step or slots.on_step_skipped
        if self._plain_zero_grad and not between:
            return True
        self.args.norm_of_step()
        return False

    def step_or_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, by the user's function if there is one, unless the step is skipped; return whether it stepped."""
        args, progress = self.args, self.progress
        if self.ranks.act_together:
            self.agreement.times.end_backward()
            if self.agreement.skips_late:
                self.agreement.decide_skip()
        if args.skip_requested_at != progress.step:
            self.engine.step(optimizer, self.trainer.optimizer_step)
            return True
        args.reason = args.skip_reason
        self.record.event("step_skipped", progress.step, reason=args.reason, optimizer_idx=args.optimizer_idx)
        if handler := self.slots.on_step_skipped:
            handler(args)
        args.reason = None
        return False

    def after_optimizers(self, skipped: Sequence[torch.optim.Optimizer]) -> None:
        """Update the loss scale, record losses by loader, and step the schedulers of the optimizers that stepped."""
        progress, trainer = self.progress, self.trainer
        self.args.optimizer_idx, self._settled_at = 0, progress.step
        if skipped:
            self.status.count("skipped_steps")
        self.engine.end_step()
        if self.by_loader and self.batches is not None:
            # `train/<loader>/loss` is the step's loss for each loader that had micro-batches in it.
            for loader, parts in self.args.parts_by_loader().items():
                name, loss = f"train/{loader}/loss", weighted_mean(parts)
                self.unrecorded.append((progress.step, progress.epoch, name, loss, time()))
                self.stats.set_latest(progress.step, name, loss)
                for part in parts:
                    self.stats.add(name, part.loss)
        self.note_rate()
        if self.schedules:
            self.unrecorded.append((progress.step, progress.epoch, "train/lr", self.args.used_lr, time()))
            trainer.step_schedulers([one for one in trainer.optimizers if one not in skipped])

    def settle_failed_step(self) -> None:
        """Update loss scale and schedulers if a step failed after an optimizer stepped: they belong to its weights."""
        if self.stepped is not None and self.more_to_do and self._settled_at != self.progress.step:
            optimizers = self.trainer.optimizers
            self.after_optimizers(optimizers[optimizers.index(self.stepped) + 1 :])

    def note_rate(self) -> None:
        """Store the rate that this step used: a hook or a scheduler may change it before on_step_end."""
        if self.args.used_lr is None:
            self.args.used_lr = self.trainer.lr

    def log_step_metrics(self) -> None:
        """Record the loss of a window, and what step_fn returned beside the loss."""
        if not self.plain:
            if not self.window.has_weight:  # the mean of nothing may be NaN
                return
            progress, loss = self.progress, self.window.share_of(self.args.window_tensor())
            number = loss.item() if isinstance(loss, Tensor) and loss.is_cpu else loss
            self.unrecorded.append((progress.step, progress.epoch, "train/loss", number, time()))
            if isinstance(number, float) and not isfinite(number):
                self.note_bad_loss()
        trainer, step, epoch = self.trainer, self.progress.step, self.progress.epoch
        for key, value in self.args.step_means().items():
            name = f"train/{key}"
            if self.ranks.act_together and key in trainer.training_metrics.optional:
                trainer.share(RankMean(name, step, epoch, value, self.window.share))
            else:
                trainer.log(name, self.window.share_of(value))
            self.stats.set_latest(step, name, value)

    # ---- boundaries ------------------------------------------------------------------------------------------------

    def request_boundary(self) -> None:
        """Run `boundary` after the current step. A signal handler calls this, so it only assigns."""
        self.next_boundary = 0

    def note_bad_loss(self) -> None:
        """Write the record after the current step if its loss is the first that is not finite: that announces it."""
        if not self._had_bad_loss:
            self._had_bad_loss, self._flush_at, self.next_boundary = True, 0, 0

    def boundary(self) -> None:
        """Do what is due after this step: write the record, validate, save, end the run."""
        trainer, step = self.trainer, self.progress.step
        self.agreement.times.end_step()
        self.args.release_gradients()  # on_step_end released them unless the hook that asked for them has gone
        trainer.ranks.check()
        trainer.checkpointer.poll()
        if step >= self._flush_at or time() >= self.flush_by:
            self.flush()
        if self.validate_steps and step % self.validate_steps == 0:
            trainer.step_plateau_schedulers(trainer.validate())
        self.agreement.after_step(step)
        if not self.is_last_of_epoch:  # else the end of the epoch saves, as the start of the next one
            trainer.checkpointer.save_requested()
        marks = [self._flush_at, self.options.max_steps or self._flush_at]
        if self.validate_steps:
            marks.append(step - step % self.validate_steps + self.validate_steps)
        if trainer.saving or self.ranks.act_together:  # poll until the checkpoint is durable
            marks.append(step + 1)
        self.next_boundary = min(marks)
        self.over = self.finished()  # last: a signal that arrives in between has set next_boundary back
        # A run that was asked to stop reads no more: after a signal its loader's workers may be gone.
        if self.over and self.batches is not None and self.status.stop_reason is None:
            self.reading = True
            self.batches.stop(self.progress.batch_idx + 1)

    def flush(self, wait: bool = False) -> None:
        """Write what was recorded, without waiting for a device unless asked to."""
        self.write_unrecorded()
        self.record.flush(wait=wait)
        self.stats.fold_chunks()
        self._costs.check()
        self._flush_at, self.flush_by = self.progress.step + FLUSH_STEPS, time() + FLUSH_SECONDS

    def write_unrecorded(self) -> None:
        """Pass the metrics of the last steps to the record."""
        self.record.extend(self.unrecorded)
        self.unrecorded.clear()
