"""Runs that continue beyond the end that their learning-rate schedule was made for."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from transformers import get_cosine_schedule_with_warmup

from hookline import SimpleTrainer, read_metrics
from hookline.demo.lr_schedules import warmup_cosine
from hookline.errors import CheckpointError

Make = Callable[[Any, int], Any]


def sequential(optimizer: Any, steps: int) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, steps - 2)]
    return SequentialLR(optimizer, parts, [2])


def chained(optimizer: Any, steps: int) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, steps)], optimizer)


SCHEDULES: dict[str, Make] = {
    "CosineAnnealingLR": CosineAnnealingLR,
    "OneCycleLR": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps),
    "PolynomialLR": PolynomialLR,
    "LinearLR": lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "LambdaLR": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / (2 * steps)),
    "warmup_cosine": lambda optimizer, steps: warmup_cosine(optimizer, 2, steps),
    "StepLR": lambda optimizer, steps: StepLR(optimizer, steps // 2),
    "Transformers": lambda optimizer, steps: get_cosine_schedule_with_warmup(optimizer, 2, steps),
}
ENDS = {"CosineAnnealingLR": "T_max", "SequentialLR": "T_max", "ChainedScheduler": "T_max"}
ENDS |= {"OneCycleLR": "total_steps", "PolynomialLR": "total_iters", "LinearLR": "total_iters"}
ENDS |= {"Transformers": "num_training_steps"}
ALL = pytest.mark.parametrize("name", SCHEDULES)


def trained(make: Make, steps: int, end: int, **options: Any) -> SimpleTrainer:
    """Train a number of steps, with a schedule that ends at a step, and save the last one."""
    trainer = make_trainer(
        scheduler=partial(lambda optimizer: make(optimizer, end)), data=make_batches(4), max_epochs=5, record=True
    )
    trainer.add_checkpointing(save_last=True, save_every_n_epochs=None)
    trainer.fit(max_steps=steps, **options)
    return trainer


def rates(trainer: SimpleTrainer) -> dict[int, float]:
    """Return the learning rate of each step of a run."""
    return {row["step"]: row["train/lr"] for row in read_metrics(trainer.run_dir) if "train/lr" in row}


@ALL
def test_an_end_that_is_made_anew_counts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The run continues on the schedule that a run of that length has, and says before its first step that it does."""
    whole = rates(trained(SCHEDULES[name], 12, 12))
    first = trained(SCHEDULES[name], 6, 6)
    caplog.clear()
    resumed = trained(SCHEDULES[name], 12, 12, resume=first.run_dir, fork=True)
    assert rates(resumed) == pytest.approx({step: whole[step] for step in range(7, 13)})
    (line,) = [line for line in caplog.messages if "the learning rate changes from" in line]
    assert "to keep its schedule, create it with" in line
    events = map(json.loads, (resumed.run_dir / "events.jsonl").read_text().splitlines())
    (event,) = [event for event in events if event["kind"] == "resume_not_exact"]
    assert (event["why"], event["step"]) == (line, 6)


@ALL
def test_the_same_schedule_resumes_exactly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit, and without a word."""
    whole = trained(SCHEDULES[name], 12, 12)
    first = trained(SCHEDULES[name], 5, 12)
    resumed = trained(SCHEDULES[name], 12, 12, resume=first.run_dir, fork=True)
    assert rates(resumed) == {step: rate for step, rate in rates(whole).items() if step > 5}
    assert all(map(torch.equal, whole.model.state_dict().values(), resumed.model.state_dict().values()))
    assert not [line for line in caplog.messages if "schedule" in line]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_that_continues_beyond_the_end_says_so(
    name: str, resumes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its first step, with what to pass; resumed, forked or as a second run of the trainer."""
    trainer = trained(SCHEDULES[name], 6, 6)
    assert not [line for line in caplog.messages if "schedule" in line]
    again = partial(trainer.fit, max_steps=12)
    if resumes:
        again = partial(trained, SCHEDULES[name], 12, 6, resume=trainer.run_dir)
    if name == "OneCycleLR":
        with pytest.raises(ValueError, match="Tried to step 7 times"):
            again()
    else:
        again()
    (line,) = [line for line in caplog.messages if "schedule" in line]
    then, now = (4, 10) if name == "SequentialLR" else (6, 12)
    kind = "LambdaLR" if ENDS[name] == "num_training_steps" else name
    assert line.startswith(f"the schedule of {kind} ({ENDS[name]}={then}) ends 6 steps before this run, and then ")
    assert line.endswith(f"; create it with {ENDS[name]}={now} and resume the run")


