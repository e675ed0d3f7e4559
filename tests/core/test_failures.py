"""Failure policies: named, counted, annotated on the exception, reported."""

import logging
from typing import Any

import pytest

from hookline import HookRegistry, TrainingHook
from hookline.core.failures import POLICIES, FailureCount, Incident, check_policy
from hookline.errors import ConfigError, MetricMissing


class Failing(TrainingHook):
    """Raises what it was given at every epoch's end."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_epoch_end(self, epoch: int) -> None:
        """Raise it."""
        raise self.error


def test_there_are_three_policies_and_a_miss_names_the_nearest() -> None:
    """warn, disable and raise; anything else is rejected with its config path."""
    assert [check_policy(name) for name in POLICIES] == ["warn", "disable", "raise"]
    with pytest.raises(ConfigError, match=r"hooks.x.on_error: 'rise' is not a failure policy; did you mean 'raise'"):
        check_policy("rise", "hooks.x.on_error")


def test_failures_in_a_row_are_counted_per_event() -> None:
    """Two events are counted separately; the total is over both."""
    failures = FailureCount()
    assert [failures.add("a"), failures.add("b"), failures.add("a")] == [1, 1, 2]
    assert failures.total == 3


def test_an_exception_is_annotated_once_with_where_it_came_from() -> None:
    """Hook, event, step and, away from rank 0, the rank are notes on the exception itself."""
    error = ValueError("x")
    registry = HookRegistry()
    registry.register(Failing(error), name="h")
    registry.on_epoch_end(0)
    registry.on_epoch_end(0)
    registry.failures.rank = 2
    registry.on_epoch_end(0)
    assert error.__notes__ == [
        "raised by hook 'h' in on_epoch_end, step 0",
        "raised by hook 'h' in on_epoch_end, step 0, rank 2",
    ]


@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_a_strict_monitor_ends_the_run_under_every_policy(policy: str) -> None:
    """An exception with `always_raise` is raised even under warn and disable."""
    registry = HookRegistry()
    registry.register(Failing(MetricMissing("val/loss")), on_error=policy)
    with pytest.raises(MetricMissing):
        registry.on_epoch_end(0)


def test_subscribers_get_every_incident_and_the_log_only_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """The record gets all of them; a hook that fails a thousand times does not flood the log."""
    incidents: list[Incident] = []
    registry = HookRegistry()
    registry.register(Failing(ValueError("boom")), name="h")
    end: Any = registry.failures.subscribe(incidents.append)
    with caplog.at_level(logging.WARNING, "hookline"):
        registry.on_epoch_end(0)
        registry.on_epoch_end(0)
        end()
        registry.on_epoch_end(0)
    assert [incident.message for incident in incidents] == ["failed: ValueError: boom"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'h', on_epoch_end, step 0: failed: ValueError: boom",
        "hook 'h', on_epoch_end, step 0: switched off after 3 failures in a row",
    ]
    assert caplog.records[0].exc_info is not None
