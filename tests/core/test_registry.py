"""The registry under attack: order, switches, failures, changes from inside events and from other threads."""

import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_trainer
from idle_hook import Idle

from hookline import ForwardHook, GradientMonitor, HooklineError, HookRegistry, StopTraining, TrainingHook, UpdateHook
from hookline.core import plugins
from hookline.core.schedule import Reading
from hookline.errors import MetricMissing, MissingArgument, RegistrationError
from hookline.ranks import Ranks

Heard = list[Any]


def says(called: Heard, word: Any) -> Callable[[], None]:
    """A function that says one word."""
    return lambda: called.append(word)


class Speaker(TrainingHook):
    """Says its name at the end of every batch and of the run."""

    def __init__(self, name_: str, called: Heard) -> None:
        self.name, self.called = name_, called

    def on_train_batch_end(self) -> None:
        self.called.append(self.name)

    def on_train_end(self) -> None:
        self.called.append(f"{self.name} ends")


def heard_by(called: Heard, step: int) -> None:
    """A function that needs a partial to be a hook."""
    called.append(("partial", step))


class BuiltIn(Speaker):
    """A speaker that counts as built in; its subclasses do not."""

    __module__, built_in = "hookline.own", True


def incidents(registry: HookRegistry) -> list[Any]:
    """Everything the registry reports from now on."""
    reported: list[Any] = []
    registry.failures.subscribe(reported.append)
    return reported


# ---- order --------------------------------------------------------------------------------------------------------


@pytest.mark.req("000-07", "002-70")
def test_hooks_run_in_registration_order(registry: HookRegistry) -> None:
    """Hooks of one kind are called as they were registered, every time."""
    called: Heard = []
    for name in ("zeta", "alpha", "mid"):
        registry.register(Speaker(name, called))
    for _ in range(3):
        registry.on_train_batch_end()
    assert called == ["zeta", "alpha", "mid"] * 3


@pytest.mark.req("002-71")
def test_users_run_before_built_ins_even_when_registered_later(registry: HookRegistry) -> None:
    """A hook added after the trainer's own still comes before them."""
    called: Heard = []
    registry.register(BuiltIn("built-in", called))
    registry.on_train_batch_end()
    registry.register(Speaker("user", called))
    registry.on_train_batch_end()
    assert called == ["built-in", "user", "built-in"]


@pytest.mark.req("002-72")
def test_a_subclass_of_a_built_in_is_the_users_own(registry: HookRegistry) -> None:
    """Who enhances a built-in runs among the users, and can see and change what it does."""

    class Mine(BuiltIn):
        def on_train_batch_end(self) -> None:
            super().on_train_batch_end()
            self.called.append("enhanced")

    called: Heard = []
    registry.register(BuiltIn("theirs", called))
    registry.register(Mine("mine", called))
    registry.on_train_batch_end()
    assert called == ["mine", "enhanced", "theirs"]
    assert [record.origin for record in registry.list_hooks()] == ["code", "built-in"]


@pytest.mark.req("002-72")
def test_a_user_hook_can_replace_a_built_in(registry: HookRegistry) -> None:
    """Removing a built-in and registering another under its name is all it takes."""
    called: Heard = []
    registry.register(BuiltIn("console_log", called))
    registry.remove("console_log")
    registry.register(says(called, "mine"), "console_log", event="train_batch_end")
    registry.on_train_batch_end()
    assert called == ["mine"]


def test_an_attribute_of_a_users_hook_does_not_make_it_built_in(registry: HookRegistry) -> None:
    """It would skip what keeps observers from changing training; only Hookline's own classes are marked."""
    called: Heard = []

    class Mine(Speaker):
        built_in = True

        def on_train_batch_end(self) -> None:
            torch.rand(1)
            super().on_train_batch_end()

    registry.register(BuiltIn("theirs", called))
    registry.register(Mine("mine", called))
    assert [hook.origin for hook in registry.list_hooks()] == ["code", "built-in"]
    drawn = []
    for trainer in (make_trainer(), make_trainer(Mine("mine", called))):
        torch.manual_seed(1)
        trainer.train()
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)


