"""Windows that accumulate, weight or scale losses: the mean of their gradients, and a rank's share of train/loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline._console import logger
from hookline._tensors import iter_tensors
from hookline.errors import TrainingError
from hookline.run.step_log import LOSS
from hookline.run.window import MicroBatch, Window
from hookline.trainer.counting import count_loss_terms, count_tokens

if TYPE_CHECKING:
    from hookline.run.epoch_stats import EpochStats
    from hookline.trainer.trainer import Trainer

OVERFLOW_REASON = "non-finite gradients under GradScaler"


class AccumulationWindow(Window):
    """The window of the current step, and the weight of this rank's share among all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.engine)
        options = trainer.options
        self._trainer, self._ranks = trainer, trainer.ranks
        self.size = options.accumulate
        self._loss_weight = options.loss_weight
        self.is_weighted = options.loss_weight != "batches"
        # Whether the share of a micro-batch is known only at the end of the window.
        self._has_shares = self.is_weighted and self._ranks.world_size > 1
        self._had_weight = not self.is_weighted  # whether anything had a weight in any step
        # Gradients are reduced over the ranks once a step, unless that takes too much memory.
        self._reduces_once = self._engine.averages and self.size > 1 and not options.sync_each_batch
        # Then every rank runs each backward pass, because the others wait for it.
        self._has_reductions = self._engine.averages or self._engine.forward_is_collective
        self._zeroing: Any = None  # the handle of the forward hook that keeps a loss of weight zero out of gradients

    def begin(self, batch: Any) -> bool:
        """Weight a micro-batch, and prepare the model for how its backward pass affects gradients of other ranks."""
        if self.is_weighted:
            self.weight = self.weigh_batch(batch)
            if not self.weight and self._has_reductions:
                self._zeroing = self._trainer.forward.model.register_forward_hook(zero_gradients)
        if self._reduces_once:
            is_last = self.count + 1 == self.size or not self._trainer.has_more_batches()
            self._engine.sync_gradients(self._trainer.model, is_last)
        return self.count == 0

    def weigh_batch(self, batch: Any) -> float:
        """Return the weight of a batch, by tokens or samples. Its tensors are still where the loader put them."""
        trainer = self._trainer
        if self._loss_weight != "tokens":
            return super().weigh_batch(batch)
        if trainer.count_tokens is not count_tokens:
            return float(trainer.count_tokens(batch))
        return float(count_loss_terms(batch, trainer.loss_fn, trainer.model, self._warn_once))

    def _warn_once(self, problem: str) -> None:
        if self._trainer.run_status.first_time(problem):
            logger.warning("loss_weight=%r: %s", self._loss_weight, problem)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch with its share of the window."""
        args, progress, weight = self._trainer.event_args, self._trainer.progress, self.weight
        weighted = loss
        if self.is_weighted:
            weighted = loss * weight
        elif self.size > 1:
            weighted = loss / self.size
        # The mean loss of nothing is NaN, and does not count in the mean of the window. With several ranks, its
        # backward pass takes part in reducing the gradients, to which it then adds zeros.
        if weight or self._has_reductions:
            self._engine.backward(weighted)
            self._stop_zeroing()
        args.micro_batches.append(
            MicroBatch(loss.detach(), weight, progress.batch_idx, progress.dataloader_name, args.step_metrics)
        )
        self.count += 1

    def finish_gradients(self) -> None:
        """Unscale the gradients; for a weighted or short window, turn them into the mean over its contents.

        If scaled gradients overflowed, the whole step is skipped: the norms of the update chain span all optimizers,
        and transforms with a state should not see gradients that no optimizer uses. All ranks find the same overflow:
        replicas have the same gradients, and torch looks for infinities in all shards of a DTensor.
        """
        args, trainer = self._trainer.event_args, self._trainer
        trainer.find_new_parameters()
        if self._engine.unscale(trainer.optimizers):
            args.overflowed, args.skip_reason = True, OVERFLOW_REASON
        if self.is_weighted:
            weights, world_size = [part.weight for part in args.micro_batches], self._ranks.world_size
            totals = self._ranks.total(weights)  # this waits for the slowest rank, as reducing the gradients did
            weight, total = sum(weights), sum(totals)
            if self._has_shares:
                self._add_shares(totals)
            self.has_weight = total > 0
            if not weight:
                args.micro_batches = args.micro_batches[-1:]  # several micro-batches with weight zero have no mean
            if not total:
                self.rank_weight = 1.0
                self._skip_uncounted()
                return
            # The engine took the mean over the ranks of their sums.
            self._had_weight, scale, self.rank_weight = True, world_size / total, weight * world_size / total
        elif len(args.micro_batches) != self.size:
            scale = self.size / len(args.micro_batches)
        else:
            return
        args.grads.writable().multiply_(scale)

    def add_to_means(self, stats: EpochStats, name: str, value: Tensor | float) -> None:
        """Add a number of the current micro-batch to a mean of the epoch; `_add_shares` does so with shares."""
        if not self._has_shares:
            super().add_to_means(stats, name, value)

    def add_loss_of(self, part: MicroBatch, stats: EpochStats, name: str) -> None:
        """Add the loss of a micro-batch of the window, which is complete, to a mean of the epoch."""
        if self._has_shares:
            stats.add_share(name, part.loss, part.share)
        else:
            super().add_loss_of(part, stats, name)

    def _add_shares(self, totals: Sequence[float]) -> None:
        """Add the window to the means of the epoch: each rank's micro-batches count by their share of the global ones.

        Args:
            totals: The weights of the global micro-batches.
        """
        args, stats, world_size = self._trainer.event_args, self._trainer.stats, self._ranks.world_size
        args.micro_batches = [
            part._replace(share=part.weight * world_size / total) if total else part
            for part, total in zip(args.micro_batches, totals, strict=True)
        ]
        for part in (part for part in args.micro_batches if part.weight):
            stats.add_share(LOSS, part.loss, part.share)
            for key, value in part.metrics.items():
                stats.add_share(f"train/{key}", value, part.share)

    def _skip_uncounted(self) -> None:
        """Skip a step whose total weight is zero, for instance because all its labels are ignored.

        If this is the run's first step, the batches may have been misread: Hookline warns, and the run fails if no
        later step has a weight. A step that is called manually fails, because it is unknown when such steps end.

        Raises:
            TrainingError: If this is the first step, called manually.
        """
        trainer, progress = self._trainer, self._trainer.progress
        if not progress.steps_done:
            if trainer.reader is None:
                raise TrainingError(f"this step would train nothing: {self._why_uncounted()}")
            logger.warning("step %d is skipped: %s", progress.step, self._why_uncounted())
        trainer.event_args.skip_reason = f"no {self._loss_weight.removesuffix('s')} counts"

    def _why_uncounted(self) -> str:
        return (
            f"loss_weight={self._loss_weight!r}: nothing was counted in its batches; tokens are labels that are "
            "not ignored ('labels' of a dict, the second item of a tuple), else ones in 'attention_mask', else "
            "elements of 'input_ids' or of an integer tensor; for other batches, pass count_tokens="
        )

    def check_trained(self) -> None:
        """Raise TrainingError if no step of the run had anything to train on."""
        status = self._trainer.run_status
        is_untrained = not self._had_weight and status.skipped_steps == self._trainer.progress.steps_done
        if is_untrained and not status.stops:
            raise TrainingError(f"the run trained nothing: {self._why_uncounted()}")

    def leave(self) -> None:
        """Leave the model as it was, even if the run fails inside a window."""
        self._stop_zeroing()
        self._engine.sync_gradients(self._trainer.model, True)

    def _stop_zeroing(self) -> None:
        if self._zeroing is not None:
            self._zeroing.remove()
            self._zeroing = None


def zero_gradients(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Make a loss's contribution to the gradients of a module zero, even if it is NaN: a forward hook for one call."""
    for tensor in iter_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
