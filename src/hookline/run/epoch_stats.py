"""Accumulate the losses and metrics of an epoch on their device; they are read only when a mean is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline.ranks import Ranks
from hookline.run.step_log import LOSS
from hookline.run.window import without_nan

if TYPE_CHECKING:
    from hookline.run.window import Window

Number = torch.Tensor | float
CHUNK = 64  # losses or metrics that are added up at once


class EpochStats:
    """Means over the micro-batches of one epoch, and the newest value of every metric of a step.

    The metrics are the losses of each of several loaders and the numbers that `step_fn` returns besides the loss.

    Args:
        optional: Metrics for which a micro-batch may have no value; it is then NaN and left out of the mean.
    """

    def __init__(self, optional: Collection[str] = ()) -> None:
        self._optional = optional
        self._pending: dict[str, list[Number]] = {LOSS: []}  # detached losses and metrics that are not in the sums yet
        self._sums: dict[str, Number] = {LOSS: 0.0}
        self._counts: dict[str, torch.Tensor | float] = {LOSS: 0}  # with weights, the sums of the weights
        self._non_finite: torch.Tensor | int = 0  # losses that are NaN or infinite
        self._latest: dict[str, tuple[int, Number]] = {}  # with the step
        self.began = -1  # the last step before the epoch
        self._means_over_ranks: dict[str, float] | None = None  # the means over all ranks, until something is added
        self._loss_over_ranks = -1, math.nan  # the last step whose loss was averaged over the ranks, and that loss

    def next_epoch(self, step: int) -> EpochStats:
        """Return the statistics of an epoch that starts after a step: new means, and the latest values so far."""
        following = EpochStats(self._optional)
        following._latest, following.began = self._latest, step
        return following

    def add(self, name: str, value: Number) -> None:
        """Add a detached loss or metric of one micro-batch."""
        self._pending.setdefault(name, []).append(value)

    def add_share(self, name: str, value: Number, share: float) -> None:
        """Add a detached metric of one micro-batch, for this rank's share of the samples or tokens."""
        wide = value.double() if isinstance(value, torch.Tensor) else value
        total, weight = without_nan(wide * share, share) if name in self._optional else (wide * share, share)
        self._means_over_ranks = None
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0) + weight
        if name == LOSS:
            self._non_finite = self._non_finite + ~torch.as_tensor(value).isfinite()

    def set_latest(self, step: int, name: str, value: Number) -> None:
        """Store a detached metric of a step."""
        self._latest[name] = step, value

    def fold(self) -> None:
        """Add the recent losses and metrics to the sums, on their device."""
        for name in self._pending:
            self._fold(name)

    def fold_chunks(self) -> None:
        """Add losses and metrics to the sums in chunks of a fixed size, and leave the rest.

        A device adds up each chunk in its own order. This may therefore be called at any time without changing a bit of
        the sums.
        """
        for name, values in self._pending.items():
            while len(values) >= CHUNK:
                self._fold(name, CHUNK)

    def _fold(self, name: str, count: int | None = None) -> None:
        """Add the first recent values of a metric to its sum, without those that are missing.

        Args:
            name: The metric, or `LOSS`.
            count: How many values; by default all.
        """
        values, is_optional = self._pending[name][:count], name in self._optional
        if not values:
            return
        del self._pending[name][:count]
        self._means_over_ranks = None
        total, counted = self._sums.get(name, 0.0), self._counts.get(name, 0)
        if any(not isinstance(value, torch.Tensor) or value.is_cpu for value in values):
            numbers, total = list(map(float, values)), float(total)
            for number in numbers:  # one by one, so that no bit depends on when this is done
                if not (is_optional and math.isnan(number)):
                    total, counted = total + number, counted + 1
            bad: torch.Tensor | int = sum(not math.isfinite(number) for number in numbers)
        else:
            stacked = torch.stack([torch.as_tensor(value).reshape(()) for value in values]).double()
            total = total + (stacked.nansum() if is_optional else stacked.sum())
            counted = counted + ((~stacked.isnan()).sum() if is_optional else len(values))
            bad = (~stacked.isfinite()).sum() if name == LOSS else 0
        self._sums[name], self._counts[name] = total, counted
        if name == LOSS:
            self._non_finite = self._non_finite + bad

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch so far, NaN before the first batch; waits for the device."""
        self._fold(LOSS)
        return self._mean(LOSS)

    def _mean(self, name: str) -> float:
        count = float(self._counts[name])
        return float(self._sums[name]) / count if count else math.nan

    def average_over_ranks(self, ranks: Ranks, step: int, loss: float, window: Window) -> None:
        """Replace the means and latest values with those over all ranks, until something is added; all must do so.

        Args:
            ranks: The ranks.
            step: The current step.
            loss: Its loss on this rank.
            window: Its window, which has the weight of this rank's numbers in the step.
        """
        self.fold()
        parts: dict[tuple[str, str], list[float]] = {("step", LOSS): [window.weigh(loss), 1.0]}
        for name, total in self._sums.items():
            parts["sum", name] = [float(total), float(self._counts[name])]
        for name, (at, latest) in self._latest.items():
            value, weight = float(latest), window.rank_weight if at == step else 1.0
            if name in self._optional and math.isnan(value):
                weight = 0.0
            parts["latest", name] = [value * weight if weight else 0.0, weight, at, 1.0]
        means: dict[str, float] = {}
        latest_of_ranks: dict[str, tuple[int, Number]] = {}
        for (kind, metric), numbers in ranks.add_up(parts).items():
            total, count, *steps = numbers.tolist()
            mean = total / count if count else math.nan
            if kind == "step":
                self._loss_over_ranks = step, mean
            elif kind == "sum":
                means[_epoch_name(metric)] = mean
            else:  # Ranks may have measured a metric at different steps; they agree on the mean.
                latest_of_ranks[metric] = round(steps[0] / steps[1]), mean
        means[_epoch_name(LOSS)] = means.pop(_epoch_name(LOSS))  # moved to the end, where `means` has it, too
        self._means_over_ranks, self._latest = means, latest_of_ranks

    @property
    def has_losses(self) -> bool:
        """Whether a loss was added in this epoch."""
        return bool(self._pending[LOSS] or self._counts[LOSS])

    def loss_over_ranks(self, step: int) -> float | None:
        """Return the loss of a step over all ranks, if they have averaged it."""
        return self._loss_over_ranks[1] if self._loss_over_ranks[0] == step else None

    def means(self) -> dict[str, float]:
        """Return the means by recorded name (`train/epoch_acc`, `train/books/epoch_loss`); waits for the device."""
        if self._means_over_ranks is not None and not any(self._pending.values()):
            return dict(self._means_over_ranks)
        self.fold()
        metrics = [name for name in self._sums if name != LOSS]
        return {_epoch_name(name): self._mean(name) for name in [*metrics, LOSS]}

    def latest(self, since: int | None = None) -> dict[str, float]:
        """Return the latest values of steps after `since`, or of this epoch; waits for the device."""
        after = self.began if since is None else since
        return {name: float(value) for name, (step, value) in self._latest.items() if step > after}

    def take_non_finite(self) -> int:
        """Return how many losses were NaN or infinite since the last call; waits for the device."""
        self.fold()
        count, self._non_finite = int(self._non_finite), 0
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as numbers; waits for the device."""
        self.fold()
        counts = {name: float(count) for name, count in self._counts.items()}
        counts = {name: int(count) if count.is_integer() else count for name, count in counts.items()}
        sums = {name: [counts[name], float(total)] for name, total in self._sums.items()}
        count, total = sums.pop(LOSS)
        newest = {name: [step, float(value)] for name, (step, value) in self._latest.items()}
        metrics = {"sums": sums, "newest": newest, "began": self.began}
        return {"count": count, "sum": total, "bad": int(self._non_finite), "beside": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for values in self._pending.values():
            values.clear()
        metrics = state["beside"]
        sums = {**metrics["sums"], LOSS: [state["count"], state["sum"]]}
        self._counts = {name: count for name, (count, _) in sums.items()}
        self._sums = {name: total for name, (_, total) in sums.items()}
        self._non_finite = int(state["bad"])
        self._latest = {name: (step, value) for name, (step, value) in metrics["newest"].items()}
        self.began = metrics["began"]


def _epoch_name(name: str) -> str:
    place, slash, last = name.rpartition("/")
    return f"{place}{slash}epoch_{last}"


def add_losses(states: Sequence[Mapping[str, Any]], is_counted: bool) -> dict[str, Any]:
    """Add up what `state_dict` returned on several ranks; the latest values are those of the first rank.

    Args:
        states: The states by rank.
        is_counted: Whether the sums are wanted; otherwise they are zero, and only their names are returned.
    """
    of_ranks = [state["beside"]["sums"] for state in states]
    names = dict.fromkeys(name for sums in of_ranks for name in sums)
    sums = {name: [sum(rank.get(name, (0, 0.0))[index] for rank in of_ranks) for index in (0, 1)] for name in names}
    totals = {key: sum(state[key] for state in states) for key in ("count", "sum", "bad")}
    if not is_counted:
        sums, totals = {name: [0, 0.0] for name in sums}, {"count": 0, "sum": 0.0, "bad": 0}
    return {**totals, "beside": {**states[0]["beside"], "sums": sums}}
