"""The first loss or gradient that is not finite is found before it reaches the weights."""

from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import Batch, make_batches
from torch import nn

from hookline import NanForensics, Trainer, replay_crash
from hookline.record import read_events
from hookline.record.outcome import Outcome


class Root(nn.Module):
    """Finite, but its slope is not where its input is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x.clamp(min=0))


def make_layers(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), middle or nn.ReLU(), nn.Linear(3, 1))


def batches_with_nan(bad: int) -> list[Batch]:
    """Make eight batches, one of which contains a NaN."""
    batches = make_batches(8)
    batches[bad][0][0, 0] = float("nan")
    return batches


OPTIONS = {"model": make_layers, "data": make_batches(8), "lr": 0.01, "record": True}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


def finite(trainer: Trainer) -> bool:
    return all(bool(torch.isfinite(param).all()) for param in trainer.model.parameters())


@pytest.mark.req("002-06", "002-78")
def test_a_bad_loss_ends_the_run_with_good_weights() -> None:
    """The module is named and recorded, and the step is skipped, so the weights are those of the step before."""
    trainer = make_trainer(hook := NanForensics(), data=batches_with_nan(4))
    state = trainer.train()
    assert (trainer.step, state["status"], trainer.skipped_steps) == (5, "completed", 1)
    assert finite(trainer)
    assert hook.autopsy.batch == ("batch[0]",) and hook.autopsy.module == "0"
    assert hook.crash == trainer.run_dir / "crashes" / "step-00000005"
    assert trainer.stopped_by == "nan_forensics" and "the batch itself is not finite" in str(trainer.stop_reason)
    events = {event["kind"]: event for event in read_events(trainer.run_dir)}
    assert events["crash"]["path"] == str(hook.crash) and events["crash"]["step"] == 5


def test_replaying_the_crash_reproduces_the_nan() -> None:
    """In a new trainer that is built like the one that crashed."""
    train(hook := NanForensics(), data=batches_with_nan(4))
    replay = replay_crash(hook.crash, make_trainer())
    assert replay.same and replay.now.batch == ("batch[0]",)


def test_bad_gradients_of_a_good_loss_are_found() -> None:
    """Before the optimizer uses them, with the module whose backward made them."""
    trainer = train(hook := NanForensics(), model=make_layers(Root()))
    assert trainer.step == 1
    assert (hook.autopsy.backward_module, hook.autopsy.gradients) == ("2", ("0.weight", "0.bias"))
    assert hook.autopsy.operation is not None
    assert finite(trainer)
    assert replay_crash(hook.crash, trainer).same


def test_without_stop_the_run_continues() -> None:
    """One crash is written, and nothing more is checked."""
    trainer = train(NanForensics(stop_run=False), data=batches_with_nan(2))
    assert trainer.step == 8 and not finite(trainer)
    assert len(list(Path("runs").rglob("crash.json"))) == 1


def test_the_micro_batch_of_a_window_is_found() -> None:
    """Under accumulation the crash holds the batch that was bad, not the last one of its window."""
    trainer = train(hook := NanForensics(), data=batches_with_nan(5), accumulate=4)
    assert trainer.step == 2
    assert replay_crash(hook.crash, trainer).then["batch_idx"] == 5
    assert finite(trainer)


@pytest.mark.parametrize("bad", [4, 5])
def test_the_micro_batch_whose_gradients_are_bad_is_found(bad: int) -> None:
    """Each of a window is run again until one goes wrong by itself, first or last."""
    options = {"accumulate": 2, "loss_fn": lambda out, y: (out * y).pow(2).sum().sqrt()}
    data = make_batches(8)
    data[bad][1].zero_()
    trainer = train(hook := NanForensics(), data=data, **options)
    assert trainer.step == 3
    assert hook.autopsy.loss == 0 and hook.autopsy.gradients
    replay = replay_crash(hook.crash, trainer)
    assert replay.same and replay.then["batch_idx"] == bad


def test_batches_of_other_steps_are_released() -> None:
    """On a schedule by batches, and after a run that failed: no batch of another step is blamed or held."""
    trainer, hook = make_trainer(accumulate=2), NanForensics()
    trainer.add_hook(hook, every="3 batches")
    held: list[list[int]] = []
    trainer.on("train_batch_start", name="witness", after="nan_forensics")(
        lambda: held.append([recorded.batch_idx for recorded in hook._recorded])
    )
    trainer.train()
    assert held == [[], [], [2], [2], [], [5], [], []]
    trainer = make_trainer(hook, accumulate=2)
    trainer.on("before_backward", name="bomb", on_error="raise", at=2)(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hook._recorded == [] and hook.crash is None


def test_a_run_without_a_record_keeps_its_crash_elsewhere() -> None:
    """The folder is in a temporary directory, and the hook says where."""
    train(hook := NanForensics(state=False), data=batches_with_nan(0), record=False)
    assert hook.crash is not None and (hook.crash / "crash.json").exists()


def test_large_but_finite_gradients_are_not_reported() -> None:
    """A norm that overflows is not taken for a gradient that did."""
    train(hook := NanForensics(), loss_fn=lambda out, y: (out * 1e30).sum(), max_steps=1)
    assert hook.crash is None


def test_a_healthy_run_is_the_same_with_and_without() -> None:
    """Bit for bit, random streams included, dropout in the model."""
    results = []
    for hooks in (None, [NanForensics()]):
        trainer = make_trainer(hooks=hooks, max_epochs=2)
        torch.manual_seed(3)
        trainer.train()
        results.append([*trainer.model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_under_a_grad_scaler_gradients_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-finite gradients are normal there, and the scaler skips the step."""
    trainer = make_trainer(hook := NanForensics(), model=make_layers(Root()), max_steps=1)
    monkeypatch.setattr(type(trainer), "uses_grad_scaler", True)
    trainer.train()
    assert not finite(trainer) and hook.crash is None


