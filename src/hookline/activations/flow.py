"""Gradient flow: at which parameters gradients vanish, explode or never arrive, as a verdict with names."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from hookline.activations.accounting import aligned
from hookline.activations.named_parameters import NamedParameters
from hookline.errors import HooklineError
from hookline.events.schedule import Schedule
from hookline.registry.base import TrainingHook
from hookline.stats.newest import recall_norms
from hookline.stats.pieces import Pieces

Verdict = Literal["ok", "vanishing", "exploding", "non-finite", "never arrived", "frozen"]
SAID: dict[Verdict, str] = {
    "non-finite": "are not finite in",
    "exploding": "explode in",
    "vanishing": "vanish in",
    "never arrived": "never arrive at",
}
COUNTED: dict[str, Verdict] = {  # the last part of a metric's name
    "vanishing": "vanishing",
    "exploding": "exploding",
    "non_finite": "non-finite",
    "missing": "never arrived",
}
NAMES_SHOWN = 5  # in the verdict, of each kind; the table has all
logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class GradientRow:
    """One parameter's gradient."""

    name: str
    numel: int
    norm: float | None
    """None when there is no gradient."""
    verdict: Verdict


@dataclass(frozen=True)
class GradientFlow:
    """The gradients of all parameters, in the model's order; prints as a table."""

    rows: tuple[GradientRow, ...]
    median: float
    """The median of the finite norms; nan when there are none."""

    def of(self, verdict: Verdict) -> list[GradientRow]:
        """The parameters with that verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def troubled(self) -> dict[str, Verdict]:
        """The parameters that are neither ok nor frozen, with their verdicts."""
        return {row.name: row.verdict for row in self.rows if row.verdict in SAID}

    @property
    def ok(self) -> bool:
        """Whether every parameter that wants a gradient has a healthy one."""
        return not self.troubled

    @property
    def verdict(self) -> str:
        """One sentence that names the parameters in trouble."""
        wanting = len(self.rows) - len(self.of("frozen"))
        if wanting == 0:
            return "no parameter wants a gradient"
        if len(self.of("never arrived")) == wanting:
            return f"no gradient has arrived at any of {wanting} parameters: look after backward, before zero_grad"
        if self.ok:
            return f"gradients are healthy in all {wanting} parameters (median norm {self.median:.2g})"
        return "gradients " + "; ".join(f"{said} {self._named(kind)}" for kind, said in SAID.items() if self.of(kind))

    def _named(self, kind: Verdict) -> str:
        """The first few names of a kind; norms only where they say more than the verdict."""
        rows = self.of(kind)
        names = [row.name for row in rows[:NAMES_SHOWN]]
        if kind in ("vanishing", "exploding"):
            names = [f"{row.name} ({row.norm:.2g})" for row in rows[:NAMES_SHOWN]]
            names[0] = f"{rows[0].name} ({rows[0].norm:.2g}, median {self.median:.2g})"
        more = len(rows) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def __str__(self) -> str:
        cells = [
            (row.name, str(row.numel), "-" if row.norm is None else f"{row.norm:.3g}", row.verdict) for row in self.rows
        ]
        return f"{aligned(('parameter', 'numel', 'norm', 'verdict'), cells)}\n{self.verdict}"


@dataclass(frozen=True)
class Limits:
    """Between which norms a gradient counts as healthy."""

    vanishing: float = 1e-7
    exploding: float = 1e3
    ratio: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.vanishing < self.exploding:
            raise HooklineError(
                f"gradient flow: vanishing={self.vanishing!r} must be at least 0 and below exploding={self.exploding!r}"
            )
        if not 0 < self.ratio < 1:
            raise HooklineError(f"gradient flow: ratio={self.ratio!r} must lie between 0 and 1")

    def beside(self, median: float) -> tuple[float, float]:
        """The lowest and highest healthy norm beside a median norm.

        Comparing means something only while the median itself is healthy: above a median of next to nothing, a layer
        that stands out has not exploded; the others have vanished.
        """
        if not self.vanishing / self.ratio <= median <= self.exploding:
            return self.vanishing, self.exploding
        return self.ratio * median, min(self.exploding, median / self.ratio)

    def allow(self, norms: Collection[float]) -> bool:
        """Whether all of these norms are healthy; quicker than a verdict on each."""
        if not norms or not all(map(math.isfinite, norms)):
            return False
        low, high = self.beside(median(norms))
        return 0 < min(norms) >= low and max(norms) <= high


def gradient_flow(
    model: torch.nn.Module, *, vanishing: float = 1e-7, exploding: float = 1e3, ratio: float = 1e-4
) -> GradientFlow:
    """Judge the gradients of every parameter. Call it after backward and before `zero_grad`.

    A gradient vanishes when its norm is below `vanishing`, or below `ratio` times the median norm; it explodes above
    `exploding`, or above the median divided by `ratio`. It never arrived when the parameter requires one and has none.
    All norms are read from a device at once. Of a sharded gradient, this rank's part is judged.
    """
    return judge(dict(model.named_parameters()), Limits(vanishing, exploding, ratio))


def judge(params: dict[str, torch.nn.Parameter], limits: Limits) -> GradientFlow:
    """Judge the gradients that named parameters hold."""
    present = {name: param.grad for name, param in params.items() if param.grad is not None}
    return judge_norms(params, dict(zip(present, gradient_norms(list(present.values())), strict=True)), limits)


def judge_norms(params: Mapping[str, torch.nn.Parameter], norms: Mapping[str, float], limits: Limits) -> GradientFlow:
    """Judge parameters by norms that were measured already; one without a norm has no gradient."""
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    middle = median(finite) if finite else math.nan
    low, high = limits.beside(middle)
    rows = [
        GradientRow(name, param.numel(), norms.get(name), _verdict(param, norms.get(name), low, high))
        for name, param in params.items()
    ]
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
    """The norm of each gradient, in one host read; what is not finite in it is not finite in the gradient."""
    norms: list[float] = Pieces(gradients).norms().tolist()
    return norms


def _norms_just_read(params: Mapping[str, torch.nn.Parameter]) -> dict[str, float]:
    """The norms of the gradients that are there, by name; not read again where another hook has at this event."""
    present = {name: param.grad for name, param in params.items() if param.grad is not None}
    gradients = list(present.values())
    read = recall_norms(gradients)
    return dict(zip(present, gradient_norms(gradients) if read is None else read.tolist(), strict=True))


class GradientFlowHook(TrainingHook):
    """Watches where gradients vanish, explode or never arrive: `latest`, the record, and one warning per change.

    Looks at the first step and every 100th unless told otherwise (``every=…``), when the gradients are complete and
    before clipping. Each look waits once for the device.
    """

    built_in = True
    name = "gradient_flow"
    schedule = Schedule.parse(every=100, at=1)

    def __init__(self, vanishing: float = 1e-7, exploding: float = 1e3, ratio: float = 1e-4) -> None:
        self.vanishing, self.exploding, self.ratio = vanishing, exploding, ratio
        self._limits = Limits(vanishing, exploding, ratio)
        self._newest: tuple[dict[str, torch.nn.Parameter], dict[str, float]] | None = None
        self._told: dict[str, Verdict] = {}
        self._parameters = NamedParameters()
        self._own_name = self.name

    def setup(self, name: str) -> None:
        """Sign notes with the name it goes by."""
        self._own_name = name

    def close(self) -> None:
        """Let go of the model."""
        self._parameters = NamedParameters()

    def on_gradients_ready(self, model: torch.nn.Module, trainer: Any, step: int) -> None:
        """Look, log how many parameters are in trouble, and speak up when it is not the same ones as before."""
        healthy = self._look(self._parameters.of(model))
        flow = None if healthy else self.latest  # a verdict on each costs more than the look
        for key, verdict in COUNTED.items():
            trainer.log(f"grad_flow/{key}", float(len(flow.of(verdict))) if flow else 0.0)
        troubled = flow.troubled if flow else {}
        if troubled != self._told:
            self._told = troubled
            if flow is not None and not flow.ok:
                self._tell(flow, trainer, step)

    def _look(self, params: dict[str, torch.nn.Parameter]) -> bool:
        """Read the norms; whether all are healthy."""
        norms = _norms_just_read(params)
        self._newest = params, norms
        wanting = sum(param.requires_grad for param in params.values())
        return len(norms) == wanting and self._limits.allow(norms.values())

    @property
    def latest(self) -> GradientFlow | None:
        """The verdict on every parameter at the newest look."""
        return None if self._newest is None else judge_norms(*self._newest, self._limits)

    def _tell(self, flow: GradientFlow, trainer: Any, step: int) -> None:
        logger.warning("step %d: %s", step, flow.verdict)
        if callable(note := getattr(trainer, "note", None)):
            note("gradient_flow", by=self._own_name, verdict=flow.verdict, parameters=flow.troubled)
