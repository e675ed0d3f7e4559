"""Validation: eval mode, no grad, training's random streams untouched, metrics averaged by samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError
from hookline.events.catalog import find_event
from hookline.events.dispatch import Fire
from hookline.trainer.forward import plain
from hookline.trainer.loaders import refuse_loader_without_batches, why_empty
from hookline.trainer.moment import numbers_of, respelled
from hookline.trainer.positions import order_untouched
from hookline.trainer.rng import rng_untouched
from hookline.trainer.user_metrics import all_of

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_KEPT = (
    "batch", "batch_idx", "dataloader_idx", "dataloader_name", "phase", "live_loss", "step_metrics",
    "_loss", "_loss_of", "_metrics", "_metrics_of", "val_metrics", "eval_metrics",
)  # fmt: skip


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode, without grad; afterwards every module is in the mode it was in, frozen ones too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def set_aside(trainer: Trainer, phase: str) -> Iterator[None]:
    """Keep what the moment knows of the training batch while other batches run."""
    moment = trainer.moment
    kept = {name: getattr(moment, name) for name in _KEPT}
    outer, moment.set_aside = moment.set_aside, moment.set_aside or kept
    moment.phase = phase
    try:
        yield
    finally:
        moment.set_aside = outer
        for name, value in kept.items():
            setattr(moment, name, value)


def validate(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None) -> dict[str, float]:
    """One validation with its events; returns the metrics, keys that hooks added included."""
    moment, fire = trainer.moment, trainer.hooks.fire
    order = order_untouched(trainer.train_loaders, loaders)
    with under_way(trainer), set_aside(trainer, "validation"), rng_untouched(), order, evaluation(trainer.model):
        if heard := fire.on_validation_start:
            heard(moment)
        metrics = moment.val_metrics = measured(trainer, loaders, limit, fire)
        moment.eval_metrics = respelled(metrics, "val/", "eval/")
        if heard := fire.on_validation_end:
            heard(moment)
        moment.mirror_metrics("eval_metrics")
    for key, value in numbers_of(metrics).items():
        trainer.log(key, value)
    return metrics


@contextmanager
def under_way(trainer: Trainer) -> Iterator[None]:
    """A hook may validate inside a validation, but not again inside that one: its own event would call it for ever."""
    validating, caller = trainer.moment.validating, trainer.hooks.who_is_calling()
    if caller in validating[1:]:  # the first is inside of none, whoever asked for it
        who = "validate()" if caller is None else f"validate() by hook {caller!r}"
        raise TrainingError(
            f"{who} inside the validation that it asked for itself: that one has the same events; let the hook "
            "remember that it is validating, or run the model in trainer.inference(), which has none"
        )
    validating.append(caller)
    try:
        yield
    finally:
        validating.pop()


def measured(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None, fire: Fire) -> dict[str, Any]:
    """The metrics of all batches, the user's own included."""
    averages, tokens, nested = Averages(), 0, len(trainer.moment.validating) > 1
    with trainer.user_metrics.measuring(loaders, trainer.device, nested) as own:
        read = {name: first_batches(loader, limit) for name, loader in loaders.items()}
        for name, samples, results in trainer.loop.validation_batches(read, fire, own.batch):
            averages.add(name, samples, results)
            tokens += trainer.count_tokens(trainer.moment.batch)
        refuse_silence(loaders, averages)
        return all_of(averages.metrics(language_model=tokens > 0), own.computed())


def first_batches(loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """Not a batch more than the limit is read, which an iterator would lose; the loader begins when its turn comes."""
    yield from islice(loader, limit)


def refuse_silence(loaders: Mapping[str, Iterable[Any]], averages: Averages) -> None:
    """Every loader must have been heard: if others hid one that gave nothing, val/loss would mean something else."""
    silent = {name: loader for name, loader in loaders.items() if name not in averages}
    if len(silent) == len(loaders):
        raise TrainingError(f"the validation loaders gave no batches{why_empty(silent)}")
    for name, loader in silent.items():
        refuse_loader_without_batches("validation", name, loader)


def sanity_check(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], batches: int) -> None:
    """Try a few validation batches before the first step, silently: better to fail now than after an epoch.

    An iterator is left alone: it can be read only once, and the first validation would miss what was tried.
    """
    again = {name: loader for name, loader in loaders.items() if not isinstance(loader, Iterator)}
    if not again:
        return
    order = order_untouched(trainer.train_loaders, loaders)
    with set_aside(trainer, "validation"), rng_untouched(), order, evaluation(trainer.model), trainer.hooks.silenced():
        fire = fire_of_sanity_check(trainer)
        if heard := fire.on_validation_start:
            heard(trainer.moment)
        measured(trainer, again, batches, fire)


def fire_of_sanity_check(trainer: Trainer) -> Fire:
    """Nobody hears it but hooks that say `hears_sanity_check`, who look after the run and not at what is measured."""
    fire = Fire()
    for event in map(find_event, ("on_validation_start", "on_validation_batch_start", "on_validation_batch_end")):
        listeners = trainer.hooks.listeners(event, due=None)
        bound = [one for one in listeners if getattr(one.owner, "hears_sanity_check", False)]  # an owner is anything
        setattr(fire, event.name, trainer.hooks.tables.compile(event, bound))
    return fire


class Averages:
    """Sums on the device, weighted by samples; read once at the end. A batch without a key has no part in its mean."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor | float]] = {}
        self._samples: dict[str, dict[str, int]] = {}  # of the batches that had the key

    def __contains__(self, loader: str) -> bool:
        """Whether it gave a batch with something in it."""
        return loader in self._samples

    def add(self, loader: str, samples: int, results: Mapping[str, Any]) -> None:
        """One batch; without samples it weighs nothing, and its mean is NaN."""
        if not samples:
            return
        sums, counts = self._sums.setdefault(loader, {}), self._samples.setdefault(loader, {})
        for key, value in results.items():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(plain(value))
            sums[key] = sums.get(key, 0.0) + wide * samples
            counts[key] = counts.get(key, 0) + samples

    def metrics(self, language_model: bool) -> dict[str, float]:
        """'val/…', and 'val/<loader>/…' beside it when there are several loaders."""
        having: dict[str, list[str]] = {}  # the loaders of each key
        for loader, sums in self._sums.items():
            for key in sums:
                having.setdefault(key, []).append(loader)
        found = {f"val/{key}": self._mean(key, loaders) for key, loaders in having.items()}
        if len(self._sums) > 1:
            of_each = ({f"val/{one}/{key}": self._mean(key, [one]) for key in sums} for one, sums in self._sums.items())
            found = all_of(*of_each, found)
        if language_model:
            found["val/perplexity"] = math.exp(found["val/loss"]) if found["val/loss"] < 700 else math.inf
        return found

    def _mean(self, key: str, loaders: list[str]) -> float:
        """Over the samples that had the key, in these loaders."""
        total = sum(float(self._sums[loader][key]) for loader in loaders)
        return total / sum(self._samples[loader][key] for loader in loaders)
