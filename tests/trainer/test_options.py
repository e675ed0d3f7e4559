"""Options are checked where they are given, and a wrong one is named with the right ones."""

import inspect
from typing import Any

import pytest

from hookline import GenericTrainer, SimpleTrainer, TrainingHook, get_trainer
from hookline.core.catalog import CATALOG
from hookline.errors import ConfigError
from hookline.trainer.options import TrainerOptions


@pytest.mark.parametrize("function", [SimpleTrainer, GenericTrainer, get_trainer])
def test_help_lists_the_options(function: Any) -> None:
    """Every option is a keyword of its own in the signature, with its default; nothing is hidden in ``**``."""
    parameters = inspect.signature(function).parameters
    assert not [parameter for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    assert (parameters["accumulate"].default, parameters["validate_every"].default) == (1, "1 epoch")
    assert "loss_fn" in parameters and parameters["max_steps"].annotation == int | None


@pytest.mark.parametrize("event", CATALOG.values(), ids=lambda event: event.name)
def test_help_of_an_event_lists_its_arguments(event: Any) -> None:
    """`help(TrainingHook.on_step_end)` has a line for each argument that a hook may name there."""
    text = inspect.getdoc(getattr(TrainingHook, event.name)) or ""
    listed = [line.partition(":")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    assert listed == event.argument_names and text.startswith(event.doc)


def test_one_epoch_by_default() -> None:
    """Without max_epochs and max_steps a run is one epoch; with max_steps alone epochs are not limited."""
    assert TrainerOptions().epochs == 1
    assert TrainerOptions(max_steps=5).epochs is None
    assert TrainerOptions(max_steps=5, max_epochs=2).epochs == 2


def test_an_unknown_option_is_rejected_with_the_nearest() -> None:
    """A misspelt keyword says which one was meant."""
    with pytest.raises(ConfigError, match=r"trainer\.max_epoch: unknown option; did you mean 'max_epochs'\?"):
        TrainerOptions.make({"max_epoch": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate", 0),
        ("accumulate", 1.5),
        ("accumulate", True),
        ("max_epochs", -1),
        ("max_steps", "3"),
        ("fast_dev_run", -2),
    ],
)
def test_a_wrong_count_is_rejected(name: str, value: Any) -> None:
    """Counts are whole numbers that are large enough."""
    with pytest.raises(ConfigError, match=rf"trainer\.{name}: expected an integer of at least"):
        TrainerOptions.make({name: value})


@pytest.mark.parametrize("value", ["30 s", "1M tokens", "2 batches", "often"])
def test_validation_is_counted_in_steps_or_epochs(value: str) -> None:
    """Another unit, or no unit at all, is refused when the options are made."""
    with pytest.raises(ConfigError, match=r"trainer\.validate_every"):
        TrainerOptions(validate_every=value)


def test_the_validation_period_is_a_value() -> None:
    """A number counts steps, words say their unit, and None means never."""
    period = TrainerOptions(validate_every="2 epochs").validation_period
    assert period is not None and (period.amount, period.unit) == (2, "epochs")
    assert str(TrainerOptions(validate_every=10).validation_period) == "10 steps"
    assert TrainerOptions(validate_every=None).validation_period is None


def test_a_trial_run_is_short_strict_and_leaves_nothing() -> None:
    """fast_dev_run is one epoch, keeps no record and lets hooks raise."""
    options = TrainerOptions(fast_dev_run=3, max_epochs=10, max_steps=100)
    assert (options.epochs, options.record, options.debug) == (1, False, True)
    assert TrainerOptions(fast_dev_run=3, max_steps=2).max_steps == 2


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, True, "half"])
def test_a_wrong_limit_is_rejected(value: Any) -> None:
    """An epoch is limited to a count of batches or to a share of them."""
    with pytest.raises(ConfigError, match=r"trainer\.limit_train_batches: expected a count, or a share such as 0\.1"):
        TrainerOptions(limit_train_batches=value)


def test_validation_is_as_short_as_the_trial() -> None:
    """fast_dev_run and overfit_batches limit validation, limit_train_batches does not."""
    assert TrainerOptions(fast_dev_run=2).validation_limit == 2
    assert TrainerOptions(overfit_batches=3).validation_limit == 3
    assert TrainerOptions(limit_train_batches=4).validation_limit is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loader_schedule": "robin"}, r"loader_schedule: invalid value 'robin'; did you mean 'round_robin'"),
        ({"loader_end": "shortest"}, r"loader_end: loader_schedule='sequential' reads every loader to its end"),
        ({"loader_weights": {"a": 1}}, r"loader_weights: only for loader_schedule='weighted', not 'sequential'"),
        ({"loader_schedule": "weighted", "loader_weights": {}}, r"loader_weights: expected a weight for each loader"),
        ({"loader_schedule": "weighted", "loader_weights": [1]}, r"loader_weights: expected a weight for each loader"),
        (
            {"loader_schedule": "weighted", "loader_weights": {"a": 0}},
            r"loader_weights\.a: expected a finite number",
        ),
        ({"loader_schedule": "weighted", "loader_weights": {"a": True}}, r"loader_weights\.a: .*got True"),
        ({"loader_schedule": "weighted", "loader_weights": {"a": float("inf")}}, r"loader_weights\.a: .*got inf"),
    ],
    ids=str,
)
def test_inconsistent_loader_schedules_are_rejected(given: dict[str, Any], said: str) -> None:
    """What a schedule would ignore, and weights that never come up."""
    with pytest.raises(ConfigError, match=rf"^trainer\.{said}"):
        TrainerOptions(**given)


@pytest.mark.parametrize("never", [0, "0", "0 epochs"])
def test_a_validation_that_is_never_due_is_said_with_null(never: int | str) -> None:
    """Hooks and schedulers that wait for validations warn when there are none, and know that by null."""
    with pytest.raises(ConfigError, match=r"trainer\.validate_every: .* is never due; write null for never"):
        TrainerOptions(validate_every=never)
    assert TrainerOptions(validate_every=None).validation_period is None


def test_weights_that_no_number_can_hold_are_rejected() -> None:
    """Their sum would be infinite, every draw the last loader's, and the epoch without an end."""
    with pytest.raises(ConfigError, match="only their ratios count"):
        TrainerOptions(loader_schedule="weighted", loader_weights={"a": 1e308, "b": 1e308})
