"""Lifecycles: what happens in each, which hook is where, and how a failure is told."""

import threading
from pathlib import Path
from typing import Any

import pytest

from hookline import HooklineError, TrainingHook, UpdateHook
from hookline.core.catalog import CATALOG
from hookline.errors import RankError
from hookline.testing import EventRecorder, Lifecycle, lifecycles
from hookline.testing.runs import SyntheticTrainer

LIFECYCLES = {lifecycle.name: lifecycle for lifecycle in lifecycles()}


class CountsSteps(TrainingHook):
    saves = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self) -> None:
        self.count += 1


def test_every_event_is_interrupted() -> None:
    """Every event is in the catalog of lifecycles, except the two that follow an interruption."""
    events = CATALOG.keys() - {"on_exception", "on_checkpoint_load"}
    assert {lifecycle.raises_at for lifecycle in lifecycles()} - {""} == events
    assert {lifecycle.resumes_at for lifecycle in lifecycles()} - {""} == events


@pytest.mark.parametrize("lifecycle", lifecycles(), ids=str)
def test_what_happens_in_each(lifecycle: Lifecycle) -> None:
    """Each one has its event, and an exception ends the run where a resumed one reaches the end."""
    recorder = EventRecorder()
    run = lifecycle.run(recorder)
    names = recorder.names
    assert names[-1] == "on_train_end" and run.hook is recorder
    if lifecycle.raises_at:
        assert ("on_exception" in names) == (lifecycle.raises_at != "on_train_end")
        assert run.record.run["reason"].startswith("Interruption: ") and lifecycle.raises_at in run.record.run["reason"]
    else:
        steps = 6 if lifecycle.accumulate == 2 else 10
        assert (run.step, run.record.run["outcome"]) == (steps, "completed")
    if lifecycle.resumes_at:
        assert names[0] == ("on_train_start" if lifecycle.resumes_at == "on_train_start" else "on_checkpoint_load")
        assert "on_exception" not in names


def test_accumulation_and_a_skipped_step() -> None:
    """A window has two micro-batches, and the last of an epoch one; a skipped step counts as one."""
    accumulation, skipped = EventRecorder(), EventRecorder()
    LIFECYCLES["accumulation"].run(accumulation)
    LIFECYCLES["skipped_step"].run(skipped)
    assert (accumulation.names.count("on_step_end"), accumulation.names.count("on_train_batch_end")) == (6, 10)
    assert ("on_step_skipped", 4) in skipped.events and ("on_after_optimizer_step", 4) not in skipped.events


def test_a_resumed_hook_has_the_state_of_the_other() -> None:
    """The hook that is passed is the one that resumes, and the step that was not finished is made again."""
    hook = CountsSteps()
    LIFECYCLES["resume_at_on_after_backward"].run(hook)
    assert hook.count == 10
    forgetful = CountsSteps()
    forgetful.saves = ()
    LIFECYCLES["resume_at_on_after_backward"].run(forgetful)
    assert forgetful.count == 7


