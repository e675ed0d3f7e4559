"""A `Run` without our trainer: a plain loop drives every built-in hook; how it begins, ends and is recorded."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import Batch, make_batches, make_trainer
from hook_parameters import NEEDED
from run_control import in_progress, train
from safetensors.torch import save_file
from torch import nn
from tracked_runs import OFFLINE

from hookline import HookManager, TrainingHook
from hookline.core.catalog import CAPABILITIES, CATALOG
from hookline.core.plugins import HOOKS
from hookline.errors import RegistrationError, TrainingError
from hookline.gradients.transforms import ClipNorm
from hookline.run.run import Run
from hookline.run.view import RunView
from hookline.testing import EventRecorder
from hookline.trainer.trainer import Trainer

REFUSED = {
    "checkpoint": "can_save",
    "confusion_matrix": "knows_validation_batches",
    "debug_training": "can_rerun",
    "early_stopping": "can_validate",
    "nan_forensics": "can_rerun",
    "sample_predictions": "knows_validation_batches",
}
"""What a plain run cannot do for a built-in hook."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def make_run(*hooks: Any, manager: HookManager | None = None, **options: Any) -> Run:
    model = make_model()
    return Run(model, [torch.optim.SGD(model.parameters(), lr=0.1)], hooks if manager is None else manager, **options)


def batches(count: int = 6) -> list[Batch]:
    return make_batches(count, features=4)


def train_bare(model: nn.Module, batches: list[Batch]) -> None:
    """Train without Hookline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, target in batches:
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- every built-in hook ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in HOOKS.built_in if name not in REFUSED])
def test_every_built_in_hook_works_in_a_plain_loop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event of it fails; one that only observes leaves the weights of a loop without Hookline, bit for bit."""
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    trackio = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **options: trackio))
    save_file({"1/1/outputs/0": torch.ones(8)}, "states.safetensors")
    run = make_run(manager=HookManager(enable_intervention=True), output_dir=tmp_path / "runs")
    run.hooks.register(name, on_error="raise", **NEEDED.get(name, {}))
    torch.manual_seed(2)
    train(run, batches())
    (hook,) = run.hooks.list_hooks()
    assert (hook.failures, run.step, run.record.run["outcome"]) == (0, 6, "completed")
    if not hook.intervenes:
        bare = make_model()
        torch.manual_seed(2)
        train_bare(bare, batches())
        assert all(map(torch.equal, run.model.parameters(), bare.parameters()))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_needs_more_is_refused(name: str) -> None:
    """When it is registered, by its name, with what is missing; a manager that has it is refused by the run."""
    words = rf"'{name}' needs a run that .*\(`{REFUSED[name]}`\).*; Run cannot\. Leave the hook out, or train with"
    run = make_run()
    with pytest.raises(RegistrationError, match=words):
        run.hooks.register(name)
    assert not list(run.hooks)
    manager = HookManager()
    manager.register(name)
    with pytest.raises(RegistrationError, match=words):
        make_run(manager=manager)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("early_stopping", {"monitor": "train/loss"}),
        ("early_stopping", {"monitor": "train/loss", "check_every_n_steps": 2}),
        ("spike_guard", {"action": "clip"}),
    ],
)
def test_what_a_hook_needs_follows_from_its_parameters(name: str, parameters: dict[str, Any]) -> None:
    """A metric of training needs no validation, and clipping skips no step."""
    run = make_run()
    run.can_skip_steps = False
    run.hooks.register(name, on_error="raise", **parameters)
    train(run, batches())
    assert run.step == 6


# ---- capabilities ----------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_can_do() -> None:
    """Every capability is an attribute of runs, and our trainer can do all of them."""
    assert all(isinstance(vars(RunView)[name], bool) for name in CAPABILITIES)
    assert all(getattr(Trainer, name) for name in CAPABILITIES)
    assert [name for name in CAPABILITIES if not getattr(Run, name)] == [
        "can_save",
        "can_validate",
        "can_rerun",
        "knows_validation_batches",
    ]
    assert {event.needs for event in CATALOG.values()} - {""} <= set(CAPABILITIES)


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    """It listens only to events that this run never fires; with another event it is taken."""
    run = make_run()
    words = "'quiet' needs a run that can validate .* to fire on_validation_end, which is all that it listens to"
    with pytest.raises(RegistrationError, match=words):
        run.hooks.on("validation_end", name="quiet")(lambda: None)

    class Both(TrainingHook):
        def on_validation_end(self) -> None: ...

        def on_step_end(self) -> None: ...

    run.hooks.register(Both())
    assert list(run.hooks) == ["both"]


