"""`hookline evaluate` and `hookline predict` use the model of a run, and write nothing into the run."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_trainer
from commands import Captured, error_of, json_of, line_of_error, output_of
from opened_files import opened_files

from hookline import Trainer, read_metrics, register_data, register_model
from hookline.cli import main
from hookline.core import plugins

CONFIG = """
model: {name: char_gpt, context: 16, width: 8, heads: 2, layers: 1, dropout: 0.3}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: {name: adamw, lr: 1e-2}
metrics: [accuracy]
trainer: {max_steps: 6, validate_every: 2, seed: 1, name: small, report: false}
hooks:
  lifecycle:
    - {name: checkpoint, monitor: val/loss, mode: max, save_top_k: 3}
    - {name: notify, webhook_url: "${env:HOOK_URL}"}
"""
CLASSES = """
model: {name: flat, classes: 3}
data: {name: points, classes: 3}
optimizer: {name: sgd, lr: 0.1}
loss: cross_entropy
trainer: {max_steps: 2, seed: 1, report: false, sanity_batches: 0}
hooks: {lifecycle: [{name: checkpoint}]}
"""


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (plugins.MODELS, plugins.DATA):
        monkeypatch.setattr(table, "_added", dict(table._added))


@pytest.fixture
def run(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a short run whose first checkpoint is ranked best; the variable of its secret is gone afterwards."""
    monkeypatch.setenv("HOOK_URL", "https://example.invalid/secret-token-123")
    Path("run.yaml").write_text(CONFIG.replace("{name: notify,", "{name: notify, enabled: false,"))
    path = Path(output_of(capsys, ["train", "run.yaml", "--device", "cpu"]).splitlines()[-1])
    monkeypatch.delenv("HOOK_URL")
    return path


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def validated(run: Path, step: int) -> dict[str, float]:
    (row,) = (row for row in read_metrics(run) if row["step"] == step)
    return {name: value for name, value in row.items() if name.startswith("val/")}


