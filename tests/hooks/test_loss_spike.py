"""Losses far above the others are reported, and ordinary noise is not."""

import random
from typing import Any

import pytest
import torch
from builders import train
from run_control import PlainRun

from hookline import LossSpike
from hookline.errors import ConfigError


def feed(hook: LossSpike, losses: list[float]) -> PlainRun:
    """Give a hook one loss per step."""
    run = PlainRun()
    for step, loss in enumerate(losses, 1):
        hook.on_step_end(run, step, loss, step - 1, "train")
    return run


def noise(count: int, level: float = 2.0) -> list[float]:
    """A falling, noisy loss."""
    drawn = random.Random(0)
    return [level - 0.002 * step + drawn.gauss(0, 0.05) for step in range(count)]


def test_a_spike_is_found_with_its_batch() -> None:
    """Step, loss, how far it is above the others, and where the batch came from."""
    losses = noise(60)
    losses[45] = 9.0
    hook = LossSpike()
    run = feed(hook, losses)
    assert [(spike.step, spike.loss, spike.batch_idx) for spike in hook.spikes] == [(46, 9.0, 45)]
    assert hook.spikes[0].spreads > 50
    assert [(note["kind"], note["loss"]) for note in run.notes] == [("loss_spike", 9.0)]
    assert run.stop_reason is None


def test_noise_is_not_reported() -> None:
    """Neither over a thousand noisy steps, nor where the loss hardly moves, nor where it falls at once."""
    for losses in (noise(1000), [1.0] * 50 + [1.0001] * 50, [5.0] * 50 + [0.1] * 50):
        hook = LossSpike()
        feed(hook, losses)
        assert hook.spikes == []


def test_spikes_do_not_hide_the_next_one() -> None:
    """The median and the spread are not moved by the spikes before."""
    losses = noise(60)
    for place in (40, 42, 44):
        losses[place] = 8.0
    hook = LossSpike()
    feed(hook, losses)
    assert [spike.step for spike in hook.spikes] == [41, 43, 45]


def test_a_new_level_becomes_ordinary() -> None:
    """A loss that jumps and stays is reported at first, and is then compared with."""
    hook = LossSpike(window=20, warmup=10)
    feed(hook, noise(40) + noise(40, level=6.0))
    assert 1 <= len(hook.spikes) <= 12


def test_nothing_is_judged_before_the_warmup_and_nan_is_ignored() -> None:
    """Early losses vary, and a NaN would make the median NaN."""
    hook = LossSpike(warmup=20)
    feed(hook, [2.0, 50.0, float("nan"), *[2.0] * 10, 60.0])
    assert hook.spikes == []
    feed(hook, [2.0] * 10 + [float("inf"), 70.0])
    assert [spike.loss for spike in hook.spikes] == [70.0]


def test_it_can_end_the_run_and_its_losses_are_saved() -> None:
    """The checkpoint has the losses that the next ones are compared with."""
    batches = [(torch.ones(2, 3), torch.ones(2, 1) * (100 if number == 30 else 1)) for number in range(40)]
    trainer = train(hook := LossSpike(stop_run=True), data=batches, lr=1e-4)
    assert trainer.step == 31 and trainer.stopped_by == "loss_spike"
    reason = str(trainer.stop_reason)
    assert "spreads above the median" in reason and "(batch 30 of 'train')" in reason
    again = LossSpike()
    again.load_state_dict(hook.state_dict())
    assert again.state_dict() == hook.state_dict()
    assert again.spikes == hook.spikes


@pytest.mark.parametrize(
    "parameters",
    [
        {"warmup": 1},
        {"warmup": 200},
        {"factor": 0},
        {"factor": "8"},
        {"window": 50.5},
        {"factor": float("inf")},
        {"stop_run": "no"},
    ],
    ids=str,
)
def test_invalid_parameters_are_rejected(parameters: dict[str, Any]) -> None:
    """Such as a window that is never full, or a factor that everything exceeds."""
    with pytest.raises(ConfigError):
        LossSpike(**parameters)


def test_under_accumulation_the_worst_micro_batch_is_named() -> None:
    """Of the loader that it came from, not the last one of the step."""
    usual = [torch.tensor(1.0 + 0.01 * (index % 3)) for index in range(40)]
    odd = [*usual[:30], torch.tensor(50.0), *usual[31:]]
    train(
        hook := LossSpike(warmup=5), data={"a": odd, "b": usual}, loader_schedule="round_robin", accumulate=2,
        loss_fn=None, step_fn=lambda model, batch: model(torch.zeros(1, 3)).sum() * 0 + float(batch),
    )  # fmt: skip
    assert [(spike.batch_idx, spike.dataloader_name) for spike in hook.spikes] == [(60, "a")]
