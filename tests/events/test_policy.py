"""Failure policies: named, counted, annotated, reported."""

import logging

import pytest

from hookline.errors import ConfigError, MetricMissing
from hookline.events.policy import POLICIES, Failures, Incident, annotate, check_policy, must_raise, report


def test_there_are_three_policies_and_a_miss_names_the_nearest() -> None:
    """warn, disable and raise; anything else is refused with its config path."""
    assert [check_policy(name) for name in POLICIES] == ["warn", "disable", "raise"]
    with pytest.raises(ConfigError, match=r"hooks.x.on_error: 'rise' is no failure policy; did you mean 'raise'"):
        check_policy("rise", "hooks.x.on_error")


def test_failures_count_in_a_row_per_event() -> None:
    """Two events have rows of their own; the total is over both."""
    failures = Failures()
    assert [failures.add("a"), failures.add("b"), failures.add("a")] == [1, 1, 2]
    assert failures.total == 3


def test_an_exception_is_annotated_once_and_says_where_it_came_from() -> None:
    """Hook, event, step and, away from rank 0, the rank are notes on the exception itself."""
    error = ValueError("x")
    annotate(error, "h", "on_step_end", 4, 0)
    annotate(error, "h", "on_step_end", 4, 0)
    annotate(error, "h", "on_step_end", 4, 2)
    assert error.__notes__ == [
        "raised by hook 'h' in on_step_end, step 4",
        "raised by hook 'h' in on_step_end, step 4, rank 2",
    ]


def test_a_strict_monitor_gets_through_every_policy() -> None:
    """An error that insists is raised even under warn and disable."""
    assert must_raise(MetricMissing("val/loss"), "warn") and must_raise(MetricMissing("val/loss"), "disable")
    assert must_raise(ValueError(), "raise") and not must_raise(ValueError(), "warn")


def test_listeners_hear_every_incident_and_the_console_only_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """The record gets all of them; a hook that fails a thousand times does not flood the log."""
    heard: list[Incident] = []
    incident = Incident("failed", "h", "on_step_end", 3, "failed: boom", ValueError("boom"))
    with caplog.at_level(logging.WARNING, "hookline"):
        report(incident, True, [heard.append])
        report(incident, False, [heard.append])
    assert heard == [incident, incident]
    assert [record.getMessage() for record in caplog.records] == ["hook 'h', on_step_end, step 3: failed: boom"]
    assert caplog.records[0].exc_info is not None
