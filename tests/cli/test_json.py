"""`--json`: every command that prints data prints strict JSON, and errors stay on stderr."""

import json
from pathlib import Path

import pytest
from builders import make_trainer
from commands import Captured, json_of, output_of

from hookline.cli import COMMANDS, main, make_parser

WITHOUT = {"run", "train", "resume", "example", "schema", "help"}  # they print a path, YAML, JSON anyway, or a page


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with a checkpoint."""
    trainer = make_trainer("checkpoint", record=True, output_dir=str(tmp_path_factory.mktemp("runs")))
    trainer.train()
    return trainer.run_dir


def test_every_command_that_prints_data_has_it(capsys: Captured) -> None:
    """A new command has --json, too, or says here why not."""
    parser = make_parser(*COMMANDS)
    without = set()
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            parser.parse_args([name, "--help"])
        if "--json" not in capsys.readouterr().out:
            without.add(name)
    assert without <= WITHOUT | {"report"}


def test_checkpoints(recorded: Path, capsys: Captured) -> None:
    """Each checkpoint has its name, path, state, step and size; a damaged one its problems and status 1."""
    (listed,) = json_of(capsys, "checkpoints", str(recorded))
    assert (listed["name"], listed["good"], listed["problems"], listed["step"]) == ("step-00000004", True, [], 4)
    assert listed["bytes"] > 0 and "T" in listed["saved"]
    assert json_of(capsys, "verify-checkpoint", listed["path"]) == [listed]
    Path(listed["path"], "extra").write_text("x")
    manifest = Path(listed["path"], "manifest.json")
    before = manifest.read_bytes()
    manifest.write_bytes(b"{")
    (damaged,) = json.loads(output_of(capsys, ["checkpoints", str(recorded), "--json"], 1))
    assert damaged["good"] is False and damaged["problems"]
    manifest.write_bytes(before)
    Path(listed["path"], "extra").unlink()


def test_events_and_hooks(capsys: Captured) -> None:
    """All of them, or one."""
    events = json_of(capsys, "events")
    assert events[0]["name"] == "on_train_start" and "meaning" in events[0]["arguments"]["step"]
    assert [event["name"] for event in json_of(capsys, "events", "--event", "on_batch_end")] == ["on_train_batch_end"]
    hooks = {hook["name"]: hook for hook in json_of(capsys, "hooks")}
    assert hooks["ema"]["kind"] == "lifecycle" and hooks["ema"]["origin"] == "built-in"
    (ema,) = json_of(capsys, "hooks", "ema")
    assert ema == hooks["ema"] and {"name", "required", "default", "meaning"} == set(ema["parameters"][0])


def test_explain_and_export(recorded: Path, capsys: Captured) -> None:
    """The hooks of an event in order, and the files that were written."""
    (event,) = json_of(capsys, "explain", "--event", "on_step_end", "--hook", "ema")
    assert event["event"] == "on_step_end" and event["hooks"][0].startswith("1. ")
    files = json_of(capsys, "export", str(recorded), "--to", "csv", "--output", "out")
    assert files[0] == {"path": "out/metrics.csv", "table": "metrics", "rows": 4}


def test_errors_stay_on_stderr(capsys: Captured) -> None:
    """Standard output is empty, and the status is that of the error."""
    for arguments in (["checkpoints", "none"], ["hooks", "emma"], ["events", "--event", "on_x"], ["runs", "none"]):
        assert main([*arguments, "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("hookline: error: ")
