"""Who changed what: hooks may steer a run by writing learning rates, parameters or batches; the record says so.

Only hooks that name something through which they can write are watched, one by one, at every call. Looking at the
version counters of a hundred parameters takes some 10 µs, which a hook that has the whole run in its hands may cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hookline.events.catalog import Event
from hookline.events.dispatch import Bound
from hookline.events.policy import logger
from hookline.trainer.forward import tensors_of

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

REACHES_THE_RUN = {"trainer", "optimizer", "model", "ctx", "state", "batch"}


class Steering:
    """Watches the users' lifecycle hooks of one trainer for what they write."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._times: dict[tuple[str, str, str], int] = {}

    def dress(self, event: Event, bound: Sequence[Bound], timed: bool) -> list[Bound]:
        """The listeners as they shall be called."""
        return [self._watched(event, item) if self._may_write(event, item) else item for item in bound]

    def _may_write(self, event: Event, item: Bound) -> bool:
        return event.kind == "lifecycle" and not item.built_in and not REACHES_THE_RUN.isdisjoint(item.listener.wanted)

    def _watched(self, event: Event, item: Bound) -> Bound:
        call, reads_batch = item.listener.call, "batch" in item.listener.wanted

        def watched(*arguments: Any, **named: Any) -> Any:
            rates, said = self._rates(), self._trainer.lr_changes
            params = self._parameter_versions()
            batch = self._batch_versions() if reads_batch else 0
            result = call(*arguments, **named)
            if self._rates() != rates and self._trainer.lr_changes == said:  # else trainer.lr = … has said so
                self._note(item.hook, event, "learning rate", old=rates, new=self._rates())
            if self._parameter_versions() != params:
                self._note(item.hook, event, "parameters")
            if reads_batch and self._batch_versions() != batch:
                self._note(item.hook, event, "batch")
            return result

        return replace(item, listener=replace(item.listener, call=watched))

    def _rates(self) -> list[Any]:
        return [_plain(group["lr"]) for one in self._trainer.optimizers for group in one.param_groups]

    def _parameter_versions(self) -> int:
        return sum([param._version for param in self._trainer.params.values()])

    def _batch_versions(self) -> int:
        return sum([_version(tensor) for tensor in tensors_of(self._trainer.moment.batch)])

    def _note(self, hook: str, event: Event, what: str, **values: Any) -> None:
        """Into the record at the first, second, fourth, eighth … time; aloud the first time, unless it was a rate."""
        key = (hook, event.name, what)
        times = self._times[key] = self._times.get(key, 0) + 1
        if times & (times - 1) == 0:
            self._trainer.note("hook_wrote", hook=hook, on=event.name, what=what, times=times, **values)
        if times == 1 and what != "learning rate":
            logger.warning("hook %r wrote to the %s in %s: training is no longer what it was", hook, what, event.name)


def _plain(rate: Any) -> Any:
    """A rate that is a tensor is compared by what was done to it, so that nothing waits for a device."""
    return f"tensor {id(rate)} version {rate._version}" if isinstance(rate, torch.Tensor) else rate


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