def test_a_misspelt_need_is_refused() -> None:
    """The message has the nearest capability."""

    class Saves(TrainingHook):
        needs = ("can_safe",)

        def on_step_end(self) -> None: ...

    with pytest.raises(RegistrationError, match=r"'saves' needs 'can_safe', .* did you mean 'can_save'"):
        HookManager().register(Saves())


def test_a_run_that_lost_its_hooks_refuses_nothing() -> None:
    """Another run has taken over the manager, and decides."""

    class Saving(Run):
        can_save = True

    manager = HookManager()
    make_run(manager=manager)
    model = make_model()
    Saving(model, [torch.optim.SGD(model.parameters(), lr=0.1)], manager)
    manager.register("checkpoint")
    assert list(manager) == ["checkpoint"]


def test_a_run_that_lost_its_hooks_does_not_begin() -> None:
    """Its update and forward hooks would not be called: it would train without clipping, and not say so."""
    manager = HookManager([ClipNorm(max_norm=1.0)])
    first, trainer, last = make_run(manager=manager), make_trainer(hooks=manager), make_run(manager=manager)
    for begin in (first.open, trainer.fit, lambda: trainer.training_step(make_batches(1)[0])):
        with pytest.raises(TrainingError, match=r"now belong to another run.* give each run its own HookManager"):
            begin()
    assert not (first.running or trainer.running)
    train(last, batches())
    assert last.step == 6


