"""Validation: eval mode, no grad, training's random streams untouched, metrics averaged by samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import TrainingError
from hookline.events.dispatch import Fire
from hookline.trainer.loaders import refuse_loader_without_batches, why_empty
from hookline.trainer.moment import numbers_of, respelled
from hookline.trainer.rng import rng_untouched

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_KEPT = (
    "batch", "batch_idx", "dataloader_idx", "dataloader_name", "phase", "live_loss", "step_metrics",
    "_loss", "_loss_of", "_metrics", "_metrics_of",
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
    with set_aside(trainer, "validation"), rng_untouched(), evaluation(trainer.model):
        if heard := fire.on_validation_start:
            heard(moment)
        moment.val_metrics = measured(trainer, loaders, limit, fire)
        moment.eval_metrics = respelled(moment.val_metrics, "val/", "eval/")
        if heard := fire.on_validation_end:
            heard(moment)
        moment.mirror_metrics("eval_metrics")
    for key, value in numbers_of(moment.val_metrics).items():
        trainer.log(key, value)
    return moment.val_metrics


def measured(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None, fire: Fire) -> dict[str, Any]:
    """The metrics of all batches, the user's own included."""
    averages, tokens = Averages(), 0
    with trainer.user_metrics.measuring(loaders, trainer.device) as own:
        for name, samples, results in trainer.loop.validation_batches(loaders, limit, fire, own.batch):
            averages.add(name, samples, results)
            tokens += trainer.count_tokens(trainer.moment.batch)
        refuse_silence(loaders, averages)
        return {**averages.metrics(language_model=tokens > 0), **own.computed()}


def refuse_silence(loaders: Mapping[str, Iterable[Any]], averages: Averages) -> None:
    """Every loader must have been heard: if others hid one that gave nothing, val/loss would mean something else."""
    silent = {name: loader for name, loader in loaders.items() if name not in averages}
    if len(silent) == len(loaders):
        raise TrainingError(f"the validation loaders gave no batches{why_empty(silent)}")
    for name, loader in silent.items():
        refuse_loader_without_batches("validation", name, loader)


def sanity_check(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], batches: int) -> None:
    """Try a few validation batches before the first step, silently: better to fail now than after an epoch."""
    nobody = Fire()
    with set_aside(trainer, "validation"), rng_untouched(), evaluation(trainer.model), trainer.hooks.silenced():
        measured(trainer, loaders, batches, nobody)


class Averages:
    """Sums on the device, weighted by samples; read once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor | float]] = {}
        self._samples: dict[str, int] = {}

    def __contains__(self, loader: str) -> bool:
        """Whether it gave a batch with something in it."""
        return loader in self._samples

    def add(self, loader: str, samples: int, results: Mapping[str, Any]) -> None:
        """One batch; without samples it weighs nothing, and its mean is NaN."""
        if not samples:
            return
        sums = self._sums.setdefault(loader, {})
        for key, value in results.items():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
            sums[key] = sums.get(key, 0.0) + wide * samples
        self._samples[loader] = self._samples.get(loader, 0) + samples

    def metrics(self, language_model: bool) -> dict[str, float]:
        """'val/…', and 'val/<loader>/…' beside it when there are several loaders."""
        found: dict[str, float] = {}
        if len(self._samples) > 1:
            for loader, sums in self._sums.items():
                found.update(
                    {f"val/{loader}/{key}": float(total) / self._samples[loader] for key, total in sums.items()}
                )
        for key in dict.fromkeys(key for sums in self._sums.values() for key in sums):
            having = [loader for loader, sums in self._sums.items() if key in sums]
            total = sum(float(self._sums[loader][key]) for loader in having)
            found[f"val/{key}"] = total / sum(self._samples[loader] for loader in having)
        if language_model:
            found["val/perplexity"] = math.exp(found["val/loss"]) if found["val/loss"] < 700 else math.inf
        return found
