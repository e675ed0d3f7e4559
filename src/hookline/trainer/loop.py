"""The training loop: the only one in the project. Events of batches, steps and epochs are fired here; those of the
run's ends, of a validation and of a checkpoint where these are made.

    run → epoch → micro-batch → step → boundary (validation, checkpoint, stop)

An event nobody hears is a None in `fire`: it costs its line one branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from time import time
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError
from hookline.events.dispatch import Fire, Fired
from hookline.trainer.forward import check_trainable, count_samples, count_tokens, loss_and_metrics
from hookline.trainer.loaders import EpochBatches, generators_of, restore_generators
from hookline.trainer.losses import LossBook
from hookline.trainer.moment import numbers_of
from hookline.trainer.parameters import unowned_parameters
from hookline.trainer.rng import restore_rng, rng_state, rng_untouched

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

FLUSH_STEPS, FLUSH_SECONDS = 50, 2.0


def steps_of_run(trainer: Trainer, run: AbstractContextManager[None]) -> Iterator[None]:
    """A whole run, bracketed by its beginning and end; yields after each micro-batch, to be stepped from outside."""
    with run:
        loop, moment, epochs = trainer.loop, trainer.moment, trainer.options.epochs
        while not loop.finished() and (epochs is None or moment.epoch + moment.epoch_over < epochs):
            batches = loop.begin_epoch(trainer.train_loaders)
            left = -1 if batches.length is None else batches.length - batches.given
            before = left
            for batch in batches:
                left -= 1
                loop.last_of_epoch = left == 0 or batches.last
                loop.micro_batch(batch)
                yield
                if left == 0 or (loop.over and loop.in_window == 0):
                    break
            else:
                if left == before and not batches.given:
                    batches.refuse_empty()
                left = 0  # the loaders ended by themselves
            if loop.in_window:
                loop.close_window()
            if left == 0 or batches.last:
                loop.end_epoch()


class Loop:
    """One run of a trainer.

    Python that runs once between two torch calls runs with cold caches: a call costs 1 to 2 µs there, not 0.1. So what
    every step does stands in two functions, `micro_batch` and `complete_step`; what happens now and then has its own.
    """

    def __init__(self, trainer: Trainer) -> None:
        options = trainer.options
        self.trainer, self.options = trainer, options
        self.hooks, self.tables = trainer.hooks, trainer.hooks.tables
        self.fire, self.moment = trainer.hooks.fire, trainer.moment
        self.engine, self.record = trainer.engine, trainer.record
        self.losses = LossBook()
        self.accumulate = options.accumulate
        self.weighted = options.loss_weight != "batches"
        # Most runs neither accumulate nor scale: for them a step is backward and optimizer.step, called directly.
        self.plain = self.accumulate == 1 and not self.weighted and self.engine.scaler is None
        self.counts_tuples = trainer.count_tokens is not count_tokens  # by default a tuple has no tokens
        self.schedules = bool(trainer.schedulers) and options.scheduler_interval == "step"
        period = options.validation_period if trainer.val_loaders else None
        self.validate_steps = int(period.amount) if period and period.unit == "steps" else 0
        self.validate_epochs = int(period.amount) if period and period.unit == "epochs" else 0
        self.unowned = unowned_parameters(trainer.model, trainer.params)
        self.moves = self.engine.moves
        self.in_window = 0  # micro-batches of the step under way; a plain step is one, and is not counted
        self.last_of_epoch = False
        self.bare_loss = False  # the step returns the loss itself, as a 0-dim tensor; known after the first batch
        self.unrecorded: list[tuple[int, int, str, Any, float]] = []
        self.flushed, self.flushed_step, self.flush_at = time(), self.moment.step, self.moment.step + FLUSH_STEPS
        self.over = False  # a stop was asked for, or the last step is done
        self.next_boundary = 0  # the next step after which something is due; see boundary()

    # ---- the run ---------------------------------------------------------------------------------------------------

    def begin_epoch(self, loaders: Mapping[str, Iterable[Any]]) -> EpochBatches:
        """The epoch's batches, and its event unless the epoch is entered half-way."""
        moment = self.moment
        batches = EpochBatches(loaders, self.options.fast_dev_run or None, self.accumulate > 1, self.enter_loader)
        if moment.epoch_rng is not None:
            with rng_untouched():
                restore_rng(moment.epoch_rng)  # so that a shuffling loader shuffles as it did
                restore_generators(loaders, moment.epoch_rng.get("generators", []))
                batches.skip(moment.batch_idx + 1)
        else:
            moment.enter_epoch()
            self.losses = LossBook()
            if heard := self.fire.on_epoch_start:
                heard(moment)
            moment.epoch_rng = {**rng_state(), "generators": [one.get_state() for one in generators_of(loaders)]}
        self.hooks.replan()
        return batches

    def enter_loader(self, index: int, name: str) -> None:
        """The next batch comes from this loader."""
        self.moment.dataloader_idx, self.moment.dataloader_name = index, name

    def close_window(self) -> None:
        """The loader gave fewer batches than it promised: step with what there is, for windows end with epochs."""
        self.last_of_epoch = True
        self.complete_step(in_batch=False)

    def end_epoch(self) -> None:
        """Validation if due, on_epoch_end, then the epoch's checkpoint, whose position is the next epoch's start."""
        moment, trainer = self.moment, self.trainer
        if self.options.scheduler_interval == "epoch":
            trainer.step_schedulers()
        if self.validate_epochs and (moment.epoch + 1) % self.validate_epochs == 0:
            trainer.step_plateau(trainer.validate())
        trainer.note_non_finite(self.losses.take_non_finite())
        self.record.log(moment.step, moment.epoch, "train/epoch_loss", self.losses.mean())
        if heard := self.fire.on_epoch_end:
            heard(moment)
        moment.epoch_over, moment.epoch_rng = True, None
        self.flush()
        trainer.save_if_asked()

    def all_done(self) -> bool:
        """Whether a new run would have nothing to do."""
        epochs, steps, moment = self.options.epochs, self.options.max_steps, self.moment
        by_epochs = epochs is not None and moment.epoch + moment.epoch_over >= epochs
        return moment.step > 0 and (by_epochs or (steps is not None and moment.steps_done >= steps))

    def finished(self) -> bool:
        """Whether a stop was asked for or the last step is done."""
        steps = self.options.max_steps
        return self.trainer.stop_reason is not None or (steps is not None and self.moment.step >= steps)

    # ---- one micro-batch -------------------------------------------------------------------------------------------

    def micro_batch(self, batch: Any) -> torch.Tensor:
        """Forward, backward and, at the end of its window, the optimizer step; returns the detached loss."""
        moment, fire, trainer = self.moment, self.fire, self.trainer
        if self.in_window == 0:
            moment.step += 1
        moment.batch_idx += 1
        if self.moves:
            batch = self.engine.place(batch)
        moment.batch = batch
        if self.counts_tuples or type(batch) is not tuple:
            moment.tokens_seen += trainer.count_tokens(batch)
        if self.tables.countdown > 0:  # until a schedule or a sample comes up
            self.tables.countdown -= 1
        else:
            self.hooks.decide_who_is_due(moment)
        if heard := fire.on_train_batch_start:
            heard(moment)
        result = trainer.compute(batch)  # the model's forward hooks fire in here
        loss: torch.Tensor = result if self.bare_loss and type(result) is torch.Tensor else self.find_loss(result)
        # The last batch's graph, emptied by its backward, is let go of here: freeing it earlier costs 4 µs more.
        moment.live_loss = loss
        moment.detached_loss = detached = loss.detach()
        if heard := fire.on_before_backward:
            heard(moment)
        if self.plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.backward_share(loss)
            self.in_window += 1
        if heard := fire.on_after_backward:
            heard(moment)
        self.losses.recent.append(detached)
        complete = self.plain or self.window_is_complete()
        if complete:
            self.complete_step()
        elif heard := fire.on_train_batch_end:
            self.end_batch(heard)
        return detached

    def end_batch(self, heard: Fired) -> None:
        """Somebody hears the end of the micro-batch, and may add to its metrics."""
        heard(self.moment)
        if self.moment.metrics_read:
            self.log_all(self.moment.added_metrics())

    def window_is_complete(self) -> bool:
        """Whether the optimizer steps now: at the end of a window, and at the end of an epoch."""
        return self.in_window >= self.accumulate or self.last_of_epoch

    def find_loss(self, result: Any) -> torch.Tensor:
        """The loss in what the step returned; the first one is looked at closely."""
        loss, self.moment.step_metrics = loss_and_metrics(result)
        if not self.bare_loss:
            check_trainable(loss)
        self.bare_loss = loss is result
        return loss

    def backward_share(self, loss: torch.Tensor) -> None:
        """Backward with the micro-batch's share of its window."""
        window, weight = self.moment.window, 1.0
        if self.in_window == 0:
            window.clear()
        if self.weighted:
            weight = float(self.trainer.weigh(self.moment.batch))
            loss = loss * weight
        elif self.accumulate > 1:
            loss = loss / self.accumulate
        self.engine.backward(loss)
        assert self.moment.detached_loss is not None
        window.append((self.moment.detached_loss, weight))

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def complete_step(self, in_batch: bool = True) -> None:
        """Gradients complete → update chain → optimizers → schedulers → gradients gone → metrics → boundary."""
        moment, fire, trainer = self.moment, self.fire, self.trainer
        optimizers, own_step = trainer.optimizers, trainer.optimizer_step
        if not self.plain:
            self.complete_gradients()
        if heard := fire.on_gradients_ready:
            heard(moment)
        if heard := fire.on_update:
            heard(moment)
            if (norm := moment.norm_before_clipping()) is not None:
                self.unrecorded.append((moment.step, moment.epoch, "train/grad_norm", norm, time()))
        if fire.on_step_end:
            moment.keep_gradients()
        moment.used_lr = None
        left_out: list[torch.optim.Optimizer] = []
        for index, optimizer in enumerate(optimizers):
            moment.optimizer_idx = index
            if heard := fire.on_before_optimizer_step:
                heard(moment)
            if self.plain and own_step is None and moment.skip_asked_at != moment.step:
                optimizer.step()
                stepped = True
            else:
                stepped = moment.skip_asked_at != moment.step and self.engine.step(optimizer, own_step)
            if not stepped:
                left_out.append(optimizer)
                self.skipped()
            elif heard := fire.on_after_optimizer_step:
                heard(moment)
        moment.optimizer_idx = 0
        if not self.plain:
            self.engine.end_step()
        if self.schedules or fire.on_step_end:
            moment.used_lr = optimizers[0].param_groups[0]["lr"]  # a scheduler or a hook may move it before on_step_end
        if self.schedules:
            self.unrecorded.append((moment.step, moment.epoch, "train/lr", moment.used_lr, time()))
            trainer.step_schedulers([one for one in optimizers if one not in left_out])
        if left_out:
            trainer.skipped_steps += 1
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for param in self.unowned:  # no optimizer clears these
            param.grad = None
        if in_batch and (heard := fire.on_train_batch_end):
            self.end_batch(heard)
        self.in_window = 0
        moment.steps_done = step = moment.step
        loss = moment.detached_loss if self.plain else moment.window_tensor()
        self.unrecorded.append((step, moment.epoch, "train/loss", loss, time()))
        if moment.step_metrics:
            self.log_all({f"train/{key}": value for key, value in moment.step_metrics.items()})
        if heard := fire.on_step_end:
            heard(moment)
            moment.release_gradients()
        if step >= self.next_boundary or trainer.wants_attention:
            self.boundary()

    def complete_gradients(self) -> None:
        """True values, and for a weighted or short window the mean over what was actually in it."""
        window = self.moment.window
        self.engine.unscale(self.trainer.optimizers)
        if self.weighted:
            scale = 1.0 / self.total_weight()
        elif len(window) != self.accumulate:
            scale = self.accumulate / len(window)
        else:
            return
        torch._foreach_mul_(self.moment.grads.tensors(), scale)

    def total_weight(self) -> float:
        """The weight of a whole window, which must be something."""
        total = sum(weight for _, weight in self.moment.window)
        if total:
            return total
        raise TrainingError(
            f"loss_weight={self.options.loss_weight!r}: nothing was counted in this step's batches, so it would train "
            "nothing; tokens are elements of 'input_ids' or of an integer tensor batch, else give count_tokens="
        )

    def skipped(self) -> None:
        """The optimizer did not step: say so, and why."""
        moment = self.moment
        asked = moment.skip_asked_at == moment.step
        moment.reason = moment.skip_reason if asked else "non-finite gradients under GradScaler"
        self.record.event("step_skipped", moment.step, reason=moment.reason, optimizer_idx=moment.optimizer_idx)
        if heard := self.fire.on_step_skipped:
            heard(moment)
        moment.reason = None

    def boundary(self) -> None:
        """What happens after a step now and then: the record written, validation, a checkpoint, the end."""
        trainer, step = self.trainer, self.moment.step
        trainer.wants_attention = False
        if step >= self.flush_at:
            self.flush()
        if self.validate_steps and step % self.validate_steps == 0:
            trainer.step_plateau(trainer.validate())
        if trainer.save_asked and not self.last_of_epoch:  # else the epoch's end saves, as the next one's start
            trainer.save_if_asked()
        self.over = self.finished()
        marks = [self.flush_at, self.options.max_steps or self.flush_at]
        if self.validate_steps:
            marks.append(step - step % self.validate_steps + self.validate_steps)
        self.next_boundary = min(marks)

    def flush(self) -> None:
        """Write what has gathered, nothing of which waits for a device; the next time comes in about two seconds."""
        self.record.extend(self.unrecorded)
        self.unrecorded.clear()
        self.record.flush()
        self.losses.fold()
        now, step = time(), self.moment.step
        rate = (step - self.flushed_step) / max(now - self.flushed, 1e-6)
        self.flushed, self.flushed_step = now, step
        self.flush_at = step + max(1, min(FLUSH_STEPS, int(rate * FLUSH_SECONDS)))

    def log_all(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.trainer.log(name, value)

    # ---- validation ------------------------------------------------------------------------------------------------

    def validation_batches(
        self, loaders: Mapping[str, Iterable[Any]], limit: int | None, fire: Fire
    ) -> Iterator[tuple[str, int, Any]]:
        """Forward passes over the validation loaders; yields (loader, samples, result) for each batch."""
        moment = self.moment
        for index, (name, loader) in enumerate(loaders.items()):
            for moment.batch_idx, batch in enumerate(loader):
                if limit is not None and moment.batch_idx >= limit:
                    break
                moment.dataloader_idx, moment.dataloader_name = index, name
                moment.batch = batch = self.engine.place(batch)
                if heard := fire.on_validation_batch_start:
                    heard(moment)
                loss, moment.step_metrics = loss_and_metrics(self.trainer.compute(batch))
                moment.detached_loss = loss.detach()
                if heard := fire.on_validation_batch_end:
                    heard(moment)
                added = numbers_of(moment.added_metrics()) if moment.metrics_read else {}
                yield name, count_samples(batch), {"loss": moment.detached_loss, **moment.step_metrics, **added}
