"""Hooks that know the name they go by: they sign their notes with it, and their messages."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any, TypeVar

from hookline.registry.base import TrainingHook

Kind = TypeVar("Kind", bound=TrainingHook)


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


def is_of_the_run(trainer: Any) -> bool:
    """Whether a validation decides something: not one before or after the run, nor one inside another."""
    return bool(getattr(trainer, "running", True)) and validations_under_way(trainer) <= 1


def validations_under_way(trainer: Any) -> int:
    """How many, each inside the one before; 0 where it is not known: other people's trainers do not count them."""
    under_way = getattr(getattr(trainer, "moment", None), "validating", None)
    return len(under_way) if isinstance(under_way, list) else 0


def made_again(hook: Kind, made_by: type[Any], memo: dict[int, Any]) -> Kind:
    """A deep copy of a hook whose threads and queues stay with it: made by its class with the same parameters.

    What a subclass keeps is copied; the name that the hook was registered under is not.
    """
    memo[id(hook)] = twin = type(hook).__new__(type(hook))
    made_by.__init__(twin, **{name: getattr(hook, name) for name in inspect.signature(made_by).parameters})
    of_a_subclass = {key: value for key, value in vars(hook).items() if key not in {*vars(twin), "_own_name"}}
    vars(twin).update(deepcopy(of_a_subclass, memo))
    return twin
