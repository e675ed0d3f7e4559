"""Find what a model predicts in its output: the logits, and the scores of classes in the order of their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.errors import TrainingError, with_article

IGNORE_INDEX = -100  # torch's default


def find_predictions(output: Any) -> Any:
    """Return the `logits` of an output as Hugging Face models have them, otherwise the output itself."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if logits is None else logits


def as_tensors(user: str, predictions: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return predictions and target without their graphs.

    Raises:
        TrainingError: If one is not a tensor; `user` is the metric or hook that needs it.
    """
    for what, value in (("output", predictions), ("target", target)):
        if not isinstance(value, Tensor):
            problem = "not known" if value is None else f"{with_article(type(value).__name__)}, not a tensor"
            raise TrainingError(
                f"{user}: the {what} is {problem}; let step_fn return "
                "{'loss': loss, 'output': output, 'target': target}"
            )
    return predictions.detach(), target.detach()


def align_classes(user: str, predictions: Any, target: Any, shift: bool = False) -> tuple[Tensor, Tensor]:
    """Return scores [..., classes] and targets [...], or two tensors of the same shape if there is one output each.

    Args:
        user: The metric or hook that needs them, for messages.
        predictions: [..., classes]; [batch, classes, ...] as torch's losses take them; or one output per target.
        target: [...].
        shift: Whether to compare the prediction at each position with the target of the next one.

    Raises:
        TrainingError: If one is not a tensor, or the shapes do not fit.
    """
    predictions, target = as_tensors(user, predictions, target)
    # torch's losses have the classes in the second dimension, language models in the last one.
    moved = (*predictions.shape[:1], *predictions.shape[2:])
    if predictions.shape[:-1] != target.shape and predictions.dim() > 2 and moved == target.shape:
        predictions = predictions.movedim(1, -1)
    if shift:
        if target.dim() < 2:
            raise TrainingError(f"{user}: shift needs targets [batch, time], got {list(target.shape)}")
        predictions, target = predictions[:, :-1], target[:, 1:]
    if predictions.shape == (*target.shape, 1):
        predictions = predictions.squeeze(-1)
    if predictions.shape != target.shape and predictions.shape[:-1] != target.shape:
        shapes = f"predictions {list(predictions.shape)} do not fit targets {list(target.shape)}"
        raise TrainingError(
            f"{user}: {shapes}; expected [..., classes] and [...], [batch, classes, ...] and [batch, ...], or the same "
            "shape"
        )
    return predictions, target


def predicted_classes(predictions: Tensor, target: Tensor, threshold: float) -> tuple[Tensor, Tensor, int | None]:
    """Return the predicted classes [samples], the targets [samples] and the number of classes; None if unknown.

    Args:
        predictions: Scores [..., classes]; or floats of the targets' shape, one per sample; or predicted classes.
        target: [...].
        threshold: Decision threshold for single-output models.
    """
    if predictions.shape != target.shape:
        return predictions.argmax(-1).reshape(-1), target.reshape(-1).long(), predictions.shape[-1]
    if not predictions.is_floating_point():
        return predictions.reshape(-1).long(), target.reshape(-1).long(), None
    target = target.round() if target.is_floating_point() else target
    return (predictions > threshold).reshape(-1).long(), target.reshape(-1).long(), 2
