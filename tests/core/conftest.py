"""What most tests of the core begin with."""

import pytest

from hookline import HookRegistry


@pytest.fixture
def registry() -> HookRegistry:
    """Return a registry without hooks."""
    return HookRegistry()
