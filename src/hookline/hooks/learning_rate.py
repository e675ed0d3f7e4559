"""What the optimizers are set to, as the run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from hookline.hooks.parameters import one_of, switch
from hookline.registry.base import TrainingHook


class LearningRateMonitor(TrainingHook):
    """Records the learning rate of every parameter group: ``lr``, or ``lr/<optimizer>/<group>`` if there are several.

    Every step it is the rate that the step uses; with ``frequency="epoch"`` the one that an epoch begins with. A group
    goes by its key "name", else by its number; of several of one name the later ones get a number behind it, as do
    optimizers of one class. `log_momentum` adds ``momentum`` (SGD's, or Adam's first beta) and
    ``beta2``, `log_weight_decay` adds ``weight_decay``, for the groups that have them.
    """

    built_in = True
    name = "lr_monitor"

    def __init__(
        self,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        frequency: Literal["step", "epoch"] = "step",
    ) -> None:
        self.log_momentum = switch(log_momentum, "log_momentum")
        self.log_weight_decay = switch(log_weight_decay, "log_weight_decay")
        self.frequency = one_of(frequency, ("step", "epoch"), "frequency")
        if frequency == "epoch":
            self.on_before_optimizer_step = None  # type: ignore[assignment]  # steps need not be heard
        else:
            self.on_epoch_start = None  # type: ignore[assignment]

    def on_before_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
        """The optimizer steps next: whatever schedulers and hooks did to its rates, this is what it uses."""
        self._log(trainer, optimizer_idx)

    def on_epoch_start(self, trainer: Any) -> None:
        for index in range(len(trainer.optimizers)):
            self._log(trainer, index)

    def _log(self, trainer: Any, index: int) -> None:
        for label, group in _labelled_groups(trainer.optimizers, index):
            for quantity, value in self._values(group):
                trainer.log(f"{quantity}{label}", value)

    def _values(self, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield "lr", group["lr"]
        if self.log_momentum:
            yield from _momentum(group)
        if self.log_weight_decay and "weight_decay" in group:
            yield "weight_decay", group["weight_decay"]


def _momentum(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    betas = group.get("betas") or ()
    for quantity, value in zip(("momentum", "beta2"), betas or [group.get("momentum")], strict=False):
        if value is not None:
            yield quantity, value


def _labelled_groups(optimizers: Sequence[Any], index: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One optimizer's groups, each with what is appended to a metric's name to tell it from the others."""
    groups = optimizers[index].param_groups
    if len(groups) == len(optimizers) == 1 and "name" not in groups[0]:  # as mostly
        yield "", groups[0]
        return
    classes = _told_apart([type(one).__name__ for one in optimizers])
    optimizer = f"/{classes[index]}" if len(optimizers) > 1 else ""
    alone = len(groups) == 1 and "name" not in groups[0]
    names = _told_apart([str(group.get("name", f"group_{number}")) for number, group in enumerate(groups)])
    for name, group in zip(names, groups, strict=True):
        yield optimizer + ("" if alone else f"/{name}"), group


def _told_apart(names: Sequence[str]) -> list[str]:
    """'AdamW', 'SGD', 'AdamW-1'; a number that makes another one's name is passed over."""
    taken, told = set(names), []
    for index, name in enumerate(names):
        free = (f"{name}-{count}" for count in range(1, len(names) + 1))
        told.append(name if name not in names[:index] else next(one for one in free if one not in taken))
        taken.add(told[-1])
    return told
