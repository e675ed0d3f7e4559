"""Check before the first step that what the ranks read fits together: as many batches, and not the same ones."""

from __future__ import annotations

from typing import Any

from hookline._tensors import iter_tensors, map_tensors
from hookline.checkpoints import frozen
from hookline.checkpoints.format import problem_with
from hookline.errors import RankError, TrainingError
from hookline.ranks import OneProcess, all_equal, compare, fingerprint
from hookline.trainer.data.loader_state import known_length
from hookline.trainer.data.loaders import TrainLoaders, smallest
from hookline.trainer.options import TrainerOptions

_SHARE = "give each rank its share of the data, as DataLoader(data, …, sampler=ResumableSampler(data)) does"


def check_lengths(ranks: OneProcess, loaders: TrainLoaders, options: TrainerOptions) -> None:
    """Check that an epoch has equally many batches on all ranks, each of which waits for the others in every step.

    Raises:
        TrainingError: On every rank, if it does not, or if that cannot be known.
    """
    lengths = {name: smallest(known_length(loader), loaders.limit) for name, loader in loaders.items()}
    mark, unknown = fingerprint(lengths.items()), [name for name, length in lengths.items() if length is None]
    if not all_equal(ranks.total([mark, mark * mark]), ranks.world_size):
        try:
            compare(ranks, {"the number of training batches": lengths})
        except RankError as error:
            raise TrainingError(f"{error}; {_SHARE}, or end epochs earlier with limit_train_batches") from None
    if unknown and (options.max_steps is None or options.max_epochs is not None):
        raise TrainingError(
            f"the number of batches of the training loader {unknown[0]!r} is unknown, so {ranks.world_size} processes "
            "cannot end an epoch together: set limit_train_batches, or train by max_steps alone on data without an end"
        )


def check_first_batch(ranks: OneProcess, batch: Any) -> None:
    """Check that the ranks do not all read the same data.

    Raises:
        TrainingError: On every rank, if all of them pass the same batch.
    """
    mark = fingerprint(
        [
            map_tensors(lambda tensor: None, batch),
            *(frozen.fingerprint(tensor) for tensor in iter_tensors(batch) if problem_with(tensor) is None),
        ]
    )
    if all_equal(ranks.total([mark, mark * mark]), ranks.world_size):
        raise TrainingError(
            f"the first batch is the same on all {ranks.world_size} ranks, which would train on the same data: {_SHARE}"
        )
