"""`HookManager`: a registry that can watch a model, with no trainer at all."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_trainer
from idle_hook import Idle
from torch import nn

from hookline import ForwardHook, HooklineError, HookManager, HookRegistry


class Steps(ForwardHook):
    """Keeps the steps it was called in."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_forward(self, step: int) -> None:
        self.steps.append(step)


def test_it_starts_empty_and_is_a_registry() -> None:
    """No second registry anywhere."""
    manager = HookManager()
    assert isinstance(manager, HookRegistry) and len(manager) == 0


def test_hooks_may_be_registered_before_or_after_watching() -> None:
    """Either order attaches them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager, early, late = HookManager(), Steps(), Steps()
    manager.register(early, "early")
    manager.watch(model)
    manager.register(late, "late")
    model(torch.ones(1, 2))
    assert early.steps == late.steps == [0]


def test_watching_the_same_model_again_keeps_the_dispatcher() -> None:
    """A trainer may give the run later; hooks are not attached twice."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager, hook = HookManager(), Steps()
    manager.register(hook)
    dispatcher = manager.watch(model)
    assert manager.watch(model, SimpleNamespace(step=5)) is dispatcher
    model(torch.ones(1, 2))
    assert hook.steps == [5]


def test_lifecycle_hooks_select_no_modules() -> None:
    """Only hooks with on_forward do."""
    manager = HookManager()
    manager.watch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    hook: Any = Idle("plain")
    hook.modules = "nothing"
    assert manager.register(hook) == "plain"


@pytest.mark.req("000-02", "000-10")
def test_a_manager_made_from_a_config_watches_what_the_config_says() -> None:
    """Forward hooks of a config fire whenever the model runs."""
    manager = HookManager({"forward": [{"name": "activation_stats", "modules": "0"}]})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    manager.watch(model)
    model(torch.ones(1, 2))
    assert set(manager.get("activation_stats").latest()) == {"0"}


def test_scheduled_forward_hooks_cost_their_modules_a_branch() -> None:
    """A hook that is not due leaves the slot empty."""
    manager, hook = HookManager(), Steps()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    manager.watch(model)
    manager.register(hook, every=2)
    from hookline.core.schedule import Reading

    for step in range(1, 5):
        manager.begin_batch(Reading(step, step, 1))
        model(torch.ones(1, 2))
        assert (manager.slots.on_forward is None) == (step % 2 == 1)
    assert len(hook.steps) == 2


# ---- registering -----------------------------------------------------------------------------------------------------

BATCH = torch.randn(3, 4)
METHODS = ["register_capture_hook", "register_monitoring_hook", "register_debug_hook"]


def make_watched() -> tuple[nn.Sequential, HookManager]:
    """A model and a manager that watches it."""
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), HookManager()
    manager.watch(model)
    return model, manager


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_options_of_a_registration(method: str) -> None:
    """A schedule, a failure policy, the switch and ranks."""
    _, manager = make_watched()
    options = {"every": 10, "on_error": "raise", "enabled": False, "ranks": 0}
    getattr(manager, method)("0", "hook", **options)
    entry = manager.entry("hook")
    assert (str(entry.schedule), entry.policy, entry.enabled, entry.ranks) == ("every 10 steps", "raise", False, {0})


@pytest.mark.parametrize("method", METHODS)
def test_a_misspelt_option_is_refused_with_the_nearest(method: str) -> None:
    """Among the options of the hook and of the registration."""
    _, manager = make_watched()
    with pytest.raises(HooklineError, match="has no parameter 'on_eror'; did you mean 'on_error'"):
        getattr(manager, method)("0", "hook", on_eror="raise")
    assert list(manager.list_hooks()) == []


@pytest.mark.parametrize("modules", [[], None, [None]])
@pytest.mark.parametrize("method", METHODS)
def test_a_selection_of_nothing_is_refused(modules: Any, method: str) -> None:
    """With a model and without: such a hook would never be called, and be in no report."""
    for manager in (make_watched()[1], HookManager()):
        with pytest.raises(HooklineError, match=r"hook 'hook': modules=.* selects nothing; '\*' selects all"):
            getattr(manager, method)(modules, "hook")


def test_a_named_condition_finds() -> None:
    """Like the same in a mapping."""
    model, manager = make_watched()
    manager.register_debug_hook("1", "guard", conditions=["nan", "absmax > 1e3"])
    model(BATCH)
    model(BATCH * 1e6)
    assert [finding.condition for finding in manager.get("guard").findings] == ["absmax > 1000"]


