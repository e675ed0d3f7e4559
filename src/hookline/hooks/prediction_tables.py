"""`confusion_matrix` and `sample_predictions`: record the predictions of a validation as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline._parameters import PositiveInt, names
from hookline._predictions import IGNORE_INDEX, align_classes, find_predictions, predicted_classes
from hookline.core.shared_part import SharedPart, Sizes
from hookline.errors import ConfigError, TrainingError
from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl

MAX_CLASSES = 99  # with the targets in the first column, a table of at most 10,000 cells
COLUMNS = ("sample", "target", "prediction", "probability")
MAX_POSITIONS = 200  # positions of a sequence that are shown


class ConfusionMatrix(NamedHook):
    """Records a table for each validation: how many samples of each target (row) had each prediction (column).

    The table has the hook's name. Counts stay on the device until the validation ends. With several ranks, they cover
    all ranks. Targets that are not classes are left out, with a warning.

    Args:
        classes: The names of the classes, in their order; their numbers by default.
        ignore_index: Targets that do not count.
        shift: Compare the prediction at each position with the target of the next one, for language models whose
            labels are their inputs, such as those of Hugging Face.
        threshold: Decision threshold for single-output models: 0 for logits, 0.5 for probabilities.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "confusion_matrix"
    needs = ("knows_validation_batches",)

    def __init__(
        self,
        classes: Sequence[str] | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift: bool = False,
        threshold: float = 0.0,
    ) -> None:
        self.classes = None if classes is None else names(classes, "classes")
        if self.classes is not None and not 2 <= len(self.classes) <= MAX_CLASSES:
            raise ConfigError("classes", f"expected 2 to {MAX_CLASSES} names, got {len(self.classes)}")
        self.ignore_index, self.shift, self.threshold = ignore_index, shift, threshold
        self._counts: Tensor | None = None  # Counts of pairs (target, prediction), then of samples without a class.

    def on_validation_start(self, trainer: RunControl) -> None:
        """Begin to count, unless this validation is inside another one."""
        if trainer.validations_in_progress <= 1:
            self._counts = None

    def on_validation_batch_end(self, trainer: RunControl, output: Any, target: Any) -> None:
        """Count the samples of a batch."""
        if trainer.validations_in_progress > 1:
            return
        scores, target = align_classes(self.registered_name, find_predictions(output), target, self.shift)
        predicted, target, known = predicted_classes(scores, target, self.threshold)
        count = known or (len(self.classes) if self.classes else None)
        if count is None or count > MAX_CLASSES or (self.classes is not None and len(self.classes) != count):
            given = "an unknown number of" if count is None else count
            expected = f"at most {MAX_CLASSES}" if self.classes is None else f"those in `classes`, {len(self.classes)}"
            raise TrainingError(f"{self.registered_name}: the output has {given} classes; expected {expected}")
        # Each pair has an index, and ignored samples share the one after the last pair. `bincount` would synchronize.
        is_class = (target >= 0) & (target < count) & (predicted >= 0) & (predicted < count)
        place = torch.where(is_class, target * count + predicted, count * count)
        weight = (target != self.ignore_index).double()
        counts = torch.zeros(count * count + 1, dtype=torch.float64, device=target.device).index_add_(0, place, weight)
        self._counts = counts if self._counts is None else self._counts + counts

    def on_validation_end(self, trainer: RunControl) -> None:
        """Record the table; with several ranks once their counts are together."""
        if trainer.validations_in_progress > 1:
            return
        mine, self._counts, step = self._counts, None, trainer.step

        def finish(sizes: Sizes, maxima: Tensor, counts: Tensor) -> Mapping[str, float]:
            if counts.numel():
                self.record(trainer, step, counts)
            return {}

        part = SharedPart(self.registered_name, step, trainer.epoch, {}, finish)
        if mine is not None and trainer.counts_batch:
            part.sizes, part.sums = {"counts": (0, mine.numel())}, lambda maxima: mine.cpu()
        trainer.share(part)

    def record(self, trainer: RunControl, step: int, counts: Tensor) -> None:
        """Record the table of counts, [targets x predictions] and those without a class."""
        *pairs, left_out = counts.long().tolist()
        size = round(len(pairs) ** 0.5)
        names = self.classes or [str(index) for index in range(size)]
        rows = [[name, *pairs[index * size : (index + 1) * size]] for index, name in enumerate(names)]
        trainer.log_table(self.registered_name, ["target", *names], rows, step=step, kind="confusion_matrix")
        if left_out:
            self.warn(f"{left_out} samples are left out: their target is not one of {size} classes", once="left out")


