"""The epochs of a run: read their batches, check what was read; at their ends validate, step schedulers and save."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from hookline.errors import TrainingError
from hookline.trainer.data.epoch_batches import MixedBatches, SequentialBatches, epoch_batches
from hookline.trainer.data.loaders import why_empty

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


class Epochs:
    """The current epoch of a trainer's runs, and the ones that follow."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.reader: SequentialBatches | MixedBatches | None = None
        """The batches of the epoch; None before the first one, and if `training_step` is called by hand."""

    def has_next(self) -> bool:
        """Return whether another epoch begins: there is one, and neither a stop nor the last step ends the run."""
        trainer, epochs = self._trainer, self._trainer.options.epochs
        return not trainer.is_finished() and (epochs is None or trainer.progress.epochs_done < epochs)

    def begin(self) -> Iterable[Any]:
        """Return the epoch's batches; fires on_epoch_start unless the epoch is resumed in its middle."""
        trainer, progress, loaders = self._trainer, self._trainer.progress, self._trainer.train_loaders
        trainer.agreement.before_epoch(loaders, progress.epochs_done)
        reader = self.reader = self.make_reader(progress.epochs_done)
        if progress.position is not None:
            trainer.is_reading = True
            batches = reader.resume(progress.position, progress.batch_idx + 1)
            trainer.hooks.replan()
        else:
            trainer.begin_epoch()
            trainer.is_reading = True  # a DataLoader may ask workers that live longer than an epoch
            batches = reader.start()
            progress.position = reader.start_position  # states are read when a checkpoint needs them
        trainer.signals.hold_worker_errors()
        # Cut off where the end is certain: asking for one more batch would move the random streams of some loaders.
        given = batches if reader.length is None else islice(batches, reader.length - reader.offset)
        return trainer.agreement.batches(given, loaders)

    def make_reader(self, epoch: int) -> SequentialBatches | MixedBatches:
        """Return the batches of an epoch, to be started or resumed."""
        trainer = self._trainer
        enter, has_windows = trainer.progress.enter_loader, trainer.accumulation.size > 1
        return epoch_batches(trainer.train_loaders, has_windows, enter, epoch, trainer.ranks.world_size)

    def end(self, all_read: bool) -> None:
        """Check what was read; if the epoch is over, validate if due, fire on_epoch_end, then save.

        Schedulers step after the validation: a run that resumes after a failed one repeats the end of the epoch. After
        a hook that fails in on_epoch_end the epoch is over: schedulers have stepped, and other hooks were called. The
        position in a checkpoint that is saved here is the start of the next epoch.

        Args:
            all_read: Whether the loaders gave all their batches, and the loop did not leave them earlier.
        """
        self._check(all_read)
        if not (all_read or self.is_at_last_batch):
            return
        trainer, period, metrics = self._trainer, self._trainer.validation_period, None
        if period and period.unit == "epochs" and trainer.progress.epochs % int(period.amount) == 0:
            metrics = trainer.validate()  # which shares the statistics of the ranks, too
        else:
            trainer.agreement.share_stats()
        if trainer.options.scheduler_interval == "epoch":
            trainer.step_schedulers()
        if metrics is not None:
            trainer.step_plateau_schedulers(metrics)
        trainer.end_epoch()
        trainer.checkpointer.save_requested()

    def _check(self, all_read: bool) -> None:
        """Raise TrainingError if the loaders gave no batch, ended in the middle of a window, or nothing counted."""
        trainer, window, reader = self._trainer, self._trainer.accumulation, self.reader
        trainer.is_reading, read = False, trainer.progress.batch_idx + 1
        assert reader is not None
        if not read:
            raise TrainingError(f"the training loader gave no batches{why_empty(trainer.train_loaders)}")
        if window.count and all_read:
            raise TrainingError(
                f"the training loader promised {reader.length} batches and gave {read}, which leaves "
                f"{window.count} micro-batches of a window of {window.size} without their step"
            )
        if all_read and isinstance(reader, SequentialBatches):
            trainer.agreement.after_epoch(read, reader.expected)
        window.check_trained()

    @property
    def is_at_last_batch(self) -> bool:
        """Whether the current micro-batch is known to be the epoch's last."""
        reader, read = self.reader, self._trainer.progress.batch_idx + 1
        return reader is not None and (reader.last or read == reader.length)

    def has_more_batches(self) -> bool:
        """Return whether a batch of this epoch follows; the next one is read if that is the only way to know."""
        if self.reader is None:
            return True
        self._trainer.is_reading = True
        has_more = self.reader.has_more(self._trainer.progress.batch_idx + 1)
        self._trainer.is_reading = False
        return has_more

    def stop_reading(self) -> None:
        """Let loaders know that the run reads no more batches of this epoch."""
        # A run that was asked to stop reads nothing: after a signal its loader's workers may be gone.
        if self.reader is not None and self._trainer.stop_reason is None:
            self.reader.stop(self._trainer.progress.batch_idx + 1)

    @property
    def position(self) -> dict[str, Any] | None:
        """Where the loaders are inside an epoch, None between two epochs."""
        position = self._trainer.progress.position
        return position if self.reader is None or position is None else self.reader.position
