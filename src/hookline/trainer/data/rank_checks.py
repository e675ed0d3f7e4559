"""Check that what the ranks read fits together: as many batches, and not the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from hookline._console import logger
from hookline._tensors import iter_tensors, map_tensors
from hookline.checkpoints import frozen
from hookline.checkpoints.format import problem_with
from hookline.errors import RankError, TrainingError
from hookline.ranks import Ranks, compare, fingerprint
from hookline.trainer.data.loader_state import index_sampler, known_length
from hookline.trainer.data.loaders import TrainLoaders, smallest
from hookline.trainer.options import TrainerOptions

_SHARE = "give each rank its share of the data, as DataLoader(data, …, sampler=ResumableSampler(data)) does"


def check_lengths(ranks: Ranks, loaders: TrainLoaders, options: TrainerOptions) -> None:
    """Check that an epoch has equally many batches on all ranks, each of which waits for the others in every step.

    Raises:
        TrainingError: On every rank, if it does not, or if that cannot be known.
    """
    lengths = {name: smallest(known_length(loader), loaders.limit) for name, loader in loaders.items()}
    unknown = [name for name, length in lengths.items() if length is None]
    try:
        compare(ranks, {"the number of training batches": lengths})
    except RankError as error:
        raise TrainingError(f"{error}; {_SHARE}, or end epochs earlier with limit_train_batches") from None
    if unknown and (options.max_steps is None or options.max_epochs is not None):
        raise TrainingError(
            f"the number of batches of the training loader {unknown[0]!r} is unknown, so {ranks.world_size} processes "
            "cannot end an epoch together: set limit_train_batches, or train by max_steps alone on data without an end"
        )


def check_first_batch(ranks: Ranks, batches: Iterator[Any], loaders: TrainLoaders) -> Iterator[Any]:
    """Check that the ranks do not all read the same data, and return all batches.

    Args:
        ranks: The ranks.
        batches: The batches of an epoch.
        loaders: Where they come from.

    Raises:
        TrainingError: On every rank, if the first batches of all of them are the same.
    """
    first = list(islice(batches, 1))  # none if there are no batches, of which the loop complains on all ranks
    mark = fingerprint(
        [
            map_tensors(lambda tensor: None, first),
            *(frozen.fingerprint(tensor) for tensor in iter_tensors(first) if problem_with(tensor) is None),
        ]
    )
    if ranks.all_equal(mark) and first:
        raise TrainingError(
            f"the first batch is the same on all {ranks.world_size} ranks, which would train on the same data: {_SHARE}"
        )
    _warn_of_whole_datasets(ranks, loaders)
    return chain(first, batches)


def _warn_of_whole_datasets(ranks: Ranks, loaders: TrainLoaders) -> None:
    """Warn of DataLoaders that give each rank a whole dataset: in another order, so that first batches differ."""
    for name, loader in loaders.items():
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, Subset):
            continue
        sampler = index_sampler(loader)
        if isinstance(sampler, (RandomSampler, SequentialSampler)):
            logger.warning(
                "the loader %r gives each of %d ranks all %d samples of its dataset: %s, unless their datasets differ",
                name, ranks.world_size, len(sampler), _SHARE,
            )  # fmt: skip
