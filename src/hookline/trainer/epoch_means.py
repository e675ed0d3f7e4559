"""What an epoch has beside its losses: the losses of each loader, and the numbers that step_fn returns, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Number = torch.Tensor | float


class EpochMeans:
    """Means over an epoch's micro-batches, and the newest value of every step's numbers. Both stay on their device."""

    def __init__(self) -> None:
        self._recent: dict[str, list[Number]] = {}  # not in the sums yet
        self._sums: dict[str, Number] = {}
        self._counts: dict[str, int] = {}
        self._newest: dict[str, tuple[int, Number]] = {}  # with the step it is of
        self._began = -1  # the last step before the epoch

    def of_next_epoch(self, step: int) -> EpochMeans:
        """Those of the epoch that begins after this step: means begin anew, and the newest values stay so."""
        following = EpochMeans()
        following._newest, following._began = self._newest, step
        return following

    def add(self, name: str, value: Number) -> None:
        """One micro-batch's, detached."""
        self._recent.setdefault(name, []).append(value)

    def note(self, step: int, name: str, value: Number) -> None:
        """A step's, detached."""
        self._newest[name] = step, value

    def fold(self) -> None:
        """Add the recent ones to the sums; on a device that is not the host nothing waits."""
        for name, values in self._recent.items():
            self._sums[name] = _added(self._sums.get(name, 0.0), values)
            self._counts[name] = self._counts.get(name, 0) + len(values)
        self._recent.clear()

    def means(self) -> dict[str, float]:
        """By the names that the epoch's have: `train/epoch_acc`, `train/books/epoch_loss`. Waits for the device."""
        self.fold()
        return {epoch_name(name): float(total) / self._counts[name] for name, total in self._sums.items()}

    def newest(self, since: int | None = None) -> dict[str, float]:
        """The newest values of steps later than that one, or else of the epoch's. Waits for the device."""
        after = self._began if since is None else since
        return {name: float(value) for name, (step, value) in self._newest.items() if step > after}

    def state_dict(self) -> dict[str, Any]:
        """As numbers. Waits for the device."""
        self.fold()
        sums = {name: [self._counts[name], float(total)] for name, total in self._sums.items()}
        newest = {name: [step, float(value)] for name, (step, value) in self._newest.items()}
        return {"sums": sums, "newest": newest, "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; checkpoints of an earlier version say nothing of it."""
        self._recent.clear()
        self._counts = {name: count for name, (count, _) in state.get("sums", {}).items()}
        self._sums = {name: total for name, (_, total) in state.get("sums", {}).items()}
        self._newest = {name: (step, value) for name, (step, value) in state.get("newest", {}).items()}
        self._began = state.get("began", -1)


def epoch_name(name: str) -> str:
    """What the mean over an epoch is called."""
    place, slash, last = name.rpartition("/")
    return f"{place}{slash}epoch_{last}"


def own_number(value: Any) -> Any:
    """A number that nobody else can write to, without a graph; on the host Python's own, elsewhere a copy there."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu else value.detach().clone()


def _added(total: Number, values: Sequence[Number]) -> Number:
    """On the host one by one, so that no bit tells when it was done."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and not value.is_cpu]
    if len(tensors) == len(values):
        return total + torch.stack([one.reshape(()) for one in tensors]).double().sum()
    for value in values:
        total = total + float(value)
    return total
