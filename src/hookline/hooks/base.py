"""Base class and helpers that the built-in lifecycle hooks share."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline.core.base import TrainingHook, is_built_in
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import ConfigError
from hookline.run.control import RunControl

if TYPE_CHECKING:
    from hookline.core.registry import Registry


class NamedHook(TrainingHook):
    """A lifecycle hook that signs its notes and messages with the name it was registered under."""

    _registered_name: str | None = None
    _warned_once: frozenset[Hashable] = frozenset()

    def setup(self, name: str, registry: Registry | None = None) -> None:
        """Store the name the hook was registered under."""
        self._registered_name = name

    @property
    def registered_name(self) -> str:
        """The name the hook was registered under; before that, the name of its class."""
        return self._registered_name or self.name or type(self).__name__

    def note(self, trainer: RunControl, kind: str, **fields: Any) -> None:
        """Write a decision into the run's record, signed with the hook's name."""
        trainer.note(kind, by=self.registered_name, **fields)

    def warn(self, problem: str, once: Hashable = None, of_rank: bool = False) -> None:
        """Log a warning, signed with the hook's name.

        Args:
            problem: The problem.
            once: Of several warnings with the same value, only the first is logged.
            of_rank: Whether it concerns only this rank; otherwise rank 0 logs it for all.
        """
        if once is None or once not in self._warned_once:
            self._warned_once |= {once}
            logger.warning("hook %r: %s", self.registered_name, problem, of_rank=of_rank)

    def output_path(self, trainer: RunControl, parameter: str, default: str) -> Path | None:
        """Return the path that the hook writes to: its parameter, or a default name in the run's directory.

        It is None for a trial run, which writes nothing, and for a run without a directory, which causes one warning.
        """
        given = getattr(self, parameter)
        if trainer.is_trial_run:
            return None
        if given is None and trainer.run_dir is None:
            self.warn(f"writes nothing, because this run has no record on disk; give it a {parameter}", once=parameter)
        return Path(given) if given is not None else trainer.run_dir and trainer.run_dir / default


def period(hook: TrainingHook, every: int | str | None, units: Collection[str] = ()) -> Quantity | None:
    """Read `every`, the parameter that says how often a built-in hook works; None if it was not given.

    Args:
        hook: The hook; it has the parameters in `every_aliases` as attributes already.
        every: The value that its constructor got.
        units: The units that the hook can count in; all if empty.

    Raises:
        ConfigError: If it is never due, has another unit, or one of the aliases was given, too.
    """
    if every is None:
        return None
    for name in hook.every_aliases:
        built_in = next(cls for cls in type(hook).__mro__ if is_built_in(cls))
        if getattr(hook, name) != signature(built_in).parameters[name].default:
            raise ConfigError("every", f"pass either every or {name}, not both: they are names for one setting")
    Quantity.parse(every, units=units)
    return Schedule.parse(every=every).every


def counts_for_run(trainer: RunControl) -> bool:
    """Return whether the current validation belongs to the run: not one outside of it or nested in another one."""
    return trainer.running and trainer.validations_in_progress <= 1
