"""Moved to `RunControl.is_trial_run`."""

from hookline.core.run_control import RunControl


def is_trial(trainer: RunControl) -> bool:
    """Return `trainer.is_trial_run`."""
    return trainer.is_trial_run
