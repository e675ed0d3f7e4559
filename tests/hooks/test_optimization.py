"""The package's layout: hooks are found by what they are about."""

from importlib import import_module

import pytest

LAYOUT = {
    "hookline.hooks": ["BUILT_IN"],
    "hookline.hooks.monitoring": ["ActivationStats", "GradientMonitor", "JSONLogHook", "ThroughputMonitor"],
    "hookline.hooks.optimization": ["EMAHook", "EarlyStopping", "LearningRateMonitor"],
    "hookline.hooks.checkpointing": ["CheckpointHook", "ModelCheckpoint"],
    "hookline.hooks.debugging": ["DebugHook"],
    "hookline.hooks.integration": ["NotifyHook"],
}


@pytest.mark.req("002-79")
@pytest.mark.parametrize("module", LAYOUT)
def test_the_package_s_layout(module: str) -> None:
    """The six modules that seed 002 names are there, each with its hooks."""
    found = import_module(module)
    assert [name for name in LAYOUT[module] if not hasattr(found, name)] == []
    assert sorted(getattr(found, "__all__", LAYOUT[module])) == sorted(LAYOUT[module])
