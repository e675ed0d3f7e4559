"""NaN and infinity without any hook: the first bad loss is announced, and bad weights are an outcome of the run."""

import json
import math
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from small_config import config_with

from hookline import EarlyStopping, SimpleTrainer
from hookline.cli import main
from hookline.record import read_jsonl


def diverging_trainer(bad: int | None = 3, batches: int = 6, value: float = math.nan, **options: Any) -> SimpleTrainer:
    """Return a trainer; the batch of one step holds a number that is not finite."""
    data = make_batches(batches)
    if bad is not None:
        data[bad - 1][1][0] = value
    return make_trainer(model=make_model(3, 1), data=data, **options)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged about losses."""
    return [record.getMessage() for record in caplog.records if "the loss is" in record.getMessage()]


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf")])
def test_the_first_bad_loss_is_announced_once(caplog: pytest.LogCaptureFixture, value: float, shown: str) -> None:
    """With its step and what to do, even if nothing reads losses, and it is an event of the record."""
    trainer = diverging_trainer(3, value=value, max_epochs=3)
    trainer.train()
    remedy = 'to find the module it comes from: trainer.add_hook("nan_forensics")'
    assert warnings_of(caplog) == [f"step 3: the loss is {shown}; {remedy}"]
    events = [event for event in trainer.record.events if event["kind"] == "non_finite_loss"]
    assert [event["step"] for event in events] == [3]


@pytest.mark.parametrize(
    "options",
    [{}, {"record": True}, {"accumulate": 2}, {"loss_weight": "samples"}, {"accumulate": 3, "loss_weight": "samples"}],
    ids=str,
)
def test_it_is_announced_at_its_step(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU no later step begins before the announcement, with or without a record on disk."""
    trainer, seen = diverging_trainer(6, batches=40, **options), {}
    trainer.on("train_batch_start", name="looks")(lambda step: seen.setdefault(step, warnings_of(caplog)))
    trainer.train()
    bad = math.ceil(6 / options.get("accumulate", 1))
    assert seen[bad] == [] and seen[bad + 1][0].startswith(f"step {bad}: ")


def test_later_bad_losses_do_not_write_the_record() -> None:
    """Only the first is announced; a run that has diverged writes its record as often as any."""
    writes: list[int] = []

    class Counts:
        def write_metrics(self, rows: Any) -> None:
            writes.append(len(rows))

        def write_layers(self, rows: Any) -> None: ...
        def write_events(self, rows: Any) -> None: ...

    trainer = diverging_trainer(bad=None, batches=40)
    trainer.on("train_start", name="sink")(lambda: trainer.record.add_sink(Counts()) and None)
    trainer.step_fn = lambda model, batch: model(batch[0]).sum() * math.nan
    trainer.train()
    assert sum(writes) >= 40 and len(writes) < 20


class Elsewhere(torch.Tensor):
    """A loss that says that it is on a device whose values take time to arrive."""

    @property
    def is_cpu(self) -> bool:
        """No."""
        return False


