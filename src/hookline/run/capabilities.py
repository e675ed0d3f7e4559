"""`Capabilities`: what a training loop can do for hooks; a hook that needs more is refused when it is registered."""

from __future__ import annotations

from hookline.core.catalog import CAPABILITIES, CATALOG, MOST_LISTED, Event
from hookline.core.entry import Entry
from hookline.errors import RegistrationError


class Capabilities:
    """What a run can do (`Hook.needs`, and the column of the event catalog). A host changes what is not true of it."""

    can_skip_steps = True
    """Whether `skip_step` keeps the optimizers from stepping."""
    can_stop = True
    """Whether `request_stop` ends the run."""
    can_save = False
    """Whether `save` writes checkpoints, from which the run can be resumed."""
    can_validate = False
    """Whether the run has validations, whose events are fired."""
    can_rerun = False
    """Whether `rerunning` runs a batch again as training ran it."""
    knows_loss = True
    """Whether the loss is known, because its backward pass goes through the run."""
    knows_batches = True
    """Whether the batches are known, because they go through the run."""
    knows_windows = True
    """Whether it is known which micro-batches make up a step, as `window` returns them."""
    has_unscaled_gradients = True
    """Whether gradients can be read and changed as the optimizer uses them, before any clipping."""

    def fires(self, event: Event) -> bool:
        """Return whether this host can fire an event."""
        return not event.needs or bool(getattr(self, event.needs))

    def check_needs(self, entry: Entry) -> None:
        """Refuse a hook that needs more than this host can do, or that listens only to events that it never fires.

        Raises:
            RegistrationError: It says what the hook needs, and which events it would wait for.
        """
        lacking, waits = [name for name in entry.needs if not getattr(self, name)], ""
        never = [event for event in entry.listeners if not self.fires(CATALOG[event])]
        if not lacking and never and len(never) == len(entry.listeners):
            lacking = list(dict.fromkeys(CATALOG[event].needs for event in never))
            waits = f" to fire {' and '.join(never[:MOST_LISTED])}, which is all that it listens to"
        if lacking:
            words = " and ".join(f"{CAPABILITIES[name]} (`{name}`)" for name in lacking)
            raise RegistrationError(
                f"{entry.name!r} needs a run that {words}{waits}; {type(self).__name__} cannot. Leave the hook "
                "out, or train with hookline's trainer, which can do all that hooks may need"
            )
