"""What may be registered: how a hook's listeners, options and state are read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from idle_hook import Idle

from hookline import (
    CheckpointHook,
    ForwardHook,
    HooklineError,
    HookRegistry,
    Schedule,
    TrainingHook,
    UpdateHook,
    not_an_event,
)
from hookline.core import plugins
from hookline.core.base import DEFAULTS
from hookline.errors import ConfigError, RegistrationError
from hookline.ranks import Ranks


def registered(hook: Any, **options: Any) -> HookRegistry:
    """Make a registry with one hook."""
    registry = HookRegistry()
    registry.register(hook, **options)
    return registry


def events_of(hook: Any) -> list[str]:
    """Return the events that a hook listens to."""
    return list(next(iter(registered(hook).entries())).listeners)


def test_a_misspelt_event_method_is_rejected_with_the_nearest_name() -> None:
    """A run never starts with a hook that listens to nothing by a slip."""

    class Slip(TrainingHook):
        def on_train_bach_end(self) -> None: ...

    with pytest.raises(
        RegistrationError, match=r"Slip.on_train_bach_end.*did you mean 'on_train_batch_end'.*not_an_event"
    ):
        registered(Slip())


def test_a_dict_is_not_a_hook() -> None:
    """In a config it is; the error says where it belongs, and does not take its method `update` for an event."""
    with pytest.raises(RegistrationError, match=r"^a dict is not a hook; put it into a hooks config, such as .*$"):
        registered({"name": "gradient_monitor"})


@pytest.mark.parametrize("base", [TrainingHook, ForwardHook, UpdateHook, object])
@pytest.mark.parametrize("methods", [{}, {"step_end": lambda self: None}, {"on_train_end": None}])
def test_a_hook_that_listens_to_nothing_is_refused(base: type, methods: dict[str, Any]) -> None:
    """It would never be called; a method that only lacks the prefix is named."""
    silent = type("Silent", (base,), methods)
    hint = r"; did you mean 'on_step_end' by 'step_end'\?" if "step_end" in methods else ""
    with pytest.raises(RegistrationError, match=rf"'Silent' listens to no event: .*named after one{hint}$"):
        registered(silent())


def test_an_unknown_argument_is_rejected_naming_the_method() -> None:
    """The message shows class and method."""

    class Slip(TrainingHook):
        def on_step_end(self, contxt: Any) -> None: ...

    with pytest.raises(RegistrationError, match=r"Slip\.on_step_end: on_step_end has no argument 'contxt'"):
        registered(Slip())


def test_two_spellings_in_one_class_are_rejected() -> None:
    """Which of them should be called cannot be guessed."""

    class Twice(TrainingHook):
        def on_batch_end(self) -> None: ...
        def on_train_batch_end(self) -> None: ...

    with pytest.raises(RegistrationError, match="two spellings of one event"):
        registered(Twice())


def test_down_an_inheritance_chain_the_most_derived_spelling_wins() -> None:
    """A subclass may override an event under another spelling; the event is called once."""
    called: list[str] = []

    class Parent(TrainingHook):
        def on_batch_end(self) -> None:
            called.append("parent")

        def on_epoch_end(self) -> None:
            called.append("inherited")

    class Child(Parent):
        def on_train_batch_end(self) -> None:
            called.append("child")

    registry = registered(Child())
    registry.on_batch_end()
    registry.on_epoch_end()
    assert called == ["child", "inherited"]


def test_with_several_bases_the_resolution_order_decides() -> None:
    """Mixins work as Python's own method resolution has it."""
    called: list[str] = []

    class Left(TrainingHook):
        def on_batch_end(self) -> None:
            called.append("left")

    class Right(TrainingHook):
        def on_train_batch_end(self) -> None:
            called.append("right")

    class Both(Left, Right): ...

    registered(Both()).on_train_batch_end()
    assert called == ["left"]


