"""Stops, saves, metrics, state and failures go through the host's own controls, loggers and checkpoints."""

import csv
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from hosted_loops import ADAPTERS, Loop, Net, Recorder, digest, make_batches
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from saved_checkpoints import verify_checkpoint

import hookline.ignite
from hookline import HooklineError, TrainingHook, read_metrics
from hookline.errors import RegistrationError
from hookline.hosts import versions

VALIDATION = {"val_data": make_batches(2, seed=2)}


class Counter(TrainingHook):
    """Counts the steps of a run, and of the one that it was resumed from."""

    on_error = "raise"
    count, resumed_at = 0, -1

    def on_train_start(self, resumed: bool, step: int) -> None:
        self.resumed_at = step if resumed else -1

    def on_step_end(self, trainer: Any) -> None:
        self.count += 1
        trainer.log("counted", self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def stop_at(event: str, saves: bool = False) -> TrainingHook:
    def act(self: TrainingHook, trainer: Any, step: int) -> None:
        if step >= 3:
            trainer.save() if saves else trainer.request_stop("enough")

    return type("StopAt", (TrainingHook,), {event: act})()


# ---- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ADAPTERS)
@pytest.mark.parametrize(("event", "steps"), [("on_step_end", 3), ("on_validation_end", 4), ("on_epoch_end", 4)])
def test_a_hook_stops_the_host(host: str, event: str, steps: int) -> None:
    """The host's loop ends with the step, the validation or the epoch in which a hook asked for it."""
    loop = Loop(host, hooks=[stop_at(event)], epochs=5, **VALIDATION).run()
    assert loop.control.step == steps
    assert loop.control.record.run["outcome"] == "stopped"
    if host == "ignite":
        assert loop.engine.state.iteration == steps
    else:
        state = loop.host_trainer if host == "lightning" else loop.host_trainer.state
        assert state.global_step == steps


@pytest.mark.parametrize("host", ADAPTERS)
def test_early_stopping_reads_what_the_host_measures(host: str) -> None:
    """`val/loss` is what Lightning's module logged as val_loss, eval_loss of the Trainer, and loss of the evaluator."""
    config = {"lifecycle": [{"name": "early_stopping", "monitor": "val/loss", "patience": 1, "min_delta": 1e6}]}
    loop = Loop(host, config, epochs=6, **VALIDATION).run()
    assert loop.control.step == 8 and loop.control.stopped_by == "early_stopping"
    rows = read_metrics(Path("runs") / loop.control.run_id)
    assert [row["step"] for row in rows if "val/loss" in row] == [4, 8]


# ---- saves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ADAPTERS)
def test_the_best_checkpoint_is_kept(host: str) -> None:
    """A checkpoint is written after each validation that is better, whole, and the link `best` leads to the last."""
    config = {"lifecycle": [{"name": "checkpoint", "monitor": "val/loss", "keep_previous": False}]}
    loop = Loop(host, config, epochs=3, **VALIDATION).run()
    directory = loop.control.checkpoint_dir
    names = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    assert names == ["step-00000012"] and (directory / "best").resolve().name == "step-00000012"
    assert verify_checkpoint(directory / "best") == []
    if host == "lightning":
        assert [path.name for path in directory.glob("*.ckpt")] == ["step-00000012.ckpt"]
    if host == "transformers":
        assert sorted(path.name for path in Path("hf").iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_lightning_resumes_from_a_checkpoint_that_a_hook_asked_for() -> None:
    """What `save` writes beside our checkpoint is Lightning's own: fit(ckpt_path=…) continues to equal weights."""
    whole = Loop("lightning", hooks=[Counter()], epochs=3).run()
    first = Loop("lightning", {"lifecycle": [{"name": "checkpoint", "every": 4}]}, [Counter()], epochs=2).run()
    (path,) = first.control.checkpoint_dir.glob("*4.ckpt")
    second = Loop("lightning", hooks=[counter := Counter()], epochs=3, options={"ckpt_path": str(path)}).run()
    assert counter.count == 12 and digest(second.model) == digest(whole.model)


def resumed(host: str, hooks: list[Any], tmp_path: Path) -> Loop:
    """Train one epoch, save by the host's own means, and train on with other objects."""
    if host == "lightning":
        saver = ModelCheckpoint(tmp_path, save_last=True)
        Loop(host, hooks=[Counter()], epochs=1, options={"callbacks": [saver], "enable_checkpointing": True}).run()
        return Loop(host, hooks=hooks, epochs=2, options={"ckpt_path": saver.last_model_path}).run()
    if host == "transformers":
        Loop(host, hooks=[Counter()], epochs=1, options={"save_strategy": "epoch"}).run()
        return Loop(host, hooks=hooks, epochs=2, options={"resume": True}).run()
    loop = Loop(host, hooks=[Counter()], epochs=1)
    saved: list[Any] = []

    def save(engine: Engine) -> None:
        parts = {"engine": engine, "model": loop.model, "optimizer": loop.optimizer, "hooks": loop.callback}
        Checkpoint(parts, DiskSaver(tmp_path, require_empty=False))(engine)
        saved.extend(tmp_path.glob("*.pt"))

    loop.options = {"handlers": [(Events.EPOCH_COMPLETED, save)]}
    loop.run()
    other = Loop(host, hooks=hooks, epochs=2)
    other.options = {"checkpoint": torch.load(saved[-1], weights_only=True)}
    return other.run()


@pytest.mark.parametrize("host", ADAPTERS)
def test_state_travels_in_the_hosts_checkpoint(host: str, tmp_path: Path) -> None:
    """A run that the host resumes has the counters and the state of its hooks, and ends with equal weights."""
    whole = Loop(host, hooks=[Counter()], epochs=2).run()
    loop = resumed(host, [counter := Counter()], tmp_path)
    assert (counter.resumed_at, counter.count) == (4, 8)
    assert loop.control.step == 8 and loop.control.epoch == 1
    assert digest(loop.model) == digest(whole.model)


def test_a_checkpoint_without_our_state_continues_the_count(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Steps are counted from those of the host, with a warning."""
    saver = ModelCheckpoint(tmp_path, save_last=True)
    options = {"callbacks": [saver], "enable_checkpointing": True}
    Loop("lightning", epochs=1, attaches=False, options=options).run()
    loop = Loop("lightning", hooks=[Counter()], epochs=2, options={"ckpt_path": saver.last_model_path}).run()
    assert loop.control.step == 8
    assert "Lightning resumes after step 4 without saved hook state: hooks start fresh" in caplog.text


def test_a_loaded_state_is_for_one_run() -> None:
    """The run after a resumed one begins anew; an engine may run as often as one likes."""
    loop = Loop("ignite", hooks=[counter := Counter()]).run()
    loop.callback.load_state_dict(loop.callback.state_dict())
    for resumed_at in (8, -1):
        loop.engine.run(loop.data, max_epochs=2)
        assert counter.resumed_at == resumed_at


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_reach_lightnings_logger(tmp_path: Path) -> None:
    """What a hook logs is in the CSV of Lightning's logger, and what the module logs is in our record, once."""
    logger = CSVLogger(tmp_path)
    loop = Loop("lightning", hooks=[Counter()], options={"logger": logger}, **VALIDATION).run()
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["counted"]) for line in lines if line["counted"]] == [
        (str(step), str(step + 1))
        for step in range(8)  # the numbers that Lightning's own rows have
    ]
    assert [line["step"] for line in lines if line["seen"]] == [str(step) for step in range(8)]
    assert "val/loss" not in lines[0] and "val_loss" in lines[0]
    seen = [row["seen"] for row in read_metrics(Path("runs") / loop.control.run_id) if "seen" in row]
    assert seen == [0, 1, 2, 3] * 2


def test_metrics_reach_the_log_of_transformers() -> None:
    """What a hook logs is in the Trainer's history, not our own losses; what the Trainer logs is in our record."""
    loop = Loop("transformers", hooks=[Counter()], options={"max_grad_norm": 1e9}).run()
    history = loop.host_trainer.state.log_history
    assert not any("train/loss" in entry or "train/lr" in entry for entry in history)
    theirs = {entry["step"]: entry["epoch"] for entry in history if "loss" in entry}
    ours = [(entry["counted"], entry["step"], entry["epoch"]) for entry in history if "counted" in entry]
    assert ours == [(step, step, pytest.approx(theirs[step])) for step in range(1, 9)]
    assert loop.host_trainer.state.global_step == 8 and loop.host_trainer.state.epoch == 2
    rows = read_metrics(Path("runs") / loop.control.run_id)
    assert [row["step"] for row in rows if "grad_norm" in row] == list(range(1, 9))


def test_metrics_reach_ignites_metrics() -> None:
    """What a hook logs is among the metrics of the engine."""
    assert Loop("ignite", hooks=[Counter()]).run().engine.state.metrics["counted"] == 8


def test_ignite_needs_no_backward_of_ours() -> None:
    """Without `hl.backward` the loss is what the engine's function returned; hooks of the backward pass are refused."""
    told, untold = Recorder(), Counter()
    Loop("ignite", hooks=[told]).run()
    loop = Loop("ignite", hooks=[untold], options={"tells_loss": False}).run()
    rows = read_metrics(Path("runs") / loop.control.run_id)
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(told.losses)

    class Backward(TrainingHook):
        def on_after_backward(self) -> None: ...

    with pytest.raises(RegistrationError, match=re.escape("Call `hl.backward(loss)` in the function of your engine")):
        Loop("ignite", hooks=[Backward()], options={"tells_loss": False}).run()


def test_ignite_reads_each_loss_where_it_is_told() -> None:
    """A function may call `hl.backward` in some iterations, and only return the loss in others."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    returned = []

    def update(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        hl.backward(loss) if engine.state.iteration % 2 else loss.backward()
        optimizer.step()
        returned.append(loss.item())
        return returned[-1]

    engine = Engine(update)
    hl = hookline.ignite.attach(engine, model, optimizer)
    engine.run(make_batches())
    rows = read_metrics(Path("runs") / hl.run.run_id)
    assert [row["train/loss"] for row in rows] == pytest.approx(returned) and len(returned) == 4


# ---- versions and misuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "minimum", "old"),
    [
        ("lightning", (2, 6), "2.5.3"),
        ("transformers", (5, 0), "4.57.1"),
        ("pytorch-ignite", (0, 5), "0.4.13"),
        ("accelerate", (1, 15), "1.14.0"),
    ],
)
def test_an_older_host_is_refused(
    package: str, minimum: tuple[int, int], old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the installed version and what to install."""
    versions.check_version(package, minimum)
    monkeypatch.setattr(versions, "version", lambda name: old)
    words = ".".join(map(str, minimum))
    message = f"hooks need {package} {words} or newer, and {old} is installed: pip install '{package}>={words}'"
    with pytest.raises(HooklineError, match=re.escape(message)):
        versions.check_version(package, minimum)


def test_attach_asks_for_the_version_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an Accelerator is passed, and only then."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(versions, "version", lambda name: "1.14.0")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(HooklineError, match=re.escape("hooks need accelerate 1.15 or newer, and 1.14.0 is installed")):
        hookline.attach(model, optimizer, accelerator=accelerator)
    hookline.attach(model, optimizer)


def test_a_host_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(HooklineError, match=r"package lightning is not installed: pip install 'lightning>=2\.6'"):
        versions.check_version("lightning", (2, 6))


def test_misuse_is_one_clear_error() -> None:
    """What is not an engine, and a callback that no Trainer calls."""
    with pytest.raises(HooklineError, match=r"ignite\.attach: expected an Engine first, got Net"):
        hookline.ignite.attach(Net(), None, None)
    with pytest.raises(HooklineError, match=r"pass callbacks=\[…\] to a transformers.Trainer"):
        hookline.transformers.Hooks().on_init_end(None, None, None)
    with pytest.raises(HooklineError, match="no training by Lightning is in progress"):
        hookline.lightning.Hooks().attached  # noqa: B018 - it raises
    with pytest.raises(HooklineError, match=r"config: .*\(hooks go into `hooks=\[…\]`\), got list"):
        hookline.transformers.Hooks(["ema"])  # where it is written, not when the training begins


def test_validating_alone_begins_no_run() -> None:
    """The callback is quiet in `validate` and `evaluate` outside of training."""
    callback = hookline.lightning.Hooks(hooks=[Recorder()])

    class Module(lightning.LightningModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "enable_model_summary": False}
    lightning.Trainer(callbacks=[callback], **options).validate(Module(), [torch.ones(1)], verbose=False)
    assert not Path("runs").exists() and callback.state_dict() == {}
