"""What commands, the page and `load_run` say of recorded runs stays the same, text for text.

The runs in tests/golden_reading/records were written once (tests/helpers/recorded_runs.py); the texts beside them are
what is read from them (tests/helpers/reading.py). A text changes only where the change is meant.
"""

import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reading
from commands import python
from opened_files import opened_files
from recorded_runs import make
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hookline import load_run
from hookline.cli import COMMANDS, main, module_of

TEXTS = Path(__file__).resolve().parents[1] / "golden_reading" / "texts"
MAKERS = reading.texts()


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    """Work beside a copy of the recorded runs."""
    with reading.runs_folder():
        yield


def test_each_text_is_compared() -> None:
    assert {path.stem for path in TEXTS.iterdir()} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_a_recorded_run_reads_as_before(name: str) -> None:
    if name.startswith("help") and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other versions of Python")
    before, now = (TEXTS / f"{name}.txt").read_text(), MAKERS[name]()
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=1)
    assert now == before, "\n".join([*lines][:60])


def test_the_page_has_the_histograms_of_all_monitors() -> None:
    (run,) = json.loads(reading.page_data("rich"))["runs"]
    assert run["histograms"]["activation_histograms"]["names"] == ["0", "2"]


def test_trackers_and_export_agree_on_the_edges_of_bins(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_epochs=1)
    trainer.add_hook("monitor", modules="1", metrics=["histogram"], every=8)  # half of its outputs are zero
    trainer.add_hook("tensorboard")
    trainer.train()
    columns = load_run(trainer.run_dir).layers["activation_histograms"]
    exported = dict(zip(columns["low"], columns["counts"], strict=True))
    assert exported[0.0] > 0  # exact zeros have a bin of their own
    (event,) = histograms(trainer.run_dir)["activation_histograms/1"]
    shown = event.histogram_value
    lows = [0.0, *shown.bucket_limit]  # the first filled bin is that of zeros; each other one begins where one ends
    assert {low: count for low, count in zip(lows, shown.bucket, strict=False) if count} == exported


def histograms(run_dir: Path) -> dict[str, Any]:
    """Return the histograms that TensorBoard reads, by tag."""
    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0})
    reader.Reload()
    return {tag: reader.Histograms(tag) for tag in reader.Tags()["histograms"]}


@pytest.mark.parametrize("kind", ["tracker_failed", "tracker_abandoned", "tracker_dropped_rows"])
def test_a_tracker_that_lost_something_is_an_alert(kind: str, tmp_path: Path, capsys: Any) -> None:
    trainer = make(tmp_path, max_epochs=1)
    fields = {"hook": "wandb", "rows": 5, "seconds": 2.0, "error": "OSError: no connection"}
    trainer.on("train_end")(lambda trainer: trainer.note(kind, **fields))
    trainer.train()
    capsys.readouterr()
    assert main(["show", str(trainer.run_dir), "--json"]) == 0
    assert kind in [alert["kind"] for alert in json.loads(capsys.readouterr().out)["alerts"]]


READING = [
    ["show", "rich"], ["show", "killed"], ["show", "resumed", "--json"], ["compare", "rich", "other"],
    ["compare", "killed", "resumed", "--json"], ["report", "rich"], ["report", "rich", "other", "killed"],
    ["export", "resumed"], ["export", "rich"], ["plot", "rich", "other"], ["label", "rich"], ["runs"],
    ["tail", "rich"], ["checkpoints", "resumed"], ["verify-checkpoint", "resumed", "last"],
    ["show", "latest"], ["compare", "diverging", "two ranks", "rich"], ["plot", "aaaaaaab", "latest"],
    ["export", "latest"], ["report", "two ranks"], ["tail", "latest"],
]  # fmt: skip
LOADING = {"resume", "evaluate", "predict", "replay"}
"""Commands that load a checkpoint: tests/cli/test_evaluate.py and test_replay.py count what they open."""


def test_every_command_that_reads_a_run_is_tried() -> None:
    of_runs = {
        name for name in COMMANDS if {"run", "runs", "path", "directory", "crash"} & module_of(name).ARGUMENTS.keys()
    }
    assert {words[0] for words in READING} | LOADING == of_runs


def arguments_of(words: list[str]) -> list[str]:
    """Return a command line that has the runs by their names here."""
    command, *given = (f"runs/{reading.NAMES[word]}" if word in reading.NAMES else word for word in words)
    given = ["/".join(given)] if command == "verify-checkpoint" else given
    return [command, *given, *{"export": ["--to", "csv"], "report": ["--output", "page.html"]}.get(command, [])]


def test_reading_a_run_needs_no_torch() -> None:
    """A command that takes a second longer to start is not used; verifying a checkpoint takes longer than that."""
    lines = [arguments_of(words) for words in READING if words[0] not in ("checkpoints", "verify-checkpoint")]
    lines = [[*line, "--output", str(place)] if line[0] == "export" else line for place, line in enumerate(lines)]
    code = (
        "import json, sys; from hookline.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    assert main(words) == 0 and 'torch' not in sys.modules, words\n"
    )
    python("-c", code, json.dumps(lines), check=True)


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_no_command_opens_a_file_of_a_run_twice(words: list[str]) -> None:
    with opened_files() as files:
        assert main(arguments_of(words)) == 0
    inside = [path for path in files if "/runs/2026" in str(path)]
    repeated = {path.relative_to(Path.cwd()) for path in inside if inside.count(path) > 1}
    assert not repeated
    assert inside
