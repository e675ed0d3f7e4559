"""Test that nothing in a run's directory is read or written through a symbolic link."""

import os
import shutil
from pathlib import Path

import pytest
from builders import make_trainer

from hookline import HooklineError, Trainer, read_layers, read_metrics
from hookline.checkpoints.store import write_checkpoint
from hookline.cli import main
from hookline.record import read_json
from hookline.record.record import CONTENTS

FOLDERS = ("checkpoints", "abandoned", "exception", "crashes", "captures", "traces", "media")


def writing_trainer(root: Path, steps: int = 3) -> Trainer:
    """Make a trainer whose hooks write all that hooks can write into a run's directory."""
    hooks = {
        "lifecycle": [
            {"name": "checkpoint", "save_every_n_steps": 1},
            {"name": "profiler", "first_step": 2, "steps": 1, "warmup": 0},
            {"name": "nan_forensics", "stop_run": False},
            {"name": "json_log", "log_every_n_batches": 1},
            "tensorboard",
        ],
        "forward": [{"name": "capture", "save": True}, "activation_stats"],
    }
    return make_trainer(hooks=hooks, record=True, output_dir=str(root), max_steps=steps)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run."""
    trainer = writing_trainer(tmp_path_factory.mktemp("recorded"))
    trainer.on("train_batch_start", at="3 batches")(lambda batch: batch[0].fill_(float("nan")))
    trainer.on("step_end", at=2)(lambda: trainer.log_table("table", ["a"], [[1]]))
    trainer.train()
    return trainer.run_dir


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the run's directory, as a stranger may send it."""
    return Path(shutil.copytree(recorded, tmp_path / "runs" / recorded.name, symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_list_of_contents_is_complete(recorded: Path) -> None:
    """A run writes nothing into its directory that is not checked for links when the run is resumed."""
    names = {path.name for path in recorded.iterdir()}
    assert names == set(CONTENTS) - {".lock", "abandoned", "exception", "ranks"}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_resumed_run_follows_no_link(name: str, run: Path, tmp_path: Path) -> None:
    """Each of its files and folders as a link is one error that names it, and what it leads to stays untouched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target, link = outside / name, run / name
    if link.exists():
        link.rename(target)
    elif name in FOLDERS:
        target.mkdir()
    else:
        target.write_text("precious")
    link.symlink_to(target)
    before = contents(outside)
    with pytest.raises(HooklineError, match=rf"cannot \w+ {link}: it is a symbolic link"):
        writing_trainer(tmp_path).fit(resume=run)
    assert main(["resume", str(run)]) == 2
    assert contents(outside) == before


@pytest.mark.parametrize(
    "place", ["traces/step-00000004.json.gz", "captures/capture.safetensors", "crashes/step-00000004"]
)
def test_nor_one_inside_a_folder(place: str, run: Path, tmp_path: Path) -> None:
    """A link inside one of the run's folders is refused in the same way."""
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to(tmp_path / "created")
    with pytest.raises(HooklineError, match=f"cannot write {run / place}: it is a symbolic link"):
        writing_trainer(tmp_path).fit(resume=run)
    assert not (tmp_path / "created").exists()


def test_a_link_that_appears_during_the_run_is_not_followed(tmp_path: Path) -> None:
    """layers.jsonl is opened when its first row is written; the row is lost, and training continues."""
    trainer = writing_trainer(tmp_path / "runs")

    @trainer.on("train_start")
    def plant() -> None:
        (trainer.run_dir / "layers.jsonl").symlink_to(tmp_path / "created")

    with pytest.warns(RuntimeWarning, match="layers.jsonl: it is a symbolic link"):
        trainer.train()
    assert not (tmp_path / "created").exists() and trainer.record.lost and trainer.step == 3


def test_links_that_users_make_are_fine(run: Path, tmp_path: Path) -> None:
    """The directory of runs or the run itself may be a link, and other names in it are not Hookline's."""
    linked = tmp_path / "linked"
    linked.symlink_to(run.parent)
    (linked / "latest").symlink_to(run.name)
    (run / "notes").symlink_to(tmp_path)
    (run / "checkpoints" / "best").symlink_to("step-00000003")  # as the checkpoint hook makes them
    trainer = writing_trainer(tmp_path, steps=4)
    trainer.fit(resume=linked / "latest")
    assert trainer.step == 4 and (run / "checkpoints" / "step-00000004").is_dir()


def test_json_log_writes_through_a_link_that_its_user_chose(tmp_path: Path) -> None:
    """A path that is given to the hook is not the run's."""
    (tmp_path / "log").symlink_to(tmp_path / "real.jsonl")
    trainer = writing_trainer(tmp_path / "runs")
    trainer.hooks.remove("json_log")
    trainer.add_hook("json_log", path=str(tmp_path / "log"))
    trainer.train()
    assert "train_end" in (tmp_path / "real.jsonl").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "layers.jsonl", "run.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_readers_follow_none(name: str, kind: str, run: Path, tmp_path: Path) -> None:
    """Reading a stranger's record opens plain files only: a pipe would wait without end."""
    (run / name).rename(tmp_path / name)
    if kind == "link":
        (run / name).symlink_to(tmp_path / name)
    elif kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).mkdir()
    readers = {
        "metrics.jsonl": read_metrics,
        "layers.jsonl": read_layers,
        "run.json": lambda at: read_json(at / "run.json"),
    }
    with pytest.raises(HooklineError, match=f"cannot read {run / name}: "):
        readers[name](run)


def test_a_linked_folder_of_checkpoints_is_not_read(tmp_path: Path) -> None:
    """A fork writes elsewhere, but would load the weights that the link leads to."""
    write_checkpoint(tmp_path / "outside", "step-1", {"model": {}}, {"step": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "outside")
    with pytest.raises(HooklineError, match="checkpoints: it is a symbolic link"):
        writing_trainer(tmp_path).fit(resume=tmp_path / "run", fork=True)
    assert main(["checkpoints", str(tmp_path / "run")]) == 2