def test_a_function_among_named_conditions_is_called() -> None:
    """Names, mappings and functions can be in one list."""
    model, manager = make_watched()
    seen: list[str] = []
    ask: Callable[[str, Any], bool] = lambda name, output: bool(seen.append(name))  # noqa: E731
    manager.register_debug_hook("0", "guard", conditions=["nan", ask])
    model(BATCH)
    assert seen == ["0"]


def test_states_of_every_kind_have_the_name_of_their_module() -> None:
    model, manager = make_watched()
    manager.register_capture_hook("0", "captured")
    manager.register_monitoring_hook("0", "monitored")
    manager.register_debug_hook("0", "debugged", conditions="absmax >= 0", inspect=True)
    model(BATCH)
    names = [state.name for hook in manager for state in manager.get_captured_states(hook)]
    assert names == ["0"] * 4


@pytest.mark.parametrize("run", [None, SimpleNamespace(step=1), SimpleNamespace(step=1, model="other")])
def test_a_hook_gets_the_watched_model_unless_the_run_has_another(run: Any) -> None:
    model, manager = make_watched()
    seen: list[Any] = []
    manager.watch(model, run)
    manager.on("forward", name="it")(lambda model: seen.append(model))
    model(BATCH)
    assert seen == [getattr(run, "model", model)] * 2


@pytest.mark.parametrize("scheduled", [False, True])
def test_on_forward_can_be_fired_by_hand(scheduled: bool) -> None:
    """The hooks that are due get what the call passes; the model fires it, too."""
    model, manager = make_watched()
    seen: list[Any] = []
    manager.on("forward", name="it", **({"every": 2} if scheduled else {}))(
        lambda name, output, step: seen.append((name, output, step))
    )
    for step in (1, 2):
        manager.on_train_batch_start(step=step)
        manager.on_forward("x", BATCH, step=step)
    assert seen == [("x", BATCH, step) for step in ((2,) if scheduled else (1, 2))]
    model(BATCH)
    assert [name for name, _, _ in seen[-2:]] == ["0", "1"]


# ---- a user's own loop -----------------------------------------------------------------------------------------------


def fire_around(manager: HookManager, forward: Callable[[], Any], steps: range) -> None:
    """A loop that fires the events before and after a forward pass."""
    for step in steps:
        manager.on_train_batch_start(step=step)
        forward()
        manager.on_train_batch_end(step=step)
        manager.on_step_end(step=step)


def fire_after(manager: HookManager, forward: Callable[[], Any], steps: range) -> None:
    """A loop that fires one event, when the step is over."""
    for step in steps:
        forward()
        manager.on_step_end(step=step)


def fire_with_context(manager: HookManager, forward: Callable[[], Any], steps: range) -> None:
    """A loop whose event carries an object with the step."""
    for step in steps:
        forward()
        manager.on_step_end(ctx=SimpleNamespace(step=step, loss=0.0))


def fire_by_batch(manager: HookManager, forward: Callable[[], Any], steps: range) -> None:
    """A loop that counts batches from 0 and has no steps."""
    for step in steps:
        forward()
        manager.on_batch_end(batch_idx=step - 1)


LOOPS = [fire_around, fire_after, fire_with_context, fire_by_batch]


