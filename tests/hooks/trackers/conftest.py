"""Keep trackers on this machine."""

import pytest
from tracked_runs import OFFLINE


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send nothing: no uploads, no telemetry."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