def test_two_ranks() -> None:
    """They train on different batches, each with its own hook; numbers are averaged, and a stop is agreed on."""
    seen: list[tuple[int, int]] = []

    class Rank(TrainingHook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.log("rank", trainer.ranks.rank)
            seen.append((trainer.ranks.rank, step))
            if (trainer.ranks.rank, step) == (1, 4):
                trainer.request_stop("enough")

    run = LIFECYCLES["two_ranks"].run(Rank)
    assert (run.ranks.rank, run.step, run.stop_reason) == (0, 5, "enough")
    assert [row["rank"] for row in run.record.metrics if "rank" in row] == [0.5] * 5
    assert sorted(seen) == [(rank, step) for rank in (0, 1) for step in range(1, 6)]


def test_a_rank_that_leaves_the_others_alone_is_named() -> None:
    """Instead of a hang, an error says which rank has not come."""

    class Alone(TrainingHook):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.ranks.rank == 0:
                trainer.ranks.gather(1)

    before = threading.active_count()
    with pytest.raises(RankError, match=r"not in step: rank 0 called gather\(\), rank 1 called total\(\)"):
        LIFECYCLES["two_ranks"].run(Alone)
    assert threading.active_count() == before


class BadAtTheEnd(TrainingHook):
    def on_step_end(self, loss: float) -> None:
        self.last = loss

    def on_exception(self) -> None:
        self.last = self.last * 2


@pytest.mark.hooks_fail(raises=AttributeError)
def test_a_failure_is_told() -> None:
    """With hook, event, step, lifecycle, exception and what would be right."""
    words = (
        r"^hook 'bad_at_the_end', on_exception, step 0, in the lifecycle 'exception_at_on_train_start': failed: "
        r"AttributeError: .*'last'.*\. To fix this: a run may fail anywhere, even before its first loss, so read only"
    )
    with pytest.raises(AssertionError, match=words) as raised:
        for lifecycle in lifecycles():
            lifecycle.run(BadAtTheEnd())
    assert isinstance(raised.value.__cause__, AttributeError)


class MeanOfEpoch(TrainingHook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, loss: float) -> None:
        self.losses.append(loss)

    def on_epoch_end(self) -> None:
        print(sum(self.losses) / len(self.losses))
        self.losses.clear()


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_what_a_resumed_hook_has_forgotten_is_told() -> None:
    """A run that resumes at the end of an epoch has no losses of it, unless the hook saves them."""
    words = r"'resume_at_on_epoch_end': failed: ZeroDivisionError: .* a hook that resumes has only what it `saves`"
    with pytest.raises(AssertionError, match=words):
        next(lifecycle for lifecycle in lifecycles() if lifecycle.name == "resume_at_on_epoch_end").run(MeanOfEpoch)


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_failure_on_another_rank_is_told() -> None:
    """With the rank."""

    class Fails(TrainingHook):
        def on_epoch_end(self, trainer: Any) -> None:
            if trainer.ranks.rank:
                raise ValueError("no")

    with pytest.raises(AssertionError, match=r"'fails', on_epoch_end, step 5 on rank 1, in the lifecycle 'two_ranks'"):
        LIFECYCLES["two_ranks"].run(Fails())


def test_a_change_that_is_undone_is_told() -> None:
    """Metrics belong to those who added them."""

    class Removes(TrainingHook):
        def on_train_batch_end(self, metrics: Any) -> None:
            metrics.clear()

    with pytest.raises(AssertionError, match=r"'removes', on_train_batch_end, step 1, .* removed 'loss' in metrics"):
        LIFECYCLES["complete"].run(Removes())


@pytest.mark.hooks_fail(raises=HooklineError)
def test_a_state_that_cannot_be_saved_is_told() -> None:
    """At state_dict, with the remedy."""

    class Saves(CountsSteps):
        def state_dict(self) -> Any:
            return {"lock": threading.Lock()}

    with pytest.raises(AssertionError, match=r"'saves', state_dict, step 1.*return numbers, strings, tensors"):
        LIFECYCLES["resume_at_on_step_end"].run(Saves())


def test_a_run_on_disk(tmp_path: Path) -> None:
    """With `output_dir` the run has a directory and checkpoints, also one that is killed."""
    run = LIFECYCLES["resume_at_on_step_end"].run(CountsSteps(), output_dir=tmp_path)
    assert run.run_dir is not None and run.run_dir.parent == tmp_path and len(list(tmp_path.iterdir())) == 2
    assert {path.name for path in run.checkpoint_dir.iterdir()} == {"validated", "validated-1"}


def test_what_a_hook_may_be() -> None:
    """An object, a class, a name, a function that makes one; options are those of `add_hook`."""
    lifecycle = LIFECYCLES["complete"]
    assert isinstance(lifecycle.run(CountsSteps).hook, CountsSteps)
    assert isinstance(lifecycle.run(lambda: CountsSteps()).hook, CountsSteps)
    assert lifecycle.run("clip_norm", max_norm=1.0).tested == "clip_norm"
    assert lifecycle.run(CountsSteps(), every=5).hook.count == 2

    class Locked(CountsSteps):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    assert lifecycle.run(Locked()).hook.count == 10
    with pytest.raises(TypeError, match=r"Locked cannot be copied \(.*\): pass lambda: Locked\(\.\.\.\)"):
        LIFECYCLES["two_ranks"].run(Locked())
    LIFECYCLES["two_ranks"].run(lambda: Locked())


def test_update_and_forward_hooks_are_driven() -> None:
    """The gradients that an update hook returns are used."""

    class Zero(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            return {name: grad * 0 for name, grad in grads.items()}

    run = LIFECYCLES["complete"].run(Zero())
    untrained = SyntheticTrainer()
    assert all((a == b).all() for a, b in zip(run.model.parameters(), untrained.model.parameters(), strict=True))
