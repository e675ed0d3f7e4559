"""The forward pass of a trainer: the model as it is called, the step function, the loss and the training metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError
from hookline.run.numbers import detached_copy
from hookline.run.outputs import OUTPUT_AND_TARGET, OutputReader, find_target
from hookline.trainer.metrics import TrainingMetrics
from hookline.trainer.step_fn import LOSS_SOURCES, loss_and_metrics, make_step

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


class ForwardPass:
    """Computes losses of batches, in training and in eval mode.

    Args:
        trainer: The trainer.
        metrics: The metrics that are measured on every training batch, by name.
    """

    def __init__(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._trainer, self.metrics, self._outputs = trainer, TrainingMetrics(metrics), OutputReader()
        self._measures = bool(metrics)
        model, compiles = trainer.model, trainer.options.compile
        self.model: Any = torch.compile(model) if compiles else model
        """The model as the run calls it."""
        inner = trainer.engine.eval_model(model)
        self.eval_model: Any = self.model
        """The same in eval mode: without a wrapper that would wait for other ranks."""
        if inner is not model:
            self.eval_model = torch.compile(inner) if compiles else inner
        self.make_step()

    def make_step(self) -> None:
        """Make the function from a batch to what step_fn, loss_fn or the model returns; again if one was replaced."""
        self.compute = self._trainer.agreement.measure(self._in_precision(self.model))

    def eval_compute(self) -> Callable[[Any], Any]:
        """Return the same function for eval mode."""
        return self.compute if self.eval_model is self.model else self._in_precision(self.eval_model)

    def _in_precision(self, model: Any) -> Callable[[Any], Any]:
        """Return the forward pass of one batch through a model, in the run's precision."""
        trainer = self._trainer
        plain = make_step(model, trainer.step_fn, trainer.loss_fn)
        if trainer.options.precision == "fp32":
            return plain

        def in_precision(batch: Any) -> Any:
            with trainer.engine.autocast():
                return plain(batch)

        return in_precision

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """Run the forward pass of a micro-batch, and return its loss; metrics, output and target are set for hooks."""
        trainer, args = self._trainer, self._trainer.event_args
        wants_output = not OUTPUT_AND_TARGET.isdisjoint(trainer.hooks.dispatch_table.named_at("on_train_batch_end"))
        if not (self._measures or wants_output):
            loss, metrics = loss_and_metrics(self.compute(batch))
        else:
            with self._outputs.attached(self.model):
                result = self.compute(batch)
            output = self._outputs.take(result)
            if wants_output:  # its memory is then in use during the backward pass
                args.set_output(output, find_target(result, batch))
            loss, metrics = loss_and_metrics(result)
            if self._measures:
                metrics = {**metrics, **self.metrics.measure_batch(batch, result, output)}
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not require grad, so nothing would be trained: was it detached, made under no_grad, or "
                f"are all parameters frozen? ({LOSS_SOURCES})"
            )
        args.step_metrics = metrics and {key: detached_copy(value) for key, value in metrics.items()}
        for key, value in args.step_metrics.items() if trainer.accumulation.weight else ():
            trainer.stats.add(f"train/{key}", value)
        return loss