def test_the_metrics_are_those_of_the_run(run: Path, capsys: Captured) -> None:
    """By default of its best checkpoint; others by name, step or path. The run stays as it was, bit for bit."""
    before, here = contents(run), sorted(os.listdir())  # noqa: PTH208
    assert validated(run, 2)["val/loss"] > validated(run, 6)["val/loss"]
    ways: dict[tuple[str, ...], int] = {
        ("small",): 2, ("latest", "--checkpoint", "best"): 2, ("latest/best",): 2, ("small", "--checkpoint", "last"): 6,
        ("small", "--checkpoint", "4"): 4, ("small", "--checkpoint", "step-00000004"): 4, ("latest/last",): 6,
        (str(run / "checkpoints" / "step-00000004"),): 4,
        ("latest/step-00000006", "--checkpoint", str(run / "checkpoints" / "step-00000002")): 2,
    }  # fmt: skip
    for words, step in ways.items():
        measured = json_of(capsys, "evaluate", *words, "--device", "cpu")
        assert measured["step"] == step and measured["run_id"] == run.name
        assert measured["metrics"] == validated(run, step)
    assert contents(run) == before and sorted(os.listdir()) == here  # noqa: PTH208
    lines = output_of(capsys, ["evaluate", "small", "--device", "cpu"]).splitlines()
    assert lines[0] == f"step-00000002  of runs/{run.name}"
    assert lines[1].split() == ["val/loss", f"{validated(run, 2)['val/loss']:.6g}"]


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["evaluate", "small"], set()),
        (["evaluate", "small/best"], set()),
        (["evaluate", "small/last"], set()),
        (["evaluate", "small/step-00000004", "--data", "batch_size=4"], set()),
        (["predict", "small", "--output", "predicted.jsonl"], set()),
        (["resume", "small"], {"run.json", "manifest.json"}),
        (["resume", "RUN", "--fork"], set()),
        (["resume", "RUN/checkpoints/step-00000004", "--fork"], set()),
        (["resume", "small/step-00000004", "--fork"], {"run.json", "labels.json"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_command_opens_a_file_of_a_run_twice(
    words: list[str], again: set[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading every byte of a checkpoint takes minutes for a large model.

    A run that continues reads run.json again when it has the lock, because another process may have written it since,
    and manifests when it has made its first step, to move later checkpoints away. A name is looked for in small files.
    """
    words = [word.replace("RUN", str(run)) for word in words]
    monkeypatch.setenv("HOOK_URL", "https://example.invalid/secret-token-123")
    with opened_files() as files:
        assert main([*words, "--device", "cpu", *(["trainer.max_steps=8"] if words[0] == "resume" else [])]) == 0
    inside = [path for path in files if path.is_relative_to(run.resolve())]
    assert any(path.name == "model.safetensors" for path in inside)
    repeated = {path.name for path in inside if inside.count(path) > 1}
    assert repeated == again and not any(inside.count(path) > 2 for path in inside)


def test_what_a_checkpoint_may_be(run: Path, capsys: Captured) -> None:
    """A wrong one names those that there are."""
    assert "has no checkpoint of step 3; it has 2, 4, 6" in line_of_error(
        capsys, "evaluate", "small", "--checkpoint", "3"
    )
    error = line_of_error(capsys, "evaluate", "small", "--checkpoint", "stp-2")
    assert "has no checkpoint 'stp-2'; it has best, step-00000002, step-00000004, step-00000006" in error
    (run / "checkpoints" / "best" / "model.safetensors").write_bytes(b"x")
    assert "is damaged" in line_of_error(capsys, "evaluate", "small")
    assert json_of(capsys, "evaluate", "small/last")["step"] == 6


def test_checkpoints_by_name(run: Path, capsys: Captured) -> None:
    """Other commands that take a checkpoint find it in the same way."""
    assert "step-00000002  good" in output_of(capsys, ["verify-checkpoint", "latest/best"])
    (run / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"x")
    assert "step-00000006  damaged" in output_of(capsys, ["verify-checkpoint", "small/last"], 1)
    assert main(["resume", "small/best", "trainer.max_steps=3", "--device", "cpu"]) == 2  # a secret is missing
    assert "environment variable 'HOOK_URL' is not set" in capsys.readouterr().err


def test_other_data(run: Path, capsys: Captured) -> None:
    """`--data` changes parameters or takes the section of a file; ids keep their meaning."""
    texts = Path("texts")
    texts.mkdir()
    (texts / "a.txt").write_text("zebra " * 500)
    (run / "checkpoints" / "best").unlink()
    section = "data: {name: stdlib_text, context: 16, batch_size: 1, path: texts, pattern: '*.txt'}\n"
    Path("other.yaml").write_text(f"{section}model: char_gpt\n")
    Path("alone.json").write_text(
        json.dumps({"name": "stdlib_text", "context": 16, "path": "texts", "pattern": "*.txt"})
    )
    usual = json_of(capsys, "evaluate", "small")["metrics"]["val/loss"]
    words = [["path=texts", "pattern=*.txt"], ["other.yaml", "batch_size=2"], ["alone.json"]]
    losses = [json_of(capsys, "evaluate", "small", "--data", *given)["metrics"]["val/loss"] for given in words]
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2]) != usual
    (row, *_) = predicted(capsys, "small", "--data", "path=texts", "pattern=*.txt")
    vocab = Trainer.load("small").hook_data["vocab"]
    assert set(vocab.decode(row["target"])) == set("zebra ")
    assert "did you mean 'batch_size'?" in line_of_error(capsys, "evaluate", "small", "--data", "batch_sise=2")
    assert "--data run.yaml: one file" in line_of_error(capsys, "evaluate", "small", "--data", "other.yaml", "run.yaml")
    assert "write key=value, or the name of a file" in line_of_error(capsys, "evaluate", "small", "--data", "x")
    Path("none.yaml").write_text("model: {name: char_gpt}\n")
    assert "expected a section `data:`" in line_of_error(capsys, "evaluate", "small", "--data", "none.yaml")


def predicted(capsys: Captured, *words: str) -> list[dict[str, Any]]:
    """Run `predict`, check what it prints, and return the rows of the file."""
    out = output_of(capsys, ["predict", *words, "--output", "rows.jsonl", "--device", "cpu"])
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert out.startswith(f"rows.jsonl: {len(rows)} example")
    return rows


def register_points() -> None:
    """Register a classifier, and data of seven points for its validation."""

    @register_model("flat")
    def flat(classes: int) -> torch.nn.Module:
        return torch.nn.Linear(4, classes)

    @register_data("points")
    def points(classes: int, dtype: str = "classes") -> Any:
        inputs, targets = torch.randn(7, 4), torch.arange(7) % classes
        if dtype != "classes":
            targets = torch.randn(7, classes)
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        loader = torch.utils.data.DataLoader(dataset, 3)
        return SimpleNamespace(train=loader, validation={"one": loader} if dtype == "one" else loader)


def test_predictions_of_a_classifier(capsys: Captured) -> None:
    """A row has the class, its scores and the target; the scores are the model's own outputs."""
    register_points()
    Path("run.yaml").write_text(CLASSES)
    assert main(["train", "run.yaml", "--device", "cpu"]) == 0
    capsys.readouterr()
    rows = predicted(capsys, "latest")
    trainer = Trainer.load("latest", device="cpu")
    scores = torch.cat(trainer.predict())
    assert [row["index"] for row in rows] == [*range(7)] and [row["target"] for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    assert [row["scores"] for row in rows] == scores.tolist()
    assert [row["prediction"] for row in rows] == scores.argmax(-1).tolist()
    rows = predicted(capsys, "latest", "--data", "dtype=floats", "--import", "json")
    assert rows[0].keys() == {"index", "target", "output"} and len(rows[0]["output"]) == 3
    described = json_of(capsys, "predict", "latest", "--output", "rows.jsonl")
    assert described["examples"] == 7 and described["path"] == "rows.jsonl"


def test_a_file_is_replaced_only_by_a_whole_one(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written or predicted leaves the old file, and nothing beside it."""
    register_points()
    Path("run.yaml").write_text(CLASSES)
    assert main(["train", "run.yaml", "--device", "cpu"]) == 0
    Path("rows.jsonl").write_text("old")
    capsys.readouterr()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: {"what": x})
    assert "the model's output is a dict, not a tensor" in error_of(
        capsys, ["predict", "latest", "--output", "rows.jsonl"]
    )
    assert Path("rows.jsonl").read_text() == "old" and not list(Path().glob(".rows*"))
    assert "does not exist; create it first" in error_of(capsys, ["predict", "latest", "--output", "no/rows.jsonl"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in error_of(capsys, ["predict", "latest", "--output", "rows.jsonl"])


def test_a_run_from_elsewhere_imports_nothing(capsys: Captured, tmp_path: Path) -> None:
    """Dotted paths in its config have to be allowed, as for `resume`; a link in its directory is refused."""
    register_points()
    Path("run.yaml").write_text(CLASSES)
    assert main(["train", "run.yaml", "--device", "cpu"]) == 0
    run = Path(capsys.readouterr().out.splitlines()[-1])
    Path("danger.py").write_text("import pathlib\npathlib.Path('executed').touch()\ndef model(classes): pass\n")
    config = run / "config.yaml"
    written = config.read_text()
    config.write_text(written.replace("name: flat", "name: danger.model"))
    for command in (["evaluate", "latest"], ["predict", "latest", "--output", "x.jsonl"]):
        assert "model.name: 'danger.model' is not allowed" in line_of_error(capsys, *command)
    assert not Path("executed").exists()
    error_of(capsys, ["evaluate", "latest", "--allow", "danger"])
    assert Path("executed").exists()
    config.unlink()
    Path("elsewhere.yaml").write_text(written)
    config.symlink_to(Path("elsewhere.yaml").absolute())
    assert "link" in line_of_error(capsys, "evaluate", "latest")


def test_a_run_that_was_made_in_code(capsys: Captured) -> None:
    """The error says what to do in the script."""
    trainer = make_trainer(record=True, report=False)
    trainer.add_hook("checkpoint", every=2)
    trainer.train()
    assert trainer.run_dir is not None
    error = error_of(capsys, ["evaluate", "latest"])
    assert "that run was created in code; build the same trainer there and call trainer.load_checkpoint('" in error