@pytest.mark.req("000-07", "000-03")
def test_forward_and_update_hooks_have_no_tiers(registry: HookRegistry) -> None:
    """They run in registration order, built-in or not."""

    class BuiltInLink(UpdateHook):
        __module__, built_in = "hookline.own", True

        def on_update(self, grads: Any) -> Any:
            return grads

    class UserLink(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            return grads

    registry.register(BuiltInLink())
    registry.register(UserLink())
    assert registry.explain("update").index("built_in_link") < registry.explain("update").index("user_link")


def test_before_and_after_move_only_the_hook_that_has_them(registry: HookRegistry) -> None:
    """A name not registered yet is kept and applied when it arrives."""
    called: Heard = []
    registry.register(Speaker("a", called), after="late")
    registry.register(Speaker("b", called))
    registry.on_train_batch_end()
    registry.register(Speaker("late", called))
    registry.on_train_batch_end()
    assert called == ["a", "b", "b", "late", "a"]


def four_in_order(called: Heard) -> HookRegistry:
    """a, b, x and c, of which two came last and asked for their places."""
    registry = HookRegistry()
    registry.register(Speaker("b", called))
    registry.register(Speaker("c", called))
    registry.register(Speaker("a", called), before="b")
    registry.register(Speaker("x", called), after="a", before="c")
    return registry


def test_the_order_does_not_change_when_others_are_off_or_not_due() -> None:
    """What runs is what explain says: a hook that is off still holds the place that others refer to."""
    called: Heard = []
    registry = four_in_order(called)
    registry.disable("b")
    registry.on_train_batch_end()
    assert called == ["a", "x", "c"]


def test_removing_a_hook_never_makes_the_order_of_the_rest_an_error() -> None:
    """What was legal when it was asked cannot break a run later."""
    called: Heard = []
    registry = four_in_order(called)
    registry.remove("b")
    registry.on_train_batch_end()
    assert sorted(called) == ["a", "c", "x"] and called.index("a") < called.index("x")


def test_a_circle_is_rejected_before_anything_has_changed(registry: HookRegistry) -> None:
    """Also one that goes through hooks of different kinds; the refused hook is not set up."""

    class Forward(ForwardHook):
        def on_forward(self) -> None: ...

        def setup(self) -> None:
            raise AssertionError("set up")

    registry.register(Speaker("a", []), before="f")
    with pytest.raises(RegistrationError, match="cycle"):
        registry.register(Forward("f"), before="a")
    assert list(registry) == ["a"]


def test_constraints_are_checked_within_the_kind_of_the_hook(registry: HookRegistry) -> None:
    """Between an early built-in and a late user link, update hooks can be placed; there are no tiers among them."""

    class Link(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            return grads

    class BuiltInLink(Link):
        __module__, built_in = "hookline.own", True

    registry.register(BuiltInLink("b"))
    registry.register(Link("u"))
    registry.register(Link("x"), after="b", before="u")
    registry.remove("x")
    with pytest.raises(RegistrationError, match="'y' asks to run before 'b' and after 'u'"):
        registry.register(Link("y"), after="u", before="b")
    registry.register(Link("x"), after="b", before="u")
    assert [line.split()[1].rstrip(":") for line in registry.explain("update").splitlines()[1:]] == ["b", "x", "u"]


# ---- registering ---------------------------------------------------------------------------------------------------


def test_a_name_is_unique(registry: HookRegistry) -> None:
    """A duplicate is rejected, and the first stays."""
    first = Idle("a")
    registry.register(first)
    with pytest.raises(RegistrationError, match="a hook named 'a' is registered already"):
        registry.register(Idle("a"))
    assert registry.get("a") is first and len(registry) == 1


@pytest.mark.req("000-01")
def test_objects_classes_functions_and_names_are_registered(registry: HookRegistry) -> None:
    """Every form of a hook, and none is left silent."""
    called: Heard = []
    registry.register(Speaker("object", called))
    registry.register(Speaker, "made", name_="class", called=called)
    registry.register("clip_norm", max_norm=1.0)
    registry.on("train_batch_end", name="decorated")(says(called, "decorated"))
    registry.register(functools.partial(heard_by, called), "partial", event="batch_end")
    registry.on_batch_end(step=3)
    assert called == ["object", "class", "decorated", ("partial", 3)]
    assert registry.get("clip_norm").max_norm == 1.0 and list(registry)[1] == "made"


@pytest.mark.hooks_fail(raises=OSError)
def test_setup_and_close_are_called_once_each(registry: HookRegistry) -> None:
    """setup on attaching; close on removal or at the end, whichever comes first; an error in close is reported."""
    calls: Heard = []

    class Resource(TrainingHook):
        def setup(self) -> None:
            calls.append("setup")

        def close(self) -> None:
            calls.append("close")
            raise OSError("disk gone")

    reported = incidents(registry)
    handle = registry.register(Resource())
    registry.close()
    registry.close()
    handle.remove()
    assert calls == ["setup", "close"]
    assert [(incident.hook, incident.event) for incident in reported] == [("resource", "close")]


def test_a_hook_whose_setup_fails_is_not_in(registry: HookRegistry) -> None:
    """The error reaches the caller of `register`, and the name stays free."""

    class Broken(TrainingHook):
        def setup(self) -> None:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        registry.register(Broken("a"))
    registry.register(Idle("a"))
    assert len(registry) == 1


class Maker(TrainingHook):
    """Registers another hook in its `setup`, under a name that may be its own."""

    def __init__(self, helper: str, catches: bool = False) -> None:
        self.helper, self.catches = helper, catches

    def setup(self, registry: HookRegistry) -> None:
        try:
            registry.register(Idle(self.helper))
        except RegistrationError:
            if not self.catches:
                raise


def test_setup_may_register_other_hooks(registry: HookRegistry) -> None:
    """Numbers stay unique."""
    registry.register(Maker("helper"))
    assert {entry.name: entry.number for entry in registry.entries()} == {"maker": 1, "helper": 2}


@pytest.mark.parametrize("name", ["chosen", None])
def test_setup_cannot_give_the_name_of_its_hook_to_another(name: str | None) -> None:
    """The other hook is refused, also where the name is derived; the one that is being set up keeps its name."""
    registry, taken = HookRegistry(), name or "maker"
    with pytest.raises(RegistrationError, match=rf"'{taken}' is being registered: .* give this one another name"):
        registry.register(Maker(taken), name)
    assert len(registry) == 0
    registry.register(Maker(taken, catches=True), name)
    assert [type(registry.get(one)) for one in registry] == [Maker]


def test_an_attribute_named_enabled_is_not_read(registry: HookRegistry) -> None:
    """The switch is the registry's; a hook may use the word for anything."""
    called: Heard = []
    hook = Speaker("a", called)
    hook.enabled = False
    registry.register(hook)
    registry.on_train_batch_end()
    assert called == ["a"] and registry.is_enabled("a")


def rank_of(number: int) -> Ranks:
    ranks = Ranks()
    ranks.rank = number
    return ranks


def test_ranks_limit_where_a_hook_runs(registry: HookRegistry) -> None:
    """A hook of rank 0 is listed on the others and silent there."""
    called: Heard = []
    registry.set_ranks(rank_of(1))
    registry.register(says(called, "zero"), "zero", event="train_end", ranks=0)
    registry.register(says(called, "one"), "one", event="train_end", ranks=[1, 2])
    registry.on_train_end()
    assert called == ["one"] and "zero" in registry


# ---- switching -----------------------------------------------------------------------------------------------------


@pytest.mark.req("000-05", "000-06")
def test_a_disabled_hook_is_listed_silent_and_keeps_its_place(registry: HookRegistry) -> None:
    """Switching off and on again changes neither the list nor the order."""
    called: Heard = []
    for name in "abc":
        registry.register(Speaker(name, called))
    registry.disable("b")
    registry.on_train_batch_end()
    assert called == ["a", "c"] and [record.name for record in registry.list_hooks()] == ["a", "b", "c"]
    registry.enable("b")
    registry.on_train_batch_end()
    assert called == ["a", "c", "a", "b", "c"]


@pytest.mark.req("000-36")
def test_the_list_shows_every_hook_with_its_status(registry: HookRegistry) -> None:
    """Its name, and whether it is enabled or disabled, one line each."""
    registry.register(Idle("on"))
    registry.register(Idle("off"), enabled=False)
    lines = str(registry.list_hooks()).splitlines()
    assert lines[0].startswith("on: enabled") and lines[1].startswith("off: disabled")


def test_an_unknown_name_names_the_nearest(registry: HookRegistry) -> None:
    """get, enable, disable and remove miss alike."""
    registry.register(Idle("console"))
    for method in (registry.get, registry.enable, registry.disable, registry.remove, registry.is_enabled):
        with pytest.raises(HooklineError, match="no hook is named 'consol'; did you mean 'console'"):
            method("consol")


# ---- failures ------------------------------------------------------------------------------------------------------


def failing(times: Iterator[bool]) -> Callable[[], None]:
    """A function that fails when the iterator says so."""

    def hook() -> None:
        if next(times):
            raise ValueError("boom")

    return hook


@pytest.mark.req("000-41")
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_failing_hook_leaves_the_others_alone(registry: HookRegistry) -> None:
    """The others listen to the event, before and after it in the order, and the error is reported with its place."""
    called: Heard = []
    reported = incidents(registry)
    registry.register(Speaker("a", called))
    registry.register(failing(itertools.repeat(True)), "broken", event="train_batch_end")
    registry.register(Speaker("c", called))
    registry.on_train_batch_end(step=7)
    assert called == ["a", "c"]
    assert [(one.kind, one.hook, one.event, one.step) for one in reported] == [
        ("failed", "broken", "on_train_batch_end", 7)
    ]
    assert reported[0].error is not None and reported[0].error.__notes__ == [
        "raised by hook 'broken' in on_train_batch_end, step 7"
    ]


@pytest.mark.parametrize("event", ["train_batch_end", "epoch_end", "on_update"])
@pytest.mark.hooks_fail(raises=ValueError)
def test_three_failures_in_a_row_switch_a_hook_off(event: str, registry: HookRegistry) -> None:
    """Not two, and not three with a success between them; it stays listed and can be switched on again."""
    hook = failing(iter([True, True, False, True, True, True, True]))
    fire = getattr(registry, event if event.startswith("on_") else f"on_{event}")
    if event == "on_update":
        registry.register(lambda grads: hook() or grads, "broken", event=event, on_error="warn")
        fire = functools.partial(fire, {"weight": torch.ones(2)})
    else:
        registry.register(hook, "broken", event=event)
    reported = incidents(registry)
    for expected in (True, True, True, True, True, False, False):
        fire()
        assert registry.is_enabled("broken") is expected
    assert [one.kind for one in reported] == ["failed"] * 5 + ["disabled"]
    registry.enable("broken")
    fire()
    assert registry.is_enabled("broken") and registry.entry("broken").failures.total == 6


@pytest.mark.hooks_fail(raises=ValueError)
def test_rows_count_per_event(registry: HookRegistry) -> None:
    """A success at another event does not break a row, and failures at two events do not add up."""

    class Half(TrainingHook):
        def on_train_batch_start(self) -> None: ...

        def on_train_batch_end(self) -> None:
            raise ValueError

        def on_epoch_end(self) -> None:
            raise ValueError

    registry.register(Half())
    for _ in range(2):
        registry.on_train_batch_start()
        registry.on_train_batch_end()
        registry.on_epoch_end()
    assert registry.is_enabled("half")
    registry.on_train_batch_start()
    registry.on_train_batch_end()
    assert not registry.is_enabled("half")


@pytest.mark.hooks_fail(raises=ValueError)
def test_disable_switches_off_at_once_and_raise_ends(registry: HookRegistry) -> None:
    """The other two policies; the one that is raised is the hook's own exception, cause and all."""

    def broken() -> None:
        raise ValueError("boom") from KeyError("why")

    called: Heard = []
    registry.register(broken, "once", event="train_batch_end", on_error="disable")
    registry.on_train_batch_end()
    assert not registry.is_enabled("once")
    registry.register(broken, "fatal", event="train_batch_end", on_error="raise")
    registry.register(Speaker("after", called))
    with pytest.raises(ValueError, match="boom") as caught:
        registry.on_train_batch_end()
    assert called == ["after"] and isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["raised by hook 'fatal' in on_train_batch_end, step 2"]


def test_debug_makes_every_policy_raise_and_strict_errors_always_do(registry: HookRegistry) -> None:
    """Under debug nothing is isolated; MetricMissing never is."""

    def strict() -> None:
        raise MetricMissing("val/loss")

    registry.register(strict, "strict", event="epoch_end")
    with pytest.raises(MetricMissing):
        registry.on_epoch_end()
    registry.register(failing(itertools.repeat(True)), "broken", event="train_batch_end")
    registry.failures.debug = True
    with pytest.raises(ValueError, match="boom"):
        registry.on_train_batch_end()


@pytest.mark.hooks_fail(raises=ValueError)
def test_closing_events_reach_everyone_and_failures_become_notes(registry: HookRegistry) -> None:
    """Even hooks whose policy is raise cannot replace the exception that ends a run."""
    called: Heard = []
    registry.register(failing(itertools.repeat(True)), "broken", event="on_exception", on_error="raise")
    registry.register(says(called, "last"), "last", event="on_exception")
    original = RuntimeError("the original")
    registry.on_exception(exception=original)
    assert original.__notes__ == ["hook 'broken' then failed in on_exception: ValueError: boom"]
    assert called == ["last"] and registry.entry("broken").failures.total == 1


def test_the_end_of_a_run_reaches_everyone_before_a_failure_is_raised(registry: HookRegistry) -> None:
    """If nothing else ended the run, the policy raise applies at on_train_end, too."""
    called: Heard = []
    registry.register(failing(itertools.repeat(True)), "broken", event="on_train_end", on_error="raise")
    registry.register(says(called, "last"), "last", event="on_train_end")
    with pytest.raises(ValueError, match="boom"):
        registry.on_train_end()
    assert called == ["last"] and registry.entry("broken").failures.total == 1


def test_stop_training_reaches_the_owner_of_a_users_own_loop_after_the_others(registry: HookRegistry) -> None:
    """A manually fired event has no run to stop, so the exception reaches the caller and is not counted."""
    called: Heard = []

    def stop() -> None:
        raise StopTraining("enough")

    registry.register(stop, "stopper", event="step_end")
    registry.register(says(called, "after"), "after", event="step_end")
    with pytest.raises(StopTraining, match="enough"):
        registry.on_step_end(step=1)
    assert called == ["after"] and registry.entry("stopper").failures.total == 0


def test_stop_training_becomes_a_stop_request_in_a_run(registry: HookRegistry) -> None:
    """In a run it equals request_stop, naming the hook."""
    asked: Heard = []

    class Moment:
        step = 1

        def request_stop(self, reason: str, by: str) -> None:
            asked.append((reason, by))

    def stop() -> None:
        raise StopTraining

    registry.register(stop, "stopper", event="step_end")
    fired = registry.slots.on_step_end
    fired(Moment())
    assert asked == [("StopTraining", "stopper")]


@pytest.mark.hooks_fail(raises=ValueError)
def test_the_failure_of_a_hook_that_removed_itself_is_not_hidden(registry: HookRegistry) -> None:
    """The hook has no entry left to count failures on; its failure is reported all the same."""
    reported = incidents(registry)

    def suicide() -> None:
        registry.remove("gone")
        raise ValueError("last words")

    registry.register(suicide, "gone", event="train_batch_end")
    registry.on_train_batch_end(step=3)
    assert [(one.kind, one.hook, one.message) for one in reported] == [
        ("failed", "gone", "failed: ValueError: last words")
    ]


@pytest.mark.hooks_fail(raises=ValueError)
def test_the_rank_is_reported(registry: HookRegistry) -> None:
    """On another rank the note says which."""
    ranks = Ranks()
    ranks.rank, ranks.world_size = 3, 4
    registry.set_ranks(ranks)
    reported = incidents(registry)
    registry.register(failing(itertools.repeat(True)), "broken", event="train_batch_end")
    registry.on_train_batch_end()
    assert reported[0].error is not None and reported[0].error.__notes__[0].endswith("rank 3")


# ---- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.req("000-41")
def test_what_a_hook_does_to_others_metrics_is_undone_and_reported(registry: HookRegistry) -> None:
    """Keys added by earlier hooks are seen by later ones; changes of other keys are restored and reported once."""
    reported, seen = incidents(registry), []

    def vandal(metrics: dict[str, Any]) -> None:
        metrics["loss"] = 0.0
        metrics.pop("mine", None)
        metrics["more"] = torch.ones(2)

    registry.register(lambda metrics: metrics.update(mine=1.0), "adds", event="train_batch_end")
    registry.register(vandal, "vandal", event="train_batch_end")
    registry.register(lambda metrics: seen.append(dict(metrics)), "reads", event="train_batch_end")
    for _ in range(3):
        registry.on_train_batch_end("batch", 0.5)
    assert [{key: one[key] for key in ("loss", "mine")} for one in seen] == [{"loss": 0.5, "mine": 1.0}] * 3
    assert [(one.kind, one.hook) for one in reported] == [("overruled", "vandal")]
    assert "'loss', 'mine'" in reported[0].message and registry.entry("vandal").overruled == {"on_train_batch_end": 3}


# ---- changes from inside an event ----------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["train_batch_end", "epoch_end"])
def test_an_event_in_flight_finishes_on_the_set_it_started_with(event: str, registry: HookRegistry) -> None:
    """Adding, removing and switching from inside take effect at the next event."""
    called: Heard = []

    def changes() -> None:
        if "added" not in registry:
            registry.register(says(called, "added"), "added", event=event)
            registry.remove("removed")
            registry.disable("switched")

    registry.register(changes, "changes", event=event)
    registry.register(says(called, "removed"), "removed", event=event)
    registry.register(says(called, "switched"), "switched", event=event)
    fire = getattr(registry, f"on_{event}")
    fire()
    assert called == ["removed", "switched"]
    called.clear()
    fire()
    assert called == ["added"]


def test_a_hook_may_remove_itself(registry: HookRegistry) -> None:
    """Once is once."""
    called: Heard = []

    def once() -> None:
        called.append("once")
        registry.remove("once")

    registry.register(once, "once", event="train_batch_end")
    registry.on_train_batch_end()
    registry.on_train_batch_end()
    assert called == ["once"] and registry.slots.on_train_batch_end is None


def test_an_event_may_be_fired_from_inside_another(registry: HookRegistry) -> None:
    """Re-entrancy: the inner event is complete before the outer one continues."""
    called: Heard = []
    registry.register(says(called, "inner"), "inner", event="epoch_end")
    registry.register(lambda: registry.on_epoch_end(), "fires", event="train_batch_end")
    registry.register(says(called, "outer"), "outer", event="train_batch_end")
    registry.on_train_batch_end()
    assert called == ["inner", "outer"]


def test_a_change_keeps_the_batchs_due_set(registry: HookRegistry) -> None:
    """Due for a micro-batch means due for all its events, even if the set of hooks changes in between."""
    called: Heard = []

    class Scheduled(TrainingHook):
        def on_train_batch_start(self) -> None:
            called.append("start")
            registry.register(lambda: None, f"extra{len(registry)}", event="epoch_end")

        def on_train_batch_end(self) -> None:
            called.append("end")

    registry.register(Scheduled(), every=2)
    for step in range(1, 5):
        registry.begin_batch(Reading(step, step, 1))
        for event in ("on_train_batch_start", "on_train_batch_end"):
            if fired := getattr(registry.slots, event):
                fired(None)
    assert called == ["start", "end"] * 2


def test_a_scheduled_hook_added_inside_a_batch_waits_for_the_next(registry: HookRegistry) -> None:
    """It was not asked for this micro-batch, so it does not listen to the rest of it."""
    called: Heard = []
    registry.begin_batch(Reading(2, 2, 1))
    registry.register(says(called, "h"), "h", event="train_batch_end", every=2)
    assert not registry.due_now("h")
    registry.begin_batch(Reading(4, 4, 1))
    assert registry.due_now("h")


def test_a_callable_from_an_earlier_batch_leaves_the_later_ones_alone(registry: HookRegistry) -> None:
    """It may be called late, by another thread: what it is made for then is not what that batch's hooks were."""
    called: Heard = []
    registry.register(lambda step: called.append(step), "even", event="train_batch_end", every=2)
    registry.register(says(called, "always"), "always", event="train_batch_end")
    registry.begin_batch(Reading(1, 1, 1))
    late = registry.slots.on_train_batch_end
    registry.begin_batch(Reading(2, 2, 1))
    late(SimpleNamespace(step=2))
    called.clear()
    registry.begin_batch(Reading(3, 3, 1))
    registry.slots.on_train_batch_end(SimpleNamespace(step=3))
    assert called == ["always"]


def test_schedules_gate_inner_events_only(registry: HookRegistry) -> None:
    """Run, epoch, validation, checkpoint and exception events always arrive."""
    called: Heard = []
    registry.register(Speaker("a", called), every=1000)
    registry.on_train_batch_end(step=1)
    registry.on_train_end()
    assert called == ["a ends"]


# ---- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.hooks_fail(raises=ValueError)
def test_registering_and_removing_while_another_thread_fires(registry: HookRegistry) -> None:
    """A permanent hook listens to every event exactly once, and nothing breaks, whatever two other threads do."""
    called = itertools.count()
    registry.register(lambda: next(called) and None, "permanent", event="train_batch_end")
    registry.register(failing(itertools.cycle([True, False])), "flaky", event="train_batch_end")
    errors: list[BaseException] = []
    done = threading.Event()

    def churn(prefix: str) -> None:
        try:
            for number in itertools.count():
                if done.is_set():
                    return
                with registry.register(lambda: None, f"{prefix}{number}", event="train_batch_end", every=2):
                    registry.disable(f"{prefix}{number}")
                    registry.list_hooks()
                    registry.explain("train_batch_end")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(prefix,)) for prefix in "xy"]
    for thread in threads:
        thread.start()
    until, fired = time.monotonic() + 1.0, 0
    while time.monotonic() < until:
        fired += 1
        registry.begin_batch(Reading(fired, fired, 1))
        heard_slot = registry.slots.on_train_batch_end
        heard_slot(type("Moment", (), {"step": fired})())
    done.set()
    for thread in threads:
        thread.join()
    assert errors == [] and next(called) == fired
    assert list(registry) == ["permanent", "flaky"] and registry.is_enabled("flaky")


