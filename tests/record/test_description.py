"""What a record says is complete, and says no secret."""

import pytest

from hookline.errors import RecordError
from hookline.record.description import check_outcome, describe_run, event_line, note_the_end


def test_a_run_is_described_before_it_begins() -> None:
    """Every field that run.json promises is there from the start, with no outcome yet."""
    run = describe_run("r1", {"lr": 1}, 7, [{"name": "slack", "params": {"webhook": "https://x"}}])
    assert list(run) == [
        "run_id", "started", "git", "config_hash", "environment", "seed", "hooks", "lineage", "attempts", "outcome",
    ]  # fmt: skip
    assert run["outcome"] is None
    assert run["hooks"] == [{"name": "slack", "params": {"webhook": "<redacted>"}}]
    assert set(run["attempts"][0]) == {"started", "pid", "host"}


def test_the_end_is_noted_for_run_and_attempt() -> None:
    """The outcome is kept with the attempt, too, so that a resumed run does not erase it."""
    run = describe_run("r1", {}, None, [])
    note_the_end(run, "failed", "token=abc was refused", [], [], {"steps": 3}, lost=2)
    assert run["outcome"] == run["attempts"][-1]["outcome"] == "failed"
    assert run["reason"] == "token=<redacted> was refused"
    assert (run["lost"], run["counters"]) == (2, {"steps": 3})


def test_an_event_says_when_and_what() -> None:
    """An event's line has time, kind and step first, and its secrets are hidden."""
    line = event_line("failed", None, {"by": "slack", "password": "x"})
    assert list(line) == ["time", "kind", "step", "by", "password"]
    assert line["password"] == "<redacted>"


def test_outcomes_are_four() -> None:
    """A misspelt outcome is refused with the nearest right one."""
    check_outcome("completed")
    with pytest.raises(RecordError, match="did you mean 'stopped'"):
        check_outcome("stoped")
