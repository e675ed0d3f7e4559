"""Links that look and change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ConfigError, nearest
from hookline.gradients.view import Gradients
from hookline.registry.base import UpdateHook, passes_through
from hookline.stats.columns import STATISTICS
from hookline.stats.merging import merge
from hookline.stats.pieces import Pieces

NORM = "norm"


class Measure(UpdateHook):
    """Logs the gradients' global norm as ``gradients/<as>/norm``, where it stands in the chain; changes nothing.

    `metrics` may name more: mean, std, min, max, absmax, zeros, nans, infs, count of all elements together. Everything
    stays on the device until the record is next written.
    """

    built_in = True
    intervenes = False
    name = "measure"

    def __init__(self, metrics: Sequence[str] = (NORM,), params: Any = None) -> None:
        self.params = params
        self.metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        for metric in self.metrics:
            if metric not in (NORM, *STATISTICS):
                choices = nearest(str(metric), [NORM, *STATISTICS], 20)
                raise ConfigError("metrics", f"{metric!r} is no metric; {choices}")
        self.latest: dict[str, Tensor] = {}
        """The last values, on the device."""

    def setup(self, name: str) -> None:
        """Learn the name it goes by."""
        self._label = name

    def on_update(self, grads: Gradients, trainer: Any) -> Gradients:
        tensors = grads.look().tensors
        if tensors:
            self.latest = dict(zip(self.metrics, self._values(grads, tensors), strict=True))
            for metric, value in self.latest.items():
                trainer.log(f"gradients/{self._label}/{metric}", value)
        return grads

    def _values(self, grads: Gradients, tensors: list[Tensor]) -> Iterator[Tensor]:
        wider = any(metric != NORM for metric in self.metrics)
        row = merge(Pieces(tensors, list(grads)).summarize()) if wider else None
        for metric in self.metrics:
            if row is None or metric == NORM:
                yield torch.linalg.vector_norm(grads.known.of(tensors))
            else:
                yield row[STATISTICS.index(metric)]


class LinkNorms(UpdateHook):
    """Logs the norm before and after every link: ``update/<link>/norm_before`` and ``update/<link>/norm_after``.

    It does so wherever it stands in the chain, when it is due; the norms are of the gradients that the link selects.
    """

    built_in = True
    intervenes = False
    name = "link_norms"
    reports_norms = True

    @passes_through
    def on_update(self, grads: Gradients) -> Gradients:
        return grads
