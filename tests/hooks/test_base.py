"""Built-in hooks sign their notes and warnings with the name they were registered under."""

import pytest
from run_control import PlainRun

from hookline import LossSpike


def test_notes_are_signed() -> None:
    """With the registered name; before the hook is registered, with the config name of its class."""
    hook, run = LossSpike(), PlainRun()
    hook.note(run, "noted")
    run.hooks.register(hook, "mine")
    hook.note(run, "noted")
    assert [note["by"] for note in run.notes] == ["loss_spike", "mine"]
    assert hook.registered_name == "mine"


def test_a_warning_can_be_given_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of several with the same key only the first is logged."""
    hook = LossSpike()
    for number in range(2):
        hook.warn(f"problem {number}", once="problem")
        hook.warn("always")
    assert caplog.messages == ["hook 'loss_spike': problem 0", *["hook 'loss_spike': always"] * 2]
