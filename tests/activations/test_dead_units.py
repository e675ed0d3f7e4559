"""Dead units: never above zero over all samples of a window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.activations.series import DeadUnits


def indices(dead: dict[str, torch.Tensor], name: str) -> list[int]:
    """Which units of a module are dead."""
    return [int(unit) for unit in dead[name].nonzero().flatten()]


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
    found = DeadUnits(10, unit_dim)
    found.add("a", output)
    assert len(found.by_module()["a"]) == 5
    assert indices(found.by_module(), "a") == [0, 1, 3, 4]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.lists(st.lists(st.integers(-1, 1), min_size=3, max_size=3), min_size=1, max_size=12))
def test_windows_equal_brute_force(window: int, steps: list[list[int]]) -> None:
    """Each complete window counts all its outputs together, at its last step."""
    found, counted = DeadUnits(window), []
    for step, values in enumerate(steps, start=1):
        found.add("a", torch.tensor([values], dtype=torch.float32))
        found.end_step(step)
        counted += [(table.step, *table.values.flatten().tolist()) for table in found.complete(wait=False)]
    true = []
    for end in range(window, len(steps) + 1, window):
        highest = torch.tensor(steps[end - window : end]).amax(0)
        true.append((end, float((highest <= 0).sum()), 3.0))
    assert counted == true


def test_nan_does_not_count_as_dead() -> None:
    """A unit with a NaN stays alive for the whole window."""
    found = DeadUnits(10)
    found.add("a", torch.tensor([[float("nan"), -1.0]]))
    found.add("a", torch.tensor([[-1.0, -1.0]]))
    assert indices(found.by_module(), "a") == [1]


def test_a_later_write_into_the_output_changes_nothing() -> None:
    """Also into an output with one dimension, where there is nothing to reduce."""
    found, output = DeadUnits(10), torch.tensor([1.0, -1.0])
    found.add("a", output)
    output.fill_(-5)
    assert indices(found.by_module(), "a") == [1]


def test_odd_outputs() -> None:
    """Scalars and empty tensors have no units; a module that changes its width starts over."""
    found = DeadUnits(10)
    found.add("scalar", torch.tensor(1.0))
    found.add("empty", torch.empty(0, 4))
    assert found.by_module() == {} and found.incomplete() == []
    found.add("a", torch.tensor([[1.0, -1.0]]))
    found.add("a", torch.tensor([[-1.0, -1.0, 1.0]]))
    assert indices(found.by_module(), "a") == [0, 1]


def test_the_last_complete_window_is_reported() -> None:
    """A window that has only started does not replace it."""
    found = DeadUnits(1)
    found.add("a", torch.tensor([[1.0, -1.0]]))
    assert found.incomplete()[0].values.tolist() == [[1, 2]]
    found.end_step(1)
    assert [table.step for table in found.complete(wait=True)] == [1]
    found.add("a", torch.tensor([[-1.0, -1.0]]))
    assert indices(found.by_module(), "a") == [1] and found.incomplete() == []
