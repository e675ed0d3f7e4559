"""Throughput is computed correctly, according to a clock that the test controls."""

import time
from typing import Any

import builders
import pytest
import torch
from builders import make_batches, make_model, make_trainer
from run_control import PlainRun, train
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline import ThroughputMonitor, Trainer, TrainingHook
from hookline.errors import ConfigError
from hookline.hooks.console import times
from hookline.runs.step_parts import STEP_PARTS

PREFIX = "throughput/"


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monitor's clock."""
    made = Clock()
    monkeypatch.setattr(times, "perf_counter", made)
    return made


class SlowData(Dataset[Any]):
    """Batches each of which takes a second to load."""

    def __init__(self, clock: Clock, batches: list[Any]) -> None:
        self.clock, self.batches = clock, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        self.clock.passes(1.0)
        return self.batches[index]


def trained(clock: Clock, monitor: ThroughputMonitor, batches: list[Any], **options: Any) -> Trainer:
    """A run in which a forward pass takes three seconds and a validation a hundred."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        clock.passes(3.0 if model.training else 100.0)
        return model(batch).mean()

    options = {"model": nn.Embedding(5, 1), "sanity_batches": 0, "loss_fn": None, "step_fn": step, **options}
    every = options.pop("every", None)
    trainer = make_trainer(data=DataLoader(SlowData(clock, batches), batch_size=None), **options)
    trainer.add_hook(monitor, every=every)
    trainer.train()
    return trainer


class FunctionHooks(TrainingHook):
    """A user's hook that has these functions for events."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)


def reports(trainer: Any) -> dict[int, dict[str, float]]:
    """Return what was reported, by step."""
    measured: dict[int, dict[str, float]] = {}
    for line in trainer.record.metrics:
        values = {key[len(PREFIX) :]: value for key, value in line.items() if key.startswith(PREFIX)}
        if values:
            measured[line["step"]] = values
    return measured


def tokens(rows: int = 2, columns: int = 8) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.long)


def test_rates_and_the_wait_for_data(clock: Clock) -> None:
    """Four seconds a step, one of them spent waiting for data; two rows and 16 tokens a step."""
    trainer = trained(clock, ThroughputMonitor(log_every_n_steps=5), [tokens()] * 13)
    measured = reports(trainer)
    assert list(measured) == [5, 10, 13]
    for step in measured:  # also of the first window and of the last, which is shorter
        assert {"step_seconds", *(f"{part}_seconds" for part in STEP_PARTS)} <= measured[step].keys()
        assert measured[step].pop("hooks_seconds") >= 0  # by the real clock
        assert measured[step] == pytest.approx(
            {
                "step_seconds": 4.0,
                "steps_per_s": 0.25,
                "samples_per_s": 0.5,
                "tokens_per_s": 4.0,
                "data_wait_seconds": 1.0,
                "data_wait_share": 0.25,
                "forward_backward_seconds": 3.0,
                "optimizer_seconds": 0.0,
            }
        )


@pytest.mark.parametrize(("steps", "reported"), [(12, [5, 10]), (13, [5, 10, 13]), (2, [2])], ids=str)
def test_few_steps_at_the_end_are_not_reported(steps: int, reported: list[int], clock: Clock) -> None:
    """Their mean would look like a change of speed; a short run has its own."""
    assert list(reports(trained(clock, ThroughputMonitor(log_every_n_steps=5), [tokens()] * steps))) == reported


@pytest.mark.parametrize("every", [None, 3])
def test_where_the_time_of_a_step_goes(clock: Clock, every: int | None) -> None:
    """Per step: the wait for its batches, their forward and backward passes, and the steps of all optimizers."""

    def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
        clock.passes(2.0)
        optimizer.step()

    options = {"optimizer_step": step_optimizer, "accumulate": 2, "every": every}
    slow = FunctionHooks(on_step_end=lambda: clock.passes(5.0))
    measured = reports(trained(clock, ThroughputMonitor(4), [tokens()] * 24, hooks=[slow], **options))
    for values in list(measured.values())[:-1]:
        assert values["step_seconds"] == pytest.approx(15.0)
        assert values["data_wait_seconds"] == pytest.approx(2.0)
        assert values["forward_backward_seconds"] == pytest.approx(6.0)
        assert values["optimizer_seconds"] == pytest.approx(2.0)


