"""`hookline compare`: differences, curves over each other, and the first step at which runs diverge."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from commands import error_of, json_of, output_of

import hookline
from hookline.cli import main

MINUS = "\N{MINUS SIGN}"


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
    (result,) = json_of(capsys, "compare", first, second)["divergences"]
    return dict(result)


def test_two_runs_of_the_same_seed_are_the_same_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    shown = compare(capsys, first, second)
    assert "are the same, bit for bit, in all 20 steps" in shown
    assert "differences  none" in shown


def test_runs_diverge_at_the_first_step_with_other_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate changes after step 7, so that step 8 trains with another one and step 9 has another loss."""
    result = divergence(capsys, train(), train(Change(7)))
    assert result["step"] == 9
    assert result["before"] == 8
    assert "lr changed at step 7 by change" in result["likely_causes"][0]


def test_a_seed_is_the_likely_cause_from_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    result = divergence(capsys, train(), train(seed=2, warn_above=0.5))
    assert (result["step"], result["before"]) == (1, 0)
    assert "seed: 1 and 2" in result["likely_causes"][0]
    assert not any("warn_above" in cause for cause in result["likely_causes"])


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
    result = divergence(capsys, first, second)
    assert (result["step"], result["name"], result["values"][0]) == (row["step"], "train/loss", value)
    assert "nothing in the record differs" in result["likely_causes"][0]


def test_a_layer_that_differs_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Statistics per layer differ before the loss shows it."""
    first, second = (train(hookline.GradientMonitor(log_frequency=1)) for _ in range(2))
    lines = (second / "layers.jsonl").read_text().splitlines()
    row = json.loads(lines[5])
    row["data"] = "A" * 16 + row["data"][16:]
    lines[5] = json.dumps(row)
    (second / "layers.jsonl").write_text("\n".join(lines) + "\n")
    result = divergence(capsys, first, second)
    assert result["step"] == row["step"]
    assert result["name"].startswith("gradients: ")


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
    result = divergence(capsys, train(), train(hookline.LossSpike(), lr=0.2))
    assert not any("loss_spike" in cause for cause in result["likely_causes"])


def test_one_run_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least two runs" in error_of(capsys, ["compare", str(train())])


def test_runs_without_a_common_step(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train()
    (second / "metrics.jsonl").write_text("")
    assert "have no step in common" in compare(capsys, first, second)
    result = divergence(capsys, first, second)
    assert [result[key] for key in ("step", "name", "values", "before", "last_same")] == [None] * 5


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_a_missing_config_is_said_once_and_the_rest_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(), train(seed=2)
    (second / "config.yaml").unlink()
    assert main(["compare", str(first), str(second)]) == 0
    shown, said = capsys.readouterr()
    why = "No such file or directory. A run's directory is runs/<run_id>"
    assert said == f"hookline: warning: cannot read {second / 'config.yaml'}: {why}\n"
    assert "diverge at step 1 (the first step): train/loss is" in shown
    assert "likely  seed: 1 and 2" in shown
    assert any("config.yaml" in line and line.endswith("(not there)") for line in shown.splitlines())


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
    shown = " ".join(compare(capsys, *runs).split())
    last, best = shown.partition(" last value ")[2].split(" best value (step) ")
    assert "val/wer 20" in last and "train/lr 0.01" in last  # in the line of equal ones
    assert "val/wer 1 (1)" in best and "train/lr" not in best.partition(" differences")[0]


class ManyMetrics(hookline.TrainingHook):
    """Logs metrics whose names differ in the middle and at the end."""

    name = "many_metrics"

    def on_step_end(self, trainer: hookline.RunControl, step: int) -> None:
        for name in ("accuracy", "accuracy_top5", "f1"):
            for group in ("first", "second", "third"):
                trainer.log(f"train/epoch_{group}_group_of_samples_{name}", step * trainer.lr)


def test_five_runs_are_readable_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line wraps, every name is distinct, every run is in each table, and what is left out is counted."""
    monkeypatch.setenv("COLUMNS", "80")
    runs = [train(ManyMetrics(), lr=0.1 / (index + 1), steps=6) for index in range(5)]
    shown = compare(capsys, *runs)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    begin, end = (next(at for at, line in enumerate(lines) if line.startswith(title)) for title in ("last", "best"))
    last = lines[begin:end]
    values = [re.sub(rf"[+{MINUS}]\S+ %", "", line).split()[1:] for line in last if line.startswith("train/loss")]
    assert sum(map(len, values)) == 5
    names = [line.split()[0] for line in last if line.startswith("train/epo")]
    assert len(names) == 20 and len(set(names)) == 10  # in two tables
    best = lines[end:]
    assert sum(line.count("(") for line in best if line.startswith("train/loss")) == 5
    runs = [train(ManyMetrics(), hookline.GradientMonitor(log_frequency=1), steps=6) for _ in range(2)]
    result = json_of(capsys, "compare", *runs)["metrics"]
    more = f"and {len(result) - 12} more; --json has all"
    assert len(result) > 12 and more in " ".join(compare(capsys, *runs).split())


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


