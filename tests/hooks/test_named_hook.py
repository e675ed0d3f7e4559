"""A hook signs with the name it was registered under."""

from typing import Any
from unittest.mock import Mock

from hookline import HookManager
from hookline.hooks.named_hook import NamedHook


class Signs(NamedHook):
    """One that notes every step."""

    name = "signs"

    def on_step_end(self, trainer: Any) -> None:
        self.note(trainer, "seen", what=1)


def test_notes_are_signed() -> None:
    """With the instance's name; before it has one, with its type's."""
    hook, trainer = Signs(), Mock()
    hook.on_step_end(trainer)
    HookManager().register(hook, "mine")
    hook.on_step_end(trainer)
    assert [call.kwargs for call in trainer.note.call_args_list] == [
        {"by": "signs", "what": 1},
        {"by": "mine", "what": 1},
    ]
    assert hook.called == "mine"


def test_a_run_that_keeps_no_notes_is_fine() -> None:
    """Any loop may be what a hook hears of."""
    Signs().on_step_end(object())
