"""`HookRunner`: the registry for a loop of one's own."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from idle_hook import Idle

from hookline import (
    ForwardHook,
    HooklineError,
    HookManager,
    HookRegistry,
    HookRunner,
    Identity,
    SimpleTrainer,
    StepContext,
    TrainingHook,
)
from hookline.core.catalog import SPELLINGS
from hookline.core.dispatch import BoundHook
from hookline.errors import ConfigError, MissingArgument, RegistrationError


def ctx(step: int, tokens: int = 0) -> StepContext:
    """A finished step."""
    return StepContext(step, 0.5, 1.0, 1e-3, tokens, None, None)


class Everything(TrainingHook):
    """A hook of the five events with their usual arguments."""

    def __init__(self, name: str, called: list[Any]) -> None:
        self.name, self.called = name, called

    def on_train_begin(self, config: Any) -> None:
        self.called.append((self.name, "begin", config))

    def on_step_end(self, ctx: StepContext) -> None:
        self.called.append((self.name, "step", ctx.step))

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        self.called.append((self.name, "eval", metrics, step))

    def on_checkpoint_save(self, step: int, path: str) -> None:
        self.called.append((self.name, "save", step, path))

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        self.called.append((self.name, "end", step, tokens_seen))


@pytest.mark.req("004-09", "004-24", "004-26")
def test_five_events_reach_a_list_of_hooks_by_position() -> None:
    """The runner is made with a list and dispatches each of the five in the order of the list."""
    called: list[Any] = []
    runner = HookRunner([Everything("a", called), Everything("b", called)])
    runner.on_train_begin({"lr": 1})
    runner.on_step_end(ctx(1))
    runner.on_eval_end({"loss": 2.0}, 1)
    runner.on_checkpoint_save(1, "here")
    runner.on_train_end(1, 64)
    assert [entry[:2] for entry in called] == [(n, e) for e in ("begin", "step", "eval", "save", "end") for n in "ab"]
    assert called[4] == ("a", "eval", {"loss": 2.0}, 1) and called[-1] == ("b", "end", 1, 64)


def test_a_runner_takes_a_config_or_its_path(tmp_path: Path) -> None:
    """As a registry, a manager and a trainer do; text is not a list of letters."""
    config = {"update": [{"name": "clip_norm", "max_norm": 1.0}], "lifecycle": ["throughput"]}
    path = tmp_path / "hooks.yaml"
    path.write_text("hooks:\n  update: [{name: clip_norm, max_norm: 1.0}]\n  lifecycle: [throughput]\n")
    for given in (config, path, str(path)):
        assert list(HookRunner(given)) == list(HookRegistry(given)) == ["throughput", "clip_norm"]
    path.write_text("hooks: {lifecycle: [{name: logging.Filter}]}\n")
    with pytest.raises(ConfigError, match="logging"):
        HookRunner(path)
    with pytest.raises(HooklineError, match="listens to no event"):
        HookRunner(path, allow="logging")
    with pytest.raises(ConfigError, match="nowhere"):
        HookRunner("nowhere.yaml")


@pytest.mark.req("004-10", "004-25")
def test_an_empty_runner_returns_at_once() -> None:
    """With no hooks nothing is looked at, not even the arguments, and it costs a branch."""
    runner = HookRunner()
    assert not runner.hooks
    for spelling in SPELLINGS.keys() - {"on_update"}:
        assert getattr(runner, spelling)(1, 2, 3, 4, 5, 6, 7, nonsense=True) is None
    assert runner.on_update("the gradients") == "the gradients"
    began = time.thread_time()
    for _ in range(10_000):
        runner.on_step_end(None)
    assert time.thread_time() - began < 0.1


@pytest.mark.req("004-26")
def test_hooks_come_and_go_without_touching_the_loop() -> None:
    """runner.hooks is always the hooks that are there."""
    runner = HookRunner()
    hook = Idle("a")
    handle = runner.register(hook)
    assert runner.hooks == (hook,)
    handle.remove()
    assert runner.hooks == ()


@pytest.mark.req("004-40")
def test_hooks_are_added_to_the_list_of_a_runner() -> None:
    """`runner.hooks.append` registers a hook, and assigning a list replaces all of them."""
    called: list[Any] = []
    first, second, third = (Everything(name, called) for name in "abc")
    runner = HookRunner()
    runner.hooks.append(first)
    runner.hooks.append(second)
    runner.hooks.append(third)
    runner.on_step_end(ctx(1))
    assert runner.hooks == (first, second, third) and [one[0] for one in called] == ["a", "b", "c"]
    runner.hooks = [third, fourth := Everything("d", called)]
    assert runner.hooks == (third, fourth) and list(runner) == ["c", "d"]


@pytest.mark.req("004-40")
def test_assigning_the_hooks_of_a_runner_orders_them() -> None:
    """They are called in the order of the list, those that were there among the new ones, as a plain list's are."""
    called: list[Any] = []
    first, second, third = (Everything(name, called) for name in "abc")
    runner = HookRunner([first, second])
    runner.on_step_end(ctx(1))
    runner.hooks = [second, third, first]
    runner.on_step_end(ctx(2))
    assert [one[0] for one in called] == ["a", "b", "b", "c", "a"]
    assert runner.hooks == (second, third, first) and [hook.name for hook in runner.list_hooks()] == ["b", "c", "a"]
    runner.hooks = runner.hooks[::-1]
    runner.hooks.append(Everything("d", called))
    runner.on_step_end(ctx(3))
    assert [one[0] for one in called[5:]] == ["a", "c", "b", "d"]


