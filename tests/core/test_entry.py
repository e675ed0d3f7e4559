"""What a hook listens to, found in its class, its bases and its instance."""

from typing import Any

import pytest

from hookline.core.base import ForwardHook, TrainingHook, UpdateHook, not_an_event
from hookline.core.entry import (
    Entry,
    HookList,
    default_name,
    find_listeners,
    snake_case,
)
from hookline.core.registry import HookRegistry
from hookline.core.schedule import Schedule
from hookline.errors import RegistrationError


def entry(hook: Any, **more: Any) -> Entry:
    """A hook as the registry keeps it."""
    return Entry(default_name(hook), hook, 1, find_listeners(hook), False, "warn", Schedule(), **more)


def test_a_misspelt_event_method_is_refused_with_the_nearest_name() -> None:
    """A run never starts with a hook that listens to nothing by a slip."""

    class Slip(TrainingHook):
        def on_train_bach_end(self) -> None: ...

    with pytest.raises(
        RegistrationError, match=r"Slip.on_train_bach_end.*did you mean 'on_train_batch_end'.*not_an_event"
    ):
        find_listeners(Slip())


def test_an_unknown_argument_is_refused_naming_the_method() -> None:
    """The message shows class and method."""

    class Slip(TrainingHook):
        def on_step_end(self, contxt: Any) -> None: ...

    with pytest.raises(RegistrationError, match=r"Slip\.on_step_end: on_step_end has no argument 'contxt'"):
        find_listeners(Slip())


def test_two_spellings_in_one_class_are_refused() -> None:
    """Which of them should be called cannot be guessed."""

    class Twice(TrainingHook):
        def on_batch_end(self) -> None: ...
        def on_train_batch_end(self) -> None: ...

    with pytest.raises(RegistrationError, match="two spellings of one event"):
        find_listeners(Twice())


def test_down_an_inheritance_chain_the_most_derived_spelling_wins() -> None:
    """A subclass may override an event under another spelling; the event is heard once."""

    class Parent(TrainingHook):
        def on_batch_end(self) -> str:
            return "parent"

        def on_epoch_end(self) -> str:
            return "inherited"

    class Child(Parent):
        def on_train_batch_end(self) -> str:
            return "child"

    listeners = find_listeners(Child())
    assert listeners["on_train_batch_end"].call() == "child"
    assert listeners["on_epoch_end"].call() == "inherited"


def test_with_several_bases_the_resolution_order_decides() -> None:
    """Mixins work as Python's own method resolution has it."""

    class Left(TrainingHook):
        def on_batch_end(self) -> str:
            return "left"

    class Right(TrainingHook):
        def on_train_batch_end(self) -> str:
            return "right"

    class Both(Left, Right): ...

    assert find_listeners(Both())["on_train_batch_end"].call() == "left"


def test_static_class_and_instance_methods_are_heard() -> None:
    """However a method hangs on a hook, its own arguments are read."""

    class Mixed:
        @staticmethod
        def on_train_end(step: int) -> int:
            return step

        @classmethod
        def on_epoch_end(cls, epoch: int) -> tuple[str, int]:
            return cls.__name__, epoch

        def __init__(self) -> None:
            self.on_step_end = lambda loss: loss

    listeners = find_listeners(Mixed())
    assert listeners["on_train_end"].call(3) == 3 and listeners["on_train_end"].wanted == ("step",)
    assert listeners["on_epoch_end"].call(1) == ("Mixed", 1)
    assert listeners["on_step_end"].wanted == ("window_loss",)


def test_an_instance_attribute_overrides_the_class() -> None:
    """Replacing a method on one object is heard, under any spelling."""

    class Hook(TrainingHook):
        def on_batch_end(self) -> str:
            return "class"

    hook = Hook()
    hook.on_train_batch_end = lambda: "instance"  # type: ignore[method-assign, assignment]
    assert find_listeners(hook)["on_train_batch_end"].call() == "instance"


def test_marked_methods_and_plain_attributes_are_no_events() -> None:
    """on_error, on_device and marked helpers do not count."""

    class Hook(TrainingHook):
        on_error = "raise"
        on_device = True

        @not_an_event
        def on_helper(self) -> None: ...

        @staticmethod
        @not_an_event
        def on_static_helper() -> None: ...

    assert find_listeners(Hook()) == {}


