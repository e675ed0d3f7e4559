"""The record has the learning rates, at the step that used them."""

from functools import partial
from typing import Any

import pytest
import torch
from builders import make_batches, train
from run_control import PlainRun
from torch import nn

from hookline import HooksConfig, LearningRateMonitor
from hookline.errors import ConfigError


def recorded(config: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the metrics of two epochs of three steps, without time and losses."""
    hooks = HooksConfig(enable_lr_monitor=True, lr_monitor_config=config)
    metrics = train(hooks=hooks, data=make_batches(3), max_epochs=2, **options).record.metrics
    return [{key: line[key] for key in line if key != "time" and not key.startswith("train/")} for line in metrics]


@pytest.mark.req("002-35", "002-36", "002-37", "002-38")
def test_the_config_of_document_002() -> None:
    """Once an epoch, with momentum and weight decay beside the learning rate."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    config = {
        "log_momentum": True,  # Also log momentum if available
        "log_weight_decay": True,  # Log weight decay
        "frequency": "epoch",  # "step" or "epoch"
    }
    lines = recorded(config, optimizer=optimizer, scheduler=scheduler, scheduler_interval="epoch")
    more = {"momentum": 0.9, "weight_decay": 0.01}
    assert [line for line in lines if len(line) > 2] == [
        {"step": 0, "epoch": 0, "lr": 0.1, **more},
        {"step": 3, "epoch": 1, "lr": 0.05, **more},
    ]


@pytest.mark.req("002-38")
def test_every_step_has_the_rate_that_it_used() -> None:
    """The scheduler moves after the step; what is recorded is what the step used, also what a hook set before it."""
    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    lines = recorded({"frequency": "step"}, lr=1.0, scheduler=scheduler)
    assert [(line["step"], line["lr"]) for line in lines] == [(step, 0.5 ** (step - 1)) for step in range(1, 7)]
    assert all(set(line) == {"step", "epoch", "lr"} for line in lines)


@pytest.mark.req("002-36")
def test_all_groups_by_name() -> None:
    """Groups go by their name or number, optimizers by their class; betas are momentum and beta2, where there are."""
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    first = torch.optim.AdamW(
        [{"params": [body.weight], "name": "weights"}, {"params": [body.bias], "lr": 0.2, "weight_decay": 0.0}], lr=0.1
    )
    second = torch.optim.AdamW([head.weight], lr=0.3, betas=(0.8, 0.95))
    third = torch.optim.Adagrad([head.bias], lr=0.4)
    config = {"log_momentum": True, "log_weight_decay": True}
    line = recorded(config, optimizer=[first, second, third], model=nn.Sequential(body, head))[0]
    assert {key: value for key, value in line.items() if key.startswith("lr")} == {
        "lr/AdamW/weights": 0.1,
        "lr/AdamW/group_1": 0.2,
        "lr/AdamW-1": 0.3,
        "lr/Adagrad": 0.4,
    }
    assert (line["momentum/AdamW-1"], line["beta2/AdamW-1"], line["weight_decay/AdamW/group_1"]) == (0.8, 0.95, 0.0)
    assert not any(key.startswith(("momentum/Adagrad", "beta2/Adagrad")) for key in line)


def test_groups_of_one_name_get_numbers() -> None:
    """The second of a name gets a number, so that it does not overwrite the first."""
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "name": "a", "lr": 0.1}, {"params": [model.bias], "name": "a", "lr": 0.2}]
    line = recorded({}, optimizer=torch.optim.SGD(groups, lr=1.0), model=model)[0]
    assert {key: value for key, value in line.items() if key.startswith("lr")} == {"lr/a": 0.1, "lr/a-1": 0.2}


def test_it_can_have_a_schedule() -> None:
    """Registered with every=2, it costs nothing at the other steps."""
    lines = recorded({"every": 2})
    assert [line["step"] for line in lines if "lr" in line] == [2, 4, 6]


def test_an_invalid_frequency_is_rejected() -> None:
    """The error names the nearest valid value."""
    with pytest.raises(ConfigError, match="frequency: invalid value 'epochs'; did you mean 'epoch'"):
        LearningRateMonitor(frequency="epochs")


def test_an_appended_number_never_gives_the_name_of_another_group() -> None:
    """One of the two would overwrite the other."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    groups = [{"params": [param], "name": name} for param, name in zip(params, ("a", "a", "a-1", "a"), strict=True)]
    run = PlainRun()
    run.optimizers = [torch.optim.SGD(groups, lr=0.5)]
    LearningRateMonitor().on_before_optimizer_step(run, 0)
    assert [name for name, _ in run.logged] == ["lr/a", "lr/a-2", "lr/a-1", "lr/a-3"]
