"""`hookline replay` rebuilds the run from the crash folder alone, and reproduces the NaN."""

import json
from pathlib import Path

import pytest
import torch

from hookline import NanForensics, get_trainer, load_config, register_model, trainer_from_config
from hookline.cli import main
from hookline.core import plugins
from hookline.demo.char_gpt import CharGPT
from hookline.hooks.nan_forensics.dump import read_crash

CONFIG = """
model: {name: fragile_gpt, context: 16, width: 8, heads: 2, layers: 1}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: {name: sgd, lr: 1e-2}
trainer: {max_steps: 8, seed: 3, validate_every: null, sanity_batches: 0, console: false}
hooks:
  lifecycle: [{name: nan_forensics, state: STATE}]
"""
Captured = pytest.CaptureFixture[str]


class FragileGPT(CharGPT):
    """Drops out, and gives NaN when the dropped-out noise is large: by chance, so that the random streams matter."""

    def forward(self, *args: object, **kwargs: object) -> object:
        result = super().forward(*args, **kwargs)  # type: ignore[arg-type]
        loss = result["loss"] if isinstance(result, dict) else result.loss if hasattr(result, "loss") else result
        return loss * (float("nan") if torch.rand(()) > 0.7 else 1.0)


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a model, as a module of `--import` would."""
    monkeypatch.setattr(plugins.MODELS, "_added", dict(plugins.MODELS._added))
    register_model("fragile_gpt")(FragileGPT)


def crash(state: bool = True) -> Path:
    """Train from a config file until it crashes."""
    Path("run.yaml").write_text(CONFIG.replace("STATE", str(state).lower()), encoding="utf-8")
    config, from_file = load_config("run.yaml")
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.train()
    found = trainer.hooks.get("nan_forensics").crash
    assert found is not None
    return Path(found)


def test_a_replay_reproduces_the_nan(capsys: Captured) -> None:
    """The NaN is the same although all random streams have another state, and the folder was moved."""
    folder = crash().rename("a-crash")
    torch.manual_seed(1234)
    assert main(["replay", str(folder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "loss nan" in out and "verdict    the same" in out
    assert read_crash(folder)[0]["autopsy"]["summary"].split("; ")[0] in " ".join(out.split())
    assert not Path("a-crash/runs").exists()


def test_a_nan_that_is_not_reproduced_is_status_1(capsys: Captured) -> None:
    """If the replay does not fail in the same way, the exit status is 1."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    report["autopsy"]["module"] = "elsewhere"
    (folder / "crash.json").write_text(json.dumps(report))
    assert main(["replay", str(folder), "--device", "cpu"]) == 1
    assert "verdict    not the same" in capsys.readouterr().out


def test_a_crash_without_weights_needs_a_checkpoint(capsys: Captured) -> None:
    """Without --weights, the error says to give a checkpoint; with it, the replay runs."""
    folder = crash(state=False)
    assert main(["replay", str(folder), "--device", "cpu"]) == 2
    assert "hookline replay --weights" in capsys.readouterr().err
    config, from_file = load_config("run.yaml")
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1)
    trainer.train()  # the same run again, with its checkpoints; the last bad step was left out
    assert main(["replay", str(folder), "--device", "cpu", "--weights", str(trainer.run_dir)]) == 0


def test_a_run_made_in_code_cannot_be_replayed(capsys: Captured) -> None:
    """The command cannot rebuild such a model; the error says what to call in code."""
    model = torch.nn.Linear(1, 1)
    data = [(torch.full((1, 1), float("nan")), torch.ones(1, 1))]
    trainer = get_trainer(
        "simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=torch.nn.functional.mse_loss, console=False, hooks=[NanForensics()],
    )  # fmt: skip
    trainer.train()
    assert main(["replay", str(trainer.hooks.get("nan_forensics").crash)]) == 2
    assert "made in code; build the same trainer there and call" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"name": "os.system"}, {"name": "no_such_model"}])
def test_a_crash_folder_cannot_import_code(change: dict[str, str], capsys: Captured) -> None:
    """A crash folder counts as a file: what it names must be registered or allowed."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    report["config"]["model"].update(change)
    (folder / "crash.json").write_text(json.dumps(report))
    assert main(["replay", str(folder)]) == 2
    assert "cannot be rebuilt: model.name:" in capsys.readouterr().err


def test_a_path_that_is_not_a_crash_is_refused(capsys: Captured) -> None:
    """The error is one line."""
    assert main(["replay", "nowhere"]) == 2
    assert "nowhere has no crash.json" in capsys.readouterr().err