def test_the_steps_of_several_optimizers_are_one_part_of_a_step(clock: Clock) -> None:
    """The time of a step's optimizers is added up; it is not the mean of theirs."""

    def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
        clock.passes(2.0)
        optimizer.step()

    model = make_model()
    optimizers = [torch.optim.SGD(model[place].parameters(), 0.1) for place in (0, 2)]
    trainer = make_trainer(ThroughputMonitor(2), model=model, optimizer=optimizers, optimizer_step=step_optimizer)
    trainer.train()
    assert [values["optimizer_seconds"] for values in reports(trainer).values()] == [4.0, 4.0]


def test_the_time_of_hooks_is_measured() -> None:
    """Every call of each; a hook that sleeps at every step takes at least that long per step."""
    slow = FunctionHooks(on_train_batch_end=lambda: time.sleep(0.001))
    trainer = builders.train(slow, ThroughputMonitor(60), data=make_batches(60))
    assert reports(trainer)[60]["hooks_seconds"] >= 0.001


@pytest.mark.parametrize("steps", [3, 10])
def test_the_steps_that_are_left_are_reported_at_the_end(clock: Clock, steps: int) -> None:
    """A run shorter than a window, or just as long, has its report, with every step and token in it."""
    measured = reports(trained(clock, ThroughputMonitor(10), [tokens()] * steps))
    seconds = 4.0 * steps - 1  # there is no wait after the last batch
    assert list(measured) == [steps]
    assert measured[steps]["step_seconds"] == pytest.approx(seconds / steps)
    assert measured[steps]["tokens_per_s"] == pytest.approx(16 * steps / seconds)
    assert measured[steps]["samples_per_s"] == pytest.approx(2 * steps / seconds)


def test_hooks_do_not_count_as_wait_for_data(clock: Clock) -> None:
    """What other hooks do when a step is over makes it longer, and nothing else."""
    slow = FunctionHooks(on_step_end=lambda: clock.passes(7.0), on_train_batch_end=lambda: clock.passes(5.0))
    measured = reports(trained(clock, ThroughputMonitor(5), [tokens()] * 11, hooks=[slow]))
    assert measured[10]["data_wait_seconds"] == pytest.approx(1.0)
    assert measured[10]["step_seconds"] == pytest.approx(16.0)


@pytest.mark.parametrize("validates", [True, False])
def test_the_time_between_epochs_is_excluded(clock: Clock, validates: bool) -> None:
    """With a validation before it or without: neither slow hooks there nor what comes after them count."""
    slow = FunctionHooks(on_epoch_end=lambda: clock.passes(50.0), on_epoch_start=lambda: clock.passes(20.0))
    more = {"val_dataloader": [tokens()]} if validates else {}
    trainer = trained(clock, ThroughputMonitor(4), [tokens()] * 3, max_epochs=4, hooks=[slow], **more)
    measured = reports(trainer)
    assert list(measured) == [4, 8, 12] and measured[8]["step_seconds"] == pytest.approx(4.0)
    assert measured[8]["data_wait_seconds"] == pytest.approx(1.0)


def test_accumulation_counts_steps(clock: Clock) -> None:
    """Two micro-batches are one step, of eight seconds."""
    measured = reports(trained(clock, ThroughputMonitor(2), [tokens()] * 12, accumulate=2))
    assert list(measured) == [2, 4, 6]
    assert measured[4]["step_seconds"] == pytest.approx(8.0) and measured[4]["samples_per_s"] == pytest.approx(0.5)
    assert measured[4]["data_wait_seconds"] == pytest.approx(2.0)


def test_validation_is_excluded(clock: Clock) -> None:
    """A validation of a hundred seconds does not count as step time or as wait for data."""
    trainer = trained(clock, ThroughputMonitor(4), [tokens()] * 9, val_dataloader=[tokens()], validate_every=3)
    values = reports(trainer)[8]
    assert values["step_seconds"] == pytest.approx(4.0) and values["data_wait_seconds"] < 1.01


def test_flops(clock: Clock) -> None:
    """With the model's FLOPs it reports what is achieved, and with the device's peak the share of it."""
    measured = reports(trained(clock, ThroughputMonitor(2, flops_per_token=1e12, peak_flops=16e12), [tokens()] * 3))
    assert measured[2]["tflops"] == pytest.approx(4.0 * 16 / 16, rel=0.2)
    assert measured[2]["mfu"] == pytest.approx(measured[2]["tflops"] / 16)
    samples = reports(trained(clock, ThroughputMonitor(2, flops_per_sample=2e12), [tokens()] * 3))[2]
    assert samples["tflops"] == pytest.approx(2 * samples["samples_per_s"]) and "mfu" not in samples


