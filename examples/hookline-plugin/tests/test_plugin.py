"""Tests of the plugin; install it first: pip install -e ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hookline_plugin import Lines, UnitRMS, WeightNorm, confidence

from hookline import HookManager
from hookline.testing import Lifecycle, lifecycles


def test_a_config_can_name_the_hooks() -> None:
    """The entry points lead to the classes."""
    manager = HookManager({"lifecycle": ["weight_norm", "lines"], "update": ["unit_rms"]})
    kinds = [type(manager.get(name)) for name in ("weight_norm", "lines", "unit_rms")]
    assert kinds == [WeightNorm, Lines, UnitRMS]


@pytest.mark.parametrize("make", [WeightNorm, UnitRMS])
def test_the_hooks_survive_what_happens_in_runs(make: Callable[[], Any], hookline_lifecycle: Lifecycle) -> None:
    """None fails when a step is skipped, a run fails or resumes, or there are two ranks."""
    hookline_lifecycle.run(make())


def test_observing_changes_nothing(assert_hook_harmless: Any) -> None:
    """Training is bit for bit the same with the hook as without it."""
    assert_hook_harmless(WeightNorm())


def test_the_hooks_resume(assert_hook_resumable: Any, assert_hook_within_budget: Any) -> None:
    """A run that is killed and resumed ends as one without interruption, and a step costs little."""
    for hook in (WeightNorm(), UnitRMS()):
        assert_hook_resumable(hook)
        assert_hook_within_budget(hook, microseconds_per_step=20_000)


def test_lines_are_written(tmp_path: Path) -> None:
    """A tracker needs a run on disk."""
    lifecycles()[0].run(Lines(), output_dir=tmp_path)
    (lines,) = tmp_path.glob("*/lines.txt")
    assert lines.read_text().endswith("completed\n")


def test_gradients_get_a_root_mean_square_of_scale() -> None:
    """A gradient of zeros stays as it is."""
    scaled = UnitRMS(scale=0.5).on_update({"weight": torch.tensor([7.0, -1.0]), "bias": torch.zeros(2)})
    assert torch.allclose(scaled["weight"], torch.tensor([0.7, -0.1]))
    assert not scaled["bias"].any()


def test_confidence_is_the_mean_of_the_highest_probabilities() -> None:
    """Two equal outputs give a half; a certain one gives 1."""
    outputs = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    assert confidence(outputs, None).item() == 0.75
