"""A snapshot of the gradients is one table, whose columns are known beforehand."""

import math

import pytest
import torch
from torch import nn

from hookline.hooks.gradient_snapshot import GradientSnapshot, SnapshotSpec, percentile_name


def layer_with_gradients() -> nn.Linear:
    """A layer after its backward pass."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    layer(torch.randn(5, 3)).square().sum().backward()
    return layer


@pytest.mark.parametrize("moments", [True, False])
@pytest.mark.parametrize("points", [(), (10.0, 50.0)])
@pytest.mark.parametrize("per_octave", [0, 1, 8])
@pytest.mark.parametrize("update_ratio", [True, False])
def test_the_table_has_the_columns_of_its_spec(
    moments: bool, points: tuple[float, ...], per_octave: int, update_ratio: bool
) -> None:
    """Each named column holds what its name says, and the bins come last."""
    layer = layer_with_gradients()
    wanted = SnapshotSpec(moments, per_octave, points, update_ratio)
    snapshot = GradientSnapshot(7, dict(layer.named_parameters()), wanted)
    assert layer.weight.grad is not None
    layer.weight.grad.mul_(2)
    snapshot.measure_final()
    (_, _, named), table = snapshot.table()
    layer.weight.grad.div_(2)
    columns = dict(zip(named, table[0].tolist(), strict=False))
    assert columns["l2"] == pytest.approx(layer.weight.grad.norm().item())
    assert columns["final_l2"] == pytest.approx(2 * columns["l2"])
    if wanted.needs_statistics:
        assert columns["absmax"] == layer.weight.grad.abs().max().item()
    if points:
        assert columns["p10"] < columns["p50"]
    bins = table[:, len(named) :]
    assert bins.shape[1] == {0: 0, 1: 68, 8: 512}[per_octave]
    assert not per_octave or bins.sum(dim=1).tolist() == [6, 2]
    assert "update_l2" not in columns or math.isnan(columns["update_l2"])  # no optimizer has stepped


def test_norms_alone_need_no_statistics() -> None:
    """Without moments, percentiles and histograms there is one column."""
    assert SnapshotSpec(moments=False).columns == ("l2",)
    assert SnapshotSpec(moments=False, points=(5,)).columns[-1] == "p5"


def test_unchanged_gradients_are_not_measured_again() -> None:
    """Then the table has no column for their final norms; if no optimizer stepped, it is NaN."""
    snapshot = GradientSnapshot(1, dict(layer_with_gradients().named_parameters()), SnapshotSpec(moments=False))
    (_, _, before), table = snapshot.table()
    assert before == ("final_l2", "l2")
    assert table[:, 0].isnan().all()
    snapshot.measure_final()
    assert snapshot.table()[0].columns == ("l2",)


def test_the_layout_lists_the_gradients_that_are_present() -> None:
    """A parameter without a gradient keeps its row, which is NaN."""
    layer = layer_with_gradients()
    layer.bias.grad = None
    snapshot = GradientSnapshot(1, dict(layer.named_parameters()), SnapshotSpec())
    (names, there, _), table = snapshot.table()
    assert (names, there) == (("weight", "bias"), (0,))
    assert table[1].isnan().all()


def test_a_write_between_the_two_measurements_is_detected() -> None:
    """The final norm is measured again if a gradient was written to or replaced."""
    for change in (lambda layer: layer.weight.grad.mul_(2), lambda layer: setattr(layer.bias, "grad", torch.ones(2))):
        layer = layer_with_gradients()
        snapshot = GradientSnapshot(1, dict(layer.named_parameters()), SnapshotSpec(moments=False))
        change(layer)
        snapshot.measure_final()
        found = snapshot.table()[1][:, 0].tolist()
        assert found == pytest.approx([param.grad.norm().item() for param in layer.parameters()])


def test_update_sizes_are_those_of_the_optimizer_that_stepped() -> None:
    """The update's norm and the parameter's norm before it; a parameter of an optimizer that was skipped has NaN."""
    first, second = nn.Parameter(torch.full((4,), 3.0)), nn.Parameter(torch.ones(9))
    first.grad, second.grad = torch.full((4,), 0.5), torch.ones(9)
    spec = SnapshotSpec(moments=False, update_ratio=True)
    snapshot = GradientSnapshot(1, {"first": first, "second": second}, spec)
    snapshot.measure_final()
    stepping, skipped = torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0)
    snapshot.before_step(stepping)
    stepping.step()
    snapshot.after_step()
    snapshot.before_step(skipped)
    layout, table = snapshot.table()
    assert layout.columns == ("update_l2", "weight_l2", "l2")
    assert table[0].tolist() == [1.0, 6.0, 1.0] and first.tolist() == [2.5] * 4
    assert table[1, :2].isnan().all()


def test_percentiles_have_short_names() -> None:
    """Whole numbers without a point."""
    assert [percentile_name(point) for point in (10, 50.0, 99.9)] == ["p10", "p50", "p99.9"]


@pytest.mark.parametrize("moments", [True, False])
def test_gradients_made_in_inference_mode_are_measured_again(moments: bool) -> None:
    """They have no version that could tell of a write between the two measurements."""
    param = nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        param.grad = torch.full((3,), 2.0)
    snapshot = GradientSnapshot(1, {"p": param}, SnapshotSpec(moments, 0, (), False))
    with torch.inference_mode():
        param.grad.mul_(3)
    snapshot.measure_final()
    assert snapshot.table()[1][0, 0].item() == pytest.approx(6 * math.sqrt(3))
