"""`sample_predictions`: record what the model predicts for a few validation samples, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline import _checks
from hookline._parameters import PositiveInt
from hookline._predictions import IGNORE_INDEX, align_classes, find_predictions
from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl

COLUMNS = ("sample", "target", "prediction", "probability")
MAX_POSITIONS = 200  # positions of a sequence that are shown


class SamplePredictions(NamedHook):
    """Records a table of the first samples of each validation: target, prediction and the prediction's probability.

    The table has the hook's name. Classes are shown by their names or numbers; sequences of them, as of language
    models, as text if the data has a vocabulary (`trainer.hook_data["vocab"]`), with the mean probability. Outputs of
    the targets' shape are shown as numbers. Reading the samples waits for the device. With several ranks they are
    rank 0's.

    Args:
        samples: How many samples to show.
        classes: The names of the classes, in their order; their numbers by default.
        ignore_index: Targets that do not count; in a sequence neither they nor the predictions there are shown.
        shift: Compare the prediction at each position with the target of the next one, for language models whose
            labels are their inputs, as those of Hugging Face.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "sample_predictions"

    def __init__(
        self,
        samples: PositiveInt = 8,
        classes: Sequence[str] | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift: bool = False,
    ) -> None:
        self.classes = _checks.optional(_checks.names, classes, "classes")
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
