"""Gradient flow: report by name the parameters whose gradients vanish, explode, are not finite or never arrive."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import torch

from hookline._console import logger
from hookline._names import plain_parameters
from hookline._parameters import INFINITE
from hookline._text import format_table
from hookline.core.base import TrainingHook
from hookline.core.schedule import Schedule
from hookline.errors import HooklineError
from hookline.stats.distributed import LocalTensors

if TYPE_CHECKING:
    from hookline.run.control import RunControl

Verdict = Literal["ok", "vanishing", "exploding", "non-finite", "never arrived", "frozen"]
# The verdicts that mean trouble, in the order and with the words in which they are reported.
_VERDICT_PHRASES: dict[Verdict, str] = {
    "non-finite": "are not finite in",
    "exploding": "explode in",
    "vanishing": "vanish in",
    "never arrived": "never arrive at",
}
VERDICT_METRICS: dict[str, Verdict] = {
    "vanishing": "vanishing",
    "exploding": "exploding",
    "non_finite": "non-finite",
    "missing": "never arrived",
}
"""The verdicts that are counted, by the last part of the metric's name."""
_NAMES_SHOWN = 5  # names per verdict in a sentence; the table has all of them


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter."""

    name: str
    numel: int
    norm: float | None
    """None if the parameter has no gradient."""
    verdict: Verdict


@dataclass(frozen=True)
class GradientFlow:
    """The gradients of all parameters, in the model's order; prints as a table."""

    rows: tuple[GradientRow, ...]
    median: float
    """The median of the finite norms; NaN if there are none."""

    def of(self, verdict: Verdict) -> list[GradientRow]:
        """Return the parameters with a verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def troubled(self) -> dict[str, Verdict]:
        """The parameters that are neither ok nor frozen, with their verdicts."""
        return {row.name: row.verdict for row in self.rows if row.verdict in _VERDICT_PHRASES}

    @property
    def ok(self) -> bool:
        """Whether every parameter that requires a gradient has a healthy one."""
        return not self.troubled

    @property
    def verdict(self) -> str:
        """One sentence that names the parameters in trouble."""
        trainable = len(self.rows) - len(self.of("frozen"))
        if trainable == 0:
            return "no parameter requires a gradient"
        if len(self.of("never arrived")) == trainable:
            return f"none of the {trainable} parameters has a gradient: check after backward, before zero_grad"
        if self.ok:
            return f"gradients are healthy in all {trainable} parameters (median norm {self.median:.2g})"
        phrases = [f"{text} {self._names(kind)}" for kind, text in _VERDICT_PHRASES.items() if self.of(kind)]
        return "gradients " + "; ".join(phrases)

    def _names(self, kind: Verdict) -> str:
        """List the first names of a verdict, with norms where these say more than the verdict."""
        rows = self.of(kind)
        names = [row.name for row in rows[:_NAMES_SHOWN]]
        if kind in ("vanishing", "exploding"):
            names = [f"{row.name} ({row.norm:.2g})" for row in rows[:_NAMES_SHOWN]]
            names[0] = f"{rows[0].name} ({rows[0].norm:.2g}, median {self.median:.2g})"
        more = len(rows) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def __str__(self) -> str:
        cells = [
            (row.name, str(row.numel), "-" if row.norm is None else f"{row.norm:.3g}", row.verdict) for row in self.rows
        ]
        return f"{format_table(('parameter', 'numel', 'norm', 'verdict'), cells)}\n{self.verdict}"


@dataclass(frozen=True)
class Limits:
    """The range of norms in which a gradient counts as healthy."""

    vanishing: float = 1e-7
    exploding: float = 1e3
    ratio: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.vanishing < self.exploding:
            raise HooklineError(
                f"gradient flow: vanishing={self.vanishing!r} must be at least 0 and below exploding={self.exploding!r}"
            )
        if not 0 < self.ratio < 1:
            raise HooklineError(f"gradient flow: ratio={self.ratio!r} must be between 0 and 1")

    def range_around(self, median: float) -> tuple[float, float]:
        """Return the lowest and highest healthy norm for a median norm.

        Norms are compared with the median only while the median itself is healthy: if it is close to zero, a layer far
        above it has not exploded; rather, the others have vanished.
        """
        if not self.vanishing / self.ratio <= median <= self.exploding:
            return self.vanishing, self.exploding
        return self.ratio * median, min(self.exploding, median / self.ratio)

    def allow(self, norms: Collection[float]) -> bool:
        """Return whether all norms are healthy; faster than a verdict for each."""
        if not norms or not all(map(math.isfinite, norms)):
            return False
        low, high = self.range_around(median(norms))
        return 0 < min(norms) >= low and max(norms) <= high


def gradient_flow(
    model: torch.nn.Module, *, vanishing: float = 1e-7, exploding: float = 1e3, ratio: float = 1e-4
) -> GradientFlow:
    """Judge the gradient of every parameter. Call it after backward and before `zero_grad`.

    All norms are read from a device at once. A sharded gradient is judged as a whole, so all ranks must call this.

    Args:
        model: The model whose parameters have gradients.
        vanishing: A gradient vanishes if its norm is below this, or below `ratio` times the median norm. A bias with
            such a small gradient is healthy if its layer's weight has a healthy one: before a normalization, the
            gradient of a bias is zero except for rounding.
        exploding: A gradient explodes if its norm is above this, or above the median norm divided by `ratio`.
        ratio: How far a norm may be from the median, between 0 and 1.

    Returns:
        The verdicts. A gradient "never arrived" if the parameter requires one and has none.

    Raises:
        HooklineError: If the limits contradict each other.
    """
    limits = Limits(vanishing, exploding, ratio)
    params = plain_parameters(model)
    return judge_norms(params, _read_norms(params), limits)


def params_of_step(trainer: RunControl, params: Mapping[str, torch.nn.Parameter]) -> Mapping[str, torch.nn.Parameter]:
    """Return the parameters with gradients of this step: all, unless other optimizers step separately."""
    stepping = trainer.stepping_optimizers()
    if len(stepping) == len(trainer.optimizers):
        return params
    owned = {id(param) for optimizer in stepping for group in optimizer.param_groups for param in group["params"]}
    return {name: param for name, param in params.items() if id(param) in owned}


def _read_norms(params: Mapping[str, torch.nn.Parameter]) -> dict[str, float]:
    """Return the norms of the gradients that exist."""
    present = {name: param.grad for name, param in params.items() if param.grad is not None}
    return dict(zip(present, gradient_norms(list(present.values())), strict=True))


def judge_norms(params: Mapping[str, torch.nn.Parameter], norms: Mapping[str, float], limits: Limits) -> GradientFlow:
    """Judge parameters by the norms of their gradients.

    Args:
        params: The parameters by name.
        norms: The norms by name; a parameter without one has no gradient.
        limits: The range that counts as healthy.

    Returns:
        One row per parameter.
    """
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    middle = median(finite) if finite else math.nan
    low, high = limits.range_around(middle)
    layers: dict[str, tuple[float, int]] = {}  # by layer: the largest norm, and the size of that parameter
    for name, norm in norms.items():
        if math.isfinite(norm) and name in params:
            layer = name.rpartition(".")[0]
            layers[layer] = max(layers.get(layer, (0.0, 0)), (norm, params[name].numel()))

    def cancels(name: str) -> bool:
        """Return whether a gradient is zero except for rounding: its terms cancel, but reach the layer's weight.

        This is true of the gradient of a bias before a normalization, and of the bias of attention keys. If a weight
        gets no gradient but its bias does, its inputs are zero, which is trouble.
        """
        largest, size = layers.get(name.rpartition(".")[0], (0.0, 0))
        return params[name].numel() < size and norms[name] <= limits.ratio * largest and largest >= low

    rows = []
    for name, param in params.items():
        verdict = _verdict(param, norms.get(name), low, high)
        if verdict == "vanishing" and cancels(name):
            verdict = "ok"
        rows.append(GradientRow(name, param.numel(), norms.get(name), verdict))
    return GradientFlow(tuple(rows), middle)


def _verdict(param: torch.nn.Parameter, norm: float | None, low: float, high: float) -> Verdict:
    if not param.requires_grad:
        return "frozen"
    if norm is None:
        return "never arrived"
    if not math.isfinite(norm):
        return "non-finite"
    if norm < low or norm == 0:
        return "ok" if param.numel() == 0 else "vanishing"
    return "exploding" if norm > high else "ok"


def gradient_norms(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Return the norm of each gradient in one host read; a norm is finite only if the gradient is."""
    norms: list[float] = LocalTensors(gradients).norms().tolist()
    return norms


