"""The training loop: the only one in the project. Events of batches, steps and epochs are fired here; those of the
run's ends, of a validation and of a checkpoint where these are made.

    run → epoch → micro-batch → step → boundary (validation, checkpoint, stop)

An event nobody hears is a None in `fire`: it costs its line one branch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from time import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.core.run_control import MicroBatch
from hookline.errors import TrainingError
from hookline.events.dispatch import Fire, Fired
from hookline.gradients.chain import OVERFLOWED
from hookline.gradients.numbers import multiply_
from hookline.trainer.cost_watch import CostWatch
from hookline.trainer.epoch_means import own_number
from hookline.trainer.forward import check_trainable, count_samples, count_tokens, loss_and_metrics
from hookline.trainer.loaders import EpochBatches
from hookline.trainer.losses import LossBook
from hookline.trainer.mixture import batches_of_epoch
from hookline.trainer.moment import numbers_of
from hookline.trainer.parameters import group_sizes, unowned_parameters
from hookline.trainer.user_metrics import Measure

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

FLUSH_STEPS, FLUSH_SECONDS = 47, 2.0  # a prime: it seldom falls on the steps at which hooks are due
NONE_LEFT_OUT: tuple[torch.optim.Optimizer, ...] = ()


def steps_of_run(trainer: Trainer, run: AbstractContextManager[None]) -> Iterator[Tensor]:
    """A whole run, bracketed by its beginning and end; yields after each micro-batch, to be stepped from outside."""
    with run:
        loop, moment, epochs = trainer.loop, trainer.moment, trainer.options.epochs
        while not loop.finished() and (epochs is None or moment.epoch + moment.epoch_over < epochs):
            all_read = yield from micro_batches(loop, loop.begin_epoch(trainer.train_loaders))
            if all_read or loop.last_of_epoch:
                loop.end_epoch()


def micro_batches(loop: Loop, batches: Iterable[Any]) -> Generator[Tensor, None, bool]:
    """Forward, backward and, when a window is complete, the optimizer step; yields each micro-batch's detached loss.

    Returns whether all batches were read. Python that runs once between two torch calls runs with cold caches: a call
    costs 1 to 2 µs there, not 0.1, and an attribute more than a local. So what every step does stands here, in the
    order it happens; what happens now and then is a method of the loop.
    """
    trainer, moment, fire, tables, plain = loop.trainer, loop.moment, loop.fire, loop.tables, loop.plain
    optimizers, steps_itself, more_to_do, unowned = trainer.optimizers, loop.steps_itself, loop.more_to_do, loop.unowned
    recent, unrecorded, several = loop.losses.recent, loop.unrecorded, len(optimizers) > 1

    for batch in batches:
        # ---- where the run is, and who is due
        if plain or loop.in_window == 0:
            moment.step += 1
        moment.batch_idx += 1
        moment.used_lr = None
        if loop.moves:
            batch = loop.engine.place(batch)
        moment.batch = batch
        if loop.counts_tuples or type(batch) is not tuple:
            moment.tokens_seen += trainer.count_tokens(batch)
        if tables.countdown > 0:  # until a schedule or a sample comes up
            tables.countdown -= 1
        else:
            loop.hooks.decide_who_is_due(moment)
        if heard := fire.on_train_batch_start:
            heard(moment)

        # ---- forward and backward
        result = trainer.compute(batch)  # the model's forward hooks fire in here
        loss = result if loop.bare_loss and type(result) is Tensor else loop.find_loss(result)
        del result  # the rest of it (logits, say) need not wait for the next one
        # The last batch's graph, emptied by its backward, is let go of here: freeing it earlier costs 4 µs more.
        moment.live_loss = loss
        if heard := fire.on_before_backward:
            heard(moment)
        if plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loop.backward_share(loss)
        if heard := fire.on_after_backward:
            heard(moment)
        if not plain and not loop.window_is_complete():
            recent.append(detached := loss.data)
            if heard := fire.on_train_batch_end:
                heard(moment)
                if tables.metric_readers:
                    loop.log_added_metrics()
            yield detached
            continue

        # ---- gradients complete: update chain, optimizers, schedulers; then they are gone
        step, left_out = moment.step, NONE_LEFT_OUT
        if not plain:
            loop.complete_gradients()
        if heard := fire.on_gradients_ready:
            heard(moment)
        if heard := fire.on_update:
            loop.update(heard)
        if tables.norm_readers and fire.on_step_end:
            moment.keep_gradients()
        for optimizer in optimizers:
            if several:
                moment.optimizer_idx = optimizers.index(optimizer)
            if heard := fire.on_before_optimizer_step:
                heard(moment)
            if steps_itself and moment.skip_asked_at != step:
                optimizer.step()
            elif not loop.step_or_skip(optimizer):
                left_out = (*left_out, optimizer)
                continue
            if heard := fire.on_after_optimizer_step:
                if more_to_do or tables.lr_readers:
                    loop.note_rate()
                heard(moment)
        if more_to_do or left_out or tables.lr_readers:
            loop.after_optimizers(left_out)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for param in unowned:  # no optimizer clears these
            param.grad = None
        recent.append(detached := loss.data)  # as detach() has it, a microsecond sooner
        if heard := fire.on_train_batch_end:
            heard(moment)
            if tables.metric_readers:
                loop.log_added_metrics()

        # ---- the step is over: its metrics, and now and then a boundary
        loop.in_window = 0
        moment.steps_done = step
        unrecorded.append((step, moment.epoch, "train/loss", detached if plain else moment.window_tensor(), time()))
        if moment.step_metrics or not plain:
            loop.log_all({f"train/{key}": value for key, value in moment.step_means().items()})
        if heard := fire.on_step_end:
            heard(moment)
            if moment.kept_gradients:
                moment.release_gradients()
        if step >= loop.next_boundary:
            loop.boundary()
        yield detached
        if loop.over:
            return False

    loop.check_all_came()
    return True


class Loop:
    """One run of a trainer: what it was told, where it stands, and what happens now and then."""

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
        self.by_loader = len(trainer.train_loaders) > 1  # losses are told apart by the loader they came from
        self.more_to_do = not self.plain or self.schedules or len(trainer.optimizers) > 1 or self.by_loader
        self.steps_itself = self.plain and trainer.optimizer_step is None
        self.unowned = unowned_parameters(trainer.model, trainer.params)
        self.group_sizes = group_sizes(trainer.optimizers)
        self.moves = self.engine.moves
        self.in_window = 0  # micro-batches of the step under way; a plain step is one, and is not counted
        self.batches: EpochBatches | None = None  # those under way; None for steps made by hand
        self.bare_loss = False  # the step returns the loss itself, as a 0-dim tensor; known after the first batch
        self.unrecorded: list[tuple[int, int, str, Any, float]] = []
        self.flushed, self.flushed_step, self.flush_at = time(), self.moment.step, self.moment.step + FLUSH_STEPS
        self.cost_watch = CostWatch(trainer)
        self.over = False  # a stop was asked for, or the last step is done
        self.next_boundary = 0  # the next step after which something is due; see boundary()

    # ---- the run ---------------------------------------------------------------------------------------------------

    def begin_epoch(self, loaders: Mapping[str, Iterable[Any]]) -> Iterable[Any]:
        """The epoch's batches, and its event unless the epoch is entered half-way."""
        moment = self.moment
        epoch = moment.epoch + moment.epoch_over
        batches = batches_of_epoch(loaders, self.accumulate > 1, self.enter_loader, epoch)
        self.batches = batches
        if moment.position is not None:
            batches.go_on(moment.position, moment.batch_idx + 1)
        else:
            moment.enter_epoch()
            self.losses = LossBook(self.losses.beside.of_next_epoch(moment.step))
            if heard := self.fire.on_epoch_start:
                heard(moment)
            batches.begin()
            moment.position = batches.position
        self.hooks.replan()
        # Cut off where they are known to end: asking for one more would move the random streams of some loaders.
        return batches if batches.length is None else islice(batches, batches.length - batches.given)

    @property
    def last_of_epoch(self) -> bool:
        """Whether this micro-batch is known to be the epoch's last."""
        batches = self.batches
        return batches is not None and (batches.last or self.moment.batch_idx + 1 == batches.length)

    def check_all_came(self) -> None:
        """The loaders have ended: an epoch has batches, and no window is left open."""
        if self.batches is not None and self.moment.batch_idx < 0:
            self.batches.refuse_empty()
        if self.in_window and self.batches is not None:
            raise TrainingError(
                f"the training loader promised {self.batches.length} batches and gave {self.moment.batch_idx + 1}, "
                f"which leaves {self.in_window} micro-batches of a window of {self.accumulate} without their step"
            )

    def enter_loader(self, index: int, name: str) -> None:
        """The next batch comes from this loader; of several, this is told before each one."""
        self.moment.dataloader_idx, self.moment.dataloader_name = index, name
        if self.by_loader:  # a new dict each time: a checkpoint that is still being written may hold the old one
            counts = self.moment.loader_batches
            self.moment.loader_batches = {**counts, name: counts.get(name, 0) + 1}

    def end_epoch(self) -> None:
        """Validation if due, on_epoch_end, then the epoch's checkpoint, whose position is the next epoch's start."""
        moment, trainer = self.moment, self.trainer
        if self.options.scheduler_interval == "epoch":
            trainer.step_schedulers()
        if self.validate_epochs and (moment.epoch + 1) % self.validate_epochs == 0:
            trainer.step_plateau(trainer.validate())
        trainer.note_non_finite(self.losses.take_non_finite())
        for name, mean in self.epoch_metrics().items():
            trainer.log(name, mean)
        if heard := self.fire.on_epoch_end:
            heard(moment)
        moment.epoch_over, moment.position = True, None
        self.flush()
        trainer.save_if_asked()

    def epoch_metrics(self) -> dict[str, float]:
        """The means of the epoch so far, by the names they are recorded under. Waits for the device."""
        return {**self.losses.beside.means(), "train/epoch_loss": self.losses.mean()}

    def newest_metrics(self, since: int | None = None) -> dict[str, float]:
        """The newest number of each name, if it is of a later step, or else of this epoch. Waits for the device."""
        return self.losses.beside.newest(since)

    def loader_names(self) -> list[str]:
        """The loaders whose losses are told apart."""
        return list(self.trainer.train_loaders) if self.by_loader else []

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

    def by_hand(self, batch: Any) -> Tensor:
        """One micro-batch that no epoch gave; returns its detached loss."""
        self.batches = None
        return next(micro_batches(self, [batch]))

    def log_added_metrics(self) -> None:
        """Hooks that name a micro-batch's metrics may have added to them."""
        if self.moment.metrics_read:
            for name, value in self.moment.added_metrics().items():
                self.trainer.log(name, value)

    def window_is_complete(self) -> bool:
        """Whether the optimizer steps now: at the end of a window, and at the end of an epoch."""
        return self.in_window >= self.accumulate or self.last_of_epoch

    def find_loss(self, result: Any) -> Tensor:
        """The loss in what the step returned; the first one is looked at closely."""
        loss, metrics = loss_and_metrics(result)
        self.moment.step_metrics = self.gathered(metrics) if metrics else metrics
        if not self.bare_loss:
            check_trainable(loss)
        self.bare_loss = loss is result
        return loss

    def gathered(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What step_fn returned beside the loss, for the epoch's means: without its graph, and nobody's to write to."""
        found = {key: own_number(value) for key, value in metrics.items()}
        for key, value in found.items():
            self.losses.beside.add(f"train/{key}", value)
        return found

    def backward_share(self, loss: Tensor) -> None:
        """Backward with the micro-batch's share of its window."""
        moment, weight = self.moment, 1.0
        if self.in_window == 0:
            moment.window.clear()
        if self.weighted:
            weight = float(self.trainer.weigh(moment.batch))
            loss = loss * weight
        elif self.accumulate > 1:
            loss = loss / self.accumulate
        self.engine.backward(loss)
        assert moment.live_loss is not None
        loss = moment.live_loss.detach()
        part = MicroBatch(loss, weight, moment.batch_idx, moment.dataloader_name, moment.step_metrics)
        moment.window.append(part)
        self.in_window += 1

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """True values, and for a weighted or short window the mean over what was actually in it.

        Where scaled gradients overflowed, the step is left out: all of it, for the chain's norms span all optimizers,
        and links with a memory should not see what nobody will use.
        """
        window = self.moment.window
        self.look_for_new_parameters()
        if self.engine.unscale(self.trainer.optimizers):
            self.trainer.skip_step(OVERFLOWED)
        if self.weighted:
            scale = 1.0 / self.total_weight()
        elif len(window) != self.accumulate:
            scale = self.accumulate / len(window)
        else:
            return
        multiply_(self.moment.grads.numbers(), scale)

    def total_weight(self) -> float:
        """The weight of a whole window, which must be something."""
        total = sum(part.weight for part in self.moment.window)
        if total:
            return total
        raise TrainingError(
            f"loss_weight={self.options.loss_weight!r}: nothing was counted in this step's batches, so it would train "
            "nothing; tokens are elements of 'input_ids' or of an integer tensor batch, else give count_tokens="
        )

    def update(self, heard: Fired) -> None:
        """The update chain, unless the step is left out; where it clips, the norm before that is the step's."""
        moment = self.moment
        if moment.skip_asked_at == moment.step:
            return
        if self.plain:
            self.look_for_new_parameters()
            heard = self.fire.on_update or heard  # which may be another now
        heard(moment)
        if (norm := moment.norm_before_clipping()) is not None:
            self.unrecorded.append((moment.step, moment.epoch, "train/grad_norm", norm, time()))

    def look_for_new_parameters(self) -> None:
        """An optimizer may have got another group: what it trains belongs to the chain and the norm from now on."""
        sizes = group_sizes(self.trainer.optimizers)
        if sizes != self.group_sizes:
            self.trainer.find_parameters()
            self.unowned[:] = unowned_parameters(self.trainer.model, self.trainer.params)
            self.group_sizes = sizes

    def step_or_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step as scaling, the user's own function or a guard in the chain will have it; whether it stepped."""
        moment, trainer = self.moment, self.trainer
        if moment.skip_asked_at != moment.step and self.engine.step(optimizer, trainer.optimizer_step):
            return True
        moment.reason = moment.skip_reason
        self.record.event("step_skipped", moment.step, reason=moment.reason, optimizer_idx=moment.optimizer_idx)
        if heard := self.fire.on_step_skipped:
            heard(moment)
        moment.reason = None
        return False

    def after_optimizers(self, left_out: Sequence[torch.optim.Optimizer]) -> None:
        """Scaling moves on, and so do the schedulers of the optimizers that stepped."""
        moment, trainer = self.moment, self.trainer
        moment.optimizer_idx = 0
        trainer.skipped_steps += bool(left_out)
        self.engine.end_step()
        if self.by_loader and self.batches is not None:
            self.note_losses_by_loader()
        self.note_rate()
        if self.schedules:
            self.unrecorded.append((moment.step, moment.epoch, "train/lr", moment.used_lr, time()))
            trainer.step_schedulers([one for one in trainer.optimizers if one not in left_out])

    def note_rate(self) -> None:
        """The rate that this step used: a hook or a scheduler may move it before on_step_end."""
        if self.moment.used_lr is None:
            self.moment.used_lr = self.trainer.lr

    def note_losses_by_loader(self) -> None:
        """`train/<loader>/loss`: the step's loss for each loader that had a part in it."""
        moment, beside = self.moment, self.losses.beside
        for name, loss in moment.losses_by_loader().items():
            self.unrecorded.append((moment.step, moment.epoch, f"train/{name}/loss", loss, time()))
            beside.note(moment.step, f"train/{name}/loss", loss)
        for name, loss in moment.micro_losses():
            beside.add(f"train/{name}/loss", loss)

    def boundary(self) -> None:
        """What happens after a step now and then: the record written, validation, a checkpoint, the end."""
        trainer, step = self.trainer, self.moment.step
        self.moment.release_gradients()  # on_step_end did, unless whoever asked for them left before it
        trainer.background.look()
        if step >= self.flush_at:
            self.flush()
        if self.validate_steps and step % self.validate_steps == 0:
            trainer.step_plateau(trainer.validate())
        if trainer.save_asked and not self.last_of_epoch:  # else the epoch's end saves, as the next one's start
            trainer.save_if_asked()
        marks = [self.flush_at, self.options.max_steps or self.flush_at]
        if self.validate_steps:
            marks.append(step - step % self.validate_steps + self.validate_steps)
        if trainer.saving:  # look after every step, until it is durable
            marks.append(step + 1)
        self.next_boundary = min(marks)
        self.over = self.finished()  # last: a signal that asks to stop in between has set next_boundary back

    def flush(self) -> None:
        """Write what has gathered, nothing of which waits for a device; the next time comes in about two seconds."""
        self.record.extend(self.unrecorded)
        self.unrecorded.clear()
        self.record.flush()
        self.losses.fold()
        self.cost_watch.look()
        now, step = time(), self.moment.step
        rate = (step - self.flushed_step) / max(now - self.flushed, 1e-6)
        self.flushed, self.flushed_step = now, step
        self.flush_at = step + max(1, min(FLUSH_STEPS, int(rate * FLUSH_SECONDS)))

    def log_all(self, values: Mapping[str, Any]) -> None:
        """Record what step_fn returned beside a step's loss; until the epoch ends it is the newest of its name."""
        for name, value in values.items():
            self.trainer.log(name, value)
            self.losses.beside.note(self.moment.step, name, value)

    # ---- validation ------------------------------------------------------------------------------------------------

    def validation_batches(
        self, loaders: Mapping[str, Iterable[Any]], fire: Fire, measure: Measure
    ) -> Iterator[tuple[str, int, Any]]:
        """Forward passes over the validation loaders; yields (loader, samples, results) for each batch."""
        moment = self.moment
        for index, (name, loader) in enumerate(loaders.items()):
            for moment.batch_idx, batch in enumerate(loader):
                moment.dataloader_idx, moment.dataloader_name = index, name
                moment.batch = batch = self.engine.place(batch)
                if heard := fire.on_validation_batch_start:
                    heard(moment)
                result = self.trainer.compute(batch)
                loss, metrics = loss_and_metrics(result)
                moment.live_loss, moment.step_metrics = loss, {**metrics, **measure(name, batch, result)}
                if heard := fire.on_validation_batch_end:
                    heard(moment)
                added = numbers_of(moment.added_metrics()) if moment.metrics_read else {}
                yield name, count_samples(batch), {"loss": loss.detach(), **moment.step_metrics, **added}
