"""The metrics that a config can name; they are computed from sums, however batches and ranks divide the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from hookline._parameters import PositiveInt, check
from hookline._predictions import IGNORE_INDEX, align_classes, as_tensors, predicted_classes
from hookline.errors import TrainingError

BUILT_IN: dict[str, str] = {
    "accuracy": "hookline.trainer.built_in_metrics:Accuracy",
    "f1": "hookline.trainer.built_in_metrics:F1",
    "mae": "hookline.trainer.built_in_metrics:MeanAbsoluteError",
    "mse": "hookline.trainer.built_in_metrics:MeanSquaredError",
    "precision": "hookline.trainer.built_in_metrics:Precision",
    "recall": "hookline.trainer.built_in_metrics:Recall",
}


class SumMetric(ABC):
    """A metric that is computed from sums over all samples, on their device; only reading it waits for the device."""

    is_mean = False
    """Whether it is a mean over samples, so that its value for one training batch means something."""
    may_be_missing = False
    """Whether a batch may have no value, because all its targets may be ignored; the value is then NaN."""
    name: str
    """Its name in a config."""
    label: str | None = None
    """The name it is recorded under, instead of its name in the config."""
    sums: Tensor | None = None

    def reset(self) -> None:
        """Forget all batches."""
        self.sums = None

    def update(self, predictions: Any, target: Any) -> None:
        """Add the sums of a batch."""
        sums = self.measure(predictions, target)
        self.sums = sums if self.sums is None else self.sums + sums

    def compute(self) -> Tensor:
        """Return the value over all batches since `reset`."""
        if self.sums is None:
            raise TrainingError(f"{self.name}: there were no batches")
        return self.value(self.sums)

    @abstractmethod
    def measure(self, predictions: Any, target: Any) -> Tensor:
        """Return the sums of one batch, float64 [sums], on its device."""

    def value(self, sums: Tensor) -> Tensor:
        """Return the metric that follows from sums; here the first is the total, and the second its count."""
        return sums[0] / sums[1]


class _OfClasses(SumMetric):
    """A metric of predicted classes.

    Args:
        ignore_index: Targets that do not count.
        shift: Compare the prediction at each position with the target of the next one, for language models whose
            labels are their inputs, such as those of Hugging Face.
        threshold: Decision threshold for models with one output: 0 for logits, 0.5 for probabilities.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, shift: bool = False, threshold: float = 0.0) -> None:
        self.ignore_index = check(ignore_index, int, "ignore_index")
        self.shift = check(shift, bool, "shift")
        self.threshold = check(threshold, float, "threshold")


class Accuracy(_OfClasses):
    """The share of samples whose target is the class with the highest output, or among the `k` highest.

    Args:
        k: How many of the highest outputs count; above 1 it is recorded as ``top<k>_accuracy``.
        ignore_index: Targets that do not count.
        shift: Compare the prediction at each position with the target of the next one, for language models whose
            labels are their inputs, such as those of Hugging Face.
        threshold: Decision threshold for models with one output: 0 for logits, 0.5 for probabilities.
    """

    name, is_mean, may_be_missing = "accuracy", True, True

    def __init__(
        self, k: int = 1, ignore_index: int = IGNORE_INDEX, shift: bool = False, threshold: float = 0.0
    ) -> None:
        super().__init__(ignore_index, shift, threshold)
        self.k = check(k, PositiveInt, "k")
        self.label = f"top{k}_accuracy" if k > 1 else None

    def measure(self, predictions: Any, target: Any) -> Tensor:
        """Return how many predictions are correct, and out of how many."""
        scores, target = align_classes(self.name, predictions, target, self.shift)
        if self.k == 1 or scores.shape == target.shape:
            predicted, target, _ = predicted_classes(scores, target, self.threshold)
            right = predicted == target
        else:
            if self.k > scores.shape[-1]:
                raise TrainingError(f"accuracy: k={self.k} is more than the {scores.shape[-1]} classes")
            right = (scores.topk(self.k, dim=-1).indices == target.unsqueeze(-1)).any(-1)
        counts = target != self.ignore_index
        return torch.stack([(right & counts).sum(), counts.sum()]).double()


