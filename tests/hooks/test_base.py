"""Built-in hooks sign their notes with the name they were registered under."""

from run_control import PlainRun

from hookline import RunControl
from hookline.hooks.base import NamedHook


class NotesSteps(NamedHook):
    """Notes every step."""

    name = "notes_steps"

    def on_step_end(self, trainer: RunControl) -> None:
        self.note(trainer, "step_noted", what=1)


def test_notes_are_signed() -> None:
    """With the registered name; before registration, with the name of the class."""
    hook, run = NotesSteps(), PlainRun()
    hook.on_step_end(run)
    run.hooks.register(hook, "mine")
    hook.on_step_end(run)
    assert [note["by"] for note in run.notes] == ["notes_steps", "mine"]
    assert hook.registered_name == "mine"
