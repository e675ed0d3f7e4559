"""How losses and metrics cross the ranks: the means of a step, of an epoch and of a validation are those of all ranks.

The loss of a step is logged like any number. `Window.weigh` weights it by what was in the window of this rank, and the
record takes the mean in its next exchange (record/shared.py). The methods here do the rest. Most of them wait for the
other ranks, because hooks decide by these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.core.shared_part import SharedPart, Sizes
from hookline.ranks import Ranks
from hookline.run.agreement import Agreement
from hookline.run.outputs import as_python_number
from hookline.trainer.metrics import merge_metrics

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer


class RankMeans(Agreement):
    """The part of `RankAgreement` that is about numbers: tokens, metrics of a step, means of an epoch."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._trainer, self._ranks = trainer, trainer.ranks
        self._tokens = -1, 0  # micro-batches, and the tokens of all ranks by then

    def tokens_seen(self) -> int:
        """Return the tokens of all ranks; waits for them, once per micro-batch."""
        progress = self._trainer.progress
        if self._tokens[0] != progress.batches:
            tokens = self.count_once(progress.tokens_seen)
            self._tokens = progress.batches, self._ranks.total([tokens])[0]
        return self._tokens[1]

    def count_once(self, count: int) -> int:
        """Return what this rank adds to a count over all ranks: nothing if rank 0 has the same batches."""
        return count if self._trainer.engine.averages or self._ranks.rank == 0 else 0

    def record_mean(self, name: str, value: Any, is_optional: bool) -> None:
        """Record a metric of the step as the mean over the ranks; a rank may have no value of an optional one."""
        trainer, window = self._trainer, self._trainer.accumulation
        if not is_optional:
            trainer.log(name, window.weigh(value))
            return
        weight = window.rank_weight

        def sums(_: Tensor) -> Tensor:
            number = float(value)  # waits for its device; NaN if this rank has no value, which then has no weight
            return torch.tensor([0.0, 0.0] if math.isnan(number) else [number * weight, weight], dtype=torch.float64)

        def finish(sizes: Sizes, maxima: Tensor, sums: Tensor) -> dict[str, float]:
            total, weights = sums.tolist()
            return {name: total / weights if weights else math.nan}

        trainer.share(SharedPart(name, trainer.step, trainer.epoch, {name: (0, 2)}, finish, sums=sums))

    def average_stats(self) -> None:
        """Make means, latest values and the step's loss those of all ranks, where hooks decide by them."""
        trainer, loss = self._trainer, self._trainer.event_args.window_loss
        trainer.stats.average_over_ranks(self._ranks, trainer.step, loss, trainer.accumulation)
        self.tokens_seen()  # kept; a rank that has no validation batch would not ask for it


class SampleAverages:
    """Means weighted by samples, summed on the device and read once. A batch without a key has no part in its mean.

    A key that only some ranks have is averaged over their samples.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[Any, int]] = {}  # a total and its samples, by loader and key
        self.tokens = 0

    def add(self, loader: str, samples: int, results: Mapping[str, Any]) -> None:
        """Add the results of one batch; a batch without samples has no weight."""
        for key, value in results.items() if samples else ():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(as_python_number(value))
            total, count = self._sums.get((loader, key), (0.0, 0))
            self._sums[loader, key] = total + wide * samples, count + samples

    def add_up(self, ranks: Ranks) -> None:
        """Add the sums of all ranks, so that each sample counts once; waits for the device and for all ranks."""
        named: dict[str, list[float]] = {"": [self.tokens]}
        for (loader, key), (total, samples) in self._sums.items():
            named[f"{loader}\n{key}"] = [float(total), samples]
        added = {name: numbers.tolist() for name, numbers in ranks.add_up(named).items()}
        self.tokens, self._sums = int(added.pop("")[0]), {}
        for name, (total, samples) in added.items():
            loader, _, key = name.partition("\n")
            self._sums[loader, key] = total, int(samples)

    def loaders(self) -> list[str]:
        """Return the loaders that had samples."""
        return list(dict.fromkeys(loader for loader, _ in self._sums))

    def metrics(self) -> dict[str, float]:
        """Return `val/<key>`, and with several loaders `val/<loader>/<key>`, once `add_up` has read the sums.

        Batches with tokens are a language model's, which has a perplexity.
        """
        totals: dict[str, tuple[float, int]] = {}
        for (_, key), (total, samples) in self._sums.items():
            total_so_far, samples_so_far = totals.get(key, (0.0, 0))
            totals[key] = total_so_far + total, samples_so_far + samples
        metrics = {f"val/{key}": total / samples for key, (total, samples) in totals.items()}
        if len(self.loaders()) > 1:
            of_each = ({f"val/{loader}/{key}": part[0] / part[1]} for (loader, key), part in self._sums.items())
            metrics = merge_metrics(*of_each, metrics)
        if self.tokens:
            metrics["val/perplexity"] = math.exp(metrics["val/loss"]) if metrics["val/loss"] < 700 else math.inf
        return metrics
