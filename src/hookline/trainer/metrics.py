"""Measure the metrics of a run, in validation and in training.

They are functions, called as ``fn(output, batch)`` for every batch and averaged by samples, and objects such as
torchmetrics': they get every batch as ``update(predictions, target)`` and are computed at the end. Training measures
functions, and objects whose value is a mean over samples: their value for a batch is treated like a number that
`step_fn` returns besides the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from hookline._device import device_indices
from hookline._predictions import find_predictions
from hookline._tensors import copy_on_write, iter_tensors, map_tensors
from hookline.core.rng_guard import TrainingStreams
from hookline.errors import TrainingError, add_note, with_article
from hookline.ranks import Ranks
from hookline.run.outputs import UNKNOWN, as_python_number, find_target, is_number
from hookline.trainer.built_in_metrics import SumMetric

PHASES = ("train", "validation")
_TAKEN_NAMES = ("loss", "perplexity")
_TAKEN_IN_TRAINING = ("lr", "grad_norm")


class MetricEntry(NamedTuple):
    """A metric, and the phases in which it is measured."""

    metric: Any
    phases: Collection[str] = ("validation",)


def check_metrics(metrics: Any, loaders: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each phase by name; reject what is not a metric, or cannot be measured in training.

    Args:
        metrics: Metrics, or entries, by name.
        loaders: Names of the training loaders.

    Raises:
        TrainingError: If something is not a metric, or its name is taken.
    """
    if not isinstance(metrics, Mapping | None):
        expected = "a list of names, or a dict of metrics by name"
        raise TrainingError(f"metrics: expected {expected}, got {with_article(type(metrics).__name__)}")
    by_phase: dict[str, dict[str, Any]] = {phase: {} for phase in PHASES}
    for name, given in (metrics or {}).items():
        metric, phases = given if isinstance(given, MetricEntry) else MetricEntry(given)
        if problem := problem_with_name(name, phases, loaders):
            raise TrainingError(f"metrics: {problem}")
        if isinstance(metric, type) or not (callable(metric) or is_metric_object(metric)):
            raise TrainingError(
                f"metrics: {name!r} is {metric!r}; pass a function of (output, batch), or an object with update, "
                "compute and reset"
            )
        if "train" in phases and is_metric_object(metric) and not is_mean(metric):
            raise TrainingError(
                f"metrics: {name!r} is computed over all samples, so one training batch has no value of it; measure it "
                "in validation"
            )
        for phase in phases:
            by_phase[phase][name] = metric
    return by_phase


def problem_with_name(name: Any, phases: Collection[str], loaders: Collection[str] = ()) -> str | None:
    """Return why metrics of some phases cannot be recorded under a name; None if they can.

    Args:
        name: The name.
        phases: The phases.
        loaders: Names of the training loaders, if they are known.
    """
    if not isinstance(name, str) or name in _TAKEN_NAMES:
        return f"{name!r} cannot be a name; {' and '.join(_TAKEN_NAMES)} are always measured"
    if "train" not in phases:
        return None
    taken, of_loader = None, [loader for loader in loaders if f"{name}/".startswith(f"{loader}/")]
    if name in _TAKEN_IN_TRAINING or name.rpartition("/")[2].startswith("epoch_"):
        taken = f"{' and '.join(_TAKEN_IN_TRAINING)} are recorded anyway, and epoch_… are the means of epochs"
    elif len(loaders) > 1 and of_loader:
        taken = f"train/{of_loader[0]}/loss is the loss of the loader {of_loader[0]!r}"
    return taken and f"{name!r} cannot be the name of a metric in training: {taken}"


