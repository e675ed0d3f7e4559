"""The forward pass: compute the loss of a batch by the user's `step_fn`, or by a default that fits batch and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError, add_note
from hookline.run.outputs import (
    OUTPUT_AND_TARGET,
    OutputReader,
    as_python_number,
    detached_copy,
    find_target,
    is_number,
)
from hookline.trainer.accelerate import unwrap_optimizer
from hookline.trainer.metrics import TrainingMetrics

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

StepFunction = Callable[[torch.nn.Module, Any], Any]

LOSS_SOURCES = (
    "the loss is, in order: what step_fn returns, what loss_fn (`loss:` in a config) returns, the output's 'loss' "
    "(out['loss'] or out.loss), or an output that is itself a scalar requiring grad"
)


class ForwardPass:
    """Computes losses of batches, in training and in eval mode.

    Args:
        trainer: The trainer.
        metrics: The metrics that are measured on every training batch, by name.
    """

    def __init__(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._trainer, self._outputs = trainer, OutputReader()
        self.metrics, self._measures = TrainingMetrics(metrics), bool(metrics)
        model, compiles = trainer.model, trainer.options.compile
        self.model: Any = torch.compile(model) if compiles else model
        """The model as the run calls it."""
        inner = trainer.engine.eval_model(model)
        self.eval_model: Any = self.model
        """The model in eval mode, without a wrapper that would wait for other ranks."""
        if inner is not model:
            self.eval_model = torch.compile(inner) if compiles else inner
        self.make_step()

    def make_step(self) -> None:
        """Build the function from a batch to the result of step_fn, loss_fn or the model, again if one was replaced."""
        self.compute = self._trainer.agreement.measure(self.compute_with(self.model))
        self._is_unchecked = True  # whether the next batch checks that the forward pass does not do the trainer's work

    def compute_with(self, model: Any) -> Callable[[Any], Any]:
        """Return the function from a batch to a loss, or to a result that contains one, in the run's precision."""
        trainer = self._trainer
        if trainer.step_fn is not None:
            compute = partial(trainer.step_fn, model)
        elif trainer.loss_fn is not None:
            compute = partial(_call_loss_fn, model, trainer.loss_fn)
        else:
            compute = partial(_call_model, model)
        if trainer.options.precision == "fp32":
            return compute

        def in_precision(batch: Any) -> Any:
            with trainer.engine.autocast():
                return compute(batch)

        return in_precision

    def _compute_checked(self, batch: Any) -> Any:
        """Run the user's forward pass for the first time.

        Raises:
            TrainingError: If it calls `backward` or steps an optimizer itself: the trainer would fail, or do it twice.
        """
        trainer, self._is_unchecked = self._trainer, False
        stepped: list[Any] = []
        params = list(trainer.model.parameters())
        had_gradients = any(param.grad is not None for param in params)
        with ExitStack() as watched:
            for optimizer in trainer.optimizers:
                plain = unwrap_optimizer(optimizer)
                if isinstance(plain, torch.optim.Optimizer):
                    watched.callback(plain.register_step_post_hook(lambda *step: stepped.append(step)).remove)
            try:
                result = self.compute(batch)
            except TypeError as error:
                if trainer.step_fn is not None:
                    add_note(error, "Hookline calls step_fn(model, batch)")
                elif trainer.loss_fn is not None and isinstance(batch, (tuple, list)):
                    add_note(error, "Hookline calls loss_fn(model(batch[0]), batch[1])")
                raise
        what = "the forward pass of the model" if trainer.step_fn is None else "step_fn"
        if stepped:
            raise TrainingError(f"{what} has called optimizer.step(); return the loss, and the trainer does the rest")
        if not had_gradients and any(param.grad is not None for param in params):
            raise TrainingError(f"{what} has called backward(); return the loss, and the trainer calls it")
        return result

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """Run the forward pass of a micro-batch, and return its loss; metrics, output and target are kept for hooks."""
        trainer, args = self._trainer, self._trainer.event_args
        compute = self._compute_checked if self._is_unchecked else self.compute
        wants_output = not OUTPUT_AND_TARGET.isdisjoint(trainer.hooks.dispatch_table.named_at("on_train_batch_end"))
        if not (self._measures or wants_output):
            loss, metrics = loss_and_metrics(compute(batch))
        else:
            with self._outputs.attached(self.model):
                result = compute(batch)
            output = self._outputs.take(result)
            if wants_output:  # its memory is then in use during the backward pass
                args.live_output, args.live_target = output, find_target(result, batch)
            loss, metrics = loss_and_metrics(result)
            if self._measures:
                metrics = {**metrics, **self.metrics.measure_batch(batch, result, output)}
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not require grad, so nothing would be trained: was it detached, made under no_grad, or "
                f"are all parameters frozen? ({LOSS_SOURCES})"
            )
        args.step_metrics = metrics and {key: detached_copy(value) for key, value in metrics.items()}
        for key, value in args.step_metrics.items():
            trainer.accumulation.add_to_means(trainer.stats, f"train/{key}", value)
        return loss


def _call_loss_fn(model: Any, loss_fn: Callable[..., Any], batch: Any) -> Any:
    """Return the loss: a tuple's items go to the model and to `loss_fn`; of other batches, `loss_fn` gets all."""
    if isinstance(batch, (tuple, list)):  # first, because isinstance(…, Mapping) is slow
        return loss_fn(model(batch[0]), batch[1])
    return loss_fn(model(**batch) if isinstance(batch, Mapping) else model(batch), batch)


def _call_model(model: Any, batch: Any) -> Any:
    """Return the model's output for a batch: each item of a tuple or a dict is an argument."""
    if not isinstance(batch, (tuple, list)):
        return model(**batch) if isinstance(batch, Mapping) else model(batch)
    try:
        return model(*batch)
    except TypeError as error:
        remedy = "pass loss_fn, in a config `loss: mse` or another, or a step_fn"
        add_note(error, f"without a loss_fn, every item of the batch is passed to the model; {remedy}")
        raise


def loss_and_metrics(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss in the result of a step, and the other single numbers in a dict.

    'output' and 'target' are not metrics, even as single numbers: a validation passes them to the user's metrics.

    Raises:
        TrainingError: If no loss is found, or if it is not a single number.
    """
    loss: Any
    metrics: dict[str, Any] = {}
    if isinstance(result, torch.Tensor):
        loss = result
    elif isinstance(result, Mapping):
        loss = result.get("loss")
        metrics = {key: as_python_number(value) for key, value in result.items() if _is_metric(key, value)}
    else:
        loss = getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"no loss was found in {_describe(result)}; {LOSS_SOURCES}")
    if loss.numel() != 1:
        raise TrainingError(
            f"the loss must be one number, got shape {tuple(loss.shape)}; reduce it (mean); {LOSS_SOURCES}"
        )
    return loss if loss.dim() == 0 else loss.reshape(()), metrics


def _is_metric(key: Any, value: Any) -> bool:
    if key in ("loss", "output", "target") or not isinstance(key, str) or not is_number(value):
        return False
    if isinstance(value, torch.Tensor) and value.is_complex():
        what = f"{key!r}, besides the loss, is a complex number"
        raise TrainingError(f"{what}, which a record cannot store; return a real number")
    return True


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, list(result)[:6]))}"
    return f"{type(result).__name__}"
