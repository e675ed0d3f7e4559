"""`hookline replay` rebuilds the run from the crash folder alone, and reproduces the NaN."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer
from commands import Captured, error_of, output_of
from opened_files import opened_files

from hookline import NanForensics, load_config, register_model, trainer_from_config
from hookline.checkpoints.store import write_checkpoint
from hookline.cli import main
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


class FragileGPT(CharGPT):
    """Drops out, and gives NaN when the dropped-out noise is large: by chance, so that the random streams matter."""

    def forward(self, *args: object, **kwargs: object) -> object:
        result = super().forward(*args, **kwargs)
        loss = result["loss"] if isinstance(result, dict) else result.loss if hasattr(result, "loss") else result
        return loss * (float("nan") if torch.rand(()) > 0.7 else 1.0)


@pytest.fixture(autouse=True)
def own_model() -> None:
    """Register a model, as a module of `--import` would."""
    register_model("fragile_gpt")(FragileGPT)


def crash(state: bool = True) -> Path:
    """Train from a config file until it crashes."""
    Path("run.yaml").write_text(CONFIG.replace("STATE", str(state).lower()), encoding="utf-8")
    config, from_file = load_config("run.yaml")
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.train()
    folder = trainer.hooks.get("nan_forensics").crash
    return Path(folder)


def test_a_replay_reproduces_the_nan(capsys: Captured) -> None:
    """The NaN is the same although all random streams have another state, and the folder was moved."""
    folder = crash().rename("a-crash")
    torch.manual_seed(1234)
    out = output_of(capsys, ["replay", str(folder), "--device", "cpu"])
    assert "loss nan" in out and "verdict    the same" in out
    assert read_crash(folder)[0]["autopsy"]["summary"].split("; ")[0] in " ".join(out.split())
    assert not Path("a-crash/runs").exists()


def test_a_replay_reads_the_crash_once(capsys: Captured) -> None:
    """Reading every byte of the state takes minutes for a large model."""
    folder = crash().resolve()
    with opened_files() as files:
        assert main(["replay", str(folder), "--device", "cpu"]) == 0
    inside = [path for path in files if path.is_relative_to(folder)]
    assert len(inside) == len(set(inside)) and folder / "state" / "model.safetensors" in inside


def test_what_a_replay_finds_is_at_the_step_of_the_crash(caplog: pytest.LogCaptureFixture) -> None:
    """The trainer that replays it has made no step."""
    folder = crash()
    step = read_crash(folder)[0]["step"]
    caplog.clear()
    assert main(["replay", str(folder), "--device", "cpu"]) == 0
    assert f"nan > 0 (1) at step {step}, train" in caplog.text


def test_a_nan_that_is_not_reproduced_is_status_1(capsys: Captured) -> None:
    """If the replay does not fail in the same way, the exit status is 1."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    report["autopsy"]["module"] = "elsewhere"
    (folder / "crash.json").write_text(json.dumps(report))
    assert "verdict    not the same" in output_of(capsys, ["replay", str(folder), "--device", "cpu"], 1)


def test_a_crash_without_weights_needs_a_checkpoint(capsys: Captured) -> None:
    """Without --weights, the error says to give a checkpoint; with it, the replay runs."""
    folder = crash(state=False)
    assert "hookline replay --weights" in error_of(capsys, ["replay", str(folder), "--device", "cpu"])
    config, from_file = load_config("run.yaml")
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=1)
    trainer.train()  # the same run again, with its checkpoints; the last bad step was left out
    assert main(["replay", str(folder), "--device", "cpu", "--weights", str(trainer.run_dir)]) == 0


def test_a_run_made_in_code_cannot_be_replayed(capsys: Captured) -> None:
    """The command cannot rebuild such a model; the error says what to call in code."""
    data = [(torch.full((1, 3), float("nan")), torch.ones(1, 1))]
    trainer = make_trainer(NanForensics(), data=data, record=True)
    trainer.train()
    assert main(["replay", str(trainer.hooks.get("nan_forensics").crash)]) == 2
    assert "created in code; build the same trainer there and call" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"name": "os.system"}, {"name": "no_such_model"}])