# ---- which run is better ---------------------------------------------------------------------------------------------


class Score(hookline.TrainingHook):
    """Logs values of a metric, one per step from the first one on."""

    name = "score"

    def __init__(self, *values: float, metric: str = "val/loss") -> None:
        self.values, self.metric = values, metric

    def on_step_end(self, trainer: hookline.RunControl, step: int) -> None:
        if step <= len(self.values):
            trainer.log(self.metric, self.values[step - 1])


def scored(name: str, *values: float, seed: int = 1, lr: float = 0.1, hooks: Any = (), **options: Any) -> Path:
    """Train a run; its scores are not in its config, as those of a real run are not."""
    run = train(*hooks, name=name, seed=seed, lr=lr, steps=4, **options)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines += [
        json.dumps({"step": step, "epoch": 0, "time": 1.0, "val/loss": value}) for step, value in enumerate(values, 1)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def monitoring(run: Path, metric: str, mode: str | None = None) -> Path:
    """Let the record say that a hook monitors a metric."""
    described = json.loads((run / "run.json").read_text())
    next(hook for hook in described["hooks"] if hook["name"] == "score")["parameters"] = {
        "monitor": metric,
        "mode": mode,
    }
    (run / "run.json").write_text(json.dumps(described))
    return run


def headline(capsys: pytest.CaptureFixture[str], *runs: Path) -> str:
    return str(json_of(capsys, "compare", *runs)["headline"])


def test_a_comparison_begins_with_the_better_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it stands on the command line; the change is against the other one."""
    good, bad = scored("s1", 3.0, 2.408, lr=0.1), scored("s2", 3.0, 2.455, lr=0.2)
    for runs in ((good, bad), (bad, good)):
        shown = compare(capsys, *runs).splitlines()
        assert shown[0] == f"s1 is better: val/loss 2.408 against 2.455 ({MINUS}1.9 %)"
        assert shown[1] == "    val/loss is the last value of each run."
    third = scored("s3", 3.0, 2.6, lr=0.3)
    assert headline(capsys, bad, third, good) == (
        "s1 is the best of 3: val/loss 2.408, then s2 2.455 (+2.0 %), s3 2.6 (+8.0 %)"
    )


def test_the_metric_that_hooks_monitor_decides_and_counts_at_its_best(capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose best checkpoint is better wins, although it ends worse, which is said."""
    runs = [
        monitoring(train(Score(*values, metric="val/score"), name=name, steps=4, lr=lr), "val/score", "max")
        for name, lr, values in (("peak", 0.1, (0.5, 0.9, 0.6)), ("steady", 0.2, (0.5, 0.7, 0.8)))
    ]
    result = json_of(capsys, "compare", *runs)
    assert result["headline"] == "peak is better: val/score 0.9 against 0.8 (+12 %)"
    assert "By the last value, steady is better." in result["notes"]
    assert (result["judged"]["kind"], result["judged"]["direction"], result["judged"]["best"]) == ("best", "high", 0)


def test_without_a_validation_the_mean_of_the_last_losses_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """A single batch that happens to be easy does not."""
    runs = [train(name=name, lr=lr, steps=40) for name, lr in (("one", 0.1), ("two", 0.2))]
    for run, losses in zip(runs, ([1.0] * 40, [2.0] * 39 + [0.1]), strict=True):
        rows = [
            json.dumps({"step": step, "epoch": 0, "time": 1.0, "train/loss": loss})
            for step, loss in enumerate(losses, 1)
        ]
        (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert headline(capsys, *runs).startswith("one is better: train/loss 1 against 1.")


@pytest.mark.parametrize(
    "values, said",
    [
        ((2.0, 2.0), "a and b are equal: val/loss 2"),
        ((2.0, float("nan")), "a is better: val/loss 2 against nan"),
        ((float("nan"), float("nan")), "none is better: val/loss is not finite (a nan, b nan)"),
        ((2.00001, 2.00002), f"a is better: val/loss 2.00001 against 2.00002 ({MINUS}<0.01 %)"),
        ((0.0, 1.0), f"a is better: val/loss 0 against 1 ({MINUS}100 %)"),
        ((-1.0, 0.0), "a is better: val/loss -1 against 0"),
    ],
)
def test_values_that_are_equal_or_not_finite(
    values: tuple[float, float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headline(capsys, scored("a", values[0]), scored("b", values[1], lr=0.2)) == said


def test_what_follows_equal_runs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = scored("c", 3.0, lr=0.3), scored("a", 2.0), scored("b", 2.0, lr=0.2)
    assert headline(capsys, *runs) == "a and b are equal: val/loss 2, then c 3 (+50 %)"
    groups = [*seeds("base", 2.0, 2.2), *seeds("wide", 2.1, 2.3, lr=0.2), runs[0]]
    assert headline(capsys, *groups).endswith("and the ranges of their runs overlap, then c 3 (+43 %)")


def test_runs_that_are_the_same_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless one of them went on, which is then said."""
    first, second, longer = scored("a", 2.0), scored("b", 2.0), scored("c", 2.0, 1.5)
    assert compare(capsys, first, second).startswith("a and b are the same, bit for bit, in all 4 steps\n")
    result = json_of(capsys, "compare", first, longer)
    assert result["headline"] == f"c is better: val/loss 1.5 against 2 ({MINUS}25 %)"
    assert "Their last val/loss is at different steps: a at step 1 and c at step 2." in result["notes"]


def test_a_metric_without_a_direction_makes_no_run_better(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        monitoring(train(Score(value, metric="val/own"), name=name, steps=4), "val/own")
        for name, value in (("a", 1.0), ("b", 2.0))
    ]
    assert headline(capsys, *runs) == "it is not known whether a low or a high val/own is better: a 1, b 2"


def test_runs_without_a_common_metric_are_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train(name="a"), train(name="b")
    (second / "metrics.jsonl").write_text("")
    assert headline(capsys, first, second) == "a and b have no metric in common that says which is better"


# ---- seeds -----------------------------------------------------------------------------------------------------------


def seeds(name: str, *values: float, **options: Any) -> list[Path]:
    return [scored(f"{name}-s{seed}", value, seed=seed, **options) for seed, value in enumerate(values, 1)]


def test_seeds_of_one_config_are_compared_as_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """By their means, with the range of each group, and the word that their spread deserves."""
    apart = seeds("base", 2.0, 2.1, 2.2), seeds("wide", 2.4, 2.6, lr=0.2)
    result = json_of(capsys, "compare", *apart[0], *apart[1])
    assert result["headline"] == f"base (3 runs) is better: mean val/loss 2.1 against 2.5 ({MINUS}16 %)"
    assert [(group["name"], group["seeds"]) for group in result["groups"]] == [
        ("base (3 runs)", [1, 2, 3]), ("wide (2 runs)", [1, 2]),
    ]  # fmt: skip
    (note,) = [note for note in result["notes"] if note.startswith("wide")]
    assert note.endswith("except for the seed: val/loss is 2.5 on average, from 2.4 to 2.6 over 2 runs.")
    (row,) = [row for row in result["rows"] if (row["metric"], row["kind"]) == ("val/loss", "last")]
    assert [row["values"][0][key] for key in ("least", "greatest", "runs")] == [2.0, 2.2, 3]
    assert row["best"] == 0 and row["changes"] == [None, pytest.approx(0.4 / 2.1)]
    assert "2.1 (2 to 2.2)" in compare(capsys, *apart[0], *apart[1])
    overlapping = seeds("third", 2.15, 2.3, lr=0.3)
    result = json_of(capsys, "compare", *apart[0], *overlapping)
    assert result["headline"] == (
        f"base (3 runs) and third (2 runs) are not clearly different: mean val/loss 2.1 against 2.225 ({MINUS}5.6 %), "
        "and the ranges of their runs overlap"
    )
    assert result["judged"]["best"] is None


def test_seeds_of_a_single_config_say_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    result = json_of(capsys, "compare", *seeds("base", 2.0, 2.2))
    assert result["headline"] == f"base-s1 is better: val/loss 2 against 2.2 ({MINUS}9.1 %)"
    assert result["notes"][1].startswith(
        "These 2 runs have the same config except for the seed: val/loss is 2.1 on average, from 2 to 2.2 over 2 runs."
    )


def test_what_is_no_group_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """Another option of the config or of a script, other code with the same seeds, and one seed twice."""

    def sizes(*runs: Path) -> list[int]:
        return [len(group["runs"]) for group in json_of(capsys, "compare", *runs)["groups"]]

    def edit(run: Path, **fields: Any) -> Path:
        described = json.loads((run / "run.json").read_text())
        for name, values in fields.items():
            described[name] |= values
        (run / "run.json").write_text(json.dumps(described))
        return run

    other = scored("other", 1.0, lr=0.3)
    first, second = seeds("base", 2.0, 2.2)
    assert sizes(first, second, other) == [2, 1]
    assert sizes(first, scored("again", 2.0), other) == [1, 1, 1]
    for script in (first, second):
        edit(script, environment={"argv": ["train.py", "--seed", script.name]})
    assert sizes(first, second, other) == [2, 1]
    edit(second, environment={"argv": ["train.py", "--seed", "2", "--dropout", "0.5"]})
    assert sizes(first, second, other) == [1, 1, 1]
    newer = [edit(run, git={"commit": "other"}) for run in seeds("newer", 2.0, 2.2, accumulate=2)]
    assert sizes(*newer, *seeds("older", 2.0, 2.2, accumulate=2)) == [2, 2]


def test_equal_metrics_are_folded_and_the_best_is_bold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    first, second = (
        scored("a", 2.0, hooks=[Score(7.0, metric="val/own")]),
        scored("b", 3.0, lr=0.2, hooks=[Score(7.0, metric="val/own")]),
    )
    lines = compare(capsys, first, second).splitlines()
    (row,) = [line for line in lines if "val/loss" in line and "+50 %" in line and "(1)" not in line]
    assert "\x1b[1m2\x1b[0m" in row.replace(" ", "") and "\x1b[1m3" not in row
    assert lines.index(row) < next(at for at, line in enumerate(lines) if "train/loss" in line and "(" not in line)
    assert any(re.search(r"equal.*val/own 7", line) for line in lines)


def test_two_groups_of_seeds_fit_80_columns_beside_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = compare(capsys, *seeds("base", 2.1234, 2.2345), *seeds("wide", 2.3456, 2.4567, lr=0.2)).splitlines()
    assert max(map(len, shown)) <= 80
    assert any(line.startswith("val/loss") and "2.346 to 2.457" in line and "2.123 to 2.235" in line for line in shown)


def test_a_group_keeps_its_name_and_has_no_range_of_equal_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column is wide enough for the name, and "2 (2 to 2)" says no more than "2"."""
    monkeypatch.setenv("COLUMNS", "80")
    apart = seeds("transformer", 2.1234, 2.2345), seeds("wide", 2.0, 2.0, lr=0.2), [scored("c", 1.0, lr=0.3)]
    shown = compare(capsys, *itertools.chain(*apart, [scored("d", 3.0, lr=0.4)]))
    (title,) = [line for line in shown.splitlines() if line.lstrip().startswith("transformer (2 runs)")][:1]
    assert "…" not in title and "2.123 to 2.235" in shown and "2 to 2)" not in shown
