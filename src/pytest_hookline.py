"""The pytest plugin of Hookline: fixtures for tests of hooks. docs/how-to/testing-hooks.md has the list.

pytest imports this module wherever Hookline is installed. So it imports neither Hookline nor torch until a test uses a
fixture.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses `hookline_lifecycle` once for each lifecycle."""
    if "hookline_lifecycle" in metafunc.fixturenames:
        from hookline.testing import lifecycles

        metafunc.parametrize("hookline_lifecycle", lifecycles(), ids=str, indirect=True)


@pytest.fixture
def hookline_lifecycle(request: pytest.FixtureRequest) -> Any:
    """A lifecycle to run a hook in; the test runs once for each: hookline_lifecycle.run(MyHook())."""
    return request.param


@pytest.fixture
def hookline_recorder() -> Any:
    """An EventRecorder: a hook that records which events a run fires."""
    from hookline.testing import EventRecorder

    return EventRecorder()


@pytest.fixture
def hookline_sink() -> Any:
    """A MemorySink, for record.add_sink: it keeps what a run records."""
    from hookline.testing import MemorySink

    return MemorySink()


@pytest.fixture
def assert_hook_harmless() -> Any:
    """The function hookline.testing.assert_harmless: training is the same with the hook as without it."""
    from hookline.testing import assert_harmless

    return assert_harmless


@pytest.fixture
def assert_hook_resumable() -> Any:
    """The function hookline.testing.assert_resumable: a run that is killed and resumed ends like any other."""
    from hookline.testing import assert_resumable

    return assert_resumable


@pytest.fixture
def assert_hook_within_budget() -> Any:
    """The function hookline.testing.assert_within_budget: the hook costs no more than its budget."""
    from hookline.testing import assert_within_budget

    return assert_within_budget
