"""`lr_monitor`: record the learning rates that the optimizers use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

from hookline.core.base import TrainingHook
from hookline.core.schedule import Schedule
from hookline.errors import ConfigError
from hookline.hooks.base import period
from hookline.run.control import RunControl


class LearningRateMonitor(TrainingHook):
    """Records the learning rate of every parameter group: ``lr``, or ``lr/<optimizer>/<group>`` if there are several.

    A group is named by its key "name", otherwise by its number. If several groups share a name, or several optimizers a
    class, the later ones get a number appended.

    Args:
        log_momentum: Record ``momentum`` (SGD's, or Adam's first beta) and ``beta2`` of groups that have them.
        log_weight_decay: Record ``weight_decay`` of groups that have it.
        frequency: "step" records the rate that each step uses, "epoch" the one at the start of each epoch.
        every: "1 epoch", or how often to record the rate that a step uses; an alternative to `frequency`.
    """

    built_in = True
    name = "lr_monitor"
    every_aliases = ("frequency",)

    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        frequency: Literal["step", "epoch"] = "step",
        every: int | str | None = None,
    ) -> None:
        self.log_momentum, self.log_weight_decay, self.frequency = log_momentum, log_weight_decay, frequency
        given = period(self, every)
        if given is not None and given.unit == "epochs":
            if given.amount != 1:
                raise ConfigError(
                    "every", f"{every!r}: learning rates are recorded at the start of each epoch or at steps"
                )
            self.frequency = "epoch"
        elif given is not None:
            self.schedule = Schedule(every=given)
        if self.frequency == "epoch":
            self.on_before_optimizer_step = None  # type: ignore[assignment]  # so that steps cost nothing
        else:
            self.on_epoch_start = None  # type: ignore[assignment]

    def on_before_optimizer_step(self, trainer: RunControl, optimizer_idx: int) -> None:
        """Record the rates that the optimizer is about to use, after any changes by schedulers and hooks."""
        self._log(trainer, optimizer_idx)

    def on_epoch_start(self, trainer: RunControl) -> None:
        """Record the rates that the epoch starts with."""
        for index in range(len(trainer.optimizers)):
            self._log(trainer, index)

    def _log(self, trainer: RunControl, index: int) -> None:
        for label, group in _labelled_groups(trainer.optimizers, index):
            values = {"lr": group["lr"]}
            if self.log_momentum:
                # The first of Adam's betas is its momentum.
                values |= zip(("momentum", "beta2"), group.get("betas") or [group.get("momentum")], strict=False)
            if self.log_weight_decay:
                values["weight_decay"] = group.get("weight_decay")
            for quantity, value in values.items():
                if value is not None:  # the group does not have it
                    trainer.log(f"{quantity}{label}", value, reduce=None)


def _labelled_groups(optimizers: Sequence[Any], index: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield one optimizer's groups, each with the suffix for the names of its metrics."""
    groups = optimizers[index].param_groups
    is_single = len(groups) == 1 and "name" not in groups[0]
    if is_single and len(optimizers) == 1:  # by far the most common case
        yield "", groups[0]
        return
    classes = _unique_names([type(optimizer).__name__ for optimizer in optimizers])
    prefix = f"/{classes[index]}" if len(optimizers) > 1 else ""
    names = _unique_names([str(group.get("name", f"group_{number}")) for number, group in enumerate(groups)])
    for name, group in zip(names, groups, strict=True):
        yield prefix + ("" if is_single else f"/{name}"), group


def _unique_names(names: Sequence[str]) -> list[str]:
    """Append numbers to repeated names ('AdamW', 'SGD', 'AdamW-1') without producing an existing name."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in count(1))
        free = (candidate for candidate in numbered if candidate not in {*names, *unique})
        unique.append(next(free) if name in unique else name)
    return unique