@pytest.mark.parametrize("accumulate", [1, 2])
def test_slow_steps_on_a_device_are_announced_by_the_clock(
    accumulate: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads such a loss, but the record is written every two seconds: with steps of a second, every other."""

    def step_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1]).as_subclass(Elsewhere)

    trainer, seen = diverging_trainer(6, batches=40, step_fn=step_fn, accumulate=accumulate), {}
    for module in ("step", "step_log"):
        monkeypatch.setattr(f"hookline.run.{module}.time", lambda: float(trainer.step))
    trainer.on("train_batch_start", name="looks")(lambda step: seen.setdefault(step, warnings_of(caplog)))
    trainer.train()
    bad = 6 // accumulate
    assert seen[bad] == [] and seen[bad + 2][0].startswith(f"step {bad}: ")


def test_a_loss_that_arrives_later_has_no_batch_in_its_event() -> None:
    """Training is at another batch by then; a loss that is read at its step has the number of its batch."""

    def step_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1]).as_subclass(Elsewhere)

    for options, batch_idx in (({}, 2), ({"step_fn": step_fn}, None)):
        trainer = diverging_trainer(3, **options)
        trainer.train()
        (event,) = [event for event in trainer.record.events if event["kind"] == "non_finite_loss"]
        assert (event["step"], event["batch_idx"]) == (3, batch_idx)


def test_the_first_one_is_named_even_if_a_later_one_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that reads every fifth loss does not make step 5 the first."""
    trainer = diverging_trainer(3)
    trainer.on("train_batch_end", at=5, name="reads")(lambda loss: None)
    trainer.train()
    assert warnings_of(caplog)[0].startswith("step 3: ")


def test_hooks_that_investigate_say_it_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """With `nan_forensics` there is no advice to add it."""
    trainer = diverging_trainer(3)
    trainer.add_hook("nan_forensics")
    trainer.train()
    assert warnings_of(caplog) == []
    assert trainer.record.run["outcome"] == "non_finite"
    assert all(param.isfinite().all() for param in trainer.model.parameters())  # the step was skipped


def test_every_run_announces_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """A second run of a trainer warns again; a run with finite losses says nothing."""
    trainer = diverging_trainer(2, max_epochs=1)
    trainer.train()
    trainer.fit(max_epochs=2)
    assert len(warnings_of(caplog)) == 2
    caplog.clear()
    diverging_trainer(None).train()
    assert warnings_of(caplog) == []


def test_bad_weights_are_an_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    """run.json, the closing line and the reason in on_train_end name the parameters; checkpoints remain."""
    reasons: list[str] = []
    trainer = diverging_trainer(3, console=True, record=True)
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.on("train_end", name="ends")(lambda reason: reasons.append(reason))
    trainer.train()
    run = json.loads((trainer.run_dir / "run.json").read_text(encoding="utf-8"))
    expected = "2 of 2 parameters are not finite, first '0.weight'"
    assert (run["outcome"], run["reason"], reasons) == ("non_finite", expected, [expected])
    assert f"non-finite weights ({expected}): 6 steps in " in capsys.readouterr().out
    assert read_jsonl(trainer.run_dir / "events.jsonl")[0][-1]["kind"] == "non_finite_weights"
    good = diverging_trainer(None, record=True)
    good.fit(resume=trainer.checkpoint_dir / "step-00000002")
    assert good.record.run["outcome"] == "completed"


def test_a_run_that_fails_with_bad_weights_has_failed() -> None:
    """Its exception is the reason, whatever the weights are by then."""
    trainer, reasons = diverging_trainer(), list[str]()
    trainer.on("train_end", name="reason")(lambda reason: reasons.append(reason))

    @trainer.on("step_end", at=5, on_error="raise")
    def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert trainer.record.run["outcome"] == "failed" and reasons[0].startswith("RuntimeError: no more")


def test_a_stopped_run_says_both() -> None:
    """The reason has the bad weights and the hook that stopped the run."""
    trainer = diverging_trainer(3)
    trainer.add_hook(EarlyStopping(monitor="train/loss", check_every_n_steps=1))
    trainer.train()
    assert trainer.record.run["outcome"] == "non_finite"
    assert "not finite, first '0.weight'; stopped by early_stopping: train/loss is nan" in trainer.record.run["reason"]


def test_the_bad_losses_of_an_epoch_that_does_not_end_are_counted() -> None:
    """They are counted when an epoch ends, and when the run does."""
    trainer = diverging_trainer(2)
    trainer.on("step_end", at=4)(lambda trainer: trainer.request_stop("enough"))
    trainer.train()
    assert trainer.non_finite_losses == 3  # the weights are bad, too
    assert [event["count"] for event in trainer.record.events if event["kind"] == "non_finite_losses"] == [3]


def test_weights_that_a_hook_restores_are_good() -> None:
    """What counts is how the weights are after on_train_end."""
    trainer = diverging_trainer(3)
    best = EarlyStopping(monitor="train/loss", check_every_n_steps=1, restore_best_weights=True)
    trainer.add_hook(best)
    trainer.train()
    assert trainer.record.run["outcome"] == "stopped"
    assert all(param.isfinite().all() for param in trainer.model.parameters())


def test_the_command_has_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`hookline train` exits with 3, and the command it names investigates: it ends before the weights are bad."""
    Path("bad.yaml").write_text(config_with("{name: checkpoint, save_every_n_steps: 1}"), encoding="utf-8")
    words = ["train", "bad.yaml", "optimizer.lr=1e30", "trainer.max_steps=5"]
    assert main(words) == 3
    out, error = capsys.readouterr()
    assert "hookline: error: the run ended with non-finite weights: " in error
    run = Path(out.splitlines()[-1])
    command = "hookline train bad.yaml optimizer.lr=1e30 trainer.max_steps=5 --hook nan_forensics"
    assert warnings_of(caplog) == [f"step 2: the loss is nan; to find the module it comes from: {command}"]
    caplog.clear()
    capsys.readouterr()
    assert main(command.split()[1:]) == 3
    assert "hookline: error: the run was stopped by nan_forensics: loss nan" in capsys.readouterr().err
    assert any("the first bad output came from " in record.getMessage() for record in caplog.records)
    caplog.clear()
    assert main(["resume", str(run), "trainer.max_steps=6"]) == 3
    again = f"hookline train {run}/config.yaml --hook nan_forensics trainer.max_steps=6"
    assert warnings_of(caplog) == [f"step 6: the loss is nan; to find the module it comes from: {again}"]


def test_a_loss_that_another_thread_reads_is_reported_by_the_record() -> None:
    """A kept context may be read anywhere; no row of the loop is lost by it, and the loss is announced once."""
    kept: list[Any] = []
    trainer = diverging_trainer(bad=2)

    @trainer.on("step_end", name="keep")
    def keep(ctx: Any) -> None:
        kept.append(ctx)
        reader = Thread(target=lambda: ctx.loss)
        reader.start()
        reader.join()

    trainer.train()
    assert [math.isnan(ctx.loss) for ctx in kept] == [False] + [True] * 5  # the weights are NaN after step 2
    events = [event for event in trainer.record.events if event["kind"] == "non_finite_loss"]
    assert len(events) == 1
    losses = [row["step"] for row in trainer.record.metrics if "train/loss" in row]
    assert losses == [ctx.step for ctx in kept]
