"""Any subset of the built-in observers, in any order, leaves training as it is without them, bit for bit."""

import random
import tempfile
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_batches, make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hookline import TrainingHook
from hookline.core.plugins import HOOKS

SERVICES = {"mlflow", "trackio", "wandb"}  # slow to start; test_harmless.py trains with them
OBSERVERS = [name for name in HOOKS.names() if not HOOKS.find(name).intervenes and name not in SERVICES]
PARAMETERS: dict[str, dict[str, Any]] = {  # where the default would do little in so short a run, or cannot be
    "checkpoint": {"save_every_n_steps": 3},
    "console_log": {"log_every_n_batches": 1},
    "early_stopping": {"patience": 1000, "monitor": "train/loss", "check_every_n_steps": 1},
    "gradient_monitor": {"log_frequency": 1, "log_histogram": True, "percentiles": [50], "log_update_ratio": True},
    "json_log": {"log_every_n_batches": 1},
    "loss_spike": {"window": 4, "warmup": 2},
    "monitor": {"metrics": ["mean", "std"], "gradients": True, "percentiles": [50]},
    "notify": {"webhook_url": "https://hooks.example.org/x", "notify_on": []},
    "profiler": {"first_step": 2, "steps": 1},
    "throughput": {"log_every_n_steps": 1},
}
CIRCUMSTANCES = st.fixed_dictionaries({
    "accumulate": st.sampled_from([1, 2]),
    "validate_every": st.sampled_from([None, 3]),
    "max_grad_norm": st.sampled_from([None, 0.5]),
})  # fmt: skip
SUBSETS = st.lists(st.sampled_from(OBSERVERS), unique=True, min_size=1)
QUICK = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Draws(TrainingHook):
    """Draws from training's random stream, and declares it."""

    isolate_rng = False

    def on_step_end(self) -> None:
        torch.rand(1)


def step(model: Any, batch: Any) -> torch.Tensor:
    """Compute a loss with draws from every stream; dropout alone would not draw from Python's and NumPy's."""
    noise = random.random() + float(np.random.standard_normal())
    return nn.functional.mse_loss(model(batch[0]) + 0.01 * noise, batch[1])


def train(observers: list[Any], **circumstances: Any) -> dict[str, Any]:
    """Return losses, parameters, optimizer state and random streams after training with these hooks."""
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    batches = make_batches(6, 5, 6)
    losses: list[float] = []

    def noted(model: Any, batch: Any) -> torch.Tensor:
        loss = step(model, batch)
        if loss.requires_grad:  # what validation measures is another matter: under `ema`, the averaged weights
            losses.append(loss.item())
        return loss

    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(
            model=model, data=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn=None,
            step_fn=noted, val_dataloader=batches[:2], sanity_batches=0, max_epochs=2, record=True, output_dir=root,
            warn_above=None, **circumstances,
        )  # fmt: skip
        if "identity" in observers:
            trainer.remove_hook("identity")  # it is there by default, and would not be where the order says
        for hook in observers:
            trainer.add_hook(hook, **(PARAMETERS.get(hook, {}) if isinstance(hook, str) else {}))
        trainer.train()
        assert trainer.hook_failures == 0
    optimizer = [value for state in trainer.optimizers[0].state_dict()["state"].values() for value in state.values()]
    return {
        "losses": losses,
        "parameters": [tensor.tolist() for tensor in model.state_dict().values()],
        "optimizer": [torch.as_tensor(value).tolist() for value in optimizer],
        "torch stream": torch.get_rng_state().tolist(),
        "python stream": random.getstate(),
        "numpy stream": repr(np.random.get_state()),
    }


@cache
def alone(**circumstances: Any) -> dict[str, Any]:
    """Return the same after training without hooks."""
    return train([], **circumstances)


def differences(observers: list[Any], circumstances: dict[str, Any]) -> list[str]:
    """Return the names of what differs in at least one bit."""
    expected, observed = alone(**circumstances), train(observers, **circumstances)
    return [what for what in expected if expected[what] != observed[what]]


@pytest.mark.req("000-15", "000-22")
@settings(max_examples=8, derandomize=True, **QUICK)
@given(observers=SUBSETS, circumstances=CIRCUMSTANCES)
def test_any_observers_change_nothing(observers: list[str], circumstances: dict[str, Any]) -> None:
    """Losses, parameters, optimizer state and random streams are the same, bit for bit, with any observers."""
    assert differences(observers, circumstances) == []


@pytest.mark.soak
@settings(max_examples=400, **QUICK)
@given(observers=SUBSETS, circumstances=CIRCUMSTANCES)
def test_many_observers_change_nothing(observers: list[str], circumstances: dict[str, Any]) -> None:
    """The same holds for many more subsets and orders of observers."""
    assert differences(observers, circumstances) == []


@pytest.mark.parametrize("order", [1, -1])
def test_all_observers_together_change_nothing(order: int) -> None:
    """All observers together change nothing, in the order of their names and in reverse."""
    assert len(OBSERVERS) >= 20
    assert differences(OBSERVERS[::order], {"accumulate": 2, "validate_every": 3, "max_grad_norm": 0.5}) == []


def test_the_comparison_can_fail() -> None:
    """A control: a hook that draws one number, or one that intervenes, is noticed."""
    circumstances = {"accumulate": 1, "validate_every": None, "max_grad_norm": None}
    assert {"losses", "parameters", "optimizer", "torch stream"} <= set(differences([Draws()], circumstances))
    assert "parameters" in differences(["sign"], circumstances)