class _ByClass(_OfClasses):
    """A metric that is measured for each class and averaged over those that occur.

    For samples with one output, it is the value of the positive class. The parameters are those of `_OfClasses`.
    """

    def measure(self, predictions: Any, target: Any) -> Tensor:
        """Return, for each class, the numbers of correct predictions, of predictions and of targets: [3 * classes]."""
        scores, target = align_classes(self.name, predictions, target, self.shift)
        is_binary = scores.shape == target.shape
        predicted, target, classes = predicted_classes(scores, target, self.threshold)
        if classes is None:
            raise TrainingError(f"{self.name} needs the scores of all classes, not the predicted classes")
        counts = (target != self.ignore_index).double()
        # Added up by index rather than by `bincount`, which waits for the device. Ignored targets add 0.
        # A target that is not a class has a place after the last one, so that every prediction for it is a miss.
        target = torch.where((target >= 0) & (target < classes), target, classes)
        sums = torch.zeros(3, classes + 1, dtype=torch.float64, device=target.device)
        sums[0].index_add_(0, target, counts * (predicted == target))
        sums[1].index_add_(0, predicted, counts)
        sums[2].index_add_(0, target, counts)
        return sums[:, int(is_binary) : classes].reshape(-1)

    def value(self, sums: Tensor) -> Tensor:
        """Return the mean over the classes that were predicted or are targets."""
        right, predicted, actual = sums.reshape(3, -1)
        occurs = predicted + actual > 0
        mean: Tensor = (self.of_class(right, predicted, actual) * occurs).sum() / occurs.sum().clamp(min=1)
        return mean

    @abstractmethod
    def of_class(self, right: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """Return the value of each class; 0 where it would be 0 / 0."""


class Precision(_ByClass):
    """The share of predictions of a class that are correct."""

    name = "precision"

    def of_class(self, right: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """Return the value of each class."""
        return right / predicted.clamp(min=1)


class Recall(_ByClass):
    """The share of a class's samples that are predicted as it."""

    name = "recall"

    def of_class(self, right: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """Return the value of each class."""
        return right / actual.clamp(min=1)


class F1(_ByClass):
    """The harmonic mean of precision and recall."""

    name = "f1"

    def of_class(self, right: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """Return the value of each class."""
        return 2 * right / (predicted + actual).clamp(min=1)


class _MeanError(SumMetric):
    """A mean over all elements of the difference between outputs and targets."""

    is_mean = True

    def measure(self, predictions: Any, target: Any) -> Tensor:
        """Return the sum of the errors, and their number."""
        predictions, target = as_tensors(self.name, predictions, target)
        shapes = [[size for size in tensor.shape if size != 1] for tensor in (predictions, target)]
        if shapes[0] != shapes[1]:  # [batch, 1] and [batch] mean the same; nothing else is broadcast
            raise TrainingError(
                f"{self.name}: predictions {list(predictions.shape)} do not fit targets {list(target.shape)}"
            )
        errors = self.errors(predictions.reshape(-1).double() - target.reshape(-1).double())
        return torch.stack([errors.sum(), torch.full_like(errors.sum(), errors.numel())])

    @abstractmethod
    def errors(self, differences: Tensor) -> Tensor:
        """Return the error of each element."""


class MeanSquaredError(_MeanError):
    """The mean of the squared differences between outputs and targets."""

    name = "mse"

    def errors(self, differences: Tensor) -> Tensor:
        """Return the squares."""
        return differences.square()


class MeanAbsoluteError(_MeanError):
    """The mean of the absolute differences between outputs and targets."""

    name = "mae"

    def errors(self, differences: Tensor) -> Tensor:
        """Return the absolute values."""
        return differences.abs()
