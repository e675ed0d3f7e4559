"""The training loop: the only one in the project, and the only place where a trainer's events are fired.

    run → epoch → micro-batch → step → boundary (validation, checkpoint, stop)

An event nobody hears is a None in `fire`: it costs its line one branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError
from hookline.trainer.forward import check_trainable, count_samples, loss_and_metrics
from hookline.trainer.loaders import EpochBatches
from hookline.trainer.losses import LossBook

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

FLUSH_STEPS, FLUSH_SECONDS = 50, 2.0


class Loop:
    """One run of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.options = trainer.options
        self.hooks, self.fire, self.moment = trainer.hooks, trainer.hooks.fire, trainer.moment
        self.engine, self.record = trainer.engine, trainer.record
        self.losses = LossBook()
        self.weighted = self.options.loss_weight != "batches"
        self.in_window = 0
        self.last_of_epoch = False
        self.checked = False  # the first loss has been looked at
        self._flushed = monotonic()
        self._until_flush = FLUSH_STEPS

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self, loaders: Mapping[str, Iterable[Any]]) -> Iterator[None]:
        """Every epoch until the run is over; yields after each micro-batch, so that it can be stepped from outside."""
        moment, fire, epochs = self.moment, self.fire, self.options.epochs
        while not self.finished() and (epochs is None or moment.epoch < epochs):
            entered_half_way = moment.batch_idx >= 0
            batches = self.batches_of_epoch(loaders)
            if not entered_half_way:
                self.losses = LossBook()
                if heard := fire.on_epoch_start:
                    heard(moment)
            self.hooks.replan()
            yield from self.epoch(batches)
            if self.finished() and not self.last_of_epoch:
                return  # stopped inside the epoch: it has no end
            self.end_epoch()

    def epoch(self, batches: EpochBatches) -> Iterator[None]:
        """The micro-batches of one epoch."""
        seen = False
        for index, name, batch in batches:
            seen, self.last_of_epoch = True, batches.last
            self.micro_batch(index, name, batch)
            yield
            if self.in_window == 0 and self.finished():
                return
        if not seen:
            raise TrainingError("the training loader gave no batches: check the dataset and the sampler")
        self.last_of_epoch = True

    def end_epoch(self) -> None:
        """Validation if due, on_epoch_end, then the epoch's checkpoint, whose position is the next epoch's start."""
        moment, trainer = self.moment, self.trainer
        if self.options.scheduler_interval == "epoch":
            trainer.step_schedulers()
        if self._validation_due("epochs", moment.epoch + 1):
            trainer.validate()
        trainer.note_non_finite(self.losses.non_finite())
        self.record.log(moment.step, moment.epoch, "train/epoch_loss", self.losses.mean())
        if heard := self.fire.on_epoch_end:
            heard(moment)
        moment.epoch += 1
        moment.batch_idx = -1
        self.record.flush()
        trainer.save_if_asked()

    def finished(self) -> bool:
        """Whether a stop was asked for or the last step is done."""
        steps = self.options.max_steps
        return self.trainer.stop_reason is not None or (steps is not None and self.moment.step >= steps)

    def batches_of_epoch(self, loaders: Mapping[str, Iterable[Any]]) -> EpochBatches:
        return EpochBatches(loaders, self.options.fast_dev_run or None, look_ahead=self.options.accumulate > 1)

    # ---- one micro-batch -------------------------------------------------------------------------------------------

    def micro_batch(self, index: int, name: str, batch: Any) -> torch.Tensor:
        """Forward, backward and, at the end of its window, the optimizer step; returns the detached loss."""
        moment, fire, trainer = self.moment, self.fire, self.trainer
        if self.in_window == 0:
            moment.begin_step()
        moment.begin_batch(index, name, self.engine.place(batch))
        moment.tokens_seen += trainer.count_tokens(moment.batch)
        self.hooks.begin_batch(moment)
        if heard := fire.on_train_batch_start:
            heard(moment)
        loss = self.forward(moment.batch)
        if heard := fire.on_before_backward:
            heard(moment)
        self.backward(loss)
        if heard := fire.on_after_backward:
            heard(moment)
        moment.live_loss = None  # let go of the graph
        self.in_window += 1
        complete = self.in_window >= self.options.accumulate or self.last_of_epoch
        if complete:
            self.optimizer_step()
        if heard := fire.on_train_batch_end:
            heard(moment)
            self.log_all(moment.added_metrics())
        detached = moment.detached_loss
        assert detached is not None
        if complete:
            self.in_window = 0
            self.end_step()
        return detached

    def forward(self, batch: Any) -> torch.Tensor:
        """The user's step; the model's forward hooks fire inside it."""
        moment = self.moment
        result = self.trainer.forward(batch)
        if type(result) is torch.Tensor and result.dim() == 0:
            loss = result
        else:
            loss, moment.step_metrics = loss_and_metrics(result)
        if not self.checked:
            check_trainable(loss)
            self.checked = True
        moment.set_loss(loss)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Backward with the micro-batch's share of its window, and the loss noted on its device."""
        moment, accumulate = self.moment, self.options.accumulate
        weight = 1.0
        if self.weighted:
            weight = float(self.trainer.weigh(moment.batch))
            loss = loss * weight
        elif accumulate > 1:
            loss = loss / accumulate
        self.engine.backward(loss)
        assert moment.detached_loss is not None
        moment.window.append((moment.detached_loss, weight))
        self.losses.add(moment.detached_loss)

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Gradients complete → update chain → optimizers → schedulers → gradients gone."""
        moment, fire, trainer = self.moment, self.fire, self.trainer
        self.complete_gradients()
        if heard := fire.on_gradients_ready:
            heard(moment)
        if heard := fire.on_update:
            heard(moment)
        if fire.on_step_end:
            moment.keep_gradients()
        stepped = False
        optimizers = trainer.optimizers
        moment.lr = optimizers[0].param_groups[0]["lr"]
        for moment.optimizer_idx, optimizer in enumerate(optimizers):
            if heard := fire.on_before_optimizer_step:
                heard(moment)
            if moment.skip_reason is None and self.engine.step(optimizer, trainer.optimizer_step):
                stepped = True
                if heard := fire.on_after_optimizer_step:
                    heard(moment)
            else:
                self.skipped()
        moment.optimizer_idx = 0
        self.engine.end_step()
        if stepped and self.options.scheduler_interval == "step":
            trainer.step_schedulers()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def complete_gradients(self) -> None:
        """True values, and for a weighted or short window the mean over what was actually in it."""
        self.engine.unscale(self.trainer.optimizers)
        window, accumulate = self.moment.window, self.options.accumulate
        if self.weighted:
            scale = 1.0 / (sum(weight for _, weight in window) or 1.0)
        elif len(window) != accumulate:
            scale = accumulate / len(window)
        else:
            return
        torch._foreach_mul_(self.moment.grads.tensors(), scale)

    def skipped(self) -> None:
        """The optimizer did not step: say so, and why."""
        moment = self.moment
        moment.reason = moment.skip_reason or "non-finite gradients under GradScaler"
        self.record.event("step_skipped", moment.step, reason=moment.reason, optimizer_idx=moment.optimizer_idx)
        self.trainer.skipped_steps += 1
        if heard := self.fire.on_step_skipped:
            heard(moment)
        moment.reason = None

    def end_step(self) -> None:
        """Metrics recorded, on_step_end, then what happens at step boundaries: validation, checkpoint."""
        moment, trainer = self.moment, self.trainer
        self.record.log(moment.step, moment.epoch, "train/loss", moment.window_tensor())
        if moment.step_metrics:
            self.log_all({f"train/{name}": value for name, value in moment.step_metrics.items()})
        if heard := self.fire.on_step_end:
            heard(moment)
        self._until_flush -= 1
        if self._until_flush <= 0 or monotonic() - self._flushed > FLUSH_SECONDS:
            self.record.flush()
            self._until_flush, self._flushed = FLUSH_STEPS, monotonic()
        if self._validation_due("steps", moment.step):
            trainer.validate()
        if trainer.save_asked and not self.last_of_epoch:
            trainer.save_if_asked()

    def log_all(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.trainer.log(name, value)

    # ---- validation ------------------------------------------------------------------------------------------------

    def _validation_due(self, unit: str, now: int) -> bool:
        period = self.trainer.validation_period
        if period is None or period.unit != unit or not self.trainer.val_loaders:
            return False
        return now % int(period.amount) == 0

    def validation_batches(self, loaders: Mapping[str, Iterable[Any]], limit: int | None) -> Iterator[tuple[str, int, Any]]:
        """Forward passes over the validation loaders; yields (loader, samples, result) for each batch."""
        moment, fire = self.moment, self.fire
        for index, (name, loader) in enumerate(loaders.items()):
            for moment.batch_idx, batch in enumerate(loader):
                if limit is not None and moment.batch_idx >= limit:
                    break
                moment.dataloader_idx, moment.dataloader_name = index, name
                moment.batch = batch = self.engine.place(batch)
                if heard := fire.on_validation_batch_start:
                    heard(moment)
                loss, moment.step_metrics = loss_and_metrics(self.trainer.forward(batch))
                moment.set_loss(loss)
                if heard := fire.on_validation_batch_end:
                    heard(moment)
                yield name, count_samples(batch), {"loss": moment.detached_loss, **moment.step_metrics}
