"""What `wandb` writes offline, read with wandb's own protocol, and what `trackio` calls."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tracked_runs import history_of, make_trainer, offline_files, read_offline, send_media

from hookline import HooklineError, TrackioTracker, WandbTracker, read_metrics


def tracker(**options: Any) -> WandbTracker:
    """Make a tracker that writes offline."""
    return WandbTracker(**{"mode": "offline", "system_metrics": False, "timeout": 600.0, **options})


@pytest.mark.req("004-37")
def test_every_number_reaches_wandb_at_its_step() -> None:
    """Each row of history has the trainer's step, which is the axis of all metrics; late numbers keep theirs."""
    trainer = make_trainer(tracker(layers="all"))
    trainer.add_hook("gradient_monitor", every=4, log_histogram=True)
    trainer.on("step_end", at=5, name="late")(lambda trainer: trainer.log("late", 7.0, step=2))
    trainer.on("step_end", at=3, name="notes")(lambda trainer: trainer.note("loss_spike", value="why"))
    trainer.train()
    (path,) = offline_files(trainer.run_dir)
    records = read_offline(path)
    rows = list(history_of(records))
    for name in ("train/loss", "val/loss"):
        logged = {row["step"]: row[name] for row in read_metrics(trainer.run_dir) if name in row}
        assert {row["trainer/step"]: row[name] for row in rows if name in row} == pytest.approx(logged)
    assert [row["trainer/step"] for row in rows if "late" in row] == [2]
    assert [row["trainer/step"] for row in rows if "gradients/0.weight/norm" in row] == [4, 8]
    histograms = [row["gradient_histograms/0.weight"] for row in rows if "gradient_histograms/0.weight" in row]
    assert [sum(histogram["values"]) for histogram in histograms] == [12, 12]
    kinds = [record.WhichOneof("record_type") for record in records]
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert axes.get("*") == "trainer/step"
    assert kinds.count("alert") == 1 and "events" in rows[-1]


def test_a_histogram_with_too_many_bins_is_sent_with_wider_ones() -> None:
    """wandb accepts 512 bins; of 1025, each three neighbours are one, and no count is lost."""
    trainer = make_trainer(tracker(), max_steps=1)
    counts = torch.arange(1.0, 1026.0).reshape(1, 1, -1)
    trainer.on("step_end", name="logs")(lambda trainer: trainer.log_layers("mine", ["a"], ["n"], counts))
    trainer.train()
    (path,) = offline_files(trainer.run_dir)
    (histogram,) = [row["mine/a"] for row in history_of(read_offline(path)) if "mine/a" in row]
    assert len(histogram["values"]) == 342 and histogram["values"][:2] == [6.0, 15.0]
    assert sum(histogram["values"]) == counts.sum() and histogram["bins"][-2:] == [1023.0, 1025.0]


def test_what_is_sent_has_no_secrets_no_code_and_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config is the record's, with the id and, of git, the commit beside it."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--password=hunter2hunter2"])
    trainer = make_trainer(tracker(project="mine", group="g"), max_steps=1)
    trainer.add_hook("json_log", path="https://me:hunter2hunter2@host/x.jsonl", every=1, enabled=False)
    trainer.train()
    (path,) = offline_files(trainer.run_dir)
    (run,) = [record.run for record in read_offline(path) if record.WhichOneof("record_type") == "run"][:1]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.run_group) == (trainer.run_id, "mine", "g")
    assert config["hookline"]["git"] == {"commit": (trainer.record.run["git"] or {}).get("commit")}
    assert config["hookline"]["run_id"] == trainer.run_id and config["trainer"]["max_steps"] == 1
    files = [file for file in path.parent.rglob("*") if file.is_file()]
    assert not any(b"hunter2" in file.read_bytes() for file in files)
    assert "wandb-metadata.json" not in {file.name for file in files}


def test_a_resumed_run_is_another_segment_with_the_same_id() -> None:
    """The two files together have every step once."""
    trainer = make_trainer(tracker(), max_steps=4)
    trainer.add_hook("checkpoint", save_every_n_steps=4)
    trainer.train()
    make_trainer(tracker(), max_steps=8).fit(resume=trainer.run_dir)
    files = offline_files(trainer.run_dir)
    assert [path.name for path in files] == [f"run-{trainer.run_id}.wandb"] * 2
    rows = [list(history_of(read_offline(path))) for path in files]
    steps = [[row["trainer/step"] for row in some if "train/loss" in row] for some in rows]
    assert steps == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_two_trackers_of_a_run_have_two_ids() -> None:
    """The second adds its name to the record's id, also after a resume."""

    def make(steps: int) -> Any:
        return make_trainer(tracker(), tracker(project="other"), max_steps=steps)

    trainer = make(4)
    trainer.add_hook("checkpoint", save_every_n_steps=4)
    trainer.train()
    make(8).fit(resume=trainer.run_dir)
    names = [f"run-{trainer.run_id}-wandb_2.wandb", f"run-{trainer.run_id}.wandb"]
    files = offline_files(trainer.run_dir)
    assert sorted(path.name for path in files) == sorted(names * 2)
    for name in names:
        rows = [row for path in files if path.name == name for row in history_of(read_offline(path))]
        assert [row["trainer/step"] for row in rows if "train/loss" in row] == list(range(1, 9))


def test_images_and_tables() -> None:
    """They are media files of the run."""
    trainer = make_trainer(tracker(), max_steps=2)

    @trainer.on("train_start", name="sends", after="wandb")
    def send() -> None:
        send_media(trainer.hooks.get("wandb"))

    trainer.train()
    (path,) = offline_files(trainer.run_dir)
    rows = {name: value for row in history_of(read_offline(path)) for name, value in row.items()}
    assert (rows["sample/pixel"]["_type"], rows["sample/table"]["_type"]) == ("image-file", "table-file")
    table = json.loads((path.parent / "files" / rows["sample/table"]["path"]).read_text())
    assert table == {"columns": ["text", "score"], "data": [["a|b", 0.5], ["c", None]]}


def test_an_empty_wandb_mode_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that start jobs set it so, and wandb itself takes it for an invalid value."""
    monkeypatch.setenv("WANDB_MODE", "")
    trainer = make_trainer(tracker())
    trainer.train()
    assert trainer.step == 8 and offline_files(trainer.run_dir)


def test_without_a_login_nothing_is_asked_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error before the first step says how to log in."""
    import wandb

    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    trainer = make_trainer(tracker(mode="online"))
    with pytest.raises(HooklineError, match="not logged in to wandb; run `wandb login`, set WANDB_API_KEY"):
        trainer.train()
    assert trainer.step == 0


def test_trackio_gets_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own step is the trainer's; the run has the record's id as its name and may continue."""
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values))),
        alert=lambda title, text: calls.append(("alert", title)),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return run

    fake = SimpleNamespace(init=init, Histogram=lambda np_histogram: np_histogram, Table=lambda **parts: parts)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    trainer = make_trainer(TrackioTracker(project="mine", timeout=600.0))
    trainer.on("step_end", at=3, name="notes")(lambda trainer: trainer.note("stall"))
    trainer.train()
    options = calls[0][1]
    assert (options["project"], options["name"], options["resume"]) == ("mine", trainer.run_id, "allow")
    logged = [content for kind, content in calls if kind == "log"]
    assert [step for step, values in logged if "train/loss" in values] == list(range(1, 9))
    assert ("alert", "stall") in calls and calls[-1] == ("finish", None) and "events" in logged[-1][1]
