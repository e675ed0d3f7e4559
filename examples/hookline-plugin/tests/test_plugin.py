"""Tests of the plugin; install it first: pip install -e ."""

import torch
from hookline_plugin import Lines, UnitRMS, WeightNorm, confidence

from hookline import HookManager
from hookline.testing import assert_harmless


def test_a_config_can_name_the_hooks() -> None:
    """The entry points lead to the classes."""
    manager = HookManager({"lifecycle": ["weight_norm", "lines"], "update": ["unit_rms"]})
    kinds = [type(manager.get(name)) for name in ("weight_norm", "lines", "unit_rms")]
    assert kinds == [WeightNorm, Lines, UnitRMS]


def test_observing_changes_nothing() -> None:
    """Training is bit for bit the same with the hook as without it."""
    assert_harmless(WeightNorm())


def test_gradients_get_a_root_mean_square_of_scale() -> None:
    """A gradient of zeros stays as it is."""
    scaled = UnitRMS(scale=0.5).on_update({"weight": torch.tensor([7.0, -1.0]), "bias": torch.zeros(2)})
    assert torch.allclose(scaled["weight"], torch.tensor([0.7, -0.1]))
    assert not scaled["bias"].any()


def test_confidence_is_the_mean_of_the_highest_probabilities() -> None:
    """Two equal outputs give a half; a certain one gives 1."""
    outputs = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    assert confidence(outputs, None).item() == 0.75