def test_on_a_schedule_rates_are_right(clock: Clock) -> None:
    """Called at every fifth step only, it still knows how long steps take and how many rows they have."""
    measured = reports(trained(clock, ThroughputMonitor(1), [tokens()] * 21, every=5))
    assert measured[14]["step_seconds"] == pytest.approx(4.0) and measured[14]["samples_per_s"] == pytest.approx(0.5)
    assert list(measured) == [9, 14, 19, 21]  # the step after the last one that was due is reported, too


@pytest.mark.parametrize("every", [5, "10 batches", "3 batches", "40 tokens"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_on_a_schedule_the_wait_for_data_is_known(clock: Clock, every: int | str, accumulate: int) -> None:
    """The batch before a due one need not be due for that; a step waits for all its batches."""
    measured = reports(trained(clock, ThroughputMonitor(1), [tokens()] * 80, every=every, accumulate=accumulate))
    assert len(measured) > 3
    for values in list(measured.values())[:-2]:  # a run that accumulates reads ahead: its last batch is not waited for
        assert values["data_wait_share"] == pytest.approx(0.25)
        assert values["samples_per_s"] == pytest.approx(0.5)
        if accumulate == 1 or every == 5:  # else a window may begin in the middle of a step
            assert values["data_wait_seconds"] == pytest.approx(accumulate)


def test_time_while_disabled_does_not_count_as_wait_for_data(clock: Clock) -> None:
    """Steps that it did not see were not spent waiting."""

    def switch(trainer: Any, step: int) -> None:
        if step in (3, 8):
            (trainer.hooks.disable if step == 3 else trainer.hooks.enable)("throughput")

    measured = reports(trained(clock, ThroughputMonitor(2), [tokens()] * 14, hooks=[FunctionHooks(on_step_end=switch)]))
    assert max(values["data_wait_seconds"] for values in measured.values()) < 1.01


def test_on_a_schedule_validations_are_left_out_and_steps_are_not(clock: Clock) -> None:
    """Steps between the last due one and a validation count as training."""
    options = {"val_dataloader": [tokens()], "validate_every": 7, "every": 5}
    measured = reports(trained(clock, ThroughputMonitor(1), [tokens()] * 21, **options))
    assert [values["step_seconds"] for values in measured.values()] == pytest.approx([4.0] * 4)


def test_device_memory_and_utilisation_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Utilisation is asked for only once if the package for it is not installed."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**20)

    def utilization(device: Any) -> int:
        asked.append("utilisation")
        raise ModuleNotFoundError("pynvml")

    def figures() -> dict[str, float]:
        """What is recorded in step 2 about a run that says that it is on a GPU."""
        run = PlainRun()
        run.device = torch.device("cuda")
        run.hooks.register(ThroughputMonitor(1), on_error="raise")
        train(run, make_batches(3))
        prefix = f"{PREFIX}device_"
        return {name: value for (name, step), value in run.logged.items() if step == 2 and name.startswith(prefix)}

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    memory = {f"{PREFIX}device_memory_mb": 3.0, f"{PREFIX}device_memory_peak_mb": 5.0}
    assert figures() == memory and asked == ["utilisation"]
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    assert figures() == {**memory, f"{PREFIX}device_utilisation": 0.75}


def test_invalid_options_are_rejected() -> None:
    """The error names the parameter."""
    with pytest.raises(ConfigError, match="log_every_n_steps"):
        ThroughputMonitor(0)
    with pytest.raises(ConfigError, match="peak_flops: expected a finite number, at least 1"):
        ThroughputMonitor(peak_flops=0)


def test_a_monitor_starts_over_with_another_run(clock: Clock) -> None:
    """A run may start at the step at which the last one ended."""
    monitor = ThroughputMonitor(log_every_n_steps=1)
    trained(clock, monitor, [tokens()] * 2, accumulate=2, max_steps=1)
    measured = reports(trained(clock, monitor, [tokens()] * 8, accumulate=2))
    assert list(measured) == [1, 2, 3, 4]
    assert all(values["samples_per_s"] / values["steps_per_s"] == pytest.approx(4.0) for values in measured.values())