def test_static_class_and_instance_methods_are_called() -> None:
    """However a method hangs on a hook, its own arguments are read."""
    called: list[Any] = []

    class Mixed:
        @staticmethod
        def on_train_end(step: int) -> None:
            called.append(step)

        @classmethod
        def on_epoch_end(cls, epoch: int) -> None:
            called.append((cls.__name__, epoch))

        def __init__(self) -> None:
            self.on_step_end = lambda loss: called.append(loss)

    registry = registered(Mixed())
    registry.on_train_end(step=3)
    registry.on_epoch_end(1)
    registry.on_step_end(loss=0.5)
    assert called == [3, ("Mixed", 1), 0.5]


def test_an_instance_attribute_overrides_the_class() -> None:
    """Replacing a method on one object is called, under any spelling."""
    called: list[str] = []

    class Hook(TrainingHook):
        def on_batch_end(self) -> None:
            called.append("class")

    hook = Hook()
    hook.on_train_batch_end = lambda: called.append("instance")
    registered(hook).on_train_batch_end()
    assert called == ["instance"]


def test_marked_methods_and_plain_attributes_are_no_events() -> None:
    """on_error, on_device and marked helpers do not count."""

    class Hook(Idle):
        on_error = "raise"
        on_device = True

        @not_an_event
        def on_helper(self) -> None: ...

        @staticmethod
        @not_an_event
        def on_static_helper() -> None: ...

    assert events_of(Hook()) == ["on_train_end"]


def test_a_subclass_can_stop_listening_to_an_event() -> None:
    """None, as Python has it for __hash__, and the mark both silence an inherited method."""

    class Parent(TrainingHook):
        def on_epoch_end(self) -> None: ...
        def on_train_end(self) -> None: ...
        def on_step_end(self) -> None: ...

    class Quiet(Parent):
        on_epoch_end = None

        @not_an_event
        def on_train_end(self) -> None: ...

    assert events_of(Quiet()) == ["on_step_end"]


def test_a_slotted_hook_without_a_dict_is_read() -> None:
    """A class with __slots__ has no instance namespace, and needs none."""

    class Slotted:
        __slots__ = ()

        def on_step_end(self) -> None: ...

    assert events_of(Slotted()) == ["on_step_end"]


@pytest.mark.req("000-03")
def test_kinds_follow_the_methods() -> None:
    """A class may be several kinds at once; one that is only set up or closed is a lifecycle hook."""

    class Resource(TrainingHook):
        def close(self) -> None: ...

    class Everything(ForwardHook, UpdateHook):
        def on_forward(self) -> None: ...
        def on_update(self, grads: Any) -> Any: ...
        def on_train_end(self) -> None: ...

    assert registered(Everything()).list_hooks()[0].kind == "lifecycle+forward+update"
    assert registered(Resource()).list_hooks()[0].kind == "lifecycle"


@pytest.mark.parametrize(
    ("name", "snake"),
    [("JSONLogHook", "json_log_hook"), ("LossWatch", "loss_watch"), ("EMA", "ema"), ("Top5Hook", "top5_hook")],
)
def test_class_names_become_snake_case(name: str, snake: str) -> None:
    """The default name of an instance."""
    assert HookRegistry().register(type(name, (Idle,), {})()) == snake


def test_a_hooks_own_name_is_used_only_if_it_is_one(registry: HookRegistry) -> None:
    """An attribute `name` that is a method or empty does not become a hook's name."""

    class Named(Idle):
        name: Any = "mine"

    class Odd(Idle):
        def name(self) -> str:
            return "no"

    assert [registry.register(Named()), registry.register(Odd())] == ["mine", "odd"]
    Named.name = ""
    assert registry.register(Named()) == "named"


