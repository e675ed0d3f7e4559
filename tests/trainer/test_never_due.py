"""Options under which a run would wait for ever are refused when it is made."""

import pytest

from hookline.errors import ConfigError
from hookline.trainer.options import TrainerOptions


@pytest.mark.parametrize("never", [0, "0", "0 epochs"])
def test_a_validation_that_is_never_due_is_said_with_null(never: int | str) -> None:
    """Hooks and schedulers that wait for validations warn when there are none, and know that by null."""
    with pytest.raises(ConfigError, match=r"trainer\.validate_every: .* is never due; write null for never"):
        TrainerOptions(validate_every=never)
    assert TrainerOptions(validate_every=None).validation_period is None


def test_weights_that_no_number_can_hold_are_refused() -> None:
    """Their sum would be infinite, every draw the last loader's, and the epoch without an end."""
    with pytest.raises(ConfigError, match="only their ratios count"):
        TrainerOptions(loader_schedule="weighted", loader_weights={"a": 1e308, "b": 1e308})
