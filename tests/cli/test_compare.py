"""`hookline compare`: differences, curves over each other, and the first step at which runs part."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from commands import error_of, json_of, output_of

import hookline


class Change(hookline.TrainingHook):
    """Changes the learning rate once."""

    name = "change"

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: hookline.RunControl, step: int) -> None:
        if step == self.at:
            trainer.lr = 0.01


def train(*hooks: Any, seed: int = 1, steps: int = 20, **options: Any) -> Path:
    model, data = make_model(seed=seed), make_batches(steps)
    trainer = make_trainer(*hooks, model=model, data=data, record=True, seed=seed, **options)
    trainer.train()
    return trainer.run_dir


def compare(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    return output_of(capsys, ["compare", *map(str, arguments)])


def divergence(capsys: pytest.CaptureFixture[str], first: Path, second: Path) -> dict[str, Any]:
    (found,) = json_of(capsys, "compare", first, second)["divergences"]
    return dict(found)


def test_two_runs_of_the_same_seed_are_the_same_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    shown = compare(capsys, first, second)
    assert "are the same, bit for bit, in all 20 steps" in shown
    assert "differences  none" in shown


def test_runs_diverge_at_the_first_step_with_other_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate changes after step 7, so that step 8 trains with another one and step 9 has another loss."""
    found = divergence(capsys, train(), train(Change(7)))
    assert found["step"] == 9
    assert found["before"] == 8
    assert "lr changed at step 7 by change" in found["likely_causes"][0]


def test_a_seed_is_the_likely_cause_from_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = divergence(capsys, train(), train(seed=2, warn_above=0.5))
    assert (found["step"], found["before"]) == (1, 0)
    assert "seed: 1 and 2" in found["likely_causes"][0]
    assert not any("warn_above" in cause for cause in found["likely_causes"])


def test_a_run_that_was_resumed_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(hookline.CheckpointHook(save_every_n_steps=5))
    torch.manual_seed(1)
    stopped = train(hookline.CheckpointHook(save_every_n_steps=5), max_steps=10)
    assert divergence(capsys, whole, stopped)["step"] is None


