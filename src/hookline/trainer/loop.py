"""The training loop: the only one in the project.

The work of each call for a micro-batch is in run/step.py, in the same order; epochs are read in trainer/epochs.py.

    run → epoch → micro-batch → step → boundary (validation, checkpoint, stop)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


def train(run: Trainer, training: AbstractContextManager[None]) -> Generator[Tensor, None, None]:
    """Run a whole run between its beginning and its end, and yield the loss after each micro-batch."""
    with training:
        while not run.is_finished():
            is_over = False
            try:
                # No variable may hold the batches: if the run failed, the traceback would keep them, with the workers
                # of a DataLoader, alive beyond on_train_end.
                for batch in run.read_epoch():  # on_epoch_start
                    loss = train_batch(run, batch)
                    is_over = run.at_boundary()  # flush, validate, agree, save, stop
                    yield loss
                    if is_over:
                        break
            finally:
                run.accumulation.leave()
            run.finish_epoch(all_read=not is_over)


def train_batch(run: Trainer, batch: Any) -> Tensor:
    """Run one micro-batch, with the optimizer step if it completes its window, and return its detached loss."""
    batch = run.begin_batch(batch)  # counters, placing, due hooks, on_train_batch_start
    loss = run.compute_loss(batch)  # forward hooks are called inside
    run.backward(loss)  # on_before_backward, its share of the window, on_after_backward
    if run.window_is_complete():
        # Unscale, mean, on_gradients_ready, the update chain. False: skipped, and the events of optimizers have fired.
        if run.gradients_ready():
            for optimizer in run.optimizers:
                run.step_optimizer(optimizer)  # on_before_optimizer_step, on_after_optimizer_step
        run.end_optimizers()  # skipped steps, loss scale, losses by loader, schedulers
        run.zero_grad()
    run.end_batch()  # on_train_batch_end; at the end of a window on_step_end
    return loss.detach()