class SamplePredictions(NamedHook):
    """Records a table of the first samples of each validation: target, prediction and the prediction's probability.

    The table has the hook's name. Classes are shown by their names or numbers; sequences, as in language models, are
    shown as text if the data has a vocabulary (`trainer.hook_data["vocab"]`), with the mean probability. Outputs with
    the same shape as the targets are shown as numbers. Reading the samples waits for the device. With several ranks,
    they come from rank 0.

    Args:
        samples: How many samples to show.
        classes: The names of the classes, in their order; their numbers by default.
        ignore_index: Targets that do not count; in a sequence, neither they nor their predictions are shown.
        shift: Compare the prediction at each position with the target of the next one, for language models whose
            labels are their inputs, such as those of Hugging Face.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "sample_predictions"
    needs = ("knows_validation_batches",)

    def __init__(
        self,
        samples: PositiveInt = 8,
        classes: Sequence[str] | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift: bool = False,
    ) -> None:
        self.classes = None if classes is None else names(classes, "classes")
        self.samples, self.ignore_index, self.shift = samples, ignore_index, shift
        self._rows: list[tuple[Any, ...]] = []

    def on_validation_start(self, trainer: RunControl) -> None:
        """Begin another table, unless this validation is inside another one."""
        if trainer.validations_in_progress <= 1:
            self._rows = []

    def on_validation_batch_end(self, trainer: RunControl, output: Any, target: Any) -> None:
        """Read the samples of a batch that still fit into the table."""
        missing = self.samples - len(self._rows)
        if trainer.validations_in_progress > 1 or missing <= 0:
            return
        scores, target = align_classes(self.registered_name, find_predictions(output), target, self.shift)
        scores, target = scores[:missing].float().cpu(), target[:missing].cpu()
        vocab = trainer.hook_data.get("vocab")
        if scores.shape == target.shape:
            predictions, probabilities = scores, None
        else:
            highest = torch.softmax(scores, -1).max(-1)
            predictions, probabilities = highest.indices, highest.values
        for index in range(len(target)):
            counts: Any = ...  # Show every position, unless some are ignored.
            is_sequence = target.dim() > 1 and (probabilities is not None or target[index].numel() > 1)
            if target[index].dim() and not target.is_floating_point():
                counts = target[index] != self.ignore_index
            probability = None
            if probabilities is not None and (counted := probabilities[index][counts]).numel():
                probability = counted.mean().item()
            shown = (self._text(values[index][counts], is_sequence, vocab) for values in (target, predictions))
            self._rows.append((len(self._rows), *shown, probability))

    def on_validation_end(self, trainer: RunControl) -> None:
        """Record the table."""
        if trainer.validations_in_progress <= 1 and self._rows:
            rows, self._rows = self._rows, []
            trainer.log_table(self.registered_name, COLUMNS, rows)

    def _text(self, values: Tensor, is_sequence: bool, vocab: Any) -> Any:
        """Return a class or number, or a sequence of them, as a cell."""
        if not is_sequence and values.numel():
            number = values.item()
            return self._name(number) if self.classes and not values.is_floating_point() else number
        listed = values.flatten()[:MAX_POSITIONS].tolist()
        if values.is_floating_point():
            return ", ".join(f"{value:.4g}" for value in listed)
        if self.classes:
            return ", ".join(map(self._name, listed))
        decode = getattr(vocab, "decode", None)
        return decode(listed) if callable(decode) else ", ".join(map(str, listed))

    def _name(self, number: Any) -> str:
        classes = self.classes or ()
        return classes[int(number)] if 0 <= number < len(classes) else str(number)