@pytest.mark.req("004-40")
def test_a_function_with_two_events_is_moved_as_one() -> None:
    """Assigning the list of hooks again changes nothing, however often an object is in it."""

    def both(step: int) -> None: ...

    runner = HookRunner([Idle("a")])
    runner.register(both, event="step_end")
    runner.register(both, event="eval_end")
    runner.hooks = runner.hooks
    assert list(runner) == ["a", "both", "both_2"]
    runner.hooks = [both, runner.get("a")]
    assert list(runner) == ["both", "both_2", "a"]


@pytest.mark.req("002-85")
def test_two_hooks_of_one_class_get_numbers() -> None:
    """Names that are derived from the class are numbered; one that was chosen twice is an error."""
    called: list[int] = []

    class Count(TrainingHook):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_step_end(self) -> None:
            called.append(self.number)

    runner = HookRunner([Count(1), Count(2), Count(3)])
    runner.on_step_end(ctx(1))
    assert list(runner) == ["count", "count_2", "count_3"] and called == [1, 2, 3]
    with pytest.raises(Exception, match="'count' is registered already"):
        runner.register(Count(4), "count")


@pytest.mark.req("000-44")
@pytest.mark.parametrize("kind", [HookManager, HookRegistry, HookRunner])
def test_every_name_takes_what_the_others_take(kind: type[HookManager]) -> None:
    """Forward hooks, interventions if they are enabled, a list or a config, by hand or in a trainer."""

    class Watch(ForwardHook):
        def on_forward(self, name: str) -> None:
            names.append(name)

    class Double(ForwardHook):
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    names: list[str] = []
    manager, model = kind([Watch()], enable_intervention=True), torch.nn.Sequential(torch.nn.Linear(1, 1))
    manager.on_forward("layer", None)
    plain = model(torch.ones(1, 1))
    manager.watch(model)
    manager.register(Double())
    assert torch.equal(model(torch.ones(1, 1)), 2 * plain) and names == ["layer", "0"]
    with pytest.raises(RegistrationError, match="interventions are disabled"):
        kind().register(Double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert SimpleTrainer(model, [torch.ones(1, 1)], optimizer, hooks=manager).hooks is manager
    assert list(kind({"update": ["identity"]})) == list(kind([Identity()])) == ["identity"]


def test_the_runner_has_its_own_positions_and_the_registry_the_others() -> None:
    """on_train_end takes step and tokens here, state there; both take everything by keyword."""
    called: list[Any] = []
    for registry in (HookRunner(), HookRegistry()):
        registry.register(lambda step: called.append(step), "h", event="train_end")
        registry.on_train_end(step=3)
    HookRunner.on_train_end(runner := HookRunner(), 1, 2)
    assert called == [3, 3] and len(runner) == 0
    with pytest.raises(TypeError, match="takes 1 value by position"):
        registry.on_train_end(1, 2)


def test_values_are_taken_out_of_ctx_and_state() -> None:
    """A hook that names loss or tokens_seen need not know how the loop passes them."""
    called: list[Any] = []
    runner = HookRunner()
    runner.register(lambda loss, tokens_seen: called.append((loss, tokens_seen)), "h", event="step_end")
    runner.on_step_end(ctx(1, 64))
    assert called == [(0.5, 64)]


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        ({"every": 3}, [3, 6, 9]),
        ({"every": 5}, [5]),
        ({"at": [1, 8]}, [1, 8]),
        ({"start": 7, "stop": 8}, [7, 8]),
        ({"every": "20 tokens"}, [2, 4, 6, 8]),
        ({"every": "1 h"}, []),
    ],
)
def test_schedules_count_the_steps_of_a_users_own_loop(schedule: dict[str, Any], due: list[int]) -> None:
    """Several events of a step share one decision; steps and tokens are those that the loop tells."""
    called: list[int] = []
    runner = HookRunner()
    runner.register(lambda step: called.append(step), "end", event="step_end", **schedule)
    for step in range(1, 10):
        runner.on_before_backward(step=step, tokens_seen=step * 10)
        runner.on_step_end(ctx(step, step * 10))
        runner.on_train_batch_end(step=step)
    assert called == due


