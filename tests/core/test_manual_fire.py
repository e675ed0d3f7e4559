"""The arguments of a manually fired event: naming one that was not passed is the caller's error."""

import pytest

from hookline.core.catalog import CATALOG
from hookline.core.failures import argument_if_any, step_of
from hookline.core.manual_fire import ManualArgs
from hookline.errors import HooklineError, MissingArgument


def test_values_lie_under_the_attributes_that_hooks_read() -> None:
    """`metrics` of a validation is there under both spellings."""
    args = ManualArgs(CATALOG["on_validation_end"], {"metrics": {"loss": 1.0}, "step": 3}, lambda name: [])
    assert args.val_metrics == args.eval_metrics == {"loss": 1.0}
    assert args.step == 3


def test_a_missing_value_names_the_event_the_hooks_and_the_remedy() -> None:
    """The message tells the caller whom the value was for and how to pass it."""
    args = ManualArgs(CATALOG["on_update"], {}, lambda name: ["halve", "clip"])
    with pytest.raises(MissingArgument, match=r"on_update: 'halve', 'clip' names 'state'.*pass state="):
        _ = args.own_state
    assert issubclass(MissingArgument, TypeError) and issubclass(MissingArgument, HooklineError)


def test_private_names_are_ordinary_attribute_errors() -> None:
    """copy, pickle and debuggers probe for private names; they get Python's own answer."""
    args = ManualArgs(CATALOG["on_update"], {}, lambda name: [])
    assert not hasattr(args, "_nothing")
    assert not hasattr(args, "__len__")


def test_what_is_not_known_falls_back_in_reports() -> None:
    """A report of an event fired without a step says step 0 and never fails itself."""
    args = ManualArgs(CATALOG["on_train_end"], {}, lambda name: [])
    assert step_of(args) == 0
    assert argument_if_any(args, "exception", None) is None
    assert step_of(ManualArgs(CATALOG["on_train_end"], {"step": 9}, lambda name: [])) == 9
