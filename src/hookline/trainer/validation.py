"""Validate: in eval mode, without grad, with training's random streams preserved and metrics averaged by samples.

The user's metrics are functions, called as ``fn(output, batch)`` for every batch and averaged by samples, and objects
such as torchmetrics': they get every batch as ``update(predictions, target)`` and are computed at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any

import torch

from hookline._tensors import count_samples
from hookline.core.catalog import find_event
from hookline.core.dispatch import EventSlots
from hookline.errors import TrainingError, add_note, with_article
from hookline.ranks import OneProcess, add_up
from hookline.trainer.data.loader_state import preserve_parts
from hookline.trainer.data.loaders import raise_no_batches, why_empty
from hookline.trainer.data.sampler import ResumableSampler
from hookline.trainer.event_args import single_numbers
from hookline.trainer.rng import preserve_rng
from hookline.trainer.step_fn import as_python_number, is_numpy_number, loss_and_metrics

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_TAKEN_NAMES = ("loss", "perplexity")
_NO_OUTPUT = object()
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


@contextmanager
def eval_batches(trainer: Trainer, phase: str) -> Iterator[None]:
    """Run other batches than the training batch, in eval mode; its arguments and random streams are preserved.

    Args:
        trainer: The trainer.
        phase: What hooks see as `phase` inside the block.
    """
    with trainer.event_args.preserve_train_batch(phase), preserve_rng(), eval_mode(trainer.model):
        try:
            yield
        finally:
            trainer.engine.free_whole_weights(trainer.model)


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
    order = preserve_parts(trainer.train_loaders, loaders, (torch.Generator, ResumableSampler))
    with args.validation(trainer.hooks.calling_hook()), eval_batches(trainer, "validation"), order:
        if handler := slots.on_validation_start:
            handler(args)
        metrics = _measure(trainer, loaders, limit, slots)
        args.val_metrics, args.eval_metrics = metrics, {}
        args.mirror_metrics("val_metrics")
        if handler := slots.on_validation_end:
            handler(args)
        args.mirror_metrics("eval_metrics")
    for key, value in single_numbers(metrics).items():
        trainer.log(key, value)
    if trainer.running and trainer.ranks.act_together:
        trainer.loop.flush(wait=True)  # ranks exchange what they have recorded
    return metrics


def sanity_check(trainer: Trainer, loaders: Mapping[str, Iterable[Any]], batches: int) -> dict[str, Any] | None:
    """Try a few validation batches before the first step: better to fail now than after an epoch.

    An iterator is left alone: it can be read only once, and the first validation would miss what was tried. Only hooks
    with the attribute `hears_sanity_check` get the events; they look after the run rather than at metrics.

    Returns:
        The metrics, None if not every loader was tried.
    """
    readable = {name: loader for name, loader in loaders.items() if not isinstance(loader, Iterator)}
    if not readable:
        return None
    args, hooks = trainer.event_args, trainer.hooks
    slots, order = EventSlots(), preserve_parts(trainer.train_loaders, loaders, (torch.Generator, ResumableSampler))
    with eval_batches(trainer, "validation"), order, hooks.silenced():
        for event in map(find_event, SANITY_EVENTS):
            bound = [one for one in hooks.listeners(event, due=None) if getattr(one.owner, "hears_sanity_check", False)]
            setattr(slots, event.name, hooks.dispatch_table.compile(event, bound))
        if handler := slots.on_validation_start:
            handler(args)
        metrics = _measure(trainer, readable, batches, slots)
    return metrics if len(readable) == len(loaders) else None


def _measure(
    trainer: Trainer, loaders: Mapping[str, Iterable[Any]], limit: int | None, slots: EventSlots
) -> dict[str, Any]:
    """Run the loaders through the model, and return the metrics over all batches, those of the user included."""
    args, averages, tokens, ranks = trainer.event_args, SampleAverages(), 0, trainer.ranks
    user = UserMetrics(trainer.validation_metrics, loaders, trainer.device, nested=len(args.validating) > 1)
    compute = trainer.eval_compute()
    with user.read_outputs(trainer.called_eval_model):
        for loader_index, (name, loader) in enumerate(loaders.items()):
            # Not one batch more than the limit is read: an iterator would lose it.
            batches: Iterator[tuple[Any, bool]] = zip(islice(loader, limit), repeat(True), strict=False)
            if trainer.engine.forward_is_collective:
                batches = _in_step(ranks, name, batches)
            for index, (batch, counts) in enumerate(batches):
                placed = trainer.engine.place(batch)
                if not counts:
                    with trainer.hooks.silenced():
                        compute(placed)
                    continue
                args.enter_validation_batch(placed, index, loader_index, name)
                if handler := slots.on_validation_batch_start:
                    handler(args)
                result = compute(placed)
                loss, metrics = loss_and_metrics(result)
                args.live_loss = loss
                args.step_metrics = {**metrics, **user.measure_batch(name, placed, result)}
                if handler := slots.on_validation_batch_end:
                    handler(args)
                results = {"loss": loss.detach(), **args.step_metrics, **args.added_metrics()}
                averages.add(name, count_samples(placed), results)
                tokens += trainer.count_tokens(placed)
        tokens = averages.add_up(ranks, tokens)
        empty = {name: loader for name, loader in loaders.items() if name not in averages.samples}
        if len(empty) == len(loaders):
            raise TrainingError(f"the validation loaders gave no batches{why_empty(empty)}")
        for name, loader in empty.items():  # if the others hid it, val/loss would mean something else
            raise_no_batches("validation", name, loader)
        return merge_metrics(averages.metrics(language_model=tokens > 0), user.compute(ranks))


def _in_step(ranks: OneProcess, loader: str, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether they count, equally often on all ranks: a sharded model's forward pass needs all.

    A rank that has no more batches gets its last one again, which does not count.

    Raises:
        TrainingError: On all ranks, if one of them has no batch at all while others have some.
    """
    last: Any = None
    for index in count():
        last, counts = next(batches, (last, False))
        have_more = ranks.total([counts])[0]  # also where len() is known: it may be wrong
        if not have_more:
            return
        if not index and have_more < ranks.world_size:
            without = [rank for rank, has_one in enumerate(ranks.gather(counts)) if not has_one]
            raise TrainingError(
                f"the validation loader {loader!r} gave no batch on rank {', '.join(map(str, without))}, and a sharded "
                "model needs one from each rank: validate on more samples, or with smaller batches"
            )
        yield last, counts


