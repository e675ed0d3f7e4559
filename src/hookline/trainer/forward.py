"""From a batch to a loss: the user's `step_fn`, or what the batch and the model suggest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hookline.errors import TrainingError
from hookline.events.batches import count_samples as count_samples  # the trainer's modules find them here
from hookline.events.batches import tensors_of as tensors_of

StepFunction = Callable[[torch.nn.Module, Any], Any]

FOUR_WAYS = (
    "the loss is, in order: what step_fn returns, what loss_fn returns, the output's 'loss' (out['loss'] or out.loss), "
    "or an output that is itself a scalar requiring grad"
)


def make_step(model: Any, step_fn: StepFunction | None, loss_fn: Callable[..., Any] | None) -> Callable[[Any], Any]:
    """The function of a batch that a run calls: the user's step_fn, or the default for what the batch is.

    A dict goes in as keywords; of a tuple the first item goes in and the second to `loss_fn`; a tensor as it is.
    """

    def users(batch: Any) -> Any:
        assert step_fn is not None
        return step_fn(model, batch)

    def with_loss_fn(batch: Any) -> Any:
        assert loss_fn is not None
        if isinstance(batch, (tuple, list)):  # first, because asking for a Mapping is slow
            return loss_fn(model(batch[0]), batch[1])
        return loss_fn(model(**batch) if isinstance(batch, Mapping) else model(batch), batch)

    def model_only(batch: Any) -> Any:
        if isinstance(batch, (tuple, list)):
            return _all_into(model, batch)
        return model(**batch) if isinstance(batch, Mapping) else model(batch)

    return users if step_fn is not None else with_loss_fn if loss_fn is not None else model_only


def _all_into(model: Any, batch: Any) -> Any:
    try:
        return model(*batch)
    except TypeError as error:
        error.add_note(f"every item of the batch went into the model, because there is no loss_fn; {FOUR_WAYS}")
        raise


def loss_and_metrics(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Find the loss in what a step returned; single numbers beside it in a dict are metrics.

    'output' and 'target' are none, even as single numbers: a validation hands them to the user's own metrics.
    """
    loss: Any
    metrics: dict[str, Any] = {}
    if isinstance(result, torch.Tensor):
        loss = result
    elif isinstance(result, Mapping):
        loss = result.get("loss")
        metrics = {key: plain(value) for key, value in result.items() if _is_metric(key, value)}
    else:
        loss = getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"no loss was found in {_shown(result)}; {FOUR_WAYS}")
    if loss.numel() != 1:
        raise TrainingError(
            f"the loss must be one number, got shape {tuple(loss.shape)}; reduce it (mean); {FOUR_WAYS}"
        )
    return loss if loss.dim() == 0 else loss.reshape(()), metrics


def check_trainable(loss: torch.Tensor) -> None:
    """A loss without a graph trains nothing."""
    if not loss.requires_grad:
        raise TrainingError(
            "the loss does not require grad, so nothing would be trained: was it detached, made under no_grad, or are "
            f"all parameters frozen? ({FOUR_WAYS})"
        )


def count_tokens(batch: Any) -> int:
    """Elements of `input_ids`, or of a batch that is itself an integer tensor; else 0."""
    if type(batch) in (tuple, list):
        return 0
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point() or tokens.is_complex():
        return 0
    return tokens.numel()


def _is_metric(key: Any, value: Any) -> bool:
    if key in ("loss", "output", "target") or not isinstance(key, str):
        return False
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float)) or is_numpy_number(value)
    if value.is_complex() and value.numel() == 1:
        raise TrainingError(
            f"{key!r}, beside the loss, is a complex number, which has no place in a record; give a real one"
        )
    return value.numel() == 1


def is_numpy_number(value: Any) -> bool:
    """A real number of NumPy's, alone or as an array with one element; asked of its type, NumPy need not be there."""
    return type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 and value.dtype.kind in "biuf"


def plain(value: Any) -> Any:
    """NumPy's numbers as Python's; others, tensors among them, as they are."""
    if not is_numpy_number(value):
        return value
    number = value.item()
    return number if isinstance(number, int) else float(number)  # the item of a longdouble is another longdouble


def _shown(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, Mapping):
        return f"a dict with {', '.join(map(repr, list(result)[:6]))}"
    return f"{type(result).__name__}"
