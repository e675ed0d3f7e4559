"""A shuffling sampler whose order is computed rather than drawn: an epoch can be entered anywhere at no cost."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from hookline.errors import TrainingError

_ROUNDS = 6
_CHUNK = 4096  # indices computed at a time
_MASK = 2**63 - 1  # torch has no unsigned 64-bit arithmetic; products wrap around, signs are cut off

Numbers = TypeVar("Numbers", int, torch.Tensor)


class ResumableSampler(Sampler[int]):
    """Shuffle `data` differently in every epoch; each index is a function of seed, epoch and position alone.

    It draws from no random stream and stores no permutation. A resumed run starts in the middle of an epoch without
    reading what was trained on before. Worker processes have separate random streams, which move with what they read.

    Args:
        data: The dataset, or anything with a length.
        seed: Decides the order, together with the epoch.
        shuffle: Whether to shuffle at all.
        dataset_draws: Set this if the dataset draws random numbers and the loader has workers; the batches before the
            resumed position are then read again.

    >>> loader = DataLoader(data, batch_size=32, sampler=ResumableSampler(data, seed=1))
    """

    def __init__(self, data: Sized, seed: int = 0, *, shuffle: bool = True, dataset_draws: bool = False) -> None:
        if len(data) == 0:
            raise TrainingError("ResumableSampler: the dataset is empty, there is nothing to sample from")
        self.seed, self.shuffle, self.dataset_draws = seed, shuffle, dataset_draws
        self.epoch = 0  # the epoch of the next iteration
        self._size = len(data)
        self._start = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Return the indices of the next epoch, from the position that `start_at` set."""
        epoch, start = self.epoch, self._start
        self.epoch, self._start = epoch + 1, 0
        return self._indices(epoch, start)

    def start_at(self, place: int) -> None:
        """Start the next iteration after `place` indices."""
        self._start = place

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next epoch, with seed and size for a check."""
        return {"epoch": self.epoch, "seed": self.seed, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of the next epoch; another dataset or seed would silently give another order."""
        for name, now in (("seed", self.seed), ("size", self._size)):
            if state[name] != now:
                raise TrainingError(f"ResumableSampler: the {name} was {state[name]} and is {now}; it must be the same")
        self.epoch = state["epoch"]

    def _indices(self, epoch: int, start: int) -> Iterator[int]:
        for first in range(start, self._size, _CHUNK):
            places = torch.arange(first, min(first + _CHUNK, self._size))
            yield from (shuffled(places, self._size, self.seed, epoch) if self.shuffle else places).tolist()


def shuffled(places: torch.Tensor, size: int, seed: int, epoch: int) -> torch.Tensor:
    """Map positions through a permutation of `range(size)` that depends on seed and epoch.

    A Feistel network permutes the next power of two; values outside the range are mapped again until they are inside.
    """
    keys = [_mixed(_mixed(_mixed(seed, _ROUNDS), epoch), turn) for turn in range(_ROUNDS)]
    bits = max(2, (size - 1).bit_length())
    found = _permuted(places, bits, keys)
    while (outside := found >= size).any():
        found[outside] = _permuted(found[outside], bits, keys)
    return found


def _permuted(values: torch.Tensor, bits: int, keys: list[int]) -> torch.Tensor:
    """Permute `range(2**bits)`: each round adds a hash of one half to the other, then the halves swap."""
    low = bits // 2
    for key in keys:
        right = values & ((1 << low) - 1)
        left = ((values >> low) + _mixed(right, key)) & ((1 << (bits - low)) - 1)
        values = (right << (bits - low)) | left
        low = bits - low
    return values


def _mixed(values: Numbers, key: int) -> Numbers:
    """Hash a number, or each element of a tensor: multiply and fold twice, like the finalizer of splitmix64."""
    values = (values ^ (key * 0x1E3779B97F4A7C15 & _MASK)) & _MASK
    for factor, shift in ((0x3F58476D1CE4E5B9, 30), (0x14D049BB133111EB, 27)):
        values = ((values ^ (values >> shift)) * factor) & _MASK
    return values ^ (values >> 31)