def test_a_subclass_can_stop_hearing_an_event() -> None:
    """None, as Python has it for __hash__, and the mark both silence an inherited method."""

    class Parent(TrainingHook):
        def on_epoch_end(self) -> None: ...
        def on_train_end(self) -> None: ...

    class Quiet(Parent):
        on_epoch_end = None  # type: ignore[assignment]

        @not_an_event
        def on_train_end(self) -> None: ...

    assert find_listeners(Quiet()) == {}


def test_a_slotted_hook_without_a_dict_is_read() -> None:
    """A class with __slots__ has no instance namespace, and needs none."""

    class Slotted:
        __slots__ = ()

        def on_step_end(self) -> None: ...

    assert list(find_listeners(Slotted())) == ["on_step_end"]


@pytest.mark.req("000-03")
def test_kinds_follow_the_methods() -> None:
    """A class may be several kinds at once; one that hears nothing is a lifecycle hook."""

    class Everything(ForwardHook, UpdateHook):
        def on_forward(self) -> None: ...
        def on_update(self, grads: Any) -> Any: ...
        def on_train_end(self) -> None: ...

    assert entry(Everything()).kinds == ["lifecycle", "forward", "update"]
    assert entry(TrainingHook()).kinds == ["lifecycle"]


@pytest.mark.parametrize(
    ("name", "snake"),
    [("JSONLogHook", "json_log_hook"), ("LossWatch", "loss_watch"), ("EMA", "ema"), ("Top5Hook", "top5_hook")],
)
def test_class_names_become_snake_case(name: str, snake: str) -> None:
    """The default name of an instance."""
    assert snake_case(name) == snake


def test_a_hooks_own_name_is_used_only_if_it_is_one() -> None:
    """An attribute `name` that is a method or empty does not become a hook's name."""

    class Named:
        name: Any = "mine"

    class Odd:
        def name(self) -> str:
            return "no"

    assert default_name(Named()) == "mine" and default_name(Odd()) == "odd"
    Named.name = ""
    assert default_name(Named()) == "named"


@pytest.mark.req("000-36")
def test_records_print_name_status_and_more_on_one_line() -> None:
    """The list of hooks shows each with its status, kind, schedule and policy."""
    shown = HookList([entry(TrainingHook("a")).record(), entry(TrainingHook("b"), enabled=False).record()])
    assert str(shown).splitlines() == [
        "a: enabled, lifecycle, always, on error warn, code",
        "b: disabled, lifecycle, always, on error warn, code",
    ]
    assert str(HookList()) == "no hooks"


def test_records_show_interveners_failures_and_overrulings() -> None:
    """What went wrong is in the list, too."""
    kept = entry(UpdateHook("u"))
    kept.failures.add("on_update")
    kept.overruled["on_update"] = 2
    assert str(kept.record()).endswith(", intervenes, 1 failures, overruled 2 times")


def test_a_function_is_a_hook_of_one_event() -> None:
    """Plain functions listen under the spelling they were given."""
    registry = HookRegistry()
    registry.register(lambda metrics: metrics, "f", event="on_eval_end")
    assert registry.entry("f").listeners["on_validation_end"].wanted == ("eval_metrics",)


def test_state_is_saved_by_method_or_by_naming_attributes() -> None:
    """state_dict wins over saves; a hook with neither has no state."""

    class Named(TrainingHook):
        saves = ("losses",)

        def __init__(self) -> None:
            self.losses = [1.0]

    class Method(Named):
        def state_dict(self) -> dict[str, Any]:
            return {"own": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    named, method = Named(), Method()
    assert entry(named).state() == {"losses": [1.0]} and entry(method).state() == {"own": 1}
    assert entry(TrainingHook()).state() is None
    entry(named).load_state({"losses": [2.0], "stranger": 3})
    entry(method).load_state({"own": 2})
    assert named.losses == [2.0] and not hasattr(named, "stranger") and method.loaded == {"own": 2}
