"""`hookline resume` continues a run from its directory alone."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_trainer
from commands import Captured, error_of, output_of

from hookline import read_metrics, register_hook
from hookline.checkpoints.store import read_checkpoint
from hookline.cli import main
from hookline.record import read_jsonl

CONFIG = """
model: {name: char_gpt, context: 16, width: 8, heads: 2, layers: 1, dropout: 0.3}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: {name: adamw, lr: 1e-2}
scheduler: {name: warmup_cosine, warmup_steps: 2}
trainer: {max_steps: 12, validate_every: 5, sanity_batches: 0, seed: 1, max_grad_norm: 1.0}
hooks:
  lifecycle: [{name: checkpoint, save_every_n_steps: 4, save_every_n_epochs: null}]
"""


@pytest.fixture(autouse=True)
def config() -> None:
    """Write a config for a very short run into the current directory."""
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")


def train(capsys: Captured, *words: str) -> Path:
    """Run a command that trains; return the run's directory, which is the last line it prints."""
    return Path(output_of(capsys, words).splitlines()[-1])


def curve(run: Path) -> list[dict[str, str]]:
    """Return every recorded number of every step, as hex."""
    return [
        {name: float(value).hex() for name, value in line.items() if name not in ("time", "resumed")}
        for line in read_metrics(run)
    ]


def last_weights(run: Path) -> list[str]:
    """Return every bit of the newest checkpoint's model and optimizers."""
    sections, _ = read_checkpoint(run / "checkpoints" / "step-00000012")
    state = sections["optimizers"][0]["state"]
    tensors = [*sections["model"].values(), *(value for entries in state.values() for value in entries.values())]
    return [tensor.numpy().tobytes().hex() for tensor in tensors]


def test_a_killed_run_ends_as_an_uninterrupted_one(capsys: Captured) -> None:
    """Steps that were lost after the newest checkpoint are trained again, with the same numbers."""
    whole = train(capsys, "train", "run.yaml")
    broken = train(capsys, "train", "run.yaml", "trainer.max_steps=7", "scheduler.total_steps=12")
    settings = yaml.safe_load((broken / "config.yaml").read_text())
    assert settings["trainer"]["max_steps"] == 7
    assert train(capsys, "resume", str(broken), "trainer.max_steps=12") == broken
    assert curve(broken) == curve(whole)
    assert last_weights(broken) == last_weights(whole)
    assert len(json.loads((broken / "run.json").read_text())["attempts"]) == 2


def test_a_killed_run_can_have_its_report_before_it_is_resumed(capsys: Captured) -> None:
    run = train(capsys, "train", "run.yaml", "trainer.max_steps=7", "scheduler.total_steps=12")
    fields = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**fields, "outcome": None}))
    (run / "report.html").unlink()
    assert main(["resume", str(run), "trainer.max_steps=8"]) == 0
    command = f"hookline report {Path('runs', run.name)}"
    said = f"hookline: the run was killed; to write a report of what it recorded: {command}\n"
    assert said in capsys.readouterr().err
    assert main(["resume", str(run), "trainer.max_steps=9"]) == 0
    assert "was killed" not in capsys.readouterr().err


def test_resuming_from_one_checkpoint(capsys: Captured) -> None:
    """Given a checkpoint, the run that it belongs to continues from there."""
    run = train(capsys, "train", "run.yaml")
    before = curve(run)
    assert train(capsys, "resume", str(run / "checkpoints" / "step-00000004")) == run
    assert curve(run) == before
    loaded = [line for line in read_jsonl(run / "events.jsonl")[0] if line["kind"] == "checkpoint_loaded"]
    assert [line["step"] for line in loaded] == [4]


def test_a_run_that_is_complete_says_so(capsys: Captured) -> None:
    """Nothing is trained, and the first line says what would train on."""
    run = train(capsys, "train", "run.yaml")
    steps = len(curve(run))
    first = output_of(capsys, ["resume", str(run)]).splitlines()[0]
    assert "resumed at step 12 of a run that had completed:" in first
    assert "nothing is left to train; to train longer, pass a larger max_steps" in first
    assert len(curve(run)) == steps


def test_a_fork_is_a_new_run(capsys: Captured) -> None:
    """A fork begins a new run, whose record names the original one."""
    run = train(capsys, "train", "run.yaml")
    fork = train(capsys, "resume", "--fork", str(run), "trainer.max_steps=14")
    assert fork != run
    lineage = json.loads((fork / "run.json").read_text())["lineage"]
    assert (lineage["run_id"], lineage["step"]) == (run.name, 12)