def test_a_schedule_registered_during_evaluation_counts_from_the_next_batch(registry: HookRegistry) -> None:
    """A change in another thread while schedules are asked must not be lost behind a long countdown."""
    registry.register(lambda: None, "far", event="train_batch_end", every=10**6)
    register = functools.partial(registry.register, lambda: None, "near", event="train_batch_end", every=3)
    thread = threading.Thread(target=register)

    class Slow(Reading):
        @property
        def steps(self) -> int:
            if not thread.ident:
                thread.start()
                thread.join(0.2)
            return self.batches

        @steps.setter
        def steps(self, value: int) -> None: ...

    registry.begin_batch(Slow(batches=1))
    thread.join()
    registry.begin_batch(Reading(2, 2, 1))
    registry.begin_batch(Reading(3, 3, 1))
    assert registry.due_now("near")


# ---- numbers, state, costs -----------------------------------------------------------------------------------------


@pytest.mark.req("000-40", "000-08")
def test_a_thousand_hooks_are_registered_fired_and_removed_quickly(registry: HookRegistry) -> None:
    """The registry stays usable with very many hooks, in their order."""
    called: Heard = []
    began = time.thread_time()
    handles = [registry.register(says(called, i), f"h{i}", event="train_batch_end") for i in range(1000)]
    registry.on_train_batch_end()
    for handle in handles:
        handle.remove()
    assert called == list(range(1000)) and len(registry) == 0
    assert time.thread_time() - began < 5.0


