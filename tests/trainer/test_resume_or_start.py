"""`resume="auto"` continues the newest unfinished run of a config, or begins one; names of runs work in a trainer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer

from hookline import SimpleTrainer
from hookline.errors import CheckpointError, ConfigError, TrainingError


def trainer_for(fail_at: int | None = None, **options: Any) -> SimpleTrainer:
    """Make a trainer for four steps with a checkpoint each, which fails in one of them."""
    trainer = make_trainer(record=True, report=False, console=options.pop("console", False), **options)
    trainer.add_hook("checkpoint", save_every_n_steps=1, save_every_n_epochs=None, save_top_k=9)

    def fail(step: int) -> None:
        if step == fail_at:
            raise RuntimeError("the machine is gone")

    trainer.on("step_end", on_error="raise", name="fails")(fail)
    return trainer


def fail_in(step: int, **options: Any) -> Path:
    """Run a trainer that fails; return the run's directory."""
    trainer = trainer_for(step, **options)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        trainer.train()
    assert trainer.run_dir is not None
    return trainer.run_dir


def change(run: Path, **fields: Any) -> None:
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**described, **fields}))


@pytest.mark.parametrize("outcome", ["failed", "interrupted", None])
@pytest.mark.parametrize("given", ["constructor", "fit"])
def test_an_unfinished_run_continues(outcome: str | None, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps its id, and its last step is that of a run that was never interrupted."""
    run = fail_in(3, console=True)
    change(run, outcome=outcome)
    again = trainer_for(console=True, **({"resume": "auto"} if given == "constructor" else {}))
    again.fit(**({"resume": "auto"} if given == "fit" else {}))
    assert again.run_dir == run and again.step == 4
    why = outcome or "killed"
    assert f"resume or start, in runs/: runs/{run.name} ({why}) continues" in capsys.readouterr().out
    assert "resume:" not in (run / "config.yaml").read_text()
    assert [one.name for one in Path("runs").iterdir()] == [run.name]


def test_without_an_unfinished_run_a_new_one_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run, one with another config, one that is being trained and one elsewhere do not count."""
    trainer_for().train()
    fail_in(2, seed=5)
    fail_in(2, output_dir="elsewhere")
    running: list[Path] = []

    def start_another(trainer: Any, step: int) -> None:
        if step == 2:
            another = trainer_for(resume="auto")
            another.train()
            assert another.run_dir is not None and another.run_dir != trainer.run_dir
            running.append(another.run_dir)

    first = trainer_for(resume="auto", console=True)
    first.on("step_end", name="starts", on_error="raise")(start_another)
    first.train()
    assert len(running) == 1 and len(list(Path("runs").iterdir())) == 4
    assert "resume or start, in runs/: no unfinished run of this config; starting a new one" in capsys.readouterr().out


def test_a_later_fit_of_one_trainer_continues_in_memory() -> None:
    """The option is about the start of a script; a trainer that has trained is where it is."""
    left = fail_in(2)
    trainer = trainer_for(seed=5, resume="auto")
    trainer.train()
    trainer.fit(max_epochs=2)
    assert trainer.step == 8 and trainer.run_dir != left


def test_a_run_without_a_record_starts() -> None:
    """A short trial writes nothing, so it continues nothing."""
    run = fail_in(2)
    before = (run / "run.json").read_bytes()
    trainer = make_trainer(resume="auto", fast_dev_run=2, record=True)
    trainer.train()
    assert trainer.run_dir is None and (run / "run.json").read_bytes() == before


def test_wrong_values_are_refused() -> None:
    """A path belongs to `fit`, and a fork needs to know of what."""
    with pytest.raises(ConfigError, match=re.escape("trainer.resume: expected 'auto' or null, got 'runs/x' (str); to")):
        make_trainer(resume="runs/x")
    with pytest.raises(TrainingError, match="fork=True begins one: name the run to fork"):
        make_trainer().fit(resume="auto", fork=True)
    assert not Path("runs").exists()


def test_names_of_runs_in_a_trainer() -> None:
    """`fit`, `load_checkpoint` and `init_from` find runs as commands do, in the trainer's own `output_dir`."""
    run = fail_in(4, output_dir="here", name="base")
    weights = {}
    for step in (1, 2, 3):
        trainer = make_trainer(output_dir="here")
        trainer.load_checkpoint(f"base/step-{step:08d}")
        assert trainer.step == step
        weights[step] = trainer.model[0].weight.clone()
    trainer.load_checkpoint("latest")
    assert trainer.step == 3
    begun = make_trainer(output_dir="here", init_from="latest/step-00000002", record=True, max_steps=0)
    begun.train()
    assert torch.equal(begun.model[0].weight, weights[2])
    assert begun.run_dir is not None
    initial = Path("here", run.name, "checkpoints", "step-00000002")
    assert f"init_from: {initial}\n" in (begun.run_dir / "config.yaml").read_text()
    again = trainer_for(output_dir="here", name="base")
    again.fit(resume="base")
    assert again.run_dir == run and again.step == 4
    with pytest.raises(CheckpointError, match="no run in here/ has this path, id or name; did you mean 'base'"):
        trainer.load_checkpoint("bsae")
    with pytest.raises(CheckpointError, match="no best checkpoint: no checkpoint hook with a `monitor`"):
        trainer.load_checkpoint("base/best")
    with pytest.raises(ConfigError, match=r"trainer\.init_from: nope: no run in here/"):
        make_trainer(init_from="nope", output_dir="here").train()
