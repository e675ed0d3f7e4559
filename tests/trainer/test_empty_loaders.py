"""A loader of several that gives nothing is refused by name: the others would hide it."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from builders import batches_of, make_trainer, train

from hookline.errors import TrainingError

BATCH = (torch.ones(4, 3), torch.zeros(4, 1))


class Unmeasured:
    """A loader without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from [BATCH] * self.count


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("empty", ["a", "b"])
def test_a_loader_without_batches_ends_the_run(empty: str, accumulate: int) -> None:
    """One after the other: the first or the last has nothing, whether or not it was read ahead."""
    loaders = {name: Unmeasured(0 if name == empty else 3) for name in ("a", "b")}
    with pytest.raises(TrainingError, match=f"the training loader '{empty}' yielded no batch: check the dataset"):
        train(data=loaders, accumulate=accumulate)


def test_an_iterator_beside_a_loader_is_rejected_in_its_second_epoch() -> None:
    """Otherwise the run would silently continue with the other loader alone."""
    trainer = make_trainer(data={"once": iter([BATCH] * 2), "always": [BATCH] * 2}, max_epochs=3)
    with pytest.raises(TrainingError, match="'once' yielded no batch: it is an iterator, which can be read only once"):
        trainer.train()
    assert trainer.epoch == 1


def test_loaders_that_give_something_are_read_as_before() -> None:
    """One batch each is enough, in every epoch."""
    trainer = train(data={"a": Unmeasured(1), "b": Unmeasured(1)}, max_epochs=2)
    assert trainer.loader_batches == {"a": 2, "b": 2}


@pytest.mark.parametrize("silent", [Unmeasured(0), batches_of(0)], ids=["no batches", "no samples"])
def test_a_validation_needs_batches_of_every_loader(silent: Iterable[Any]) -> None:
    """Without batches, or without samples in them, a loader would drop out of val/loss unseen."""
    with pytest.raises(TrainingError, match="the validation loader 'b' yielded no batch"):
        make_trainer(data=[BATCH]).validate({"a": [BATCH], "b": silent})


def test_an_iterator_to_validate_on_is_named_as_what_it_is() -> None:
    """Alone, and beside another: the second validation finds it read."""
    alone = make_trainer(data=[BATCH], val_dataloader=iter([BATCH]), max_epochs=2, sanity_batches=0)
    with pytest.raises(TrainingError, match="the validation loaders yielded no batches: it is an iterator"):
        alone.train()
    beside = make_trainer(data=[BATCH], val_loaders={"a": [BATCH], "b": iter([BATCH])}, max_epochs=2, sanity_batches=0)
    with pytest.raises(TrainingError, match="the validation loader 'b' yielded no batch: it is an iterator"):
        beside.train()


def test_a_batch_without_samples_weighs_nothing() -> None:
    """Its loss is the mean of nothing, which is NaN; the others' is not."""
    trainer = make_trainer(data=[BATCH])
    assert trainer.validate([BATCH, *batches_of(0)]) == trainer.validate([BATCH])


def test_weights_go_by_the_places_of_a_list() -> None:
    """A list numbers its loaders; the numbers may be written as numbers."""
    options = {"loader_schedule": "weighted", "max_steps": 12, "seed": 1}
    numbers = train(data=[Unmeasured(3), Unmeasured(3)], loader_weights={0: 1, 1: 5}, **options)
    texts = train(data=[Unmeasured(3), Unmeasured(3)], loader_weights={"0": 1, "1": 5}, **options)
    assert numbers.loader_batches == texts.loader_batches
