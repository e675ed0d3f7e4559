"""Failure policies: named, counted, annotated on the exception, reported."""

import bdb
import dataclasses
import logging
from typing import Any

import pytest
from idle_hook import Idle

from hookline import HookRegistry, TrainingHook
from hookline.errors import MetricMissing
from hookline.ranks import Ranks


class Failing(TrainingHook):
    """Raises what it was given at every epoch's end."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_epoch_end(self, epoch: int) -> None:
        """Raise it."""
        raise self.error


class FailingAtTwoEvents(TrainingHook):
    """Raises at the start and at the end of every epoch."""

    def on_epoch_start(self) -> None:
        raise ValueError("start")

    def on_epoch_end(self) -> None:
        raise ValueError("end")


@pytest.mark.hooks_fail(raises=ValueError)
def test_failures_in_a_row_are_counted_per_event(registry: HookRegistry) -> None:
    """Two failures at each of two events are not three in a row; the third at one of them is."""
    registry.register(FailingAtTwoEvents(), name="h")
    for _ in range(2):
        registry.on_epoch_start(0)
        registry.on_epoch_end(0)
    assert registry.is_enabled("h")
    assert registry.list_hooks()[0].failures == 4
    registry.on_epoch_end(0)
    assert not registry.is_enabled("h")


@pytest.mark.hooks_fail(raises=ValueError)
def test_an_exception_is_annotated_once_with_where_it_came_from(registry: HookRegistry) -> None:
    """Hook, event, step and, away from rank 0, the rank are notes on the exception itself."""
    error = ValueError("x")
    registry.register(Failing(error), name="h")
    registry.on_epoch_end(0)
    registry.on_epoch_end(0)
    ranks = Ranks()
    ranks.rank, ranks.world_size = 2, 4
    registry.set_ranks(ranks)
    registry.on_epoch_end(0)
    assert error.__notes__ == [
        "raised by hook 'h' in on_epoch_end, step 0",
        "raised by hook 'h' in on_epoch_end, step 0, rank 2",
    ]


@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_a_strict_monitor_ends_the_run_under_every_policy(policy: str, registry: HookRegistry) -> None:
    """An exception with `always_raise` is raised even under warn and disable."""
    registry.register(Failing(MetricMissing("val/loss")), on_error=policy)
    with pytest.raises(MetricMissing):
        registry.on_epoch_end(0)


@pytest.mark.hooks_fail(raises=ValueError)
def test_subscribers_get_every_incident_and_the_log_only_the_first(
    caplog: pytest.LogCaptureFixture, registry: HookRegistry
) -> None:
    """The record gets all of them; a hook that fails a thousand times does not flood the log."""
    incidents: list[Any] = []
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
        "hook 'h', on_epoch_end, step 0: disabled after 3 failures in a row",
    ]
    assert caplog.records[0].exc_info is not None


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_takes_the_name_of_a_failed_one_is_not_switched_off_for_it(registry: HookRegistry) -> None:
    """A subscriber may replace the hook whose failure it gets."""
    registry.register(Failing(ValueError("boom")), name="h", on_error="disable")
    kinds: list[str] = []

    def replace_failed(incident: Any) -> None:
        kinds.append(incident.kind)
        registry.remove("h")
        registry.register(Idle(), name="h")

    registry.failures.subscribe(replace_failed)
    registry.on_epoch_end(0)
    assert registry.is_enabled("h") and kinds == ["failed"]


class Unprintable(Exception):
    """An exception whose text and repr cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("policy", ["warn", "disable"])
@pytest.mark.hooks_fail(raises=Unprintable)
def test_an_exception_without_a_text_is_handled_as_any_other(policy: str, registry: HookRegistry) -> None:
    """It is reported by its class, and its hook is switched off as others are."""
    incidents: list[Any] = []
    registry.register(Failing(Unprintable()), name="h", on_error=policy)
    registry.failures.subscribe(incidents.append)
    for _ in range(3):
        registry.on_epoch_end(0)
    assert not registry.is_enabled("h")
    assert incidents[0].message == "failed: Unprintable: (its message cannot be shown: __str__ raised RuntimeError)"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception without attributes that can be set, notes included."""

    code: int


class UnreadableNotes(Exception):
    """An exception whose notes cannot be read."""

    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


@pytest.mark.parametrize("error", [Frozen(3), UnreadableNotes()], ids=["frozen", "unreadable"])
@pytest.mark.parametrize("policy", ["warn", "disable", "raise"])
@pytest.mark.hooks_fail(raises=(Frozen, UnreadableNotes))
def test_an_exception_that_refuses_notes_is_handled_as_any_other(
    policy: str, error: Exception, registry: HookRegistry
) -> None:
    """It has no note about its hook; the incident names it."""
    incidents: list[Any] = []
    registry.register(Failing(error), name="h", on_error=policy)
    registry.failures.subscribe(incidents.append)
    if policy == "raise":
        with pytest.raises(type(error)) as raised:
            registry.on_epoch_end(0)
        assert raised.value is error
    else:
        for _ in range(3):
            registry.on_epoch_end(0)
        assert not registry.is_enabled("h")
    assert (incidents[0].hook, incidents[0].error) == ("h", error)


@pytest.mark.parametrize("policy", ["warn", "disable", "raise"])
@pytest.mark.parametrize("error", [bdb.BdbQuit(), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_interruption_is_not_a_failure_of_the_hook(
    error: BaseException, policy: str, registry: HookRegistry
) -> None:
    """Ctrl-C, an exit and quitting the debugger leave an event at once, whatever the policy; nothing is counted."""
    called: list[str] = []

    @registry.on("epoch_end", name="h", on_error=policy)
    def interrupt() -> None:
        raise error

    registry.on("epoch_end", name="later")(lambda: called.append("later"))
    expected = KeyboardInterrupt if isinstance(error, bdb.BdbQuit) else type(error)
    with pytest.raises(expected):
        registry.on_epoch_end(0)
    assert registry.entry("h").failures.total == 0 and registry.is_enabled("h") and called == []


def test_quitting_the_debugger_while_a_state_is_restored_is_not_an_error_of_the_state(registry: HookRegistry) -> None:
    """It is the user's interruption, as at an event."""

    class Quitting(TrainingHook):
        def on_epoch_end(self) -> None: ...

        def load_state_dict(self, state: Any) -> None:
            raise bdb.BdbQuit

    registry.register(Quitting(), name="h")
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger in hook 'h', load_state_dict"):
        registry.load_state_dict({"h": {}})


@pytest.mark.parametrize("policy", ["warn", "disable", "raise"])
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_failing_close_follows_the_policy(policy: str, registry: HookRegistry) -> None:
    """Every hook is closed; under raise, what the first one raised is raised then."""
    closed: list[str] = []

    class Closing(Failing):
        def close(self) -> None:
            closed.append("one")
            raise self.error

    registry.register(Closing(ValueError("first")), name="one", on_error=policy)
    registry.register(Closing(ValueError("second")), name="two", on_error=policy)
    if policy == "raise":
        with pytest.raises(ValueError, match="first") as raised:
            registry.close()
        assert raised.value.__notes__ == ["raised by hook 'one' in close, step 0"]
    else:
        registry.close()
    assert closed == ["one", "one"]
    assert [row.failures for row in registry.list_hooks()] == [1, 1]
    assert registry.is_enabled("one") is (policy != "disable")
