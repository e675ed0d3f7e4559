"""The files in tests/golden: the same run writes the same formats today, and the stored run resumes.

Numbers differ between processors and times between runs, so these are replaced by placeholders; everything else is
compared as text, byte for byte: file names, keys and their order, spacing, text fields, shapes and dtypes.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden_run
import pytest
import yaml

from hookline.record.provenance import config_hash

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# Values of these keys differ between machines and runs; texts for people may be reworded.
MACHINE = ("environment", "started", "closed", "pid", "host", "message", "time", "seconds", "bytes")
FLOAT = re.compile(r"-?\b\d+\.\d+(?:e[+-]?\d+)?\b|-?\b\d+e[+-]?\d+\b")
RUN_ID = re.compile(r"\b\d{8}-\d{6}-[a-z0-9]{8}\b")
SHA256 = re.compile(r"\b[0-9a-f]{64}\b")
BUILT_IN_NAMES = re.compile(r"(: built-in.*); arguments: .*")  # the arguments that a built-in hook names may change
REPORT = "run/report.html"  # contains scripts, which are not a format; test_reading.py compares its data
PACKED = re.compile(r'"[A-Za-z0-9+/]{16,}={0,2}"')


def comparable(path: Path) -> str:
    """Return a file's text with numbers, times, ids and paths of this run replaced by placeholders."""
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        return f"{len(data)} bytes, header {data[8 : 8 + length].decode()}"
    text = RUN_ID.sub("<id>", path.read_text())
    if path.suffix in (".json", ".jsonl"):
        whole = [text] if path.suffix == ".json" else text.splitlines()
        values = [without_values(json.loads(line)) for line in whole]
        if path.name == "metrics.jsonl":
            values = steps_of(values)
        text = "\n".join(map(json.dumps, values)) + layout_of(whole)
    return BUILT_IN_NAMES.sub(r"\1", FLOAT.sub("<float>", text))


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of each step: whether one is written in one row or two depends on the time of a write."""
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        assert list(row)[:3] == ["step", "epoch", "time"]
        steps.setdefault((row["step"], row["epoch"]), {}).update(row)
    return [dict(sorted(row.items())) for row in steps.values()]


def without_values(value: Any, key: str = "") -> Any:
    """Replace what differs between two runs of one program; keys, their order and everything else stay."""
    if key in MACHINE:
        return sorted(value) if isinstance(value, dict) else f"<{type(value).__name__}>"
    if key == "costs":
        # An argument has a row only if reading it took long enough, which depends on the machine's load.
        return sorted((row["hook"], row["kind"], sorted(row)) for row in value if row["kind"] != "argument")
    if key == "path":
        return Path(value).name
    if isinstance(value, dict):
        return {name: without_values(item, name) for name, item in value.items()}
    if isinstance(value, list):
        numbers = value and all(isinstance(item, int) for item in value) and len(value) > 100  # a generator's words
        return f"<{len(value)} integers>" if numbers else [without_values(item) for item in value]
    if isinstance(value, str):
        if SHA256.fullmatch(value):
            return "<sha256>"
        return f"<{len(value)} characters>" if PACKED.fullmatch(f'"{value}"') else value
    return "<float>" if isinstance(value, float) else value


def layout_of(lines: list[str]) -> str:
    """Return the punctuation that JSON parsing loses: separators and indentation."""
    return "".join(sorted({gap for line in lines for gap in re.findall(r'": ?|, ?"|\n +(?=")', line)}))


@pytest.mark.parametrize("name", sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()))
def test_the_same_run_writes_the_same_formats(name: str, todays_run: Path) -> None:
    """Every file of the golden run is written today, equal but for numbers, times and ids."""
    assert comparable(todays_run / name) == comparable(GOLDEN / name)


def test_the_stored_config_has_the_same_hash_today() -> None:
    """Runs of one config are recognized by its hash, whatever version wrote them."""
    config = yaml.safe_load((GOLDEN / "run" / "config.yaml").read_text())
    assert config_hash(config) == json.loads((GOLDEN / "run" / "run.json").read_text())["config_hash"]


def test_nothing_else_is_written(todays_run: Path) -> None:
    """Today's run directory has the files of the golden run, the report, and no more."""
    today, golden = (
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} for root in (todays_run, GOLDEN)
    )
    assert today == golden | {REPORT}


@pytest.fixture(scope="module")
def todays_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the golden run with today's code, once, in a process without a GPU."""
    directory = tmp_path_factory.mktemp("today")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, golden_run.__file__, str(directory)], env=environment, check=True)
    return directory


@pytest.mark.parametrize("step", [3, 6])
def test_a_stored_checkpoint_resumes(step: int, tmp_path: Path) -> None:
    """A stored run continues from its checkpoints: counters, hook state, optimizer and random streams fit."""
    run = tmp_path / "runs" / "20261116-000000-golden00"
    shutil.copytree(GOLDEN / "run", run)
    for later in (path for path in (run / "checkpoints").iterdir() if int(path.name[-8:]) > step):
        shutil.rmtree(later)
    trainer = golden_run.make_trainer()
    trainer.fit(resume=run, max_epochs=3)
    assert trainer.run_dir == run
    assert trainer.step == 9
    assert trainer.hooks.get("trace").count == 9
    assert trainer.hooks.get("trace").events[0] == f"on_checkpoint_load step={step}"
    state = json.loads((run / "run.json").read_text())
    assert state["outcome"] == "completed" and len(state["attempts"]) == 2
