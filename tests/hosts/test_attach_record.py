"""What an attached run leaves on disk and on the terminal."""

import json
from pathlib import Path
from typing import Any

import own_loops
import pytest
import torch
from own_loops import batches, make, rows_of, train
from terminal import run_at_terminal

import hookline
from hookline import TrainingHook, load_run

HOOKS = ["gradient_monitor", "activation_stats", "json_log"]
LOOP = """
import sys
sys.path.insert(0, {helpers!r})
import hookline
from own_loops import batches, make, train

model, optimizer = make()
with hookline.attach(model, optimizer, hooks=["console_log"]) as hl:
    train(model, optimizer, {data}, {loss})
"""


def test_the_files_of_a_run() -> None:
    """Record, JSON log, TensorBoard's file and a report that has what was recorded."""
    pytest.importorskip("tensorboard")
    model, optimizer = make()
    config = {"lifecycle": [{"name": "gradient_monitor", "log_frequency": 1}, "json_log", "tensorboard"]}
    with hookline.attach(model, optimizer, config, hooks=["activation_stats"]) as hl:
        train(model, optimizer, hl.batches(batches()), hl)
        with hl.validation():
            hl.log("val/loss", 0.5)
    directory = hl.run.run_dir
    assert directory is not None
    assert {"run.json", "config.yaml", "metrics.jsonl", "layers.jsonl", "report.html", "log.jsonl"} <= {
        path.name for path in directory.iterdir()
    }
    assert list((directory / "tensorboard").glob("events.out.tfevents*"))
    assert list(load_run(directory).metrics["step"])[-1] == 6
    report = (directory / "report.html").read_text()
    assert all(name in report for name in ("train/loss", "val/loss", "first.weight"))
    facts = json.loads((directory / "run.json").read_text())
    assert (facts["outcome"], facts["optimizers"]) == ("completed", ["AdamW"])


@pytest.mark.parametrize(("factor", "health"), [(1.0, "healthy"), (float("nan"), "broken")])
def test_the_verdict(factor: float, health: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad weights are seen whether the loop reports its losses or not; that all is well needs losses."""
    for reports in (True, False):
        model, optimizer = make()
        with hookline.attach(model, optimizer) as hl:
            for batch in batches():
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor
                hl.backward(loss) if reports else loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        verdict = health if reports or health == "broken" else "not judged"
        assert hl.run.record.run["verdict"]["health"] == verdict
        assert hl.run.record.run["outcome"] == ("completed" if health == "healthy" else "non_finite")
        reason = "not judged: neither train/loss nor a validation was recorded"
        assert (reason in capsys.readouterr().out) == (verdict == "not judged")


def test_a_validation_is_enough_for_a_verdict() -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, optimizer, batches())
        with hl.validation():
            hl.log("val/loss", 0.5)
    assert hl.run.record.run["verdict"]["health"] == "healthy"


def test_the_advice_about_a_nan_is_for_this_loop(caplog: pytest.LogCaptureFixture) -> None:
    """There is no `trainer` in it to which a hook could be added."""
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        hl.backward(torch.nn.functional.cross_entropy(model(batches()[0][0]), batches()[0][1]) * torch.nan)
        optimizer.step()
    assert "to find the module it comes from: add the hook 'nan_forensics'" in caplog.text


@pytest.mark.parametrize("lines", ["none", "all"])
def test_progress_lines(lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They come in a loop without optional lines, too, and say nothing of what is not known."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, {"lifecycle": [{"name": "console_log", "every": 2}]}) as hl:
        train(model, optimizer, hl.batches(batches()) if lines == "all" else batches(), hl if lines == "all" else None)
    progress = [line for line in capsys.readouterr().out.splitlines() if "steps/s" in line]
    assert len(progress) == 3 and all(f"step {step}" in line for step, line in zip((2, 4, 6), progress, strict=True))
    assert all(("loss" in line and "epoch" in line) == (lines == "all") for line in progress)
    assert "nan" not in "".join(progress)


@pytest.mark.parametrize("lines", ["none", "all"])
def test_the_live_view(lines: str) -> None:
    """The same at a terminal."""
    data, loss = ("hl.batches(batches())", "hl") if lines == "all" else ("batches()", "None")
    program = LOOP.format(helpers=str(Path(own_loops.__file__).parent), data=data, loss=loss)
    screen = "\n".join(run_at_terminal(program)[0][-1])
    verdict = "healthy" if lines == "all" else "not judged"
    assert "6 steps" in screen and f"completed, {verdict}: 6 steps" in screen and "lr 0.05" in screen
    assert ("loss " in screen and "epoch 1" in screen) == (lines == "all") and "nan" not in screen


def test_metrics_of_an_epoch_reach_hooks() -> None:
    """The mean of its losses, which is over steps: a loop that accumulates divides its losses."""
    seen: list[Any] = []

    class Metrics(TrainingHook):
        def on_epoch_end(self, metrics: Any) -> None:
            seen.append(dict(metrics))

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Metrics()]) as hl:
        for _ in range(2):
            train(model, optimizer, hl.batches(batches(3)), hl)
        for _ in hl.batches([]):
            pass
    rows = rows_of(hl)
    for epoch in (0, 1):
        losses = [row["train/loss"] for row in rows if row["epoch"] == epoch and "train/loss" in row]
        assert seen[epoch]["train/epoch_loss"] == pytest.approx(sum(losses) / 3)
    assert "train/epoch_loss" not in seen[2], "nothing was trained in it"