def test_state_goes_by_name_and_misses_are_reported(registry: HookRegistry) -> None:
    """Every hook gets its own back; what has no counterpart on either side is named."""

    class Keeper(Idle):
        saves = ("count",)
        count = 0

    for name in ("a", "b"):
        registry.register(Keeper(name))
    registry.get("a").count = 5
    assert registry.state_dict() == {"a": {"count": 5}, "b": {"count": 0}}
    assert registry.load_state_dict({"a": {"count": 7}, "c": {}}) == {"without_hook": ["c"], "without_state": ["b"]}
    assert registry.get("a").count == 7


def test_a_state_that_does_not_fit_is_reported_with_its_hook(registry: HookRegistry) -> None:
    """Such as one that another hook saved under the name; what went wrong stands behind it."""

    class Strict(Idle):
        def state_dict(self) -> dict[str, int]:
            return {"count": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    registry.register(Strict("a"))
    said = r"hook 'a' \(Strict\) cannot load the state that was saved under its name: KeyError: 'count'"
    with pytest.raises(HooklineError, match=said):
        registry.load_state_dict({"a": {"other": 1}})


@pytest.mark.hooks_fail(raises=ValueError)
def test_watchers_can_stop_watching(registry: HookRegistry) -> None:
    """Both kinds of listener come with a way to end it."""
    changes, reported = [], []
    stop_changes = registry.on_change(lambda: changes.append(1))
    stop_incidents = registry.failures.subscribe(reported.append)
    stop_changes()
    stop_incidents()
    registry.register(failing(itertools.repeat(True)), "broken", event="epoch_end")
    registry.on_epoch_end()
    assert changes == [] and reported == []


def test_a_value_the_caller_did_not_pass_is_the_callers_error(registry: HookRegistry) -> None:
    """It names the event, the hook and the value, and the hook is not charged."""
    registry.register(lambda loss: None, "reader", event="train_batch_end")
    with pytest.raises(MissingArgument, match=r"on_train_batch_end: 'reader' names 'loss'"):
        registry.on_train_batch_end("batch")
    assert registry.entry("reader").failures.total == 0


class FailsToClose(TrainingHook):
    """Ends the run with every failure, and fails when it is closed."""

    on_error = "raise"

    def close(self) -> None:
        """Fail."""
        raise ValueError("cannot close")


def test_a_failing_close_ends_a_run_but_not_a_removal(caplog: pytest.LogCaptureFixture, registry: HookRegistry) -> None:
    """The hook is gone, and the log says why it could not be closed."""
    for name in "abc":
        handle = registry.register(FailsToClose(), name)
    with caplog.at_level(logging.WARNING, "hookline"):
        registry.remove("a")
        handle.remove()
    assert list(registry) == ["b"] and caplog.text.count("close: failed: ValueError: cannot close") == 2
    with pytest.raises(ValueError, match="cannot close"):
        registry.close()


def test_a_config_that_fails_is_taken_back_although_a_hook_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch, registry: HookRegistry
) -> None:
    """The error is that of the config, and no hook of it stays."""
    monkeypatch.setattr(plugins.HOOKS, "_added", {"fails": FailsToClose})
    with pytest.raises(RegistrationError, match="'a' is registered already"):
        registry.load({"lifecycle": [{"name": "fails", "as": "a"}, "fails", {"name": "lr_monitor", "as": "a"}]})
    assert list(registry) == []