@pytest.mark.req("000-36")
def test_records_print_name_status_and_more_on_one_line(registry: HookRegistry) -> None:
    """The list of hooks shows each with its status, kind, schedule and policy."""
    assert str(registry.list_hooks()) == "no hooks"
    registry.register(Idle("a"))
    registry.register(Idle("b"), enabled=False)
    assert str(registry.list_hooks()).splitlines() == [
        "a: enabled, lifecycle, always, on error warn, code",
        "b: disabled, lifecycle, always, on error warn, code",
    ]


@pytest.mark.hooks_fail(raises=ValueError)
def test_records_show_interveners_failures_and_overrulings() -> None:
    """What went wrong is in the list, too."""

    class Clumsy(TrainingHook):
        intervenes = True

        def on_train_batch_end(self, metrics: dict[str, Any]) -> None:
            metrics["loss"] = 0.0
            raise ValueError

    registry = registered(Clumsy())
    registry.on_train_batch_end(loss=0.5)
    registry.on_train_batch_end(loss=0.5)
    assert str(registry.list_hooks()).endswith(", intervenes, 2 failures, overruled 2 times")


def test_a_function_is_a_hook_of_one_event(registry: HookRegistry) -> None:
    """Plain functions listen under the spelling they were given."""
    called: list[Any] = []
    registry.register(lambda metrics: called.append(metrics), "f", event="on_eval_end")
    registry.slots.on_validation_end(SimpleNamespace(eval_metrics={"eval/loss": 1.0}))
    assert called == [{"eval/loss": 1.0}]


