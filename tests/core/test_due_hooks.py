"""Who is due is asked rarely and answered exactly: over epochs, accumulation and resumes."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import micro_batches, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import HookRegistry, Schedule
from hookline.core.schedule import Reading
from hookline.errors import RegistrationError


def fire_batch(registry: HookRegistry) -> None:
    """Fire one inner event as the loop does, with empty event arguments."""
    if called := registry.slots.on_train_batch_end:
        called(None)


def drive(registry: HookRegistry, run: list[Reading], check: Callable[[Reading, Reading], None]) -> None:
    """Run a registry over a clock as the training loop does: asked again when an epoch begins."""
    before = Reading()
    for now in run:
        if now.epochs != before.epochs:
            registry.replan()
        registry.begin_batch(now)
        fire_batch(registry)
        check(now, before)
        before = now


@settings(max_examples=150, deadline=None)
@given(
    st.lists(schedules, min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_countdown_never_skips_a_due_micro_batch(
    asked: list[Schedule], accumulate: int, epochs: list[int], tokens: int, always: bool
) -> None:
    """Through begin_batch, with hooks of several schedules, every answer is the schedule's own."""
    registry = HookRegistry()
    called: dict[str, int] = {}

    def listener(name: str) -> Callable[[], None]:
        return lambda: called.__setitem__(name, called.get(name, 0) + 1)

    for index, schedule in enumerate(asked):
        function = listener(f"h{index}")
        function.schedule = schedule
        registry.register(function, f"h{index}", event="on_train_batch_end")
    if always:
        registry.register(lambda: None, "always", event="on_train_batch_end")
    expected: dict[str, int] = {}
    held: dict[int, int] = {}

    def check(now: Reading, before: Reading) -> None:
        for index, schedule in enumerate(asked):
            due = schedule.always or schedule.due(now, before)
            if due and schedule.by_tokens_or_time:
                held[index] = now.steps
            due = due or held.get(index) == now.steps  # the rest of the window is called, too
            assert registry.due_now(f"h{index}") == due, f"{schedule} at {now}"
            expected[f"h{index}"] = expected.get(f"h{index}", 0) + due

    drive(registry, micro_batches(accumulate, epochs, tokens), check)
    assert {name: count for name, count in expected.items() if count} == called


@settings(max_examples=150, deadline=None)
@given(st.lists(schedules, min_size=1, max_size=3), st.integers(1, 5), st.lists(st.integers(1, 12), min_size=1))
def test_what_came_up_within_a_window_is_called_at_its_step(
    asked: list[Schedule], accumulate: int, epochs: list[int]
) -> None:
    """A step's events come with its last micro-batch only, whichever of them was the due one."""
    registry, called, run = HookRegistry(), set[tuple[int, int]](), micro_batches(accumulate, epochs, 3)
    for index, schedule in enumerate(asked):
        function: Any = lambda step, index=index: called.add((index, step))  # noqa: E731
        function.schedule = schedule
        registry.register(function, f"h{index}", event="on_step_end")
    expected = set[tuple[int, int]]()
    for now, before, after in zip(run, [Reading(), *run], [*run[1:], Reading()], strict=False):
        if now.epochs != before.epochs:
            registry.replan()
        registry.begin_batch(now)
        expected |= {(index, now.steps) for index, one in enumerate(asked) if one.always or one.due(now, before)}
        if after.steps != now.steps and (fired := registry.slots.on_step_end):
            fired(SimpleNamespace(step=now.steps))
    assert called == expected


def test_a_step_that_is_begun_again_has_no_due_hooks_from_before() -> None:
    """A run that failed within a window makes that step again, from other batches."""
    registry, called = HookRegistry(), []
    registry.register(lambda: called.append("h"), "h", event="on_step_end", every="3 batches")
    registry.begin_batch(Reading(1, 3, 1))
    registry.slots.on_step_end(None)
    registry.replan()
    registry.begin_batch(Reading(1, 4, 1))
    registry.slots.on_step_end(None)
    assert called == ["h"]