class TrainingMetrics:
    """The metrics that are measured on every training batch, without waiting for a device.

    Args:
        metrics: Functions, and objects that are means over samples, by name.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = dict(metrics)
        self.optional = frozenset(name for name, metric in metrics.items() if getattr(metric, "may_be_missing", False))
        """Metrics for which a batch may have no value; it is then NaN and left out of means."""
        self._guarded: Callable[[Any, Any, Any], dict[str, Any]] | None = None
        self._guards_numpy = False

    @torch.no_grad()
    def measure_batch(self, batch: Any, result: Any, output: Any) -> dict[str, Any]:
        """Return the numbers of one batch by name; this leaves training's random streams unchanged.

        Args:
            batch: The batch.
            result: The step's result for it.
            output: The model's output.
        """
        check_measurable(self._metrics, result, output)
        has_numpy = "numpy.random" in sys.modules
        if self._guarded is None or has_numpy != self._guards_numpy:
            streams = TrainingStreams(device_indices(iter_tensors([batch, output])))
            self._guarded, self._guards_numpy = streams.guard(self._measure, streams.restore), has_numpy
        return self._guarded(batch, result, output)

    def _measure(self, batch: Any, result: Any, output: Any) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            with _note_in_errors(f"in the metric {name!r}, on a training batch"):
                if isinstance(metric, SumMetric):
                    value: Any = metric.value(metric.measure(*_arguments(output, result, batch)))
                else:
                    # The backward pass follows, so a function gets views, with which it cannot change training.
                    value = metric(map_tensors(copy_on_write, output), map_tensors(copy_on_write, batch))
                numbers.update(_as_numbers(name, value))
        return numbers


class ValidationMetrics:
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
        self._names, self._loaders = list(metrics), list(loaders)
        objects = {name: metric for name, metric in metrics.items() if is_metric_object(metric)}
        self._functions = {name: metric for name, metric in metrics.items() if name not in objects}
        self._objects = _copies(objects, "a validation inside another") if nested else objects
        for name, metric in self._objects.items():
            with _note_in_errors(f"in the metric {name!r}, in reset"):
                metric.reset()
            if isinstance(metric, torch.nn.Module):
                metric.to(device)
        # An object accumulates all batches; the values of each of several loaders need copies.
        why = "each validation loader, because there are several"
        self._copies = {loader: _copies(self._objects, why) for loader in loaders if len(loaders) > 1}

    def measure_batch(self, loader: str, batch: Any, result: Any, output: Any) -> dict[str, Any]:
        """Update the objects and return the results of the functions.

        Args:
            loader: The batch's loader.
            batch: The batch.
            result: The step's result for it.
            output: The model's output.

        Returns:
            Numbers by name.
        """
        if not self._names:
            return {}
        check_measurable(self._names, result, output)
        numbers: dict[str, Any] = {}
        for name, function in self._functions.items():
            with _note_in_errors(f"in the metric {name!r}, on the validation loader {loader!r}"):
                numbers.update(_as_numbers(name, function(output, batch)))
        arguments = _arguments(output, result, batch)
        for objects in (self._objects, self._copies.get(loader, {})):
            for name, metric in objects.items():
                with _note_in_errors(f"in the metric {name!r}, on the validation loader {loader!r}"):
                    metric.update(*arguments)
        return numbers

    def compute(self, ranks: Ranks, averages: Mapping[str, float]) -> dict[str, float]:
        """Compute the objects: `val/<name>`, and with several loaders `val/<loader>/<name>`.

        The sums of built-in metrics are added up over the ranks. Only a metric object knows how its values are combined
        over the ranks; torchmetrics' objects do that themselves. The results of other objects are averaged over the
        ranks, so that all ranks decide by the same numbers.

        Args:
            ranks: The ranks.
            averages: The other metrics of the validation, including those of functions.

        Returns:
            All metrics; the user's come last, in the given order.
        """
        built_in: dict[str, SumMetric] = {}
        computed: list[dict[str, float]] = []
        groups = {f"val/{loader}/": copies for loader, copies in self._copies.items()} | {"val/": self._objects}
        for prefix, objects in groups.items():
            for name, metric in objects.items():
                if isinstance(metric, SumMetric):
                    built_in[f"{prefix}{name}"] = metric
                    continue
                with _note_in_errors(f"in the metric {name!r}, computing {prefix}{name}"):
                    numbers = _as_numbers(name, metric.compute())
                    computed.append({f"{prefix}{key}": float(value) for key, value in numbers.items()})
        built_in = dict(sorted(built_in.items()))  # ranks may have listed them in different orders
        # A rank without batches has no sums.
        sums = {("sum", name): metric.sums for name, metric in built_in.items() if metric.sums is not None}
        means = {("mean", name): [value, 1.0] for name, value in merge_metrics(*computed).items()}
        added = ranks.add_up({**means, **sums}) if self._objects else {}
        summed = {name: added.pop(("sum", name)) for name in built_in if ("sum", name) in added}
        from_sums = {name: float(built_in[name].value(total)) for name, total in summed.items()}
        others = {name: float(total / count) for (_, name), (total, count) in added.items()}
        metrics = merge_metrics(averages, others, from_sums)
        return dict(sorted(metrics.items(), key=lambda item: self._place(item[0])))

    def _place(self, recorded_as: str) -> int:
        """Return the place of a metric in the user's order; -1 if it is not one of the user's."""
        name = recorded_as.removeprefix("val/")
        for loader in self._loaders:
            name = name.removeprefix(f"{loader}/")
        return next((at for at, metric in enumerate(self._names) if f"{name}/".startswith(f"{metric}/")), -1)


def check_measurable(names: Collection[str], result: Any, output: Any) -> None:
    """Check that metrics can be measured on what a step returned.

    Args:
        names: Their names.
        result: The result of the step.
        output: The model's output.

    Raises:
        TrainingError: If a name is also a number that the step returns besides the loss, or the output is missing.
    """
    for name in names:
        if isinstance(result, Mapping) and name in result:
            raise TrainingError(f"metrics: {name!r} is also returned by the step besides the loss; rename one")
    if output is UNKNOWN:
        raise TrainingError(
            "metrics need the model's output, and step_fn did not call the model itself, or was compiled with "
            "torch.compile before a metric or hook read the output: let it return {'loss': loss, 'output': output}"
        )


def merge_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """Merge the metrics of a validation.

    Raises:
        TrainingError: If two of them have one name.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for name in part:
            if name in merged:
                raise TrainingError(
                    f"two validation metrics would both be {name!r}: the numbers of each of several loaders are "
                    "val/<loader>/<metric>, those of all val/<metric>; rename the metric or the loader"
                )
        merged.update(part)
    return merged


def is_metric_object(metric: Any) -> bool:
    """Return whether a metric is an object that accumulates batches, or its class."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def is_mean(metric: Any) -> bool:
    """Return whether a metric object is a mean over samples, which one training batch has, too."""
    return isinstance(metric, SumMetric) and metric.is_mean


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


def _arguments(output: Any, result: Any, batch: Any) -> tuple[Any, Any]:
    """Return predictions and target as metric objects take them; without a target, the batch is the target."""
    target = find_target(result, batch)
    return find_predictions(output), batch if target is UNKNOWN else target


def _as_numbers(name: str, value: Any) -> dict[str, Any]:
    """Return a metric's value as numbers by name: one, or those of a dict under their own names."""
    if isinstance(value, Mapping):
        parts = (_as_numbers(f"{name}/{inner}", item) for inner, item in value.items())
        return {key: number for part in parts for key, number in part.items()}
    if is_number(value):
        is_tensor = isinstance(value, torch.Tensor)
        return {name: value.detach().reshape(()) if is_tensor else float(as_python_number(value))}
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise TrainingError(f"the metric {name!r} gave {shown}; a metric is one number, or a dict of numbers by name")