@pytest.mark.parametrize("loop", LOOPS)
def test_states_and_statistics_have_the_step_that_events_carry(loop: Callable[..., None]) -> None:
    """Also of a forward pass that comes before the first event of its step."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states")
    manager.register_monitoring_hook("0", "numbers", metrics=["mean", "time"])
    hook = Steps()
    manager.register(hook, "own")
    manager.on_train_begin()
    loop(manager, lambda: model(BATCH), range(1, 6))
    manager.on_train_end()
    assert [state.step for state in manager.get_captured_states("states")] == [1, 2, 3, 4, 5]
    assert [(state.step, set(state.values)) for state in manager.get_captured_states("numbers")] == [
        (step, {"mean", "time"}) for step in range(1, 6)
    ]
    assert hook.steps == [step for step in range(1, 6) for _ in range(2)]
    model(BATCH)
    assert manager.get_captured_states("states")[-1].phase == "inference"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_schedule_counts_the_steps_of_a_loop(loop: Callable[..., None]) -> None:
    """Every tenth step is the tenth, in forward passes as in events, even if hooks come and go in between."""
    model, manager = make_watched()
    called: list[int] = []
    manager.on("step_end", name="event", every=10)(lambda step: called.append(step))
    manager.register_capture_hook("0", "states", every=10)
    manager.on_train_begin()
    loop(manager, lambda: model(BATCH), range(1, 20))
    manager.register_capture_hook("0", "late", every=10)
    loop(manager, lambda: model(BATCH), range(20, 31))
    assert [state.step for state in manager.get_captured_states("states")] == [10, 20, 30]
    assert [state.step for state in manager.get_captured_states("late")] == [20, 30]
    assert called == ([] if loop is fire_by_batch else [10, 20, 30])


@pytest.mark.parametrize("batch_ends_last", [False, True])
def test_the_end_of_a_micro_batch_does_not_end_the_step(batch_ends_last: bool) -> None:
    """With accumulation on_step_end ends it; before the first one, a loop could be one that never fires it."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states")
    manager.register_capture_hook("0", "scheduled", every=4)
    manager.register_capture_hook("0", "batches", every="4 batches")
    expected = []
    manager.on_train_begin()
    for step in range(1, 9):
        for micro in range(3):
            model(BATCH)
            expected.append(step)
            if micro == 2 and batch_ends_last:
                manager.on_step_end(step=step)
            manager.on_train_batch_end(step=step)
        if not batch_ends_last:
            manager.on_step_end(step=step)
    steps = [state.step for state in manager.get_captured_states("states")]
    assert steps[0] == 1 and steps[3:] == expected[3:]
    assert [state.step for state in manager.get_captured_states("scheduled")] == [4, 4, 4, 8, 8, 8]
    assert [state.step for state in manager.get_captured_states("batches")] == [2, 3, 4, 6, 7, 8]


def test_micro_batches_belong_to_the_step_whose_end_follows() -> None:
    """Numbers of batches are no steps in a loop that fires on_step_end, in forward passes as in events."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states", every=2)
    called: list[int] = []
    manager.on("train_batch_end", name="event", every=2)(lambda batch_idx: called.append(batch_idx))
    manager.on_train_begin()
    manager.on_step_end(step=0)  # Before the first one, a loop could be one that never fires it.
    for batch_idx in range(8):
        model(torch.full((1, 4), float(batch_idx)))
        manager.on_train_batch_end(batch_idx=batch_idx)
        if batch_idx % 2:
            manager.on_step_end(step=batch_idx // 2 + 1)
    found = [(state.step, int(state.inputs[0][0, 0])) for state in manager.get_captured_states("states")]
    assert found == [(2, 2), (2, 3), (4, 6), (4, 7)]
    assert called == [2, 3, 6, 7]


def test_the_batches_of_a_validation_are_no_steps() -> None:
    """They are counted from 0, too."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states", every=5)
    manager.on_train_begin()
    for step in range(1, 11):
        model(BATCH)
        manager.on_step_end(step=step)
        for batch_idx in range(2):
            manager.on_validation_batch_end(batch_idx=batch_idx)
    assert [state.step for state in manager.get_captured_states("states")] == [5, 10]


def test_a_validation_between_two_steps_belongs_to_the_first() -> None:
    """It begins no step, and states have its phase."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states")
    manager.on_train_begin()
    for step in (1, 2):
        model(BATCH)
        manager.on_step_end(step=step)
        with manager.silenced():
            model(BATCH)
        manager.on_validation_start()
        model(BATCH)
        manager.on_validation_end()
    manager.on_train_end()
    manager.on_validation_start()
    manager.on_validation_end()
    model(BATCH)
    found = [(state.step, state.phase) for state in manager.get_captured_states("states")]
    assert found == [(1, "train"), (1, "validation"), (2, "train"), (2, "validation"), (2, "inference")]


def test_a_loop_may_be_resumed_anywhere() -> None:
    """The event that begins it carries the step it continues from."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states", every=10)
    manager.on_train_begin(step=18, epoch=3)
    fire_after(manager, lambda: model(BATCH), range(19, 31))
    assert [state.step for state in manager.get_captured_states("states")] == [20, 30]


