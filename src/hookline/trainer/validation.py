"""Validate: in eval mode, without grad, with training's random streams preserved and metrics averaged by samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hookline.core.catalog import find_event
from hookline.core.dispatch import EventSlots
from hookline.errors import TrainingError
from hookline.trainer.data.loader_state import preserve_order
from hookline.trainer.data.loaders import raise_no_batches, why_empty
from hookline.trainer.event_args import single_numbers
from hookline.trainer.rng import preserve_rng
from hookline.trainer.step_fn import as_python_number
from hookline.trainer.validation_metrics import merge_metrics

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

SANITY_EVENTS = ("on_validation_start", "on_validation_batch_start", "on_validation_batch_end")


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into eval mode without grad; afterwards every module is in its previous mode, frozen ones too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def validate(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None) -> dict[str, float]:
    """Run one validation with its events.

    Args:
        trainer: The trainer.
        loaders: The validation loaders by name.
        limit: The most batches of each loader; None for all.

    Returns:
        The metrics, with the keys that hooks added.

    Raises:
        TrainingError: If a loader gives no batch, or a hook validates inside the validation that it called.
    """
    args, slots = trainer.event_args, trainer.hooks.slots
    order = preserve_order(trainer.train_loaders, loaders)
    with (
        args.validation(trainer.hooks.calling_hook()),
        args.preserve_train_batch("validation"),
        preserve_rng(),
        order,
        eval_mode(trainer.model),
    ):
        if handler := slots.on_validation_start:
            handler(args)
        metrics = _measure(trainer, loaders, limit, slots)
        args.set_validation_metrics(metrics)
        if handler := slots.on_validation_end:
            handler(args)
        args.mirror_metrics("eval_metrics")
    for key, value in single_numbers(metrics).items():
        trainer.log(key, value)
    return metrics


def sanity_check(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], batches: int) -> None:
    """Try a few validation batches before the first step: better to fail now than after an epoch.

    An iterator is left alone: it can be read only once, and the first validation would miss what was tried. Only hooks
    with the attribute `hears_sanity_check` get the events; they look after the run rather than at metrics.
    """
    readable = {name: loader for name, loader in loaders.items() if not isinstance(loader, Iterator)}
    if not readable:
        return
    args, hooks = trainer.event_args, trainer.hooks
    slots, order = EventSlots(), preserve_order(trainer.train_loaders, loaders)
    with args.preserve_train_batch("validation"), preserve_rng(), order, eval_mode(trainer.model), hooks.silenced():
        for event in map(find_event, SANITY_EVENTS):
            bound = [one for one in hooks.listeners(event, due=None) if getattr(one.owner, "hears_sanity_check", False)]
            setattr(slots, event.name, hooks.dispatch_table.compile(event, bound))
        if handler := slots.on_validation_start:
            handler(args)
        _measure(trainer, readable, batches, slots)


def _measure(
    trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None, slots: EventSlots
) -> dict[str, Any]:
    """Return the metrics over all batches, those of the user included."""
    averages, tokens = SampleAverages(), 0
    nested = len(trainer.event_args.validating) > 1
    with trainer.validation_metrics.measure(loaders, trainer.device, nested) as user:
        read = {name: _limited(loader, limit) for name, loader in loaders.items()}
        for name, samples, results in trainer.loop.validation_batches(read, slots, user.measure_batch):
            averages.add(name, samples, results)
            tokens += trainer.count_tokens(trainer.event_args.batch)
        empty = {name: loader for name, loader in loaders.items() if name not in averages}
        if len(empty) == len(loaders):
            raise TrainingError(f"the validation loaders gave no batches{why_empty(empty)}")
        for name, loader in empty.items():  # if the others hid it, val/loss would mean something else
            raise_no_batches("validation", name, loader)
        return merge_metrics(averages.metrics(language_model=tokens > 0), user.compute())


def _limited(loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """Read at most `limit` batches and not one more, which an iterator would lose; starts when it is first read."""
    yield from islice(loader, limit)


class SampleAverages:
    """Means weighted by samples, summed on the device and read once. A batch without a key has no part in its mean."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor | float]] = {}  # by loader and key
        self._samples: dict[str, dict[str, int]] = {}

    def __contains__(self, loader: str) -> bool:
        """Return whether a loader gave a batch with samples."""
        return loader in self._samples

    def add(self, loader: str, samples: int, results: Mapping[str, Any]) -> None:
        """Add the results of one batch; a batch without samples has no weight."""
        if not samples:
            return
        sums, counts = self._sums.setdefault(loader, {}), self._samples.setdefault(loader, {})
        for key, value in results.items():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(as_python_number(value))
            sums[key] = sums.get(key, 0.0) + wide * samples
            counts[key] = counts.get(key, 0) + samples

    def metrics(self, language_model: bool) -> dict[str, float]:
        """Return `val/<key>`, and with several loaders `val/<loader>/<key>`; waits for the device."""
        loaders_of: dict[str, list[str]] = {}
        for loader, sums in self._sums.items():
            for key in sums:
                loaders_of.setdefault(key, []).append(loader)
        found = {f"val/{key}": self._mean(key, loaders) for key, loaders in loaders_of.items()}
        if len(self._sums) > 1:
            of_each = ({f"val/{one}/{key}": self._mean(key, [one]) for key in sums} for one, sums in self._sums.items())
            found = merge_metrics(*of_each, found)
        if language_model:
            found["val/perplexity"] = math.exp(found["val/loss"]) if found["val/loss"] < 700 else math.inf
        return found

    def _mean(self, key: str, loaders: list[str]) -> float:
        total = sum(float(self._sums[loader][key]) for loader in loaders)
        return total / sum(self._samples[loader][key] for loader in loaders)
