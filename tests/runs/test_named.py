"""`latest`, names, parts of ids, and `best` or `last` behind them, wherever a script names a run or a checkpoint."""

import json
from pathlib import Path

import pytest
from builders import make_trainer

from hookline import load_run, read_layers, read_media, read_metrics
from hookline.errors import RecordError
from hookline.record import read_events
from hookline.runs.named import find_run


@pytest.fixture
def run() -> Path:
    """Train a run with three checkpoints, of which the first is the best."""
    trainer = make_trainer(record=True, name="base", max_steps=3, report=False)
    parameters = {"save_every_n_steps": 1, "save_top_k": 5, "monitor": "worse", "mode": "min"}
    trainer.add_hook("checkpoint", **parameters, save_every_n_epochs=None)
    trainer.on("train_batch_end")(lambda trainer, step, metrics: metrics.update(worse=float(step)))
    trainer.train()
    assert trainer.run_dir is not None
    return Path("runs", trainer.run_dir.name)


def test_readers_take_names(run: Path) -> None:
    """Every reader finds a run as the command line does."""
    for name in ("latest", "base", run.name[-5:], run.name[:15], str(run), "runs/latest", Path("base")):
        assert find_run(name) == run
        assert load_run(name).path == run
        assert [row["step"] for row in read_metrics(name)] == [1, 2, 3]
        assert read_layers(name) == {} and read_media(name) == []
        assert read_events(name)


def test_checkpoints_of_a_named_run(run: Path) -> None:
    """`last` is where the newest whole one is looked for; others go by their names."""
    checkpoints = run / "checkpoints"
    assert find_run("base/last") == checkpoints
    for path in checkpoints.iterdir():
        assert find_run(f"latest/{path.name}").samefile(path)
    with pytest.raises(RecordError, match=f"base/nope: {run} has no checkpoint 'nope'; it has .*step"):
        find_run("base/nope")
    with pytest.raises(RecordError, match="bsae: no run in runs/ has this path, id or name; did you mean 'base'"):
        find_run("bsae/last")


def test_runs_elsewhere() -> None:
    """A caller may have its runs in another directory, where names are looked up first."""
    Path("elsewhere", "one").mkdir(parents=True)
    Path("elsewhere", "one", "run.json").write_text(json.dumps({"run_id": "one", "started": "2026-01-01"}))
    assert find_run("latest", "elsewhere") == Path("elsewhere", "one")
    with pytest.raises(RecordError, match="latest: no run is in runs/"):
        find_run("latest")
