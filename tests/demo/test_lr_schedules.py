"""The learning-rate schedules are exact where they can be."""

from itertools import pairwise

import pytest
import torch

from hookline import HooklineError, trainer_from_config
from hookline.demo.lr_schedules import warmup_cosine


def optimizer_at(lr: float) -> torch.optim.Optimizer:
    """An optimizer over one parameter that has a gradient, so that stepping it is legal."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter], lr=lr)


def rates(warmup_steps: int, total_steps: int, count: int, final: float = 0.1) -> list[float]:
    """The rate that each of the first `count` optimizer steps uses, at a full rate of 1."""
    optimizer = optimizer_at(1.0)
    scheduler = warmup_cosine(optimizer, warmup_steps, total_steps, final)
    used = []
    for _ in range(count):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def test_warm_up_is_linear_and_reaches_the_full_rate() -> None:
    """Step n of four warm-up steps uses n quarters of the rate."""
    assert rates(4, 20, 4) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("final", [0.0, 0.1, 0.3, 1.0])
def test_last_step_uses_exactly_the_final_fraction(final: float) -> None:
    """The step numbered total_steps, and every later one, uses `final` of the rate to the last bit."""
    assert rates(3, 12, 15, final)[11:] == [final] * 4


def test_rate_falls_all_the_way_after_the_peak() -> None:
    """Between peak and end every step's rate is lower than the one before."""
    falling = rates(5, 50, 50)[4:]
    assert all(later < earlier for earlier, later in pairwise(falling))


def test_middle_of_the_cosine_is_half_way() -> None:
    """Half-way between peak and end the rate is the mean of the two."""
    assert rates(2, 12, 7, final=0.2)[6] == pytest.approx(0.6)


def test_no_warm_up_starts_at_the_full_rate() -> None:
    """With warmup_steps=0 the first step already uses the full rate."""
    assert rates(0, 10, 2)[0] == 1.0


def test_every_group_keeps_its_own_rate() -> None:
    """Groups with different rates are scaled by the same factor."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 8.0}]
    assert warmup_cosine(torch.optim.SGD(groups), 4, 8).get_last_lr() == [0.25, 2.0]


def test_a_resumed_schedule_continues() -> None:
    """A scheduler loaded from state_dict gives the rates that the first one would have given."""
    optimizer = optimizer_at(1.0)
    first = warmup_cosine(optimizer, 2, 10)
    for _ in range(5):
        optimizer.step()
        first.step()
    second = warmup_cosine(optimizer_at(1.0), 2, 10)
    second.load_state_dict(first.state_dict())
    for scheduler in (first, second):
        scheduler.optimizer.step()
        scheduler.step()
    assert second.get_last_lr() == first.get_last_lr() == [rates(2, 10, 7)[6]]


@pytest.mark.parametrize(
    ("warmup_steps", "total_steps", "final", "message"),
    [(10, 10, 0.1, "warmup_steps=10"), (-1, 10, 0.1, "warmup_steps=-1"), (1, 10, 1.5, "final=1.5")],
)
def test_impossible_schedules_are_refused(warmup_steps: int, total_steps: int, final: float, message: str) -> None:
    """A warm-up that fills the run, a negative one and a final fraction above 1 are named in the error."""
    with pytest.raises(HooklineError, match=message):
        warmup_cosine(optimizer_at(1.0), warmup_steps, total_steps, final)


def test_constant_keeps_the_learning_rate() -> None:
    """The learning rate never changes."""
    trainer = trainer_from_config(
        {
            "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1},
            "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60_000},
            "optimizer": {"name": "sgd", "lr": 0.3},
            "scheduler": "constant",
            "trainer": {"max_steps": 5, "record": False, "console": False},
        }
    )
    used: list[float] = []
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.train()
    assert used == [0.3] * 5
