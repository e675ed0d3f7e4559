"""The epochs of a run: how many there are, which batches they read, and whether loaders kept their promises."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from hookline.errors import TrainingError
from hookline.run.run import Run
from hookline.run.window import MicroBatch, weighted_mean
from hookline.trainer.data.epoch_batches import MixedBatches, SequentialBatches
from hookline.trainer.data.loaders import TrainLoaders, epoch_length, smallest, why_empty

if TYPE_CHECKING:
    from hookline.trainer.options import TrainerOptions
    from hookline.trainer.signals import SignalHandler


class EpochRun(Run):
    """A run that reads its batches from loaders, epoch after epoch."""

    # `Trainer` makes these.
    options: TrainerOptions
    train_loaders: TrainLoaders
    signals: SignalHandler

    reader: SequentialBatches | MixedBatches | None = None
    """The batches of the epoch; None before the first one, and if `training_step` is called by hand."""

    # ---- the length of the run ---------------------------------------------------------------------------------------

    @property
    def total_epochs(self) -> int | None:
        """The number of epochs after which the run ends, if epochs limit it."""
        return self.options.epochs

    @property
    def epoch_batches(self) -> int | None:
        """The number of micro-batches of an epoch, if known."""
        return epoch_length(self.train_loaders)

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps in the run, if known.

        Steps may have been made by hand, and earlier epochs may have had a different length.
        """
        length, epochs, progress, by_epochs = self.epoch_batches, self.total_epochs, self.progress, None
        if length is not None and epochs is not None:
            inside = progress.position is not None
            begun, done = (self.stats.began, progress.epoch) if inside else (progress.steps_done, progress.epochs_done)
            by_epochs = begun + -(-length // self.options.accumulate) * max(epochs - done, 0)
        return smallest(self.options.max_steps, by_epochs)

    def has_steps_left(self) -> bool:
        """Return whether neither the epochs nor the steps of the options are all done."""
        epochs, steps, progress = self.options.epochs, self.options.max_steps, self.progress
        return (epochs is None or progress.epochs_done < epochs) and (steps is None or progress.steps_done < steps)

    def is_finished(self) -> bool:
        """Return whether a stop was requested or the last step is done."""
        return super().is_finished() or not self.has_steps_left()

    # ---- reading an epoch --------------------------------------------------------------------------------------------

    def read_epoch(self) -> Iterable[Any]:
        """Return the batches of the next epoch; fires on_epoch_start unless the epoch is resumed in its middle."""
        progress, loaders = self.progress, self.train_loaders
        self.agreement.before_epoch(loaders, progress.epochs_done)
        reader = self.reader = self.make_reader(progress.epochs_done)
        if progress.position is not None:
            self.is_reading = True
            batches = reader.resume(progress.position, progress.batch_idx + 1)
            self.hooks.replan()
        else:
            self.begin_epoch()
            self.is_reading = True  # a DataLoader may ask workers that outlive an epoch
            batches = reader.start()
            progress.position = {}  # inside an epoch; the reader says where, when a checkpoint needs it
        self.signals.hold_worker_errors()
        # Cut off where the end is certain, because asking for one more batch would advance the random streams of some
        # loaders.
        given = batches if reader.length is None else islice(batches, reader.length - reader.offset)
        return self.agreement.batches(given, loaders)

    def make_reader(self, epoch: int) -> SequentialBatches | MixedBatches:
        """Return the batches of an epoch, to be started or resumed."""
        kind = MixedBatches if self.train_loaders.mixed else SequentialBatches
        return kind(self.train_loaders, self.progress.enter_loader, epoch, self.ranks.world_size)

    def _check_epoch(self, all_read: bool) -> None:
        """Raise TrainingError if the loaders yielded no batch, ended in the middle of a window, or nothing counted."""
        window, reader = self.accumulation, self.reader
        self.is_reading, read = False, self.progress.batch_idx + 1
        assert reader is not None
        if not read:
            raise TrainingError(f"the training loader yielded no batches{why_empty(self.train_loaders)}")
        if window.count and all_read:
            raise TrainingError(
                f"the training loader promised {reader.length} batches and yielded {read}, which leaves "
                f"{window.count} micro-batches of a window of {window.size} without their step"
            )
        if all_read and isinstance(reader, SequentialBatches):
            self.agreement.after_epoch(read, reader.expected)
        window.check_trained()

    @property
    def _is_at_last_batch(self) -> bool:
        """Whether the current micro-batch is known to be the epoch's last."""
        reader, read = self.reader, self.progress.batch_idx + 1
        return reader is not None and (reader.last or read == reader.length)

    def has_more_batches(self) -> bool:
        """Return whether a batch of this epoch follows; the next one is read if that is the only way to know."""
        if self.reader is None:
            return True
        self.is_reading = True
        has_more = self.reader.has_more(self.progress.batch_idx + 1)
        self.is_reading = False
        return has_more

    def stop_reading(self) -> None:
        """Let loaders know that the run reads no more batches of this epoch."""
        self.is_reading = True
        # A run that was asked to stop reads nothing, because after a signal its loader's workers may be gone.
        if self.reader is not None and self.stop_reason is None:
            self.reader.stop(self.progress.batch_idx + 1)

    def position(self) -> dict[str, Any] | None:
        """Return where the loaders are inside an epoch, None between two epochs."""
        position = self.progress.position
        return position if self.reader is None or position is None else self.reader.position

    @property
    def loader_names(self) -> list[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""
        return list(self.train_loaders) if len(self.train_loaders) > 1 else []

    def record_loader_losses(self) -> None:
        """Record `train/<loader>/loss` for each of several loaders that had micro-batches in the step."""
        if len(self.train_loaders) < 2 or self.reader is None:  # steps made by hand have no loader
            return
        args, window = self.event_args, self.accumulation
        only = MicroBatch(args.window_tensor(), 1.0, args.batch_idx, args.dataloader_name, args.step_metrics)
        by_loader: dict[str, list[MicroBatch]] = {}
        for part in (part for part in args.micro_batches or [only] if part.weight):
            by_loader.setdefault(part.loader, []).append(part)
        for loader, parts in by_loader.items():
            name, loss = f"train/{loader}/loss", weighted_mean(parts)
            self.step_log.add(name, window.weigh(loss))
            self.stats.set_latest(self.progress.step, name, loss)
            for part in parts:
                window.add_loss_of(part, self.stats, name)