def test_who_takes_anothers_name_is_not_due_in_its_place() -> None:
    """Hooks are known by their names, and one that is gone is forgotten at once."""
    registry, called = HookRegistry(), []
    for every in (2, 3):
        registry.register(lambda: called.append("batch"), "h", event="on_train_batch_end", every=every)
        registry.register(lambda: called.append("step"), "at step", event="on_step_end", every=every)
        if every == 2:
            registry.begin_batch(Reading(2, 2, 1))
            registry.remove("h")
            registry.remove("at step")
    for fired in (registry.slots.on_train_batch_end, registry.slots.on_step_end):
        fired(None)
    assert called == []


def test_schedules_by_batches_count_the_steps_of_a_users_own_loop() -> None:
    """Its step's end need not say which batch was the last; the batches of earlier epochs count, as in a trainer."""
    registry, called = HookRegistry(), list[tuple[int, int]]()
    registry.register(lambda step, epoch: called.append((epoch, step)), "h", event="on_step_end", every="3 batches")
    for epoch in range(2):
        for index in range(4):
            registry.on_train_batch_start(step=index // 2 + 1, batch_idx=index, epoch=epoch)
            if index % 2:
                registry.on_step_end(step=index // 2 + 1, epoch=epoch)
    assert called == [(0, 2), (1, 1)]  # at the third batch, and at the sixth


def test_a_schedule_is_not_evaluated_at_every_batch(registry: HookRegistry) -> None:
    """Between two due micro-batches the registry only counts down."""
    registry.register(lambda: None, "rare", event="on_train_batch_end", every=1000)
    asked = 0

    class Counting(Reading):
        @property
        def steps(self) -> int:
            nonlocal asked
            asked += 1
            return self.batches

        @steps.setter
        def steps(self, value: int) -> None: ...

    for number in range(1, 1001):
        registry.begin_batch(Counting(batches=number))
        fire_batch(registry)
    assert registry.due_now("rare") and asked < 40


@pytest.mark.parametrize("schedule", [{"every": "100 tokens"}, {"at": "100 tokens"}, {"every": "10 s"}, {"at": "10 s"}])
def test_a_resumed_run_does_not_repeat_what_was_passed_before(schedule: dict[str, Any], registry: HookRegistry) -> None:
    """After a resume the first micro-batch is not due for a mark of the earlier attempt."""
    registry.register(lambda: None, "h", event="on_train_batch_end", **schedule)
    registry.begin_batch(Reading(steps=20, batches=20, epochs=1, tokens=150, seconds=15))
    assert not registry.due_now("h")


@pytest.mark.parametrize("schedule", [{"every": "100 tokens"}, {"at": "200 tokens"}])
def test_a_mark_passed_by_the_first_batch_after_a_resume_is_due(
    schedule: dict[str, Any], registry: HookRegistry
) -> None:
    """Told where the counters were restored to, the registry counts on without a gap."""
    registry.register(lambda: None, "h", event="on_train_batch_end", **schedule)
    registry.replan(Reading(steps=19, batches=19, epochs=1, tokens=195))
    registry.begin_batch(Reading(steps=20, batches=20, epochs=1, tokens=205))
    assert registry.due_now("h")


def test_the_first_batch_of_a_fresh_run_counts_from_zero(registry: HookRegistry) -> None:
    """Ten tokens in the first batch pass a mark at five."""
    registry.register(lambda: None, "h", event="on_train_batch_end", every="5 tokens")
    registry.begin_batch(Reading(1, 1, 1, 10, 0.1))
    assert registry.due_now("h")


def test_a_hook_added_later_is_not_due_for_what_passed_before(registry: HookRegistry) -> None:
    """The marks of tokens that went by before a hook was there are not its own."""
    for number in range(1, 50):
        registry.begin_batch(Reading(number, number, 1, number * 10))
    registry.register(lambda: None, "late", event="on_train_batch_end", every="100 tokens")
    registry.begin_batch(Reading(50, 50, 1, 495))
    assert not registry.due_now("late")
    registry.begin_batch(Reading(51, 51, 1, 505))
    assert registry.due_now("late")


class Waiting:
    """Looks every ten batches, and asks every time whether what it saw has arrived."""

    schedule = Schedule.parse(every="10 batches")
    events_when_not_due = ("on_train_batch_end",)

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_train_batch_start(self) -> None:
        self.called.append("start")

    def on_train_batch_end(self) -> None:
        self.called.append("end")


def test_some_events_reach_a_hook_that_is_not_due() -> None:
    """Those that it names; the others keep to its schedule."""
    registry, hook = HookRegistry(), Waiting()
    registry.register(hook)
    for number in range(1, 21):
        registry.begin_batch(Reading(number, number, 1))
        for fired in (registry.slots.on_train_batch_start, registry.slots.on_train_batch_end):
            if fired:
                fired(None)
    assert hook.called == (["end"] * 9 + ["start", "end"]) * 2


def test_events_when_not_due_rejects_events_that_the_hook_does_not_implement() -> None:
    """The nearest that it does is named."""
    hook = Waiting()
    hook.events_when_not_due = ("on_train_batch_ends",)
    with pytest.raises(
        RegistrationError, match="events_when_not_due: it does not listen to 'on_train_batch_ends'; did you mean"
    ):
        HookRegistry().register(hook)


def test_one_schedule_of_several_hooks_is_evaluated_once(
    monkeypatch: pytest.MonkeyPatch, registry: HookRegistry
) -> None:
    """All of them are due together; a hook with another schedule is asked by itself."""
    asked: list[str] = []
    due = Schedule.due
    monkeypatch.setattr(Schedule, "due", lambda self, now, last: asked.append(str(self)) or due(self, now, last))
    for name, every in {"a": 10, "b": 10, "c": 10, "d": "7 batches"}.items():
        registry.register(lambda: None, name, event="on_train_batch_end", every=every)
    registry.begin_batch(Reading(10, 10, 1))
    assert [registry.due_now(name) for name in "abcd"] == [True, True, True, False]
    assert sorted(asked) == ["every 10 steps", "every 7 batches"]


def test_without_schedules_nothing_is_evaluated_again(registry: HookRegistry) -> None:
    """A registry whose hooks are always due only counts down."""
    registry.register(lambda: None, "h", event="on_train_batch_end")
    registry.begin_batch(Reading(1, 1, 1))
    for _ in range(100):
        registry.begin_batch(None)  # evaluating a schedule would read it, and raise


def test_the_clock_of_a_users_own_loop_keeps_what_an_event_omits() -> None:
    """A loop of one's own passes step, batch and epoch at different events; values that are not numbers are ignored."""
    registry, called = HookRegistry(), []
    for name, at in {"epoch": "3 epochs", "batch": "9 batches", "step": 9, "tokens": "600 tokens"}.items():
        registry.on("train_batch_end", name=name, at=at)(functools.partial(called.append, name))
    registry.on_epoch_start(epoch=1)
    registry.on_train_batch_end(batch_idx=3)
    registry.on_epoch_start(epoch=2)
    registry.on_train_batch_end(batch_idx=4)
    registry.on_train_batch_end(step=9, tokens_seen=640)
    registry.on_train_batch_end(epoch=None, step="nine")
    assert called == ["epoch", "batch", "epoch", "step", "tokens", "epoch"]


def test_the_clock_of_a_users_own_loop_counts_by_loader(registry: HookRegistry) -> None:
    """A loop of one's own that names its loaders has schedules by loader; two events of a batch are one batch."""
    called: list[int] = []
    registry.register(
        lambda batch_idx: called.append(batch_idx), "probe", event="on_train_batch_end", every="2 batches of b"
    )
    for index, name in enumerate("abbabab"):
        registry.on_train_batch_start(batch_idx=index, dataloader_name=name)
        registry.on_train_batch_end(batch_idx=index, dataloader_name=name)
    assert called == [2, 6]