def test_the_smallest_difference_counts(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    lines = (second / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[11])
    value = row["train/loss"]
    row["train/loss"] = float(torch.nextafter(torch.tensor(value, dtype=torch.float64), torch.tensor(9.0).double()))
    lines[11] = json.dumps(row)
    (second / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = divergence(capsys, first, second)
    assert (found["step"], found["name"], found["values"][0]) == (row["step"], "train/loss", value)
    assert "nothing that the record knows differs" in found["likely_causes"][0]


def test_a_layer_that_differs_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Statistics per layer differ before the loss shows it."""
    first, second = (train(hookline.GradientMonitor(log_frequency=1)) for _ in range(2))
    lines = (second / "layers.jsonl").read_text().splitlines()
    row = json.loads(lines[5])
    row["data"] = "A" * 16 + row["data"][16:]
    lines[5] = json.dumps(row)
    (second / "layers.jsonl").write_text("\n".join(lines) + "\n")
    found = divergence(capsys, first, second)
    assert found["step"] == row["step"]
    assert found["name"].startswith("gradients: ")


def test_runs_of_one_seed_that_watch_other_layers_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (train(hookline.ActivationStats(modules=modules)) for modules in ("0", "*"))
    assert "are the same, bit for bit, in all 20 steps" in compare(capsys, first, second)


def test_differences_and_values_are_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    first = train(hookline.LossSpike(factor=8.0), name="first")
    second = train(hookline.LossSpike(factor=4.0), name="second", accumulate=2)
    third = train(name="third")
    shown = compare(capsys, first, second, third)
    assert "first and second" in shown
    assert "first and third" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["loss_spike.factor", "8.0", "4.0", "(not", "there)"] in rows
    assert rows.index(["config"]) < rows.index(["trainer.accumulate", "1", "2", "1"])
    assert ["loss_spike", "(there)", "(there)", "(not", "there)"] in rows
    assert "* first   + second   o third" in shown
    assert "likely  trainer.accumulate: 1 and 2" in shown


def test_observers_are_not_named_as_causes(capsys: pytest.CaptureFixture[str]) -> None:
    found = divergence(capsys, train(), train(hookline.LossSpike(), lr=0.2))
    assert not any("loss_spike" in cause for cause in found["likely_causes"])


def test_one_run_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least two runs" in error_of(capsys, ["compare", str(train())])


def test_runs_without_a_common_step(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    (second / "metrics.jsonl").write_text("")
    assert "have no step in common" in compare(capsys, first, second)
    found = divergence(capsys, first, second)
    assert [found[key] for key in ("step", "name", "values", "before", "last_same")] == [None] * 5


def test_a_missing_config_is_said_once_and_the_rest_is_compared(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = train(), train(seed=2)
    (second / "config.yaml").unlink()
    caplog.clear()
    shown = compare(capsys, first, second)
    assert [record.getMessage() for record in caplog.records if "config.yaml" in record.getMessage()] == [
        f"cannot read {second / 'config.yaml'}: No such file or directory. A run's directory is runs/<run_id>"
    ]
    assert "diverge at step 1 (the first step): train/loss is" in shown
    assert "likely  seed: 1 and 2" in shown
    assert any("config.yaml" in line and line.endswith("(not there)") for line in shown.splitlines())


def test_the_first_run_is_read_once_however_many_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [train(steps=5) for _ in range(4)]
    opened: list[str] = []
    system_open = os.open

    def open_and_count(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(str(path))
        return system_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_and_count)
    counts = []
    for count in (2, 4):
        opened.clear()
        compare(capsys, *runs[:count])
        counts.append(sum(path.endswith(f"{runs[0].name}/metrics.jsonl") for path in opened))
    assert counts[0] == counts[1] > 0


def test_the_best_value_is_shown_where_a_direction_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A name says it, as of a word error rate; a hook that monitors the metric decides; a learning rate has none."""

    class Own(hookline.TrainingHook):
        name = "own"

        def on_step_end(self, trainer: hookline.RunControl, step: int) -> None:
            trainer.log("val/wer", step)
            trainer.log("train/lr", 0.01)

    monitor = hookline.CheckpointHook(monitor="train/epoch_loss", mode="max")
    runs = [train(Own(), monitor, steps=10, max_epochs=2) for _ in range(2)]
    metrics = json_of(capsys, "compare", *runs)["metrics"]
    assert metrics["val/wer"][0]["best"] == {"step": 1, "value": 1.0}
    highest = metrics["train/epoch_loss"][0]["best"]
    assert highest["step"] == 10 and highest["value"] > 0
    assert metrics["train/lr"][0] == {"last": {"step": 20, "value": 0.01}, "best": None}
    rows = [line.split() for line in compare(capsys, *runs).splitlines()]
    best = rows.index(["best", "value", "(step)"])
    assert ["train/lr", "0.01", "0.01"] in rows[:best] and ["val/wer", "20", "20"] in rows[:best]
    assert ["val/wer", "1", "(1)", "1", "(1)"] in rows[best:]
    assert not [row for row in rows[best:] if row[:1] == ["train/lr"]]


class ManyMetrics(hookline.TrainingHook):
    """Logs metrics whose names differ in the middle and at the end."""

    name = "many_metrics"

    def on_step_end(self, trainer: hookline.RunControl, step: int) -> None:
        for name in ("accuracy", "accuracy_top5", "f1"):
            for group in ("first", "second", "third"):
                trainer.log(f"train/epoch_{group}_group_of_samples_{name}", step / 3)


def test_five_runs_are_readable_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line wraps, every name is distinct, every run is in each table, and what is left out is counted."""
    monkeypatch.setenv("COLUMNS", "80")
    runs = [train(ManyMetrics(), lr=0.1 / (index + 1), steps=6) for index in range(5)]
    shown = compare(capsys, *runs)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    last = lines[lines.index("last value") : lines.index("best value (step)")]
    assert sum(len(line.split()) - 1 for line in last if line.startswith("train/loss")) == 5
    names = [line.split()[0] for line in last if line.startswith("train/epo")]
    assert len(names) == 20 and len(set(names)) == 10  # in two tables
    best = lines[lines.index("best value (step)") :]
    assert sum(line.count("(") for line in best if line.startswith("train/loss")) == 5
    runs = [train(ManyMetrics(), hookline.GradientMonitor(log_frequency=1), steps=6) for _ in range(2)]
    found = json_of(capsys, "compare", *runs)["metrics"]
    assert len(found) > 12 and f"and {len(found) - 12} more metrics; --json has all" in compare(capsys, *runs)


def test_the_step_before_is_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Another learning rate shows in the loss of the second step; the optimizer of code is named by its place."""
    shown = compare(capsys, train(), train(lr=0.2))
    assert "(the step before it is the same)" in " ".join(shown.split())
    assert "likely  optimizers.0.lr: 0.1 and 0.2" in shown


def test_long_values_are_listed_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [train(name=name) for name in ("one", "two")]
    for path in runs:
        run = json.loads((path / "run.json").read_text())
        run["environment"]["argv"] = ["code.py", *(f"--option-{number}-of-{path.name}" for number in range(3))]
        (path / "run.json").write_text(json.dumps(run))
    shown = compare(capsys, *runs)
    assert f'environment: argv\n  one  "code.py --option-0-of-{runs[0].name}' in shown


def test_a_damaged_line_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    lines = (second / "metrics.jsonl").read_text().splitlines()
    (second / "metrics.jsonl").write_text("\n".join([*lines[:2], "{", *lines[3:], ""]))
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        error = error_of(capsys, ["compare", str(first), str(second)], 0)
    warning = f"hookline: warning: {second}/metrics.jsonl: line 3 is damaged; the other lines were read"
    assert error.splitlines() == [warning]
