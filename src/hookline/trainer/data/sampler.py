"""Samplers that share an order between ranks; `ResumableSampler` computes its own, so it can start anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from hookline.errors import TrainingError
from hookline.ranks import rank_and_world_size

_ROUNDS = 6
_CHUNK = 4096  # indices computed at a time
_MASK = 2**63 - 1  # torch has no unsigned 64-bit arithmetic; products wrap around, signs are cut off

Numbers = TypeVar("Numbers", int, torch.Tensor)


class SharedSampler(Sampler[int]):
    """Give each rank its share of one order of the indices: one of every `world_size` consecutive indices.

    The first batches of all ranks together are therefore the first indices of the order, for any number of ranks, and a
    different number of ranks can continue after them.

    Args:
        size: How many indices there are.
        rank: The share of this process; by default the process's rank in torch.distributed, if it is initialized.
        world_size: How many shares there are; by default as many as processes.
        even: Whether all ranks get the same number of indices. The rest, fewer than `world_size`, is then left out.

    Raises:
        TrainingError: If the share does not exist or is empty.
    """

    dataset_draws = False

    def __init__(self, size: int, rank: int | None = None, world_size: int | None = None, even: bool = True) -> None:
        own_rank, processes = rank_and_world_size()
        self.rank, self.world_size = own_rank if rank is None else rank, processes if world_size is None else world_size
        self.even = even
        self._size, self._start = size, 0
        kind = type(self).__name__
        if not 0 <= self.rank < self.world_size:
            raise TrainingError(f"{kind}: there is no rank {self.rank} of {self.world_size}; ranks start at 0")
        if size == 0:
            raise TrainingError(f"{kind}: the dataset is empty, there is nothing to sample from")
        if len(self) == 0:
            raise TrainingError(f"{kind}: {size} samples cannot be shared by {self.world_size} processes; use fewer")

    def __len__(self) -> int:
        """Return how many indices the next iteration has on this rank."""
        return len(self._places())

    def start_at(self, place: int) -> None:
        """Start the next iteration after the first `place` indices of the order, counted over all ranks."""
        self._start = place

    def _places(self) -> range:
        """Return this rank's places in the order."""
        rest = self._size - self._start
        end = self._size - (rest % self.world_size if self.even else 0)
        return range(self._start + self.rank, end, self.world_size)

    def _take_places(self) -> range:
        """Return this rank's places of the iteration that starts, and forget where it starts."""
        places, self._start = self._places(), 0
        return places


class ShareOf(SharedSampler):
    """Give each rank its share of the order of another sampler, which must have the same order on all ranks.

    Args:
        sampler: The other sampler.
        rank: As for `SharedSampler`.
        world_size: As for `SharedSampler`.
    """

    def __init__(self, sampler: Any, rank: int | None = None, world_size: int | None = None) -> None:
        self.sampler = sampler
        super().__init__(len(sampler), rank, world_size)

    def __iter__(self) -> Iterator[int]:
        places = self._take_places()
        return islice(self.sampler, places.start, places.stop, places.step)


class ResumableSampler(SharedSampler):
    """Shuffle `data` differently in every epoch; each index is a function of seed, epoch and position alone.

    It draws from no random stream and stores no permutation. A resumed run starts in the middle of an epoch without
    reading what was trained on before. Worker processes have separate random streams, which depend on what they read.

    With several processes, each gets its share of the order, all with the same number of indices; the remainder, which
    is smaller than the number of processes, is left out of this epoch. For a validation, pass ``even=False``, so that
    nothing is left out.

    Args:
        data: The dataset, or anything with a length.
        seed: Decides the order, together with the epoch; the same on all ranks.
        shuffle: Whether to shuffle at all.
        dataset_draws: Set this if the dataset draws random numbers and the loader has workers; the batches before the
            resumed position are then read again.
        rank: The share of this process; by default the process's rank in torch.distributed, if it is initialized.
        world_size: How many shares there are; by default as many as processes.
        even: Whether all ranks get the same number of indices, as training needs.

    Raises:
        TrainingError: If the dataset or the rank's share of it is empty, or the rank does not exist.

    >>> loader = DataLoader(data, batch_size=32, sampler=ResumableSampler(data, seed=1))
    """

    def __init__(
        self,
        data: Sized,
        seed: int = 0,
        *,
        shuffle: bool = True,
        dataset_draws: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        even: bool = True,
    ) -> None:
        super().__init__(len(data), rank, world_size, even)
        self.seed, self.shuffle, self.dataset_draws = seed, shuffle, dataset_draws
        self.epoch = 0  # the epoch of the next iteration

    def __iter__(self) -> Iterator[int]:
        """Return the indices of the next epoch, from the position that `start_at` set."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._indices(epoch, self._take_places())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next epoch, with seed and size for a check."""
        return {"epoch": self.epoch, "seed": self.seed, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of the next epoch; a different dataset or seed would silently give a different order."""
        for name, now in (("seed", self.seed), ("size", self._size)):
            if state[name] != now:
                raise TrainingError(f"ResumableSampler: the {name} was {state[name]} and is {now}; it must be the same")
        self.epoch = state["epoch"]

    def _indices(self, epoch: int, all_places: range) -> Iterator[int]:
        for first in range(0, len(all_places), _CHUNK):
            chunk = all_places[first : first + _CHUNK]
            places = torch.arange(chunk.start, chunk.stop, chunk.step)
            yield from (shuffled(places, self._size, self.seed, epoch) if self.shuffle else places).tolist()


def shuffled(places: torch.Tensor, size: int, seed: int, epoch: int) -> torch.Tensor:
    """Map positions through a permutation of `range(size)` that depends on seed and epoch.

    A Feistel network permutes the next power of two; values outside the range are mapped again until they are inside.
    """
    keys = [_mixed(_mixed(_mixed(seed, _ROUNDS), epoch), turn) for turn in range(_ROUNDS)]
    bits = max(2, (size - 1).bit_length())
    indices = _permuted(places, bits, keys)
    while (outside := indices >= size).any():
        indices[outside] = _permuted(indices[outside], bits, keys)
    return indices


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