def test_a_run_that_loses_its_hooks_in_progress_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that fires its events by hand gives them up without a word: they are fired in the new run."""
    manager = HookManager([ClipNorm(max_norm=1.0)])
    manager.on_train_start()
    first = make_run(manager=manager)
    assert not caplog.messages
    with in_progress(first):
        train(make_run(manager=manager), batches())
    assert caplog.messages == [
        "a run in progress has lost its hooks, because another run was created with them; "
        "give each run its own HookManager"
    ]


# ---- the beginning and the end ---------------------------------------------------------------------------------------


def fail(*args: Any) -> None:
    raise OSError("no disk")


def test_the_order_of_events() -> None:
    """A plain loop fires the events of a run in their order."""
    recorder = EventRecorder()
    train(make_run(recorder), batches(1))
    assert recorder.names == [
        "on_train_start", "on_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
        "on_gradients_ready", "on_before_optimizer_step", "on_after_optimizer_step", "on_train_batch_end",
        "on_step_end", "on_epoch_end", "on_train_end",
    ]  # fmt: skip


def test_a_run_that_fails_to_begin_is_ended(tmp_path: Path) -> None:
    """What on_train_start raises after the record is open ends the run: it is recorded as failed and closed."""

    class Fails(TrainingHook):
        on_error, closed = "raise", 0

        def on_train_start(self) -> None:
            fail()

        def close(self) -> None:
            self.closed += 1

    hook = Fails()
    run = make_run(hook, output_dir=tmp_path)
    with pytest.raises(OSError, match="no disk"):
        train(run, batches())
    assert (run.running, run.status, run.step, hook.closed) == (False, "error", 0, 1)
    assert read_run(run)["outcome"] == "failed"


def test_a_host_that_fails_to_prepare_ends_the_run() -> None:
    """The events of the end are fired, although on_train_start was not."""

    class Host(Run):
        prepare = fail

    model, fired = make_model(), list[str]()
    run = Host(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for event in ("train_start", "exception", "train_end"):
        run.hooks.on(event, name=event)(lambda event=event: fired.append(event))
    with pytest.raises(OSError, match="no disk"):
        train(run, batches())
    assert fired == ["exception", "train_end"] and run.record.run["outcome"] == "failed"


def test_a_hook_that_refuses_the_run_leaves_no_directory(tmp_path: Path) -> None:
    """`check_run` is called before there is one, in any host."""

    class Refuses(TrainingHook):
        check_run = fail

    run = make_run(Refuses(), output_dir=tmp_path)
    with pytest.raises(OSError, match="no disk"):
        train(run, batches())
    assert not list(tmp_path.iterdir()) and not run.running


def test_an_error_in_the_loop_ends_the_run() -> None:
    """`end` gets it: on_exception and on_train_end are fired, and the error is not replaced."""
    run, seen = make_run(), list[Any]()
    run.hooks.on("exception", name="a")(lambda exception: seen.append(exception))
    run.hooks.on("train_end", name="b")(lambda reason: seen.append(reason))
    error = ValueError("bad batch")
    with pytest.raises(ValueError, match="bad batch") as raised, in_progress(run):
        run.begin_batch(batches(1)[0])
        raise error
    assert raised.value is error and seen == [error, "ValueError: bad batch"]
    assert (run.status, run.record.run["outcome"], run.record.run["counters"]["step"]) == ("error", "failed", 0)


@pytest.mark.parametrize(("policy", "outcome"), [("warn", "completed"), ("raise", "failed")])
@pytest.mark.hooks_fail(raises=OSError)
def test_a_hook_that_fails_at_the_end(policy: str, outcome: str) -> None:
    """Its policy decides whether the run has failed; the others are called, and the record is closed."""
    run, called = make_run(), list[str]()
    run.hooks.on("train_end", name="fails", on_error=policy)(lambda: fail())
    run.hooks.on("train_end", name="after")(lambda: called.append("after"))
    if policy == "raise":
        with pytest.raises(OSError, match="no disk"):
            train(run, batches())
    else:
        train(run, batches())
    assert called == ["after"] and not run.running
    assert (run.record.run["outcome"], run.hook_failures) == (outcome, 1)


def test_a_second_run_continues_the_count() -> None:
    """The same run may be made twice; hooks are set up again, and steps go on."""
    run = make_run("lr_monitor")
    for steps in (6, 12):
        train(run, batches())
        assert run.step == steps
    assert run.epoch == 1


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["gradients_ready", "before_optimizer_step"])
def test_a_hook_skips_a_step(event: str) -> None:
    """The weights stay, on_step_skipped is fired instead of on_after_optimizer_step, and the step counts."""
    run, fired = make_run(), list[tuple[str, int]]()
    run.hooks.on(event, name="skips", at=3)(lambda trainer: trainer.skip_step("no"))
    run.hooks.on("step_skipped", name="skipped")(lambda step, reason: fired.append((reason, step)))
    run.hooks.on("after_optimizer_step", name="stepped")(lambda step: fired.append(("stepped", step)))
    train(run, batches())
    assert fired == [("no" if step == 3 else "stepped", step) for step in range(1, 7)]
    assert (run.step, run.skipped_steps) == (6, 1)


def test_a_loop_that_steps_by_itself_asks_before() -> None:
    """`before_optimizer_step` says whether to step, and `after_optimizer_step` counts the step."""
    run = make_run()
    run.hooks.on("before_optimizer_step", name="skips", at=2)(lambda trainer: trainer.skip_step("no"))
    (optimizer,), stepped = run.optimizers, []
    with in_progress(run):
        for inputs, target in batches(3):
            run.begin_batch((inputs, target))
            run.backward(nn.functional.mse_loss(run.model(inputs), target))
            if run.window_is_complete():
                stepped.append(run.gradients_ready() and run.before_optimizer_step(optimizer))
                if stepped[-1]:
                    optimizer.step()
                    run.after_optimizer_step(optimizer)
                run.end_optimizers()
            run.end_batch()
            run.at_boundary()
    assert stepped == [True, False, True] and run.record.run["counters"]["skipped_steps"] == 1


def test_a_hook_stops_the_run() -> None:
    """`at_boundary` says so after its step."""
    run = make_run()
    run.hooks.on("step_end", name="stops", at=2)(lambda trainer: trainer.request_stop("enough"))
    train(run, batches())
    assert (run.step, run.stopped_by) == (2, "stops")
    assert (run.record.run["outcome"], run.record.run["reason"]) == ("stopped", "stopped by stops: enough")


def test_what_a_plain_run_cannot_do() -> None:
    """Validating, saving and running a batch again are errors that name the host."""
    run = make_run()
    calls: list[Callable[[], Any]] = [
        run.validate,
        run.save,
        lambda: run.rerunning({}).__enter__(),
        lambda: run.compute_loss(None),
    ]
    for call in calls:
        with pytest.raises(Exception, match="Run"):
            call()


def test_a_host_that_validates() -> None:
    """`validation` fires the events around the host's own, and records what it measured and what hooks add."""

    class Host(Run):
        can_validate = True

    model, seen = make_model(), list[Any]()
    run = Host(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    run.hooks.on("validation_start", name="a")(lambda model, step: seen.append((model.training, step)))
    run.hooks.on("validation_end", name="b")(lambda metrics: metrics.update({"val/mine": 2.0}))
    run.hooks.on("eval_end", name="c")(lambda metrics: seen.append(dict(metrics)))
    run.hooks.register("early_stopping", target=5.0)
    with in_progress(run):
        run.begin_batch(batches(1)[0])
        with run.validation() as metrics:
            metrics["val/loss"] = 3.0
    assert seen == [(False, 1), {"eval/loss": 3.0, "eval/mine": 2.0}] and model.training
    assert run.stop_reason == "val/loss 3 has reached its target 5"
    assert {"val/loss": 3.0, "val/mine": 2.0}.items() <= run.record.metrics[-1].items()


# ---- the record ------------------------------------------------------------------------------------------------------


def read_run(run: Run) -> dict[str, Any]:
    return json.loads((run.run_dir / "run.json").read_text(encoding="utf-8"))


def test_the_record_is_in_memory_by_default(tmp_path: Path) -> None:
    """Losses and what hooks log are there after the run, and nothing is on disk."""
    run = make_run()
    run.hooks.on("step_end", name="logs")(lambda trainer, step: trainer.log("mine", step))
    train(run, batches())
    rows = [row for row in run.record.metrics if "train/loss" in row]
    assert [row["mine"] for row in rows] == [1, 2, 3, 4, 5, 6] and run.run_dir is None
    assert any("train/epoch_loss" in row for row in run.record.metrics) and not list(tmp_path.iterdir())


def test_the_record_is_on_disk(tmp_path: Path) -> None:
    """With `output_dir` a run has a directory, as those of our trainer have: run.json, metrics and a report."""
    run = make_run("lr_monitor", output_dir=tmp_path, seed=7)
    train(run, batches())
    written = read_run(run)
    assert run.run_dir is not None and run.run_dir.parent == tmp_path
    assert (written["outcome"], written["counters"]["step"], written["seed"]) == ("completed", 6, 7)
    assert written["hooks"][0]["name"] == "lr_monitor"
    assert {"metrics.jsonl", "report.html"} <= {path.name for path in run.run_dir.iterdir()}


def test_hooks_given_as_a_list_are_set_up_in_the_run() -> None:
    """Their `setup` sees the run and its model, and one that the run refuses is never set up."""
    seen: list[Any] = []

    class Seeing(TrainingHook):
        def setup(self, name: str, registry: Any = None) -> None:
            seen.append((type(registry.run).__name__, registry.dispatcher.model is not None))

        def on_step_end(self) -> None: ...

    class NeedsMore(Seeing):
        needs = ("can_validate",)

    make_run(Seeing())
    assert seen == [("Run", True)]
    with pytest.raises(RegistrationError, match="needs a run that can validate"):
        make_run(NeedsMore())
    assert len(seen) == 1


@pytest.mark.req("000-35", "000-36")
def test_a_run_logs_its_hooks_before_the_first_step() -> None:
    """run.json lists every hook with its name and whether it is enabled, as `list_hooks` does."""
    trainer = make_trainer(record=True)
    logged: list[tuple[str, bool]] = []

    @trainer.on("train_start", name="reads")
    def read() -> None:
        hooks = json.loads((trainer.run_dir / "run.json").read_text())["hooks"]
        logged.extend((hook["name"], hook["enabled"]) for hook in hooks)

    trainer.add_json_logging()
    trainer.add_hook("clip_norm", max_norm=1.0, enabled=False)
    trainer.disable_hook("json_log")
    trainer.train()
    assert dict(logged) == {"reads": True, "identity": True, "clip_norm": False, "json_log": False}
    assert logged == [(hook.name, hook.enabled) for hook in trainer.hooks.list_hooks()]


def test_a_hook_whose_ranks_the_run_has_not_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """It is never called, whether its class or its registration names the ranks."""

    class Elsewhere(TrainingHook):
        ranks = (8, 4)

        def on_step_end(self) -> None:
            raise AssertionError

    trainer = make_trainer(Elsewhere())
    trainer.on("step_end", name="second", ranks=1)(lambda: calls.append(1))
    trainer.on("step_end", name="mine", ranks=[0, 1])(lambda: calls.append(0))
    calls: list[int] = []
    trainer.train()
    assert set(calls) == {0}
    told = [record.getMessage() for record in caplog.records if "is not called" in record.getMessage()]
    assert told == [
        "'elsewhere' is not called: its ranks are 4, 8, and the run has 1 process",
        "'second' is not called: its ranks are 1, and the run has 1 process",
    ]
