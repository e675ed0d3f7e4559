"""Validate, and run the sanity check: in eval mode, without grad, and with training's random streams preserved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any

import torch

from hookline._tensors import count_samples
from hookline.core.base import hook_attribute
from hookline.core.catalog import find_event
from hookline.core.dispatch import EventSlots
from hookline.errors import TrainingError
from hookline.ranks import Ranks
from hookline.run.outputs import OUTPUT_AND_TARGET, OutputReader, as_python_number, find_target
from hookline.trainer.data.loader_state import preserve_parts
from hookline.trainer.data.loaders import raise_no_batches, why_empty
from hookline.trainer.data.sampler import ResumableSampler
from hookline.trainer.metrics import ValidationMetrics, merge_metrics
from hookline.trainer.step_fn import loss_and_metrics

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

SANITY_EVENTS = ("on_validation_start", "on_validation_batch_start", "on_validation_batch_end")


def validate(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None) -> dict[str, float]:
    """Run one validation with its events.

    Args:
        trainer: The trainer.
        loaders: The validation loaders by name.
        limit: The maximum number of batches of each loader; None for all.

    Returns:
        The metrics, with the keys that hooks added.

    Raises:
        TrainingError: If a loader yields no batch, or a hook validates inside the validation that it called.
    """
    order = preserve_parts(trainer.train_loaders, loaders, (torch.Generator, ResumableSampler))
    with order, trainer.validation() as metrics:  # hooks at its beginning and its end may read them, too
        metrics.update(_measure(trainer, loaders, limit, trainer.hooks.slots))
    return metrics


def sanity_check(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], batches: int) -> dict[str, Any] | None:
    """Try a few validation batches before the first step: better to fail now than after an epoch.

    An iterator is left alone: it can be read only once, and the first validation would miss the batches that were
    tried. Only hooks with the attribute `runs_in_sanity_check` get the events; they watch the run rather than its
    metrics.

    Returns:
        The metrics; None if a loader was not tried.
    """
    readable = {name: loader for name, loader in loaders.items() if not isinstance(loader, Iterator)}
    if not readable:
        return None
    args, hooks = trainer.event_args, trainer.hooks
    slots, order = EventSlots(), preserve_parts(trainer.train_loaders, loaders, (torch.Generator, ResumableSampler))
    with trainer.other_batches("validation"), order, hooks.silenced():
        for event in map(find_event, SANITY_EVENTS):
            listeners = hooks.listeners(event, due=None)
            bound = [hook for hook in listeners if hook_attribute(hook.owner, "runs_in_sanity_check")]
            setattr(slots, event.name, hooks.dispatch_table.make_dispatch(event, bound))
        if handler := slots.on_validation_start:
            handler(args)
        metrics = _measure(trainer, readable, batches, slots)
    return metrics if len(readable) == len(loaders) else None


def _measure(
    trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None, slots: EventSlots
) -> dict[str, Any]:
    """Run the loaders through the model, and return the metrics over all batches, including the user's."""
    args, averages, ranks = trainer.event_args, SampleAverages(), trainer.ranks
    user = ValidationMetrics(trainer.validation_metrics, loaders, trainer.device, nested=len(args.validating) > 1)
    compute, reader = trainer.forward.compute_with(trainer.forward.eval_model), OutputReader()
    named = trainer.hooks.dispatch_table.named_at("on_validation_batch_end")
    reads = bool(trainer.validation_metrics) or not OUTPUT_AND_TARGET.isdisjoint(named)
    with reader.attached(trainer.forward.eval_model) if reads else nullcontext():
        for loader_index, (name, loader) in enumerate(loaders.items()):
            # No batch beyond the limit is read, because an iterator would lose it.
            batches: Iterator[tuple[Any, bool]] = zip(islice(loader, limit), repeat(True), strict=False)
            if trainer.engine.forward_is_collective:
                batches = _in_step(ranks, name, batches)
            for index, (batch, counts) in enumerate(batches):
                if not counts:
                    with trainer.hooks.silenced():
                        compute(trainer.engine.place(batch))
                    continue
                placed = trainer.begin_validation_batch(batch, index, loader_index, name, slots)
                result = compute(placed)
                loss, metrics = loss_and_metrics(result)
                output, target = reader.take(result), find_target(result, placed)
                metrics = {**metrics, **user.measure_batch(name, placed, result, output)}
                results = trainer.end_validation_batch(loss, metrics, output, target, slots)
                averages.add(name, count_samples(placed), trainer.accumulation.weigh_batch(batch), results)
                averages.tokens += trainer.count_tokens(placed)
        averages.add_up(ranks)
        empty = {name: loader for name, loader in loaders.items() if name not in averages.loaders()}
        if len(empty) == len(loaders):
            raise TrainingError(f"the validation loaders yielded no batches{why_empty(empty)}")
        for name, loader in empty.items():  # if the others hid it, val/loss would mean something else
            raise_no_batches("validation", name, loader)
        return user.compute(ranks, averages.metrics())


