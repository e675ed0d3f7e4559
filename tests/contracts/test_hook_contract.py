"""What Hookline reads from hooks is declared on their base classes, and users' hooks can use all of it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch import nn

import hookline
from hookline import HookManager, HookRegistry, HookRunner
from hookline.core.base import ForwardHook, Hook, TrainingHook, UpdateHook, hook_attribute
from hookline.errors import TrainingError

SOURCES = [path for path in sorted(Path(hookline.__file__).parent.rglob("*.py")) if "data" not in path.parts]
READ = re.compile(
    r"""(getattr|hook_attribute)\(\s*((?:type\()?[\w.\[\]]*\b(?:hook|owner|made|hooks\.get\([\w.()]*\)))\)?\s*,"""
    r"""\s*["'](\w+)["']"""
)
PART_OF_A_RUN = re.compile(
    r"\b_?(?:trainer|run)\.(?:progress|run_status|event_args|engine|agreement|stats|accumulation|reruns|_\w+)\b"
)
OF_TYPE = {"__name__", "__dict__"}  # what every function or object may have


def declared() -> set[str]:
    """What the base classes of hooks declare: with a default, or as a method that a hook may have."""
    kinds = (Hook, TrainingHook, ForwardHook, UpdateHook)
    return {name for kind in kinds for name in (*dir(kind), *kind.__annotations__)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_what_is_read_from_a_hook_is_declared(path: Path) -> None:
    """No code knows an attribute that `Hook` does not declare, and the default is written there alone."""
    for function, owner, name in READ.findall(path.read_text(encoding="utf-8")):
        if name in OF_TYPE:
            continue
        assert name in declared(), f"{path.name} reads {owner}.{name}, which Hook does not declare"
        of_class = owner.startswith("type(")
        assert function == "hook_attribute" or of_class, f"{path.name}: read {name!r} with hook_attribute"


def test_built_in_hooks_use_what_users_hooks_can_use() -> None:
    """They read nothing of a run but the documented `RunControl`: not the objects that a run consists of."""
    hooks = [path for path in SOURCES if {"hooks", "activations", "gradients"} & set(path.parts)]
    assert len(hooks) > 50
    assert not [(path.name, read) for path in hooks for read in PART_OF_A_RUN.findall(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("kind", [Hook, ForwardHook, UpdateHook])
def test_a_declaration_has_a_sentence(kind: type) -> None:
    """Every attribute and method is followed by, or begins with, what it means."""
    source = Path(hookline.__file__).parent.joinpath("core/base.py").read_text(encoding="utf-8")
    body = source.partition(f"class {kind.__name__}(")[2].partition("\nclass ")[0]
    # The docstrings of their classes are about the first two; the third is that of `Hook` with another default.
    for name in set(kind.__annotations__) - ({"modules", "params", "intervenes"} if kind is not Hook else set()):
        assert re.search(rf"^    {name}: .*\n    \"\"\"", body, re.MULTILINE), name


def test_an_object_has_the_defaults_of_a_hook() -> None:
    """A function or any other object need not declare anything; methods get the object itself."""

    def function() -> None: ...

    assert hook_attribute(function, "isolate_rng") is True
    assert hook_attribute(function, "intervenes") is None
    assert hook_attribute(function, "modules") == "*"
    assert hook_attribute(function, "state_dict") is None
    assert hook_attribute(function, "init")({}) == {}
    assert hook_attribute(function, "close")() is None
    with pytest.raises(TypeError, match="before_first_step"):
        hook_attribute(function, "before_first_step")()


class Witness(TrainingHook):
    """Writes down what is called, and draws random numbers there."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def note(self, what: str) -> None:
        self.called.append(what)
        torch.rand(1)

    def check_run(self, trainer: Any) -> None:
        self.note(f"check_run, running: {trainer.running}")

    def before_first_step(self, trainer: Any, measured: Any) -> None:
        self.note(f"before_first_step: {measured and sorted(measured)}")

    def on_train_start(self) -> None:
        self.called.append("on_train_start")

    def after_last_step(self, trainer: Any) -> None:
        self.note(f"after_last_step: {trainer.step}, {trainer.pending_save}")

    def on_train_end(self) -> None:
        self.called.append("on_train_end")


def test_a_users_hook_is_called_around_the_run() -> None:
    """Before the run has a directory, before the first step and after the last one, in this order."""
    hook = Witness()
    make_trainer(hook, val_dataloader=make_batches(1)).train()
    assert hook.called == [
        "check_run, running: False", "before_first_step: ['val/loss']", "on_train_start", "after_last_step: 4, None",
        "on_train_end",
    ]  # fmt: skip


def test_what_it_draws_there_changes_nothing() -> None:
    """Training's random streams are the same with and without the hook."""
    drawn = []
    for hooks in ([], [Witness()]):
        trainer = make_trainer(*hooks, seed=3, val_dataloader=make_batches(1))
        trainer.on("step_end", name="draws")(lambda: None)
        trainer.train()
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("method", ["check_run", "before_first_step"])
def test_a_users_hook_refuses_a_run(method: str, tmp_path: Path) -> None:
    """What it raises ends the run before its first step, whatever its policy; `check_run` leaves no directory."""

    def refuse(*args: Any) -> None:
        raise TrainingError("no licence")

    hook = Witness()
    setattr(hook, method, refuse)
    trainer = make_trainer(hook, record=True)
    with pytest.raises(TrainingError, match="no licence"):
        trainer.train()
    assert trainer.step == 0 and bool(list(tmp_path.iterdir())) == (method != "check_run")


@pytest.mark.hooks_fail(raises=OSError)
def test_a_failure_after_the_last_step_is_the_hooks() -> None:
    """Its policy decides: the default one lets the run end well."""

    class Failing(TrainingHook):
        def after_last_step(self, trainer: Any) -> None:
            raise OSError("no network")

    trainer = make_trainer(Failing())
    trainer.train()
    assert trainer.status == "completed" and trainer.hook_failures == 1


def test_a_users_hook_saves_the_end() -> None:
    """What it requests after the last step is on disk before on_train_end."""

    class Saves(TrainingHook):
        saved = ""

        def after_last_step(self, trainer: Any) -> None:
            trainer.save("end")

        def on_train_end(self, trainer: Any) -> None:
            self.saved = ", ".join(path.name for path in trainer.checkpoint_dir.iterdir())

    hook = Saves()
    make_trainer(hook, record=True).train()
    assert hook.saved == "end"


def test_a_users_hook_says_how_to_save_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Its `unsaved_hint` is in the closing line if steps are in no checkpoint."""

    class Saves(TrainingHook):
        unsaved_hint = "use Saves(end=True)"

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save()

    make_trainer(Saves(), record=True, console=True, data=make_batches(3)).train()
    assert "1 step after the last checkpoint (step 2; use Saves(end=True))" in capsys.readouterr().out


@pytest.mark.parametrize("enabled", [True, False])
def test_a_users_hook_explains_a_nan(enabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With `explains_non_finite` the run does not suggest how to find its origin, unless the hook is switched off."""

    class Explains(TrainingHook):
        explains_non_finite = True

        def on_step_end(self) -> None: ...

    trainer = make_trainer()
    trainer.add_hook(Explains(), enabled=enabled)
    trainer.fit([(torch.full((2, 3), float("nan")), torch.ones(2, 1))])
    assert ("to find the module it comes from" in caplog.text) is not enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_a_users_hook_shows_the_progress(enabled: bool) -> None:
    """With `shows_progress` the run has no `console_log` of its own, even while the hook is switched off."""

    class Bar(TrainingHook):
        shows_progress = True

        def on_train_start(self, trainer: Any) -> None: ...

    trainer, names = make_trainer(console=True), []
    trainer.add_hook(Bar(), enabled=enabled)
    trainer.on("train_start", name="names")(lambda trainer: names.extend(trainer.hooks))
    trainer.train()
    assert "bar" in names and "console_log" not in names


def test_a_users_hook_runs_last() -> None:
    """Also after hooks that are registered later, and after the built-in ones."""

    class Last(TrainingHook):
        runs_last = True

        def on_step_end(self) -> None: ...

    registry = HookRegistry()
    registry.register(Last())
    registry.register("lr_monitor")
    registry.on("step_end", name="later")(lambda: None)
    assert [hook.name for hook in registry.list_hooks()] == ["later", "lr_monitor", "last"]


def test_a_users_update_hook_reports_norms_and_reads_weights() -> None:
    """`reports_norms` logs the norm around each update hook; `reads_weights` asks for the model if fired by hand."""

    class Reads(UpdateHook):
        reads_weights = True

        def on_update(self, grads: Any) -> Any:
            return grads

    class Reports(UpdateHook):
        reports_norms = True

        def on_update(self, grads: Any) -> Any:
            return grads

    trainer = make_trainer(Reads(), Reports())
    trainer.train()
    trainer.record.flush(wait=True)
    assert "update/reads/norm_before" in {key for row in trainer.record.metrics for key in row}
    with pytest.raises(hookline.HooklineError, match=r"'reads' reads weights.*pass model="):
        HookRunner([Reads()]).on_update({"weight": torch.ones(2)})


def test_a_users_update_hook_passes_through() -> None:
    """With `passes_through` the chain leaves it out, as `identity`; a subclass with its own method is called."""

    class Passes(UpdateHook):
        passes_through = True

        def on_update(self, grads: Any) -> Any:
            raise AssertionError("it was called")

    class Doubles(Passes):
        def on_update(self, grads: Any) -> Any:
            return {name: 2 * gradient for name, gradient in grads.items()}

    trainer = make_trainer(Passes(), Doubles())
    trainer.train()
    calls = {row["hook"]: row["calls"] for row in trainer.hooks.costs()}
    assert (calls["identity"], calls["passes"], calls["doubles"]) == (0, 0, 4)


def test_a_users_hook_gathers_states() -> None:
    """`states` is what `get_captured_states` returns, and `clear_states` is called by `clear_captured_states`."""

    class Gathers(ForwardHook):
        def __init__(self) -> None:
            self.states: list[str] = []

        def on_forward(self, name: str) -> None:
            self.states.append(name)

        def clear_states(self) -> None:
            self.states.clear()

    manager, model = HookManager(), nn.Sequential(nn.Linear(2, 2))
    manager.register(Gathers())
    manager.watch(model)
    with manager.attached():
        model(torch.ones(1, 2))
    assert "0" in manager.get_captured_states("gathers")
    manager.clear_captured_states("gathers")
    assert manager.get_captured_states("gathers") == []


def test_a_users_hook_seeds_training_and_is_listed() -> None:
    """With `isolate_rng = False` it is listed as intervening."""

    class Seeds(TrainingHook):
        isolate_rng = False

        def on_step_end(self) -> None: ...

    registry = HookRegistry()
    registry.register(Seeds())
    assert registry.list_hooks()[0].intervenes
