"""A resume that fails before its first step leaves the run as it was: nothing of its directory changes."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer

from hookline import SimpleTrainer, TrainingHook, load_run
from hookline.cli import main
from hookline.errors import CheckpointError
from hookline.record import read_json


def contents(run: Path) -> dict[str, tuple[str, str]]:
    """Return a digest and the target of every file in a run's directory, except its lock."""
    return {
        str(path.relative_to(run)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            str(path.readlink()) if path.is_symlink() else "",
        )
        for path in sorted(run.rglob("*"))
        if path.name != ".lock"
    }


def saving_trainer(*hooks: Any, sizes: tuple[int, ...] = (3, 4, 1), **options: Any) -> SimpleTrainer:
    """Make a trainer that saves every other step, and records statistics of layers."""
    trainer = make_trainer(*hooks, model=make_model(*sizes), record=True, **options)
    trainer.add_hook("activation_stats", modules="0", every=1)
    trainer.add_checkpointing(save_every_n_steps=2, save_every_n_epochs=None)
    return trainer


def trained(**options: Any) -> Path:
    """Return the directory of a finished run."""
    trainer = saving_trainer(**options)
    trainer.train()
    assert trainer.run_dir is not None
    return trainer.run_dir


class FailsAt(TrainingHook):
    """Fails at one event of the resumed run."""

    on_error = "raise"

    def __init__(self, event: str) -> None:
        setattr(self, event, self.fail)

    def fail(self) -> None:
        raise ValueError("refused")


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """The run is still completed, with its own config, its report and all its checkpoints."""
    run = trained()
    before = contents(run)
    with pytest.raises(CheckpointError, match="size mismatch"):
        saving_trainer(sizes=(3, 8, 1), max_epochs=2).fit(resume=run)
    assert contents(run) == before
    again = saving_trainer(max_epochs=2)
    again.fit(resume=run)
    assert again.progress.steps_done == 8 and again.run_dir == run


@pytest.mark.parametrize("event", ["on_checkpoint_load", "on_train_start", "on_train_batch_start", "on_after_backward"])
@pytest.mark.parametrize("from_step", [4, 2])
def test_a_failure_before_the_first_step(event: str, from_step: int) -> None:
    """Also if later checkpoints would have been set aside."""
    run = trained()
    before = contents(run)
    with pytest.raises(ValueError, match="refused"):
        saving_trainer(FailsAt(event), max_epochs=2).fit(resume=run / "checkpoints" / f"step-{from_step:08d}")
    assert contents(run) == before


WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorboard": ("tensorboard", {}),
    "profiler": ("profiler", {"first_step": 5, "steps": 2, "warmup": 0}),
    "capture": ("capture", {"modules": "0", "save": True}),
    "checkpoint": ("checkpoint", {"save_on_exception": True, "save_last": True, "name": "second"}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_hooks_that_write_wait_for_the_first_step(name: str) -> None:
    """A tracker would mark the earlier attempt, and captures would replace those of the finished run."""
    hook, parameters = WRITERS[name]

    def make(*hooks: Any, **options: Any) -> SimpleTrainer:
        trainer = saving_trainer(*hooks, **options)
        trainer.add_hook(hook, **parameters)
        return trainer

    first = make()
    first.train()
    run = first.run_dir
    assert run is not None
    before = contents(run)
    with pytest.raises(ValueError, match="refused"):
        make(FailsAt("on_after_backward"), max_epochs=2).fit(resume=run / "checkpoints" / "step-00000004")
    assert contents(run) == before
    make(max_epochs=2).fit(resume=run)
    assert contents(run).keys() - before.keys() > {"checkpoints/step-00000008"}


def test_a_save_that_is_refused_changes_nothing() -> None:
    """Half a step cannot be saved, and asking for it is no step."""

    class SavesInStep(TrainingHook):
        on_error = "raise"

        def on_after_backward(self, trainer: Any) -> None:
            trainer.save_checkpoint()

    run = trained()
    before = contents(run)
    with pytest.raises(CheckpointError, match="in the middle of a step"):
        saving_trainer(SavesInStep(), max_epochs=2).fit(resume=run)
    assert contents(run) == before


def test_what_hooks_write_of_the_first_step_is_kept() -> None:
    """A tracker gets the rows of the first step, and a trace of this step alone is written after it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained()
    trainer = saving_trainer(max_epochs=2)
    trainer.add_hook("tensorboard", timeout=600.0)
    trainer.add_hook("profiler", first_step=5, steps=1, warmup=0)
    trainer.on("train_batch_start", at=5, name="notes")(lambda trainer: trainer.note("noted", value="why"))
    trainer.fit(resume=run)
    assert (run / "traces" / "step-00000005.json.gz").exists()
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert [scalar.step for scalar in reader.Scalars("train/loss")] == [5, 6, 7, 8]
    assert "events/noted/text_summary" in reader.Tags()["tensors"]


def test_a_failure_after_the_first_step_is_recorded() -> None:
    """From the first step on, the attempt is part of the run."""

    class FailsInStep(TrainingHook):
        on_error = "raise"

        def on_step_end(self, step: int) -> None:
            if step == 6:
                raise ValueError("later")

    run = trained()
    with pytest.raises(ValueError, match="later"):
        saving_trainer(FailsInStep(), max_epochs=2).fit(resume=run)
    described = read_json(run / "run.json")
    assert [attempt["outcome"] for attempt in described["attempts"]] == ["completed", "failed"]
    kinds = [event["kind"] for event in load_run(run).events]
    assert kinds.index("checkpoint_loaded") < kinds.index("exception")


def test_later_checkpoints_are_set_aside_with_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """A resume from an earlier step abandons what it will not reach, once it has begun."""
    caplog.set_level(logging.CRITICAL, "hookline")
    run = trained()
    seen: list[list[str]] = []

    class Looks(TrainingHook):
        def on_train_batch_start(self, step: int) -> None:
            seen.append(sorted(path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()))

    saving_trainer(Looks()).fit(resume=run / "checkpoints" / "step-00000002")
    assert "step-00000004" in seen[0] and "step-00000004" not in seen[1]


@pytest.mark.parametrize(("outcome", "is_kept"), [("completed", True), ("stopped", True), (None, False)])
def test_a_resume_with_nothing_left_to_train(outcome: str | None, is_kept: bool) -> None:
    """It leaves a run that had ended as it is, whatever its options; one that was killed has its end only now."""
    run = trained()
    described = read_json(run / "run.json")
    described["outcome"] = described["attempts"][-1]["outcome"] = outcome
    (run / "run.json").write_text(json.dumps(described))
    before = contents(run)
    for path in (run, run / "checkpoints" / "step-00000002") if is_kept else (run,):
        saving_trainer(lr=5.0, max_steps=2).fit(resume=path)
        assert (contents(run) == before) is is_kept
    outcomes = [attempt["outcome"] for attempt in read_json(run / "run.json")["attempts"]]
    assert outcomes == ([outcome] if is_kept else [None, "completed"])


def test_a_refused_resume_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`hookline resume RUN model.width=32` fails, and the run is shown as before: completed, with its own config."""
    settings = ["model.width=16", "model.layers=1", "model.context=16", "data.context=16", "trainer.max_steps=4"]
    assert main(["train", *settings]) == 0
    (run,) = Path("runs").iterdir()
    before = contents(run)
    assert main(["resume", str(run), "model.width=32", "trainer.max_steps=8"]) == 1
    assert "size mismatch" in capsys.readouterr().err
    assert contents(run) == before


def test_a_killed_run_is_still_killed_after_a_refused_resume() -> None:
    """Its outcome is not replaced by the failure of the resume, so that another one continues it exactly."""
    whole = saving_trainer(data=make_batches(8))
    whole.train()
    run = trained(data=make_batches(8), max_steps=5)
    described = read_json(run / "run.json")  # as a kill after step 5 leaves it
    described["outcome"] = described["attempts"][-1]["outcome"] = None
    (run / "run.json").write_text(json.dumps(described))
    before = contents(run)
    with pytest.raises(CheckpointError, match="size mismatch"):
        saving_trainer(sizes=(3, 8, 1), data=make_batches(8)).fit(resume=run)
    assert contents(run) == before and read_json(run / "run.json")["outcome"] is None
    again = saving_trainer(data=make_batches(8))
    again.fit(resume=run)
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
