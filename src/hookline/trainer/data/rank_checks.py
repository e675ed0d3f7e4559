"""Check that the ranks read consistent data: the same number of batches, but not the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from hookline._tensors import iter_tensors, map_tensors
from hookline.checkpoints import frozen
from hookline.checkpoints.format import problem_with
from hookline.core.failures import raise_if_quit
from hookline.errors import RankError, TrainingError
from hookline.ranks import Ranks, compare, fingerprint
from hookline.run.rng import preserve_rng, seed_everything
from hookline.trainer.data.loader_state import index_sampler, known_length
from hookline.trainer.data.loaders import TrainLoaders, smallest
from hookline.trainer.options import TrainerOptions

_SHARE = "give each rank its share of the data, as DataLoader(data, …, sampler=ResumableSampler(data)) does"


def check_lengths(ranks: Ranks, loaders: TrainLoaders, options: TrainerOptions) -> None:
    """Check that an epoch has the same number of batches on all ranks, because they wait for each other in every step.

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
        TrainingError: On every rank, if the first batches of all of them are the same, or if each shuffles the whole
            of one dataset.
    """
    first = list(islice(batches, 1))  # empty without batches; the loop then raises an error on all ranks
    if ranks.all_equal(_mark(first)) and first:
        raise TrainingError(
            f"the first batch is the same on all {ranks.world_size} ranks, which would train on the same data: {_SHARE}"
        )
    for name, loader in loaders.items():
        _check_whole_dataset(ranks, name, loader)
    return chain(first, batches)


def _check_whole_dataset(ranks: Ranks, name: str, loader: Any) -> None:
    """Raise TrainingError if a DataLoader on each rank shuffles one whole dataset, each in its own order.

    The ranks may have different datasets, such as files that were divided beforehand. Therefore a few of their samples
    are compared, with random streams that are equal on all ranks and restored afterwards.
    """
    sampler = index_sampler(loader) if isinstance(loader, DataLoader) else None
    is_whole = isinstance(sampler, (RandomSampler, SequentialSampler)) and not getattr(sampler, "replacement", False)
    if not is_whole or isinstance(loader.dataset, Subset):
        mark = [0, 0]
    else:
        try:
            with preserve_rng():
                seed_everything(0)
                size = len(loader.dataset)
                mark = [size, _mark([loader.dataset[index] for index in (0, size // 2, size - 1)])]
        except Exception as error:  # a dataset may use other indices
            raise_if_quit(error, f"the dataset of the loader {name!r}")
            mark = [0, 0]
    if len(set(map(tuple, ranks.gather(mark)))) == 1 and mark[0]:
        raise TrainingError(
            f"the loader {name!r} gives each of {ranks.world_size} ranks all {mark[0]} samples of one dataset, each in "
            f"an order of its own, so that an epoch trains on each sample {ranks.world_size} times: {_SHARE}. If that "
            "is what you want, give the loader your own sampler"
        )


def _mark(batch: Any) -> int:
    """Return a fingerprint of a batch or a sample."""
    tensors = (frozen.fingerprint(tensor) for tensor in iter_tensors(batch) if problem_with(tensor) is None)
    return fingerprint([map_tensors(lambda tensor: None, batch), *tensors])
