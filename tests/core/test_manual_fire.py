"""The arguments of a manually fired event: naming one that was not passed is the caller's error."""

import pytest

from hookline import StepContext
from hookline.core.catalog import CATALOG
from hookline.core.failures import argument_if_any, step_of
from hookline.core.manual_fire import ManualArgs, name_values
from hookline.errors import HooklineError, MissingArgument

BATCH_END = CATALOG["on_train_batch_end"]


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


def test_values_by_position_get_their_names() -> None:
    """A manually fired event has one positional order."""
    values = name_values(BATCH_END, BATCH_END.order, ("the batch", 0.5), {"step": 3})
    assert (values["batch"], values["loss"], values["step"]) == ("the batch", 0.5, 3)


def test_too_many_values_twice_and_unknown_ones_are_type_errors() -> None:
    """Mistakes of the caller are reported with the right order or the nearest name."""
    with pytest.raises(TypeError, match=r"takes 3 values by position \(batch, loss, state\), got 4"):
        name_values(BATCH_END, BATCH_END.order, (1, 2, 3, 4), {})
    with pytest.raises(TypeError, match="got 'loss' twice"):
        name_values(BATCH_END, BATCH_END.order, (1, 2), {"loss": 2})
    with pytest.raises(TypeError, match=r"no argument 'losss'; did you mean 'loss'"):
        name_values(BATCH_END, BATCH_END.order, (), {"losss": 2})


def test_ctx_is_taken_apart() -> None:
    """A hook naming `loss` or `step` gets it from the ctx that the loop passed."""
    ctx = StepContext(7, 0.5, 1.5, 1e-3, 640, "model", "optimizer")  # type: ignore[arg-type]
    values = name_values(CATALOG["on_step_end"], ("ctx",), (ctx,), {})
    assert (values["step"], values["loss"], values["grad_norm"], values["tokens_seen"]) == (7, 0.5, 1.5, 640)
    assert values["ctx"] is ctx


def test_state_is_taken_apart_and_gives_way_to_what_was_passed() -> None:
    """state fills in what the call left out; it never overrides what the call said."""
    state = {"latest_loss": 9.0, "current_epoch": 2, "current_batch_idx": 4, "model": "m"}
    values = name_values(BATCH_END, BATCH_END.order, ("batch", 0.5, state), {})
    assert (values["loss"], values["epoch"], values["batch_idx"], values["model"]) == (0.5, 2, 4, "m")
    assert values["metrics"] == {"loss": 0.5}


def test_aliases_of_arguments_are_accepted() -> None:
    """loader_name is dataloader_name."""
    row = CATALOG["on_train_batch_start"]
    assert name_values(row, row.order, (), {"loader_name": "a"})["dataloader_name"] == "a"
