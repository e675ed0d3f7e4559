"""Hooks that know the name they go by: they sign their notes with it, and their messages."""

from __future__ import annotations

from typing import Any

from hookline.registry.base import TrainingHook


class NamedHook(TrainingHook):
    """What built-ins that write into the record share."""

    _own_name: str | None = None

    def setup(self, name: str, registry: Any = None) -> None:
        """Take the name that it was registered under."""
        self._own_name = name

    @property
    def called(self) -> str:
        """The name it was registered under; before that, its type's."""
        return self._own_name or self.name or type(self).__name__

    def note(self, trainer: Any, kind: str, **fields: Any) -> None:
        """Write a decision into the run's record, signed, where the run keeps one."""
        if callable(write := getattr(trainer, "note", None)):
            write(kind, by=self.called, **fields)


def is_trial(trainer: Any) -> bool:
    """Whether the run only tries whether everything runs: it has learnt nothing and is no news."""
    return bool(getattr(getattr(trainer, "options", None), "fast_dev_run", 0))