def test_a_path_that_is_not_a_run(capsys: Captured) -> None:
    """A missing path, and a run that was created in code, are errors."""
    assert "missing: no run is in runs/; pass a run's directory" in error_of(capsys, ["resume", "missing"])
    trainer = make_trainer(record=True)
    trainer.train()
    error = error_of(capsys, ["resume", str(trainer.run_dir)])
    assert f"created in code; build the same trainer there and call trainer.fit(resume='{trainer.run_dir}" in error


def test_a_secret_must_be_given_again(capsys: Captured) -> None:
    """The record does not contain secrets; the error says which one is missing and how to give it."""

    class Teller:
        """Uses a secret."""

        def __init__(self, api_key: str) -> None:
            keys.append(api_key)

        def on_train_start(self) -> None: ...

    keys: list[str] = []
    register_hook("teller")(Teller)
    run = train(capsys, "train", "run.yaml", "hooks.lifecycle=[checkpoint, {name: teller, api_key: sk-hidden-1234567}]")
    assert "sk-hidden" not in (run / "config.yaml").read_text()
    assert "hooks.teller.api_key: was a secret and was not recorded" in error_of(capsys, ["resume", str(run)])
    train(capsys, "resume", str(run), "hooks.teller.api_key=sk-other-1234567", "trainer.max_steps=13")
    assert keys == ["sk-hidden-1234567", "sk-other-1234567"]


def test_the_recorded_config_cannot_import_code(capsys: Captured) -> None:
    """The recorded config counts as a file: a dotted path needs --allow."""
    run = train(capsys, "train", "run.yaml")
    recorded = run / "config.yaml"
    recorded.write_text(recorded.read_text().replace("name: adamw", "name: os.system"))
    assert "--allow" in error_of(capsys, ["resume", str(run)])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_the_exit_status(
    number: int, status: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is saved and its directory printed; resuming ends as if the run had not been interrupted."""

    class Sender:
        """Sends a signal at a step."""

        def on_step_end(self, step: int) -> None:
            if step == 7 and not sent:
                sent.append(os.kill(os.getpid(), number))

    sent: list[Any] = []
    Path("parts.py").write_text("")
    register_hook("sender")(Sender)
    whole = train(capsys, "train", "run.yaml")
    hooks = "hooks.lifecycle=[{name: checkpoint, save_every_n_steps: 4}, sender]"
    assert main(["train", "run.yaml", hooks, "--import", "parts", "--allow", "mine"]) == status
    monkeypatch.chdir("/")
    out, error = capsys.readouterr()
    run = Path(out.splitlines()[-1])
    assert (run / "checkpoints" / "step-00000007").is_dir()
    assert out.splitlines()[-3].startswith(f"interrupted ({signal.Signals(number).name}): 7 steps in ")
    _, told, command = error.rpartition("hookline: to continue from step-00000007:\n")
    cd, _, resume = command.partition(" && ")
    expected = ["hookline", "resume", f"runs/{run.name}", hooks, "--allow", "mine", "--import", "parts"]
    assert (told != "", shlex.split(cd), shlex.split(resume)) == (True, ["cd", str(run.parents[1])], expected)
    assert error.count("\n") == 2
    monkeypatch.chdir(shlex.split(cd)[1])
    assert output_of(capsys, shlex.split(resume)[1:]).startswith(f"run {run.name}, resumed at step 7: ")
    assert curve(run) == curve(whole)


def test_an_interrupted_run_whose_loss_is_nan_names_no_ruined_checkpoint(capsys: Captured) -> None:
    """The one that is saved when the signal comes has the NaN, too."""

    class Ruins:
        """Makes weights NaN at a step, and sends a signal later, as a user who sees the loss does."""

        intervenes = True

        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 6:
                next(trainer.model.parameters()).data.fill_(float("nan"))
            if step == 9:
                os.kill(os.getpid(), signal.SIGINT)

    register_hook("ruins")(Ruins)
    assert main(["train", "run.yaml", "trainer.name=sick", "--hook", "ruins"]) == 130
    out, error = capsys.readouterr()
    run = Path(out.splitlines()[-1])
    assert f"the loss became non-finite; `hookline show runs/{run.name}` says where to continue from" in error
    assert "to continue from" not in error.replace("where to continue from", "")
    shown = output_of(capsys, ["show", "sick"])
    assert f"hookline resume runs/{run.name}/checkpoints/step-00000004" in shown
    assert "from its checkpoint of step 4: `hookline resume" in " ".join(shown.split())