def test_a_crash_folder_cannot_import_code(change: dict[str, str], capsys: Captured) -> None:
    """A crash folder counts as a file: what it names must be registered or allowed."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    report["config"]["model"].update(change)
    (folder / "crash.json").write_text(json.dumps(report))
    assert "cannot be rebuilt: model.name:" in error_of(capsys, ["replay", str(folder)])


def test_a_path_that_is_not_a_crash_is_refused(capsys: Captured) -> None:
    """The error is one line."""
    assert "nowhere has no crash.json" in error_of(capsys, ["replay", "nowhere"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": None}, "expected step as int"),
        ({"reason": ["x"]}, "expected reason as str"),
        ({"autopsy": None}, "expected autopsy as dict"),
        ({"autopsy": {"module": "x"}}, "expected summary as str, it is not there"),
        ({"left_out": 3}, "expected left_out as dict"),
        ({"config": None}, "created in code"),
        ({"config": [["model", 1]]}, "created in code"),
        ({"config": {"model": 1, "data": 2, "optimizer": 3, "trainer": [1]}}, "cannot be rebuilt"),
        ({"config": {"model": {"name": []}, "data": {}, "optimizer": None}}, "cannot be rebuilt"),
    ],
)
def test_a_hostile_report_is_one_clear_error(changes: dict[str, Any], problem: str, capsys: Captured) -> None:
    """Each field that a replay reads may be anything in a folder from elsewhere."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    (folder / "crash.json").write_text(json.dumps({**report, **changes}))
    err = error_of(capsys, ["replay", str(folder), "--device", "cpu"])
    assert problem in err and err.count("\n") == 1 and "--debug shows" not in err


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"step":' + b"9" * 5000 + b"}"])
def test_a_damaged_report_is_one_clear_error(text: bytes, capsys: Captured) -> None:
    """So may the whole file."""
    folder = crash()
    (folder / "crash.json").write_bytes(text)
    assert "crash.json is not a JSON object" in error_of(capsys, ["replay", str(folder)])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"random_state": 3}, "expected random_state as dict"),
        ({"random_state": {"torch": "x"}}, "running its batch raised an error"),
        ({"batch": "text"}, "running its batch raised an error"),
        ({"batch": None}, "running its batch raised an error"),
        ({"model": 3}, "expected model as dict"),
        ({"model": {}}, "its weights do not fit this model"),
        ({"model": {"x": 3}}, "its weights do not fit this model"),
        ({"meta": {"step": "x", "modules_in_eval_mode": []}}, "expected step as int"),
        ({"meta": {"step": 1}}, "expected modules_in_eval_mode as list"),
    ],
)
def test_a_hostile_state_is_one_clear_error(changes: dict[str, Any], problem: str, capsys: Captured) -> None:
    """A state with correct hashes may hold anything."""
    folder = crash()
    _, sections, meta = read_crash(folder)
    shutil.rmtree(folder / "state")
    write_checkpoint(folder, "state", {**sections, **changes}, changes.pop("meta", meta))
    err = error_of(capsys, ["replay", str(folder), "--device", "cpu"])
    assert problem in err and err.count("\n") == 1 and "--debug shows" not in err


def test_no_link_in_a_crash_folder_is_followed(capsys: Captured) -> None:
    """Report and state are read from the folder itself."""
    folder = crash()
    for name in ("state", "crash.json"):
        (folder / name).rename(f"moved-{name}")
        (folder / name).symlink_to(Path(f"moved-{name}").absolute())
        assert main(["replay", str(folder), "--device", "cpu"]) == 2
        assert f"cannot read {folder / name}: it is a symbolic link" in capsys.readouterr().err


def test_a_report_cannot_control_the_terminal(capsys: Captured) -> None:
    """Its control characters are printed as escapes."""
    folder = crash()
    report = json.loads((folder / "crash.json").read_text())
    report["reason"] = "loss nan\x1b[2J\x07\nverdict"
    report["autopsy"]["summary"] += "\x1b]0;title\x07\u202e"
    (folder / "crash.json").write_text(json.dumps(report))
    main(["replay", str(folder), "--device", "cpu"])
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "loss nan\\x1b[2J\\x07 verdict" in out and "\\x1b]0;title\\x07\\u202e" in out