def test_a_schedule_that_cannot_be_there_is_refused() -> None:
    """A shorter OneCycleLR than what was trained."""
    first = trained(SCHEDULES["OneCycleLR"], 6, 12)
    with pytest.raises(
        CheckpointError, match=r"has total_steps=4, which was 12.*cannot continue at the checkpoint's position"
    ):
        trained(SCHEDULES["OneCycleLR"], 12, 4, resume=first.run_dir)


def test_a_warm_up_that_ends_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    """A run that resumes in its warm-up, or after it, is told nothing about it."""
    for steps in (1, 5):
        first = trained(sequential, steps, 12)
        trained(sequential, 12, 12, resume=first.run_dir, fork=True)
    warm_up = partial(LinearLR, start_factor=0.1)
    trained(lambda optimizer, _: warm_up(optimizer, total_iters=2), 12, 12).fit(max_steps=14)
    assert not [line for line in caplog.messages if "schedule" in line]


def test_a_new_setting_of_the_optimizer_counts(caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run trains with the rate and the decay that its optimizer is made with; what a hook has set stays."""

    def fit(steps: int, optimizer: Any, **options: Any) -> SimpleTrainer:
        trainer = make_trainer(data=make_batches(4), max_epochs=5, record=True, optimizer=optimizer)
        trainer.add_checkpointing(save_last=True, save_every_n_epochs=None)
        trainer.on("step_end", name="doubles", at=2)(lambda trainer: setattr(trainer, "lr", 2 * trainer.lr))
        trainer.fit(max_steps=steps, **options)
        return trainer

    first = fit(4, partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9)))
    caplog.clear()
    same = fit(6, partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9)), resume=first.run_dir, fork=True)
    assert same.lr == 0.2 and not [line for line in caplog.messages if "optimizer has" in line]
    other = fit(6, partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95)), resume=first.run_dir, fork=True)
    (group,) = other.optimizers[0].param_groups
    assert (group["lr"], group["betas"]) == (0.01, (0.8, 0.95))
    (line,) = [line for line in caplog.messages if "optimizer has" in line]
    assert "lr=0.01, which was 0.1 and betas=[0.8, 0.95], which was [0.8, 0.9]" in line


@ALL
def test_a_new_rate_moves_the_schedule(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The run continues on the curve of a run with that rate from its first step."""
    if name == "OneCycleLR":
        pytest.skip("its max_lr decides, not the rate of the optimizer")

    def fit(steps: int, lr: float, **options: Any) -> SimpleTrainer:
        trainer = make_trainer(
            scheduler=lambda optimizer: SCHEDULES[name](optimizer, 12), data=make_batches(4), max_epochs=5, lr=lr,
            record=True,
        )  # fmt: skip
        trainer.add_checkpointing(save_last=True, save_every_n_epochs=None)
        trainer.fit(max_steps=steps, **options)
        return trainer

    whole, first = rates(fit(12, 0.01)), fit(6, 0.1)
    caplog.clear()
    resumed = fit(12, 0.01, resume=first.run_dir, fork=True)
    assert rates(resumed) == pytest.approx({step: whole[step] for step in range(7, 13)})
    (line,) = [line for line in caplog.messages if "the learning rate changes from" in line]
    assert "the optimizer's lr=[0.01], which was [0.1]" in line
