"""Dead units: never above zero over all samples of a window."""

from typing import Any

import pytest
import torch
from builders import make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookline import HookManager, SimpleTrainer


def monitored(**options: Any) -> tuple[nn.Module, Any]:
    """A module that returns its input, and the monitor of its units."""
    module, manager = nn.Identity(), HookManager()
    manager.register_monitoring_hook(module, "a", ["dead_units"], **options)
    return module, manager.get("a")


@pytest.mark.parametrize(
    ("shape", "unit_dim", "axis"),
    [
        ((5,), None, 0),
        ((7, 5), None, 1),
        ((2, 7, 5), None, 2),
        ((2, 5, 3, 3), None, 1),
        ((2, 5, 7), 1, 1),
        ((5, 2), -2, 0),
    ],
)
def test_where_units_lie(shape: tuple[int, ...], unit_dim: int | None, axis: int) -> None:
    """Along the last dimension, the second one of images, or `unit_dim`; the other dimensions are samples."""
    output = -torch.rand(shape)
    alive = [2 if dim == axis else 0 for dim in range(len(shape))]  # one sample of unit 2
    output[tuple(alive)] = 1.0
    module, monitor = monitored(unit_dim=unit_dim)
    module(output)
    assert monitor.latest()["a"] == {"dead_units": 4, "units": 5}
    assert monitor.dead_units("a") == [0, 1, 3, 4]


class Passes(nn.Module):
    """Returns its batch, and has something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.weight = nn.Identity(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.same(x) + 0 * self.weight


def trained(batches: list[Tensor], window: int) -> SimpleTrainer:
    """A run over these outputs, one a step, with a monitor of their units."""
    trainer = make_trainer(model=Passes(), data=[(batch, batch) for batch in batches])
    trainer.add_hook("monitor", modules="same", metrics=["dead_units"], dead_window=window)
    trainer.train()
    return trainer


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.lists(st.lists(st.integers(-1, 1), min_size=3, max_size=3), min_size=4, max_size=12))
def test_windows_equal_brute_force(window: int, steps: list[list[int]]) -> None:
    """Each complete window counts all its outputs together, at its last step."""
    trainer = trained([torch.tensor([values], dtype=torch.float32) for values in steps], window)
    counted = [(layers.step, *layers.values.flatten().tolist()) for layers in trainer.record.layer_rows]
    true = []
    for end in range(window, len(steps) + 1, window):
        highest = torch.tensor(steps[end - window : end]).amax(0)
        true.append((end, float((highest <= 0).sum()), 3.0))
    assert counted == true


def test_nan_does_not_count_as_dead() -> None:
    """A unit with a NaN stays alive for the whole window."""
    module, monitor = monitored()
    module(torch.tensor([[float("nan"), -1.0]]))
    module(torch.tensor([[-1.0, -1.0]]))
    assert monitor.dead_units("a") == [1]


def test_a_later_write_into_the_output_changes_nothing() -> None:
    """Also into an output with one dimension, where there is nothing to reduce."""
    (module, monitor), output = monitored(), torch.tensor([1.0, -1.0])
    module(output)
    output.fill_(-5)
    assert monitor.dead_units("a") == [1]


def test_odd_outputs() -> None:
    """Scalars and empty tensors have no units; a module that changes its width starts over."""
    module, monitor = monitored()
    module(torch.tensor(1.0))
    module(torch.empty(0, 4))
    assert monitor.latest() == {}
    module(torch.tensor([[1.0, -1.0]]))
    module(torch.tensor([[-1.0, -1.0, 1.0]]))
    assert monitor.dead_units("a") == [0, 1]


def test_the_last_complete_window_is_reported() -> None:
    """A window that has only started does not replace it."""
    trainer = trained([torch.tensor([[1.0, -1.0]])] * 2 + [torch.tensor([[-1.0, -1.0]])], window=2)
    assert trainer.hooks.get("monitor").dead_units("same") == [1]
