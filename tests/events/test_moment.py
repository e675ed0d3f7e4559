"""The moment of an event fired by hand: what was passed is there, what was not is the caller's error."""

import pytest

from hookline.errors import HooklineError, MissingArgument
from hookline.events.catalog import CATALOG
from hookline.events.moment import HandMoment, known, known_step


def test_values_lie_under_the_attributes_that_hooks_read() -> None:
    """`metrics` of a validation is there under both spellings."""
    moment = HandMoment(CATALOG["on_validation_end"], {"metrics": {"loss": 1.0}, "step": 3}, lambda name: [])
    assert moment.val_metrics == moment.eval_metrics == {"loss": 1.0}
    assert moment.step == 3


def test_a_missing_value_names_the_event_the_hooks_and_the_remedy() -> None:
    """The message tells the caller whom the value was for and how to pass it."""
    moment = HandMoment(CATALOG["on_update"], {}, lambda name: ["halve", "clip"])
    with pytest.raises(MissingArgument, match=r"on_update: 'halve', 'clip' names 'state'.*pass state="):
        _ = moment.own_state
    assert issubclass(MissingArgument, TypeError) and issubclass(MissingArgument, HooklineError)


def test_private_names_are_ordinary_attribute_errors() -> None:
    """copy, pickle and debuggers probe for private names; they get Python's own answer."""
    moment = HandMoment(CATALOG["on_update"], {}, lambda name: [])
    assert not hasattr(moment, "_nothing")
    assert not hasattr(moment, "__len__")


def test_what_is_not_known_falls_back_in_reports() -> None:
    """A report of an event fired without a step says step 0 and never fails itself."""
    moment = HandMoment(CATALOG["on_train_end"], {}, lambda name: [])
    assert known_step(moment) == 0
    assert known(moment, "exception", None) is None
    assert known_step(HandMoment(CATALOG["on_train_end"], {"step": 9}, lambda name: [])) == 9