@pytest.mark.parametrize("loop", [None, *LOOPS])
@pytest.mark.req("003-42", "003-37")
def test_costs_are_measured_without_a_trainer(loop: Callable[..., None] | None) -> None:
    """Every call counts, in a loop of three steps and without any events."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "bound")
    manager.register_debug_hook("*", "called")
    for _ in range(3):
        if loop is None:
            model(BATCH)
    if loop is not None:
        manager.on_train_begin()
        loop(manager, lambda: model(BATCH), range(1, 4))
    rows = {row["hook"]: row for row in manager.costs()}
    assert (rows["bound"]["calls"], rows["called"]["calls"]) == (3, 6)
    assert rows["bound"]["seconds"] > 0 and rows["called"]["seconds"] > 0


def test_a_run_that_lacks_attributes_gives_defaults_for_them() -> None:
    """Hooks that read the phase, the epoch or the trainer are called as without a run."""
    model, manager = make_watched()
    run = SimpleNamespace(step=5)
    manager.watch(model, run)
    manager.register_capture_hook("0", "states")
    manager.register_debug_hook("0", "guard", conditions="absmax >= 0")
    model(BATCH)
    run.step, run.phase = 6, "train"
    model(BATCH)
    for name in ("states", "guard"):
        assert [(one.step, one.phase) for one in manager.get_captured_states(name)] == [(5, "inference"), (6, "train")]


@pytest.mark.parametrize("wrong", [{"step": 5}, 5, SimpleNamespace(phase="train")])
def test_a_run_without_a_step_is_refused(wrong: Any) -> None:
    """When it is given, and nothing has changed."""
    model, manager = make_watched()
    manager.register_capture_hook("0", "states")
    with pytest.raises(HooklineError, match=r"run: expected an object with `step`.*, got "):
        manager.watch(model, wrong)
    model(BATCH)
    assert [state.step for state in manager.get_captured_states("states")] == [0]


@pytest.mark.parametrize("schedule", [{"every": 5}, {"every": "5 batches"}, {"at": [5, 10]}, {"every": "2 epochs"}])
def test_a_schedule_counts_the_steps_of_a_run_without_events(schedule: dict[str, Any]) -> None:
    """The object that `watch` was given is the only one that knows them; hooks may come and go in between."""
    model, manager = make_watched()
    run = SimpleNamespace(step=0, epoch=0)
    manager.watch(model, run)
    manager.register_capture_hook("0", "all")
    manager.register_capture_hook("0", "states", **schedule)
    for step in range(1, 11):
        run.step, run.epoch = step, step // 5
        model(BATCH)
        if step == 6:
            manager.remove("all")
    steps = [5, 6, 7, 8, 9] if schedule == {"every": "2 epochs"} else [5, 10]
    assert [state.step for state in manager.get_captured_states("states")] == steps


def test_a_run_given_to_a_trainers_manager_changes_no_schedule() -> None:
    """Hooks read its step, and the trainer begins the steps."""
    model = nn.Linear(4, 4)
    trainer = make_trainer(model=model, data=[(BATCH, BATCH)] * 10)
    called: list[int] = []
    trainer.hooks.register(lambda step: called.append(step), "event", event="step_end", every=5)
    trainer.hooks.register(Steps(), "forward", every=5)
    trainer.hooks.watch(model, SimpleNamespace(step=50))
    trainer.train()
    assert called == [5, 10] and trainer.hooks.get("forward").steps == [50, 50]


def test_a_schedule_counts_the_steps_of_a_loop_with_its_own_run() -> None:
    """The events say when a step is over, and the run which step hooks see."""
    model, manager = make_watched()
    run = SimpleNamespace(step=0)
    manager.watch(model, run)
    manager.register_capture_hook("0", "states", every=10)
    manager.on_train_begin()
    for step in range(1, 31):
        run.step = step
        model(BATCH)
        manager.on_step_end(step=step)
    assert [state.step for state in manager.get_captured_states("states")] == [10, 20, 30]


def test_a_trainer_keeps_its_schedules_although_the_manager_was_used_by_hand() -> None:
    """Also if hooks come and go during the run, and events are fired by hand before it."""
    model, manager = make_watched()
    forward, events = Steps(), []
    manager.register(forward, "forward", every=5)
    manager.on("step_end", name="event", every=5)(lambda step: events.append(step))
    manager.register(Idle(), "idle")
    manager.on("train_batch_start", name="switch", at=5)(lambda trainer: trainer.hooks.disable("idle"))
    for step in (1, 2):
        model(BATCH)
        manager.on_step_end(step=step)
    trainer = make_trainer(model=model, data=[(BATCH, BATCH)] * 20, hooks=manager)
    manager.on_step_end(step=7)
    events.clear()
    trainer.fit(max_steps=20)
    assert sorted(set(forward.steps)) == events == [5, 10, 15, 20]


@pytest.mark.parametrize("config", [None, {}])
def test_a_misspelt_option_of_a_manager_is_refused(config: Any) -> None:
    """With a config and without one, where it was ignored."""
    with pytest.raises(TypeError, match="max_states"):
        HookManager(config, max_states=3)
