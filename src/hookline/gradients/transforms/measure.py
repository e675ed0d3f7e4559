"""Update hooks that change nothing: they pass the gradients on, or measure them inside the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import _parameters
from hookline.core.base import UpdateHook
from hookline.gradients.view import Gradients
from hookline.stats.distributed import LocalTensors
from hookline.stats.rows import STATISTICS, merge

if TYPE_CHECKING:
    from hookline.run.control import RunControl

NORM = "norm"


class Identity(UpdateHook):
    """Return the gradients unchanged. It is listed, and costs nothing: it is not called."""

    built_in = True
    intervenes = False
    passes_through = True
    name = "identity"

    def on_update(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return grads


class Measure(UpdateHook):
    """Log the gradients' global norm as ``gradients/<as>/norm``, at its place in the chain; changes nothing.

    Values stay on the device until the record is next written.

    Args:
        metrics: A list with any of norm, mean, std, min, max, absmax, zeros, nans, infs and count, each computed over
            all elements together.
        params: The parameters whose gradients it measures; all of them by default.
    """

    built_in = True
    intervenes = False
    name = "measure"

    def __init__(self, metrics: Sequence[str] = (NORM,), params: Any = None) -> None:
        self.params = params
        self.metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        for metric in self.metrics:
            _parameters.one_of(metric, (NORM, *STATISTICS), "metrics")
        self.latest: dict[str, Tensor] = {}
        """The last values, on the device."""

    def setup(self, name: str) -> None:
        """Store the name it was registered under."""
        self._label = name

    def on_update(self, grads: Gradients, trainer: RunControl | None = None) -> Gradients:
        tensors = grads.as_list().tensors
        if not tensors:
            return grads
        needs_row = any(metric != NORM for metric in self.metrics)
        row = merge(LocalTensors(tensors, list(grads)).summarize()) if needs_row else torch.empty(0)
        self.latest = {
            metric: grads.norm() if metric == NORM else row[STATISTICS.index(metric)] for metric in self.metrics
        }
        if trainer is not None:
            for metric, value in self.latest.items():
                trainer.log(f"gradients/{self._label}/{metric}", value)
        return grads


class LinkNorms(Identity):
    """Log the norm before and after every update hook: ``update/<hook>/norm_before`` and ``update/<hook>/norm_after``.

    Its place in the chain does not matter. It logs when it is due; the norms cover the gradients that each hook
    selects.
    """

    built_in = True
    name = "link_norms"
    reports_norms = True
