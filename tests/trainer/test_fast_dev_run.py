"""A trial (`fast_dev_run`) takes the given number of batches of each loader, however they are mixed."""

from typing import Any

import pytest
from builders import make_batches, make_trainer
from read_batches import Unknown

from hookline import SimpleTrainer


def tried(kind: Any = list, books: int = 4, **options: Any) -> tuple[list[str], SimpleTrainer]:
    """Return the loaders of the batches that a trial of two gave."""
    loaders = {"books": kind(make_batches(books)), "web": kind(make_batches(3)), "code": kind(make_batches(5))}
    validated = {"near": make_batches(3), "far": make_batches(1)}
    trainer = make_trainer(data=loaders, val_loaders=validated, fast_dev_run=2, **options)
    seen: list[str] = []
    trainer.on("train_batch_end", name="train")(lambda loader_name: seen.append(loader_name))
    trainer.on("validation_batch_end", name="val")(lambda loader_name: seen.append(loader_name))
    trainer.train()
    return seen, trainer


VALIDATED = ["near", "near", "far"]


@pytest.mark.parametrize("kind", [list, Unknown])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_loader_is_tried_in_its_order(kind: Any, accumulate: int) -> None:
    """One after the other; the run knows how many steps that makes."""
    seen, trainer = tried(kind, accumulate=accumulate)
    assert seen == ["books"] * 2 + ["web"] * 2 + ["code"] * 2 + VALIDATED
    assert trainer.step == trainer.total_steps == -(-6 // accumulate)


@pytest.mark.parametrize("kind", [list, Unknown])
def test_a_loader_that_is_shorter_than_the_trial_is_read_to_its_end(kind: Any) -> None:
    """The next one begins behind it."""
    seen, trainer = tried(kind, books=1)
    assert seen == ["books"] + ["web"] * 2 + ["code"] * 2 + VALIDATED and trainer.step == 5


@pytest.mark.parametrize(
    "options",
    [
        {"loader_schedule": "round_robin"},
        {"loader_schedule": "round_robin", "loader_end": "shortest"},
        {"loader_schedule": "weighted", "loader_weights": {"books": 1e9, "web": 1, "code": 1}},
    ],
    ids=["longest", "shortest", "weighted"],
)
@pytest.mark.parametrize("kind", [list, Unknown])
def test_mixed_loaders_are_tried_equally(kind: Any, options: dict[str, Any]) -> None:
    """LoaderOrder that are drawn might leave one out: in a trial they come round."""
    seen, trainer = tried(kind, **options)
    assert seen == ["books", "web", "code"] * 2 + VALIDATED and trainer.step == trainer.total_steps == 6


@pytest.mark.parametrize("validate_every", [2, 325, "3 epochs"])
def test_a_trial_validates_once_however_rare_validations_are(validate_every: int | str) -> None:
    """It tries a batch of everything, so a validation that is due much later, too."""
    seen, _ = tried(validate_every=validate_every)
    assert seen == ["books"] * 2 + ["web"] * 2 + ["code"] * 2 + VALIDATED


def test_a_trial_of_a_run_without_validations_has_none() -> None:
    """`validate_every=None` says that the loaders are for something else."""
    seen, _ = tried(validate_every=None)
    assert len(seen) == 6


def test_fewer_steps_may_be_requested() -> None:
    """More make no trial longer."""
    assert tried(max_steps=3)[1].step == 3 and tried(max_steps=100)[1].step == 6