def _in_step(ranks: Ranks, loader: str, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether they count, equally often on all ranks: a sharded model's forward pass needs all.

    A rank that has no more batches gets its last one again, which does not count.

    Raises:
        TrainingError: On all ranks, if one of them has no batch while others have some.
    """
    last: Any = None
    for index in count():
        last, counts = next(batches, (last, False))
        have_more = ranks.total([counts])[0]  # A known len() is not trusted: it may be wrong.
        if not have_more:
            return
        if not index and have_more < ranks.world_size:
            without = [rank for rank, has_one in enumerate(ranks.gather(counts)) if not has_one]
            raise TrainingError(
                f"the validation loader {loader!r} yielded no batch on rank {', '.join(map(str, without))}, and a "
                "sharded model needs one from each rank: validate on more samples, or with smaller batches"
            )
        yield last, counts


class SampleAverages:
    """Means weighted by samples or, according to `loss_weight`, by tokens; summed on the device and read once.

    A batch without a key does not count in its mean. A key that only some ranks have is averaged over their samples.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[Any, float]] = {}  # a total and its weight, by loader and key
        self.tokens = 0

    def add(self, loader: str, samples: int, weight: float, results: Mapping[str, Any]) -> None:
        """Add the results of one batch. Batches without samples are ignored; one of weight zero may have a NaN loss."""
        for key, value in results.items() if samples else ():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(as_python_number(value))
            total, count = self._sums.get((loader, key), (0.0, 0))
            self._sums[loader, key] = (total + wide * weight if weight else total), count + weight

    def add_up(self, ranks: Ranks) -> None:
        """Add the sums of all ranks, so that each sample counts once; waits for the device and for all ranks."""
        sums = {name: [float(total), weight] for name, (total, weight) in self._sums.items()}
        added = ranks.add_up({("", "tokens"): [self.tokens], **sums})
        self.tokens = int(added.pop(("", "tokens")))
        self._sums = {name: tuple(numbers.tolist()) for name, numbers in added.items()}

    def loaders(self) -> list[str]:
        """Return the loaders that had samples."""
        return list(dict.fromkeys(loader for loader, _ in self._sums))

    def metrics(self) -> dict[str, float]:
        """Return `val/<key>`, and with several loaders `val/<loader>/<key>`, once `add_up` has read the sums.

        Batches with tokens belong to a language model, which has a perplexity.
        """
        totals: dict[str, tuple[float, float]] = {}
        for (_, key), (total, samples) in self._sums.items():
            total_so_far, samples_so_far = totals.get(key, (0.0, 0))
            totals[key] = total_so_far + total, samples_so_far + samples
        metrics = {f"val/{key}": _mean(*part) for key, part in totals.items()}
        if len(self.loaders()) > 1:
            of_each = ({f"val/{loader}/{key}": _mean(*part)} for (loader, key), part in self._sums.items())
            metrics = merge_metrics(*of_each, metrics)
        if self.tokens:
            metrics["val/perplexity"] = math.inf if metrics["val/loss"] >= 700 else math.exp(metrics["val/loss"])
        return metrics


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