class GradientFlowHook(TrainingHook):
    """Reports where gradients vanish, explode or never arrive: `latest`, the record, and one warning per change.

    Runs at the first step and every 100th unless registered with a different schedule (``every=…``), when the gradients
    are complete and before clipping. Each time it waits once for the device.

    Args:
        vanishing: See `gradient_flow`.
        exploding: See `gradient_flow`.
        ratio: See `gradient_flow`.
    """

    built_in = True
    name = "gradient_flow"
    same_on_all_ranks = True  # gradients are the same on all ranks; measuring those of a sharded model needs all ranks
    schedule = Schedule.parse(every=100, at=1)

    def __init__(
        self, vanishing: float = 1e-7, exploding: Annotated[float, INFINITE] = 1e3, ratio: float = 1e-4
    ) -> None:
        self.vanishing, self.exploding, self.ratio = vanishing, exploding, ratio
        self._limits = Limits(vanishing, exploding, ratio)
        self._latest: GradientFlow | None = None
        self._reported: dict[str, Verdict] = {}
        self._registered_name = self.name

    def setup(self, name: str) -> None:
        """Store the name under which the hook is registered, for its notes."""
        self._registered_name = name

    def on_gradients_ready(self, model: torch.nn.Module, trainer: RunControl, step: int) -> None:
        """Log how many parameters are in trouble, and report them if they have changed."""
        params = params_of_step(trainer, plain_parameters(model))
        flow = self._latest = judge_norms(params, _read_norms(params), self._limits)
        for key, verdict in VERDICT_METRICS.items():
            trainer.log(f"grad_flow/{key}", float(len(flow.of(verdict))), reduce=None)
        troubled = flow.troubled
        if troubled and troubled != self._reported:
            logger.warning("step %d: %s", step, flow.verdict)
            trainer.note("gradient_flow", by=self._registered_name, verdict=flow.verdict, parameters=troubled)
        self._reported = troubled

    @property
    def latest(self) -> GradientFlow | None:
        """The verdict on every parameter when the hook last ran; None before that."""
        return self._latest