def test_steps_may_jump() -> None:
    """A loop that fires only now and then still finds its hooks due at the right steps."""
    called: list[int] = []
    runner = HookRunner()
    runner.register(lambda step: called.append(step), "h", event="step_end", every=20)
    for step in range(10, 101, 10):
        runner.on_step_end(ctx(step))
    assert called == [20, 40, 60, 80, 100]


def test_epochs_are_counted_from_what_the_loop_says(registry: HookRegistry) -> None:
    """`every="2 epochs"` holds for the second epoch and not for the first, batch numbers starting again."""
    called: list[tuple[int, int]] = []
    registry.register(
        lambda epoch, batch_idx: called.append((epoch, batch_idx)), "h", event="batch_end", every="2 epochs"
    )
    for epoch in range(4):
        registry.on_epoch_start(epoch, {})
        for index in range(2):
            registry.on_batch_end("batch", 0.5, {"current_epoch": epoch, "current_batch_idx": index})
    assert called == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_what_a_hook_can_do_without_need_not_be_passed() -> None:
    """A default is kept and **kwargs gets what is there; only what a hook insists on is the caller's error."""
    called: list[Any] = []
    runner = HookRunner()
    runner.register(lambda ctx, **more: called.append(sorted(more)), "open", event="step_end")
    runner.register(lambda step, batch=None, mine=3: called.append((step, batch, mine)), "default", event="step_end")
    runner.register(lambda metrics=None: called.append(metrics), "evals", event="on_eval_end")
    runner.on_step_end(ctx(4))
    runner.on_step_end(ctx(5), batch=1)
    runner.on_eval_end()
    runner.on_eval_end({"loss": 1.0}, 5)
    counted = ["batch_idx", "dataloader_idx", "dataloader_name", "epoch", "trainer"]
    assert called[0] == sorted([*counted, "lr", "model", "optimizer", "step", "tokens_seen"])
    assert called[1:4:2] == [(4, None, 3), (5, 1, 3)]
    assert called[4:] == [None, {"loss": 1.0}]
    runner.register(lambda device: None, "insists", event="step_end")
    with pytest.raises(MissingArgument, match="'insists' names 'device'"):
        runner.on_step_end(ctx(6))


def test_a_long_run_with_many_schedules_takes_no_more_memory() -> None:
    """Nearly every step has another set of due hooks; what was made for each is not kept for the whole run."""
    gc.collect()  # what other tests have left
    before = sum(type(thing) is BoundHook for thing in gc.get_objects())
    called: list[int] = []
    runner, periods = HookRunner(), range(2, 20)
    for period in periods:
        runner.register(lambda step, epoch=-1: called.append(step), f"every {period}", event="step_end", every=period)
    for step in range(1, 1501):
        runner.on_step_end(ctx(step))
    assert len(called) == sum(1500 // period for period in periods)
    listeners = sum(type(thing) is BoundHook for thing in gc.get_objects())
    assert listeners - before < 600  # without a limit it would be a listener for each hook in each of the sets


@pytest.mark.req("000-01", "000-44")
@pytest.mark.parametrize("kind", [HookManager, HookRegistry, HookRunner])
def test_configured_forward_hooks_run_by_hand(kind: type[HookManager]) -> None:
    """A name and an output are enough for statistics; what else a hook needs is passed by name, or asked for."""
    registry = kind({"forward": ["activation_stats", "capture"], "update": ["identity"]})
    module, output = torch.nn.Linear(1, 2), torch.tensor([1.0, 3.0])
    with pytest.raises(MissingArgument, match="'capture' names 'module', which the call did not pass; pass module=…"):
        registry.on_forward("layer", output)
    registry.on_forward("layer", output, module=module, inputs=(torch.ones(1),), kwargs={})
    registry.disable("capture")
    registry.on_forward("layer", 2 * output)
    registry.on_step_end()
    (captured,) = registry.get_captured_states("capture")
    assert captured.name == "layer" and torch.equal(captured.outputs, output)
    (stats,) = registry.get_captured_states("activation_stats")
    assert (stats.name, stats.values["mean"]) == ("layer", 3.0)  # of both calls