@pytest.mark.parametrize("what", ["diagnose", "write_crash"])
@pytest.mark.hooks_fail(raises=OSError)
def test_a_failing_examination_still_ends_the_run_with_good_weights(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook's failure is reported as any hook's, and the bad step is skipped all the same."""

    def fails(*arguments: Any, **more: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(f"hookline.hooks.nan_forensics.hook.{what}", fails)
    trainer = train(NanForensics(), data=batches_with_nan(2))
    assert (trainer.step, trainer.stopped_by) == (3, "nan_forensics") and finite(trainer)
    assert trainer.hooks.entry("nan_forensics").failures.total == 1
    assert ("the examination failed" in str(trainer.stop_reason)) == (what == "diagnose")


def test_a_trial_run_reports_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even into a temporary directory; the run ends all the same."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    trainer = train(hook := NanForensics(), data=batches_with_nan(0), fast_dev_run=2)
    assert trainer.stopped_by == "nan_forensics" and trainer.step == 1
    assert hook.crash is None and hook.autopsy.batch == ("batch[0]",)
    assert "step 1: loss nan; the batch itself is not finite in batch[0]" in caplog.text
    assert "non_finite" in [event["kind"] for event in trainer.record.events]
    assert list((tmp_path / "temporary").iterdir()) == [] and not Path("runs").exists()


# ---- models that write into their input ------------------------------------------------------------------------------


class Counting(nn.Module):
    """Adds 1 to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.add_(1.0))


def test_the_run_s_batches_are_written_to_once() -> None:
    """Two epochs add 2 to every batch, also to the one that was run again because its loss was NaN."""
    model, batches = Counting(), [(torch.zeros(4, 2), torch.zeros(4, 1)) for _ in range(3)]
    batches[1][0][0, 0] = float("nan")
    trainer = builders.train(NanForensics(stop_run=False), model=model, data=batches, max_epochs=2)
    assert trainer.hooks.get("nan_forensics").autopsy.batch == ("batch[0]",)
    assert all(torch.equal(x[1:], torch.full((3, 2), 2.0)) for x, _ in batches)


def test_a_run_that_it_stops_has_not_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Its outcome is non_finite, and the command exits with 3; its weights are the last good ones."""
    trainer = make_trainer(data=batches_with_nan(4), console=True)
    trainer.add_hook("nan_forensics")
    trainer.train()
    assert trainer.record.run["outcome"] == "non_finite" and finite(trainer)
    assert Outcome(trainer.record.run["outcome"]).exit_code == 3
    verdict, closing = capsys.readouterr().out.splitlines()[-3:-1]
    assert verdict.startswith("broken: step 5: nan_forensics: loss nan: ") and verdict.count("loss nan") == 1
    assert closing.startswith("stopped at a non-finite loss or gradient (by nan_forensics): 5 steps in ")