class SampleAverages:
    """Means weighted by samples, summed on the device and read once. A batch without a key has no part in its mean.

    A key that only some ranks have is averaged over their samples.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor | float]] = {}  # by loader and key
        self.samples: dict[str, dict[str, int]] = {}

    def add(self, loader: str, samples: int, results: Mapping[str, Any]) -> None:
        """Add the results of one batch; a batch without samples has no weight."""
        if not samples:
            return
        sums, counts = self._sums.setdefault(loader, {}), self.samples.setdefault(loader, {})
        for key, value in results.items():
            wide = value.detach().double() if isinstance(value, torch.Tensor) else float(as_python_number(value))
            sums[key] = sums.get(key, 0.0) + wide * samples
            counts[key] = counts.get(key, 0) + samples

    def add_up(self, ranks: OneProcess, tokens: int) -> int:
        """Add the sums of all ranks, so that each sample counts once; waits for the device and for all ranks.

        Args:
            ranks: The ranks.
            tokens: The tokens of this rank.

        Returns:
            The tokens of all ranks.
        """
        named: dict[str, list[float]] = {"": [tokens, 0]}
        for loader, sums in self._sums.items():
            for key, total in sums.items():
                named[f"{loader}\n{key}"] = [float(total), self.samples[loader][key]]
        added = add_up(ranks, named, width=2)
        tokens = int(added.pop("")[0])
        self._sums, self.samples = {}, {}
        for name, (total, samples) in added.items():
            loader, _, key = name.partition("\n")
            self._sums.setdefault(loader, {})[key] = total
            self.samples.setdefault(loader, {})[key] = int(samples)
        return tokens

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
        return total / sum(self.samples[loader][key] for loader in loaders)


# ---- the user's metrics ----------------------------------------------------------------------------------------------


def check_metrics(metrics: Any) -> dict[str, Any]:
    """Return the metrics that a trainer was given; reject what is not a metric."""
    if not isinstance(metrics, Mapping | None):
        raise TrainingError(f"metrics: expected a dict of metrics by name, got {with_article(type(metrics).__name__)}")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or name in _TAKEN_NAMES:
            raise TrainingError(f"metrics: {name!r} cannot be a name; {' and '.join(_TAKEN_NAMES)} are always measured")
        if isinstance(metric, type) or not (callable(metric) or _is_metric_object(metric)):
            raise TrainingError(
                f"metrics: {name!r} is {metric!r}; give a function of (output, batch), or an object with update, "
                "compute and reset"
            )
    return dict(metrics or {})


class UserMetrics:
    """The user's metrics during one validation.

    Args:
        metrics: Functions and metric objects by name, as `check_metrics` returned them.
        loaders: Names of the validation loaders.
        device: Where metric modules are moved to.
        nested: Whether this validation runs inside another one, whose metric objects still accumulate.
    """

    def __init__(
        self, metrics: Mapping[str, Any], loaders: Collection[str], device: torch.device, nested: bool
    ) -> None:
        objects = {name: metric for name, metric in metrics.items() if _is_metric_object(metric)}
        self._functions = {name: metric for name, metric in metrics.items() if name not in objects}
        self._objects = _copies(objects, "a validation inside another") if nested else objects
        for name, metric in self._objects.items():
            with _note_in_errors(f"in the metric {name!r}, in reset"):
                metric.reset()
            if isinstance(metric, torch.nn.Module):
                metric.to(device)
        # An object accumulates all batches; the values of each of several loaders need copies.
        each = list(loaders) if len(loaders) > 1 else []
        why = "each validation loader, because there are several"
        self._copies = {loader: _copies(self._objects, why) for loader in each}
        self._output: Any = _NO_OUTPUT

    def read_outputs(self, model: Any) -> AbstractContextManager[Any]:
        """Read the model's outputs inside the block; if a step calls the model several times, the last one counts."""

        def store_output(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        if not self._functions and not self._objects:
            return nullcontext()
        return model.register_forward_hook(store_output)  # type: ignore[no-any-return]

    def measure_batch(self, loader: str, batch: Any, result: Any) -> dict[str, Any]:
        """Update the objects and return what the functions say.

        Args:
            loader: The batch's loader.
            batch: The batch.
            result: What the step returned for it.

        Returns:
            Numbers by name.
        """
        if not self._functions and not self._objects:
            return {}
        output, self._output = self._find_output(result), _NO_OUTPUT
        found: dict[str, Any] = {}
        for name, function in self._functions.items():
            with _note_in_errors(f"in the metric {name!r}, on the validation loader {loader!r}"):
                found.update(_as_numbers(name, function(output, batch)))
        arguments = _predictions(output), _target(result, batch)
        for objects in (self._objects, self._copies.get(loader, {})):
            for name, one in objects.items():
                with _note_in_errors(f"in the metric {name!r}, on the validation loader {loader!r}"):
                    one.update(*arguments)
        return found

    def compute(self, ranks: OneProcess) -> dict[str, float]:
        """Compute the objects: `val/<name>`, and with several loaders `val/<loader>/<name>`.

        Only an object knows how its values of several ranks become one; torchmetrics' do that themselves. What those
        that do not return is averaged over the ranks, so that all ranks decide by the same numbers.
        """
        if not self._objects:
            return {}
        found: dict[str, float] = {}
        for loader, copies in self._copies.items():
            found.update(_compute(f"val/{loader}/", copies))
        found = merge_metrics(found, _compute("val/", self._objects))
        added = add_up(ranks, {name: [value, 1.0] for name, value in found.items()}, width=2)
        return {name: total / count for name, (total, count) in added.items()}

    def _find_output(self, result: Any) -> Any:
        """Return what step_fn returned as 'output', else the model's output."""
        returned = result if isinstance(result, Mapping) else {}
        for name in (*self._functions, *self._objects):
            if name in returned:
                raise TrainingError(f"metrics: {name!r} is also what the step returns beside the loss; rename one")
        output = returned.get("output", self._output)
        if output is _NO_OUTPUT:
            raise TrainingError(
                "metrics need the model's output, and step_fn did not call the model itself: "
                "let it return {'loss': loss, 'output': output}"
            )
        return output


def merge_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """Merge the metrics of a validation.

    Raises:
        TrainingError: If two of them have one name.
    """
    found: dict[str, float] = {}
    for part in parts:
        for name in part:
            if name in found:
                raise TrainingError(
                    f"two validation metrics would both be {name!r}: the numbers of each of several loaders are "
                    "val/<loader>/<metric>, those of all val/<metric>; rename the metric or the loader"
                )
        found.update(part)
    return found


def _is_metric_object(metric: Any) -> bool:
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def _copies(objects: Mapping[str, Any], why: str) -> dict[str, Any]:
    copies = {}
    for name, metric in objects.items():
        with _note_in_errors(f"the metric {name!r} is copied for {why}"):
            copies[name] = deepcopy(metric)
    return copies


@contextmanager
def _note_in_errors(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_note(error, note)
        raise


def _predictions(output: Any) -> Any:
    """Return the `logits` of an output as Hugging Face models have them, else the output itself."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if found is None else found


def _target(result: Any, batch: Any) -> Any:
    """Return step_fn's 'target', else the second item of a tuple batch or the 'labels' of a dict, else the batch."""
    if isinstance(result, Mapping) and "target" in result:
        return result["target"]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return batch.get("labels", batch) if isinstance(batch, Mapping) else batch


def _compute(prefix: str, objects: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, one in objects.items():
        with _note_in_errors(f"in the metric {name!r}, computing {prefix}{name}"):
            found.update({f"{prefix}{key}": float(value) for key, value in _as_numbers(name, one.compute()).items()})
    return found


def _as_numbers(name: str, value: Any) -> dict[str, Any]:
    """Return a metric's value as numbers by name: one, or those of a dict under their own names."""
    if isinstance(value, Mapping):
        return {key: one for inner, item in value.items() for key, one in _as_numbers(f"{name}/{inner}", item).items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {name: value.detach().reshape(())}
    if isinstance(value, (int, float)) or is_numpy_number(value):
        return {name: float(as_python_number(value))}
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise TrainingError(f"the metric {name!r} gave {shown}; a metric is one number, or a dict of numbers by name")
