"""Parameters of built-in hooks are checked against their annotations, wherever a hook is made."""

import math
import pickle
from collections.abc import Sequence
from copy import deepcopy
from fractions import Fraction
from inspect import signature
from textwrap import dedent
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt, MinLen
from commands import python

from hookline import EarlyStopping, MLflowTracker, TensorBoardTracker, Tracker, TrackioTracker
from hookline._parameters import INFINITE, ParameterError, check, parameters_of, type_hint
from hookline.config.hooks import make_hook
from hookline.core.base import TrainingHook
from hookline.core.plugins import HOOKS
from hookline.errors import ConfigError, RegistrationError

NAN, INF = math.nan, math.inf
COUNT = Annotated[int, Ge(1)]
SHARE = Annotated[float, Gt(0), Lt(1)]
PERCENTAGE = Annotated[float, Ge(0), Le(100)]
MODE = Literal["min", "max"]


@pytest.mark.parametrize(
    ("hint", "valid", "invalid"),
    [
        (bool, [True, False], ["no", 1, 0, None, np.int64(1)]),
        (Annotated[str, MinLen(1)], ["val/loss"], ["", None, 3, ["a"]]),
        (Annotated[str, MinLen(1)] | None, ["val/loss", None], ["", 3]),
        (COUNT, [1, 7, 10**30], [0, -1, True, 2.0, "3", None, INF, np.True_, torch.tensor(3)]),
        (COUNT | None, [1, None], [0, True, 2.5]),
        (float, [0.0, -1.5, 3], [NAN, INF, True, "1", None, 10**400, torch.tensor(1.0)]),
        (float | None, [0.5, None], [NAN, "1"]),
        (Annotated[float, Gt(0), INFINITE], [0.5, INF], [NAN, 0, -INF, "inf"]),
        (PERCENTAGE, [0, 12.5, 100], [-1, 101, True, "5"]),
        (MODE | None, ["min", "max", None], [["min"], 1, True]),
        (Sequence[PERCENTAGE], [[], [10, 50.0]], ["50", 50, {10: 50}, None, np.array(3.0)]),
        (COUNT | Sequence[COUNT], [3, [1, 2]], ["3", 0, {1: 2}]),
    ],
)
def test_an_annotation_says_what_is_valid(hint: Any, valid: list[Any], invalid: list[Any]) -> None:
    """A valid value is returned as it is; for an invalid one the message has the parameter and the value."""
    assert [check(value, hint, "hook.it") for value in valid] == valid
    for value in invalid:
        with pytest.raises(ConfigError) as caught:
            check(value, hint, "hook.it")
        assert str(caught.value).startswith("hook.it: expected ")
        assert repr(value)[:50] in str(caught.value)


def test_hooks_made_in_code_do_not_import_pydantic() -> None:
    """That would take a run 0.2 s."""
    code = """
        import sys
        from hookline import ConsoleLogHook, EarlyStopping, GradientMonitor
        from hookline.gradients.transforms import ClipNorm
        ConsoleLogHook(costs=False, pause=30.0), EarlyStopping(patience=5), ClipNorm(1)
        GradientMonitor(percentiles=(5, 95.0))
        assert "pydantic" not in sys.modules
    """
    python("-c", dedent(code), check=True)


@pytest.mark.parametrize("anything", [Any, str, str | None, int | str, Sequence[str], list[int], "not a type"])
def test_other_values_are_left_to_the_constructor(anything: Any) -> None:
    """A plain text may be a path or a secret, and what has several meanings is read by the constructor."""
    value = object()
    assert check(value, anything, "hook.it") is value


def test_numbers_become_pythons_own() -> None:
    """NumPy's numbers are as good as Python's; a list of numbers may also be an array, a set or a range."""
    numbers = (3, np.float32(0.5), np.float64(2), Fraction(1, 2))
    assert [type(check(value, float, "it")) for value in numbers] == [float] * 4
    assert [type(check(value, int, "it")) for value in (np.int64(3), np.uint8(3))] == [int, int]
    assert list(check(np.linspace(0, 100, 3), Sequence[PERCENTAGE], "it")) == [0, 50, 100]
    assert list(check({5}, Sequence[PERCENTAGE], "it")) == list(check(range(5, 6), Sequence[PERCENTAGE], "it")) == [5]


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (SHARE, 2, "expected a finite number, above 0 and below 1, got 2 (int)"),
        (PERCENTAGE, NAN, "expected a finite number, at least 0 and at most 100, got nan (float)"),
        (Annotated[float, Gt(0), INFINITE], 0, "expected a number, above 0, got 0 (int)"),
        (COUNT | None, 0, "expected an integer of at least 1, got 0 (int)"),
        (int, True, "expected an integer, got True (bool)"),
        (MODE, "maxx", "invalid value 'maxx'; did you mean 'max'? Valid: max, min"),
        (MODE, 3, "expected one of min, max, got 3 (int)"),
        (MODE | Sequence[MODE], ["max", "mni"], "invalid value 'mni'; did you mean 'min'? Valid: max, min"),
        (MODE | Sequence[MODE], 3, "expected one of min, max, or a list of these ([] for none), got 3 (int)"),
        (Sequence[PERCENTAGE], [10, 101], "expected a finite number, at least 0 and at most 100, got 101 (int)"),
        (Sequence[COUNT], "7", "expected a list, each item an integer of at least 1, got '7' (str)"),
        (COUNT | Sequence[COUNT], "7", "expected an integer of at least 1, or a list of these, got '7' (str)"),
    ],
)  # fmt: skip
def test_the_message_says_what_would_be_right(hint: Any, value: Any, message: str) -> None:
    """It has every bound, the nearest choice, or the one item of a list that is wrong."""
    with pytest.raises(ParameterError) as caught:
        check(value, hint, "hook.it")
    assert str(caught.value) == f"hook.it: {message}"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


