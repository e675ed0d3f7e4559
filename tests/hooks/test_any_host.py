"""Every built-in lifecycle hook does its work in a loop that is not our trainer but can do as much."""

import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_batches
from run_control import PlainRun, train
from tracked_runs import OFFLINE, offline_files

from hookline import HookManager
from hookline.core.plugins import HOOKS
from hookline.hooks import BUILT_IN

from .conftest import Server

NEEDED = {
    "clip_norm": {"max_norm": 1.0}, "clip_value": {"max_value": 1.0}, "freeze": {"params": "weight"},
    "mask": {"params": "weight"}, "scale": {"factor": 0.5},
    "notify": {"webhook_url": "https://hooks.example.org/x", "notify_on": []},
}  # fmt: skip


def is_lifecycle(name: str) -> bool:
    """Whether a built-in is a lifecycle hook."""
    if getattr(HOOKS.find(name), "intervene", False):
        return False
    manager = HookManager()
    manager.register(name, **NEEDED.get(name, {}))
    return manager.entry(name).kinds == ["lifecycle"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainRun:
    """A run that has not started, on a machine from which trackers send nothing."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    return PlainRun(tmp_path)


def run_with(run: PlainRun, name: str, spoil: float = 1.0, **parameters: Any) -> Any:
    """Train with one hook, of which no event may fail, and return it; the fifth batch is multiplied by `spoil`."""
    run.hooks.register(name, on_error="raise", **parameters)
    hook, batches = run.hooks.get(name), make_batches(6)
    batches[4][0].mul_(spoil)
    train(run, batches)
    return hook


def check_checkpoint(run: PlainRun) -> None:
    hook = run_with(run, "checkpoint", monitor="val/loss", save_every_n_steps=4)
    assert (run.checkpoint_dir / "best").resolve() == hook.best_path == run.checkpoint_dir / "step-00000006"
    assert (run.checkpoint_dir / "step-00000004").is_dir() and run.notes[0]["kind"] == "best_checkpoint"


def check_confusion_matrix(run: PlainRun) -> None:
    run_with(run, "confusion_matrix")
    columns, rows = run.tables["confusion_matrix"]
    assert columns == ("target", "0", "1") and [sum(row[1:]) for row in rows] == [1, 2]


def check_console_log(run: PlainRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(run, "console_log", log_every_n_batches=1)
    printed = capsys.readouterr().out
    assert "step 6/6" in printed and "validation  val/loss 1.0000" in printed and "What each hook cost" in printed


def check_debug_training(run: PlainRun, capsys: pytest.CaptureFixture[str]) -> None:
    hook = run_with(run, "debug_training", spoil=float("nan"), log_shapes=True)
    assert "from batch 0: batch[0]: float32 (4, 3) on cpu" in capsys.readouterr().out
    assert hook.crash is not None and hook.autopsy.batch == ("batch[0]",)


def check_early_stopping(run: PlainRun) -> None:
    hook = run_with(run, "early_stopping", target=2.0, restore_best_weights=True)
    assert run.stop_reason == "val/loss 1 has reached its target 2" and hook.best_step == 6
    assert run.notes[-1] == {"kind": "best_weights_restored", "by": "early_stopping", "saved_at": 6, "value": 1.0}


def check_ema(run: PlainRun) -> None:
    validated: list[torch.Tensor] = []
    run.hooks.on("validation_end", name="witness")(lambda model: validated.append(model.weight.detach().clone()))
    hook = run_with(run, "ema", decay=0.5)
    assert hook.updates == 6 and torch.equal(validated[0], hook.average["weight"])
    assert not torch.equal(run.model.weight, validated[0])


def check_gradient_flow(run: PlainRun) -> None:
    assert run_with(run, "gradient_flow", vanishing=1e2, exploding=1e3).latest.of("vanishing")
    assert [note["kind"] for note in run.notes] == ["gradient_flow"]


def check_gradient_monitor(run: PlainRun) -> None:
    hook = run_with(run, "gradient_monitor", log_frequency=2)
    assert sorted(step for _, step in run.layers) == [2, 4, 6]
    assert run.logged["gradients/norm", 4] > 0 and hook.latest is not None


def check_json_log(run: PlainRun) -> None:
    run_with(run, "json_log", log_every_n_batches=3)
    lines = [json.loads(line)["event"] for line in (run.run_dir / "log.jsonl").read_text().splitlines()]
    assert lines == ["train_start", "batch_end", "batch_end", "validation_end", "epoch_end", "train_end"]


def check_loss_spike(run: PlainRun) -> None:
    hook = run_with(run, "loss_spike", spoil=1000.0, warmup=4)
    assert [spike.step for spike in hook.spikes][:1] == [5] and run.notes[0]["kind"] == "loss_spike"


def check_lr_monitor(run: PlainRun) -> None:
    run_with(run, "lr_monitor")
    assert run.logged == {("lr", step): 0.1 for step in range(1, 7)}


def check_tracker(run: PlainRun, name: str, **parameters: Any) -> None:
    run.hooks.on("step_end", name="logs")(lambda step: run.record.log(step, 0, "loss", 1.0 / step))
    run_with(run, name, timeout=600.0, **parameters)
    assert run.record.events == []


def check_mlflow(run: PlainRun) -> None:
    import mlflow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow uses what SQLAlchemy 2.1 deprecates
        check_tracker(run, "mlflow", tracking_uri=(uri := f"sqlite:///{run.run_dir}/mlflow.db"))
        (stored,) = mlflow.MlflowClient(uri).search_runs(["1"])
    assert stored.data.metrics["loss"] == 1 / 6 and stored.info.status == "FINISHED"


def check_tensorboard(run: PlainRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    check_tracker(run, "tensorboard")
    reader = EventAccumulator(f"{run.run_dir}/tensorboard")
    assert [scalar.step for scalar in reader.Reload().Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def check_trackio(run: PlainRun, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    own = SimpleNamespace(log=lambda values, step: steps.append(step), finish=lambda: steps.append(-1))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **options: own))
    check_tracker(run, "trackio")
    assert steps == [1, 2, 3, 4, 5, 6, -1]


def check_wandb(run: PlainRun) -> None:
    check_tracker(run, "wandb", mode="offline", system_metrics=False)
    assert len(offline_files(run.run_dir)) == 1


def check_nan_forensics(run: PlainRun) -> None:
    hook = run_with(run, "nan_forensics", spoil=float("nan"))
    assert hook.crash == run.run_dir / "crashes" / "step-00000005"
    assert (run.stopped_by, run.event_args.skip_reason, run.step) == ("nan_forensics", "loss nan", 5)


def check_notify(run: PlainRun, server: Server) -> None:
    run_with(run, "notify", webhook_url=server.url)
    best, end = server.texts
    assert "new best model: val/loss 1 at step 6" in best and "ended: completed after step 6" in end


def check_profiler(run: PlainRun) -> None:
    hook = run_with(run, "profiler", first_step=2, steps=2)
    assert [path.name for path in hook.traces] == ["step-00000002.json.gz"] and run.notes[0]["kind"] == "trace_written"


def check_sample_predictions(run: PlainRun) -> None:
    run_with(run, "sample_predictions", samples=2)
    assert [row[:2] for row in run.tables["sample_predictions"][1]] == [(0, 0.0), (1, 1.0)]


def check_sample_text(run: PlainRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(run, "sample_text")
    assert "no sample, because the data has no vocabulary" in capsys.readouterr().out


def check_stall_watchdog(run: PlainRun) -> None:
    @run.hooks.on("before_backward", at=3, name="hang")
    def hang() -> None:
        while not run.notes:
            time.sleep(0.01)

    hook = run_with(run, "stall_watchdog", seconds=0.1)
    assert hook.stalls and run.notes[0]["kind"] == "stall" and run.notes[0]["stacks"]


def check_throughput(run: PlainRun) -> None:
    run_with(run, "throughput", log_every_n_steps=2)
    assert {step for name, step in run.logged if name == "throughput/tokens_per_s"} == {2, 4, 6}


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("name", [name for name in BUILT_IN if is_lifecycle(name)])
def test_a_built_in_hook_works_in_any_host(name: str, run: PlainRun, request: pytest.FixtureRequest) -> None:
    """Its results are right after steps, a validation, the end of an epoch and the end of the run."""
    fixtures = inspect.signature(CHECKS[name]).parameters.keys() - {"run"}
    CHECKS[name](run, **{fixture: request.getfixturevalue(fixture) for fixture in fixtures})
