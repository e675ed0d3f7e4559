"""Metrics of the user's own, measured at a validation: functions, and objects with update, compute and reset.

A function is called as `fn(output, batch)` for every batch and averaged by samples. An object sees every batch as
`update(predictions, target)` and is asked at the end; metrics of torchmetrics are such objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from hookline.errors import TrainingError
from hookline.trainer.forward import is_numpy_number, plain

Measure = Callable[[str, Any, Any], Mapping[str, Any]]  # loader, batch, what the step returned -> numbers by name
TAKEN = ("loss", "perplexity")
NOTHING = object()
EACH = "each validation loader, because there are several"


class UserMetrics:
    """The metrics that a trainer was given, by name."""

    def __init__(self, metrics: Any, model: Any) -> None:
        given = _checked(metrics)
        self._objects = {name: metric for name, metric in given.items() if _accumulates(metric)}
        self._functions = {name: metric for name, metric in given.items() if name not in self._objects}
        self._model = model  # as the run calls it, compiled or not

    @contextmanager
    def measuring(self, loaders: Collection[str], device: torch.device, nested: bool = False) -> Iterator[Measurement]:
        """One validation of these loaders; inside the block, what the model returns is seen."""
        objects = self._objects
        if nested:  # the outer one's still add up
            objects = {name: _copy(name, one, "a validation inside another") for name, one in objects.items()}
        for name, metric in objects.items():
            with _named(name, "in reset"):
                metric.reset()
            if isinstance(metric, torch.nn.Module):
                metric.to(device)
        measurement = Measurement(self._functions, objects, loaders)
        handle = self._model.register_forward_hook(measurement.see) if self._functions or objects else None
        try:
            yield measurement
        finally:
            if handle is not None:
                handle.remove()


class Measurement:
    """One validation: every batch is measured, the objects are asked at the end."""

    def __init__(self, functions: Mapping[str, Any], objects: Mapping[str, Any], loaders: Collection[str]) -> None:
        self._functions, self._objects = functions, objects
        # An object adds up all batches; for the numbers of each loader it takes copies.
        several = list(loaders) if len(loaders) > 1 else []
        self._copies = {loader: {name: _copy(name, one, EACH) for name, one in objects.items()} for loader in several}
        self._seen: set[str] = set()
        self._output: Any = NOTHING

    def see(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """The model has run; of several calls in a step, the last one counts."""
        self._output = output

    def batch(self, loader: str, batch: Any, result: Any) -> dict[str, Any]:
        """Measure a batch, given what its step returned; what the functions say of it, as numbers."""
        if not self._functions and not self._objects:
            return {}
        output, self._output = self._output_of(result), NOTHING
        self._seen.add(loader)
        found: dict[str, Any] = {}
        for name, function in self._functions.items():
            with _named(name, f"on the validation loader {loader!r}"):
                found.update(_numbers(name, function(output, batch)))
        pair = _predictions(output), _target(result, batch)
        for objects in (self._objects, self._copies.get(loader, {})):
            for name, one in objects.items():
                with _named(name, f"on the validation loader {loader!r}"):
                    one.update(*pair)
        return found

    def computed(self) -> dict[str, float]:
        """What the objects say: `val/<name>`, and `val/<loader>/<name>` when there are several loaders."""
        found: dict[str, float] = {}
        for loader in [one for one in self._copies if one in self._seen]:
            found.update(_computed(f"val/{loader}/", self._copies[loader]))
        return all_of(found, _computed("val/", self._objects))

    def _output_of(self, result: Any) -> Any:
        """What step_fn returns as 'output', else what the model returned."""
        returned = result if isinstance(result, Mapping) else {}
        for name in (*self._functions, *self._objects):
            if name in returned:
                raise TrainingError(f"metrics: {name!r} is also what the step returns beside the loss; rename one")
        output = returned.get("output", self._output)
        if output is NOTHING:
            raise TrainingError(
                "metrics need the model's output, and step_fn did not call the model itself: "
                "let it return {'loss': loss, 'output': output}"
            )
        return output


def all_of(*parts: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a validation together; two numbers under one name are refused."""
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


def _checked(metrics: Any) -> dict[str, Any]:
    """Each a function or an object of the protocol, under a name that is free."""
    if not isinstance(metrics, Mapping | None):
        raise TrainingError(f"metrics: expected a dict of metrics by name, got a {type(metrics).__name__}")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or name in TAKEN:
            raise TrainingError(f"metrics: {name!r} is no free name; {' and '.join(TAKEN)} are measured anyway")
        if isinstance(metric, type) or not (callable(metric) or _accumulates(metric)):
            raise TrainingError(
                f"metrics: {name!r} is {metric!r}; give a function of (output, batch), or an object with update, "
                "compute and reset"
            )
    return dict(metrics or {})


def _accumulates(metric: Any) -> bool:
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def _copy(name: str, metric: Any, why: str) -> Any:
    try:
        return deepcopy(metric)
    except Exception as error:
        error.add_note(f"the metric {name!r} is copied for {why}")
        raise


@contextmanager
def _named(name: str, where: str) -> Iterator[None]:
    """A failure says whose it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the metric {name!r}, {where}")
        raise


def _predictions(output: Any) -> Any:
    """What a model of transformers calls logits, else the output itself."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if found is None else found


def _target(result: Any, batch: Any) -> Any:
    """What step_fn returns as 'target', else the second item of a tuple or the 'labels' of a dict, else the batch."""
    if isinstance(result, Mapping) and "target" in result:
        return result["target"]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return batch.get("labels", batch) if isinstance(batch, Mapping) else batch


def _computed(prefix: str, objects: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, one in objects.items():
        with _named(name, f"computing {prefix}{name}"):
            found.update({f"{prefix}{key}": float(value) for key, value in _numbers(name, one.compute()).items()})
    return found


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """A metric's value as numbers by name: one, or those of a dict under their own names."""
    if isinstance(value, Mapping):
        return {key: one for inner, item in value.items() for key, one in _numbers(f"{name}/{inner}", item).items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {name: value.detach().reshape(())}
    if isinstance(value, (int, float)) or is_numpy_number(value):
        return {name: float(plain(value))}
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise TrainingError(f"the metric {name!r} gave {shown}; a metric is one number, or a dict of numbers by name")