def test_state_is_saved_by_method_or_by_naming_attributes(registry: HookRegistry) -> None:
    """state_dict wins over saves; a hook with neither has no state."""

    class Named(Idle):
        saves = ("losses",)

        def __init__(self) -> None:
            self.losses = [1.0]

    class Method(Named):
        def state_dict(self) -> dict[str, Any]:
            return {"own": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    named, method = Named(), Method()
    for hook in (named, method, Idle()):
        registry.register(hook)
    assert registry.state_dict() == {"named": {"losses": [1.0]}, "method": {"own": 1}}
    registry.load_state_dict({"named": {"losses": [2.0], "stranger": 3}, "method": {"own": 2}})
    assert named.losses == [2.0] and not hasattr(named, "stranger") and method.loaded == {"own": 2}


class Ours(TrainingHook):
    """As the built-ins are written."""

    __module__ = "hookline.hooks.ours"
    built_in, runs_last = True, True
    schedule, on_error = Schedule.parse(every=7), "raise"

    def on_step_end(self) -> None: ...


class Theirs(Ours):
    """A user's subclass of a built-in."""


@pytest.mark.parametrize("deaf", [lambda loss: None, 5, object(), "no_such_hook", print])
def test_objects_that_implement_no_event_are_rejected(deaf: Any) -> None:
    """A function without its event, or an object without event methods, would be silently ignored."""
    with pytest.raises(HooklineError, match=r"listens to no event|no hook named"):
        HookRegistry().register(deaf)


def test_a_misspelt_option_of_a_function_is_rejected() -> None:
    """`evry=10` must not become a hook that is always due."""
    with pytest.raises(RegistrationError, match="'evry' is not an option of a hook; did you mean 'every'"):
        HookRegistry().on("train_batch_end", evry=10)(lambda: None)
    with pytest.raises(RegistrationError, match="is not an event"):
        HookRegistry().on("train_bach_end")(lambda: None)


def test_what_is_not_said_comes_from_the_hook(registry: HookRegistry) -> None:
    """The hook's own schedule and policy count unless the call gives others."""
    registry.register(Ours(), "as it is")
    registry.register(Ours(), "as reported", every=3, on_error="warn")
    as_it_is, overridden = (registry.entry(name) for name in registry)
    assert (str(as_it_is.schedule), as_it_is.policy) == ("every 7 steps", "raise")
    assert (str(overridden.schedule), overridden.policy) == ("every 3 steps", "warn")


def test_a_subclass_is_not_built_in(registry: HookRegistry) -> None:
    """`built_in` of a class is not inherited; what it declares, such as `runs_last`, is."""
    registry.register(Ours)
    registry.register(Theirs)
    ours, theirs = registry.entry("ours"), registry.entry("theirs")
    assert (ours.built_in, ours.last, ours.origin) == (True, True, "built-in")
    assert (theirs.built_in, theirs.last, theirs.origin) == (False, True, "code")


@pytest.mark.parametrize(
    ("ranks", "kept"), [(None, None), (0, frozenset({0})), ([1, 2], frozenset({1, 2})), (range(2), frozenset({0, 1}))]
)
def test_one_rank_or_several(ranks: Any, kept: Any, registry: HookRegistry) -> None:
    """Ranks are a number or any collection of them."""
    registry.register(Ours(), "a", ranks=ranks, before="b", after=["c", "d"])
    entry = registry.entry("a")
    assert (entry.ranks, entry.before, entry.after) == (kept, ("b",), ("c", "d"))


def test_a_wrong_policy_lists_the_right_ones() -> None:
    """A misspelt policy is rejected at registration."""
    with pytest.raises(ConfigError, match="'wran' is not a failure policy; did you mean 'warn'"):
        HookRegistry().register(Ours(), on_error="wran")


def test_a_wrong_schedule_is_reported_of_the_function() -> None:
    """The message begins with the name that the function would go by."""

    def report(loss: float) -> None: ...

    with pytest.raises(ConfigError, match=r"^report\.every: 'bananas' is not a unit"):
        HookRegistry().register(report, event="train_batch_end", every="10 bananas")


@pytest.mark.parametrize(("kind", "method"), [(ForwardHook, "on_forward"), (UpdateHook, "on_update")])
def test_a_hook_without_what_its_kind_is_for_is_rejected(kind: type, method: str) -> None:
    """A method of another name would never be called."""
    misnamed = type("Misnamed", (kind,), {"update": lambda self, grads: grads, "on_step_end": lambda self: None})
    with pytest.raises(HooklineError, match=f"'Misnamed' is an? {kind.__name__} without a method '{method}'"):
        HookRegistry().register(misnamed())


class ChoosesInObject(TrainingHook):
    """Chooses a name for the object."""

    def __init__(self) -> None:
        super().__init__("chosen")

    def on_step_end(self) -> None: ...


class ChoosesInClass(TrainingHook):
    """Chooses a name for the class."""

    name = "chosen"

    def on_step_end(self) -> None: ...


class ChoosesNone(TrainingHook):
    """Has the name of its type."""

    def on_step_end(self) -> None: ...


class InheritsName(ChoosesInClass):
    """Has the name of its type, because only its base class has another."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ChoosesInObject, "chosen"), (ChoosesInClass, "chosen"), (ChoosesNone, "mine"), (InheritsName, "mine")],
)
def test_a_chosen_name_wins_over_that_of_the_type(
    kind: type[TrainingHook], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the hook is given as an object, a class, a name or in a config; a name at registration wins over both."""
    monkeypatch.setattr(plugins.HOOKS, "_added", {"mine": kind})
    for given in (kind(), kind, "mine"):
        registry = HookRegistry()
        registry.register(given)
        assert list(registry) == [expected]
        registry.register("mine", "other")
        assert list(registry) == [expected, "other"]
    assert list(HookRegistry({"lifecycle": ["mine", {"name": "mine", "as": "other"}]}))[:2] == [expected, "other"]


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_local_zero_is_the_first_rank_of_each_machine(rank: int, local_rank: int) -> None:
    """Two machines with two ranks each call the hook once each."""
    called: list[int] = []
    registry = registered(lambda: called.append(rank), event="train_end", ranks="local-zero")
    registry.set_ranks(SimpleNamespace(rank=rank, local_rank=local_rank, world_size=4, act_together=False))  # type: ignore[arg-type]
    registry.on_train_end()
    assert called == [rank] * (local_rank == 0)


# ---- reserved attributes ---------------------------------------------------------------------------------------------


def has(attribute: str, value: Any) -> Any:
    """Make a hook of every kind that has set an attribute of its own."""

    class Own:
        def __init__(self) -> None:
            setattr(self, attribute, value)

        def on_step_end(self) -> None: ...

        def on_forward(self) -> None: ...

        def on_update(self, grads: Any) -> Any: ...

    return Own()


WRONG = {
    "ranks": [0.5, 0.7],
    "schedule": [1, 2],
    "modules": {"encoder": 1},
    "params": 3,
    "intervene": "no",
    "intervenes": "no",
    "collective": 3,
    "saves": 5,
    "setup": "done",
    "close": 4.0,
    "init": {"weight": 1},
    "isolate_rng": 0,
    "state_dict": {"weight": 1},
    "load_state_dict": 3,
    "unsaved_hint": 5,
}


@pytest.mark.parametrize("attribute", WRONG)
def test_an_attribute_with_a_reserved_name_is_named(attribute: str) -> None:
    """A hook that uses the name for something else is refused, not obeyed."""
    words = f"reads the attribute '{attribute}' of hooks and expects .*, got .*; rename it if it means something else"
    with pytest.raises(RegistrationError, match=words):
        HookRegistry().register(has(attribute, WRONG[attribute]), "own")


@pytest.mark.parametrize("value", [[1, 2], 3, {4}])
def test_ranks_that_no_process_has_are_not_obeyed(value: Any) -> None:
    """On an object they are probably something else; a class and a registration declare them."""

    class Declares(TrainingHook):
        ranks = value

        def on_step_end(self) -> None: ...

    class Mine(TrainingHook):
        def __init__(self) -> None:
            self.ranks = value

        def on_step_end(self) -> None: ...

    registry = HookRegistry()
    with pytest.raises(RegistrationError, match="'ranks' of hooks and expects ranks of this run, which has 1, got"):
        registry.register(Mine())
    registry.register(Declares())
    registry.register(Idle("idle"), ranks=value)
    registry.set_ranks(Ranks(0, 8))
    registry.register(Mine())
    assert list(registry) == ["declares", "idle", "mine"]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("every", 5), ("enabled", False), ("at", "home"), ("start", 0), ("modules", {"a": 1}), ("params", 3)],
)
def test_other_attributes_are_the_hooks_own(attribute: str, value: Any) -> None:
    """Options of a registration are not read from a hook, nor selections from one without the event they are for."""
    called: list[int] = []

    class Own(TrainingHook):
        def __init__(self) -> None:
            setattr(self, attribute, value)

        def on_step_end(self, step: int) -> None:
            called.append(step)

    registry = HookRegistry([Own()])
    for step in (1, 2, 3):
        registry.on_step_end(step=step)
    assert called == [1, 2, 3]


def test_declarations_are_accepted() -> None:
    """In a class, on an object, as a property and in a subclass of a built-in hook."""

    class Plain:
        __slots__ = ("schedule",)
        ranks, saves, close, modules = "zero", ["mine"], None, [torch.nn.Linear, lambda name, module: True]

        def __init__(self) -> None:
            self.schedule = Schedule.parse(2)

        @property
        def params(self) -> Any:
            raise RuntimeError("not known yet")

        def on_forward(self) -> None: ...

    class Mine(CheckpointHook):
        runs_last = False

    registry = HookRegistry([Plain(), Mine()])
    assert registry.entry("plain").schedule == Schedule.parse(2) and len(registry) == 2


def test_the_page_has_every_reserved_name() -> None:
    """docs/reference/hook-attributes.md says what is read from a hook."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "hook-attributes.md").read_text()
    assert [name for name in DEFAULTS if f"`{name}`" not in page and f"`{name}(" not in page] == []