class Hostile(float):
    """A number that cannot be read or shown."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    __repr__ = __str__ = __float__  # type: ignore[assignment]


def test_a_value_may_fail_in_any_way() -> None:
    """It is still an error of the parameter, without other parameters in its message."""
    for value in (Hostile(1), 10**5000):
        with pytest.raises(ParameterError, match="expected a finite number, got a value that cannot be shown"):
            check(value, float, "hook.it")


def test_code_and_configs_get_the_same_message() -> None:
    """The hook, the parameter, what would be right, and what was given: in one line."""
    message = r"^early_stopping\.patience: expected an integer of at least 0, got -1 \(int\)$"
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(patience=-1)
    with pytest.raises(ConfigError, match=message):
        EarlyStopping("val/loss", -1)
    with pytest.raises(RegistrationError, match=message):
        make_hook("early_stopping", {"patience": -1}, {})


def test_a_missing_parameter_is_pythons_own_error() -> None:
    """The checks do not get in its way."""
    clip_norm = HOOKS.find("clip_norm")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'max_norm'"):
        clip_norm()
    with pytest.raises(TypeError, match="takes from 2 to 4 positional arguments"):
        clip_norm(1, 2, None, 4)


def test_hooks_of_users_check_themselves() -> None:
    """A subclass is checked where it calls the built-in constructor; annotations of its own are not."""

    class Own(EarlyStopping):
        def __init__(self, label: int, **parameters: Any) -> None:
            super().__init__(**parameters)
            self.label = label

    class Plain(TrainingHook):
        def __init__(self, count: int) -> None:
            self.count = count

    assert Own("text", patience=2).label == "text"  # type: ignore[arg-type]
    assert Plain("text").count == "text"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"early_stopping\.patience: expected an integer of at least 0, got 'two'"):
        Own(1, patience="two")


def test_checked_hooks_can_be_copied() -> None:
    """Copies and pickles of a hook do not call its constructor."""
    hook = EarlyStopping(patience=7, min_delta=1)
    hook._trainer = None  # type: ignore[assignment]
    for copy in (deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert (copy.patience, copy.min_delta) == (7, 1.0)


@pytest.mark.parametrize("name", HOOKS.names())
def test_defaults_are_valid(name: str) -> None:
    """Only what is given is checked, so the defaults of every built-in hook are checked here."""
    factory = HOOKS.find(name)
    for parameter in (parameters_of(factory) or {}).values():
        if parameter.default is not parameter.empty:
            check(parameter.default, type_hint(parameter, factory, bounds=True), f"{name}.{parameter.name}")


def test_trackers_have_the_parameters_of_their_base_class() -> None:
    """By keyword and by position, in their signatures, and checked; trackio has none of those of wandb."""
    assert list(signature(TensorBoardTracker).parameters) == ["directory", "layers", "queue_mb", "timeout", "every"]
    assert list(signature(TrackioTracker).parameters) == ["project", "group", "layers", "queue_mb", "timeout", "every"]
    assert signature(MLflowTracker).parameters["layers"].default == MLflowTracker().layers == "none"
    positional: Any = TensorBoardTracker
    assert positional("here", "all", 3).queue_mb == TrackioTracker(queue_mb=3).queue_mb == 3.0
    with pytest.raises(
        ConfigError, match=r"^trackio\.timeout: expected a finite number, at least 0 and at most 3600, got"
    ):
        TrackioTracker(timeout=-1)
    with pytest.raises(TypeError, match=r"^TrackioTracker has no parameter 'mode'"):
        TrackioTracker(mode="offline")  # type: ignore[call-arg]

    class Own(Tracker):
        pass

    with pytest.raises(ConfigError, match=r"^Own\.layers: invalid value 'some'; valid: all, histograms, none"):
        Own(layers="some")  # type: ignore[arg-type]


def test_a_message_has_nothing_of_other_parameters() -> None:
    """One of them may be a secret."""
    given = {"webhook_url": "https://example.org/SECRETPART", "timeout": -1}
    with pytest.raises(RegistrationError) as caught:
        make_hook("notify", given, {})
    assert str(caught.value) == "notify.timeout: expected a finite number, at least 0.01 and at most 3600, got -1 (int)"
