"""Moved to hookline.core.change_audit."""

from typing import Any

from hookline.core.change_audit import ChangeAudit


def Steering(trainer: Any) -> ChangeAudit:
    """Make the audit of a trainer; until the trainer does it itself."""
    return ChangeAudit(trainer, lambda: int(trainer.lr_changes))