def test_overlapping_registrations_get_different_numbers() -> None:
    """Also while `setup` of the first has not returned; it is called with the name that the hook keeps."""
    registry, together, names = HookRegistry(), threading.Barrier(4, timeout=300), []

    class Waits(Idle):
        def setup(self, name: str) -> None:
            names.append(name)
            together.wait()

    threads = [threading.Thread(target=lambda: registry.register(Waits())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(registry) == sorted(names) == ["waits", "waits_2", "waits_3", "waits_4"]


def test_setup_may_register_another_hook_of_its_class() -> None:
    """It gets the next number; a setup that fails leaves its name free."""

    class Parent(Idle):
        def __init__(self, children: int) -> None:
            self.children = children

        def setup(self, registry: Any) -> None:
            if self.children:
                registry.register(Parent(self.children - 1))
            elif self.children is None:
                raise ValueError

    registry = HookRegistry()
    with pytest.raises(ValueError):
        registry.register(Parent(None))
    registry.register(Parent(1))
    assert {name: registry.get(name).children for name in registry} == {"parent": 1, "parent_2": 0}


def test_one_saved_attribute_need_not_be_in_a_tuple(registry: HookRegistry) -> None:
    """`saves = "count"` names one attribute, not five letters; the same for `before` and `events_when_not_due`."""

    class Counts(TrainingHook):
        saves = "count"
        events_when_not_due = "on_step_end"
        count = 3

        def on_step_end(self) -> None: ...

    registry.register(Counts(), "counts", before="later")
    assert registry.state_dict() == {"counts": {"count": 3}}
    registry.load_state_dict({"counts": {"count": 5}})
    assert registry.get("counts").count == 5
    with pytest.raises(HooklineError, match="before: expected a name or a list of names, got 3"):
        registry.register(Counts(), "other", before=3)


@pytest.mark.parametrize("kind", ["objects", "functions", "partials"])
def test_the_work_of_a_registration_does_not_grow_with_the_hooks(kind: str) -> None:
    """5,000 hooks took 97 seconds: each was compared with all others."""
    registry, calls = HookRegistry(), 0

    def make() -> Any:
        if kind == "objects":
            return Idle()

        def listen(step: int) -> None: ...

        return listen if kind == "functions" else functools.partial(listen)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def work_of(number: int) -> int:
        nonlocal calls
        calls = 0
        for _ in range(number):
            registry.register(make(), event=None if kind == "objects" else "step_end")
        return calls

    sys.setprofile(count)
    try:
        work_of(20)  # what is cached afterwards
        first = work_of(50)
        work_of(400)
        last = work_of(50)
    finally:
        sys.setprofile(None)
    assert last < 1.5 * first
    assert len(registry) == 520
    names = list(registry)
    registry.remove(names[2])
    assert registry.register(make(), event=None if kind == "objects" else "step_end") == names[2]  # the free one


def test_a_parameter_that_an_option_of_hooks_would_hide_is_refused(registry: HookRegistry) -> None:
    """Else the hook would be scheduled, and its constructor would never get the value."""

    class Poison(Idle):
        def __init__(self, at: int = 3) -> None:
            self.at = at

    with pytest.raises(RegistrationError, match=r"Poison: 'at' is an option of hooks.*; rename the parameter"):
        registry.register(Poison, at=7)
    registry.register(Poison(at=7), "object")
    registry.register(Poison, "default")
    assert [registry.get(name).at for name in ("object", "default")] == [7, 3]


def test_every_of_a_subclass_of_a_built_in_hook_is_its_own(registry: HookRegistry) -> None:
    """As for the built-in hook: the period limits all that it does, not only its events."""

    class Mine(GradientMonitor):
        pass

    class Late(GradientMonitor):
        def __init__(self, every: int = 5, start: int = 3) -> None:
            super().__init__(every=every)

    registry.register(Mine, "mine", every=7)
    assert str(registry.get("mine").schedule) == "every 7 steps"
    with pytest.raises(RegistrationError, match="Late: 'start' is an option of hooks"):
        registry.register(Late, every=7, start=9)
