"""Judge by its curves whether a run learned: not if it diverged, never improved, lost what it had, or overfits.

A rule needs enough values, and a change far above their noise. Where a healthy run may look like that, there is no
alert: a GAN's losses do not fall, so the training loss of a run with several optimizers is not judged, and a run that
begins with trained weights need not improve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookline.record.events import Severity
from hookline.runs.curves import Curve
from hookline.runs.direction import better
from hookline.runs.summary import RunSummary
from hookline.runs.verdict import Alert

_TRAIN_LOSS = "train/loss"
_MIN_VALUES, _MIN_CHECKS = 40, 5  # values of the training loss, and of a metric of validations, below which all is well
_BLOCKS = 20  # a long curve is judged by the medians of so many parts
_NOISES = 4.0  # how many times the noise a change must be
_MUCH, _NEARLY_ALL = 0.5, 0.75  # shares of what was gained: losing this much is a warning, or an error
_OVERFIT = 0.1  # how far above its lowest value, relatively, a validation loss must be
_KNOWN = 0.6  # an accuracy that a model without any training seldom has
_INIT_FROM = re.compile(r"^\s*init_from: (?!null)", re.MULTILINE)  # the option of a config.yaml

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """The course of a metric in a few levels; in `losses` low is good, whatever it is in the metric."""

    name: str
    sign: int
    steps: NDArray[np.int64]
    losses: Values
    noise: float
    curve: tuple[NDArray[np.int64], Values]
    """The steps and the values that the levels are made of, in the same direction."""
    first: float
    """The value at the very beginning."""
    begins_high: bool
    """Whether it is far worse there than elsewhere, which a level of many steps hides."""

    @classmethod
    def of(cls, name: str, curve: Curve, sign: int, blocks: int | None = None) -> Course | None:
        """Return the course of a curve; None if it has no finite value."""
        known = np.isfinite(curve.mean)
        steps, values = curve.steps[known], sign * curve.mean[known]
        if not steps.size:
            return None
        points = steps, values
        first, peaks = float(values[0]), (curve.highest if sign > 0 else -curve.lowest)[known]
        begins_high = bool(peaks[0] > np.median(peaks) + _NOISES * _spread(peaks))
        if blocks is not None and steps.size > blocks:
            parts = np.array_split(np.arange(steps.size), blocks)
            steps = np.array([steps[part[0]] for part in parts])
            values = np.array([np.median(values[part]) for part in parts])
        # What neighbours differ by, without the trend.
        noise = _spread(np.diff(values)) / math.sqrt(2) if values.size > 1 else 0.0
        return cls(name, sign, steps, values, noise, points, first, begins_high)

    @property
    def start(self) -> float:
        """The first level."""
        return float(self.losses[0])

    @property
    def end(self) -> float:
        """The level of the last three."""
        return float(np.median(self.losses[-3:]))

    @property
    def best_at(self) -> int:
        """The index of the best level."""
        return int(self.losses.argmin())

    @property
    def best(self) -> float:
        """The best level."""
        return float(self.losses[self.best_at])

    @property
    def gained(self) -> float:
        """How much better the best level is than the beginning."""
        return max(self.start, self.first) - self.best

    @property
    def lost(self) -> float:
        """How much worse the end is than the best level; 0 if that was too late to tell."""
        return self.end - self.best if self.best_at < self.losses.size - 3 else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether the last quarter is not better than the first, nor any level much better than the beginning."""
        quarter = max(len(self.losses) // 4, 1)
        first, last = (float(np.median(part)) for part in (self.losses[:quarter], self.losses[-quarter:]))
        doubt = max(3.5 * self.noise / math.sqrt(quarter), 1e-3 * abs(first))
        is_level = first - last < doubt and self.start - self.best < _NOISES * max(self.noise, doubt)
        return is_level and not self.begins_high

    def text(self, loss: float) -> str:
        """Return a level as the metric has it."""
        return f"{self.sign * loss:.4g}"

    def at(self, index: int) -> int:
        """Return the step of a level."""
        return int(self.steps[index])

    def first_above(self, limit: float) -> int:
        """Return the first step after the best level with a value above a limit; that of the end if there is none."""
        steps, values = self.curve
        above = steps[(steps > self.at(self.best_at)) & (values > limit)]
        return int(above[0] if above.size else steps[-1])


def _spread(values: Values) -> float:
    """Return the standard deviation of values without their outliers."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def find_learning_alerts(summary: RunSummary) -> Iterator[Alert]:
    """Yield what the curves of a run say against it, at most one alert for each cause."""
    loss = _training_loss(summary)
    checks = [*_validations(summary)]
    if loss is not None:
        yield from _diverged(loss) if _has_diverged(loss) else _never_improved(loss, summary)
    # The run went back to its best weights by itself.
    is_restored = any(event["kind"] == "best_weights_restored" for event in summary.events)
    overfit = next((course for course in checks if _overfits(course, loss)), None)
    if overfit is not None and loss is not None:
        yield _alert(
            "overfitting", "info" if is_restored else "warning", overfit, overfit.at(overfit.best_at),
            f"overfits: {overfit.name} rose from {overfit.text(overfit.best)} at step {overfit.at(overfit.best_at):,} "
            f"to {overfit.text(overfit.end)} while {loss.name} fell to {loss.text(loss.end)}",
        )  # fmt: skip
    fallen = [course for course in checks if _fell_back(course)]
    if not fallen and not checks and loss is not None and _fell_back(loss) and not _has_diverged(loss):
        fallen = [loss]
    if fallen and (overfit is None or any(course.sign < 0 for course in fallen)):
        worst = max(fallen, key=lambda course: course.lost / course.gained)
        severity: Severity = "error" if worst.lost >= _NEARLY_ALL * worst.gained else "warning"
        others = ", ".join(course.name for course in fallen if course is not worst)
        yield _alert(
            "worse_than_best", "info" if is_restored else severity, worst,
            worst.first_above(worst.best + _MUCH * worst.gained),
            f"worse than at its best, and not back: {worst.name} was {worst.text(worst.best)} at step "
            f"{worst.at(worst.best_at):,} and is {worst.text(worst.end)} at the end"
            f"{f'; so are {others}' if others else ''}",
        )  # fmt: skip


def _training_loss(summary: RunSummary) -> Course | None:
    """Return the course of the training loss; None if there is too little of it, or it need not fall."""
    curve, optimizers = summary.curves.get(_TRAIN_LOSS), summary.run.get("optimizers", ())
    if curve is None or curve.finite < _MIN_VALUES or len(optimizers) > 1:
        return None
    return Course.of(_TRAIN_LOSS, curve, 1, _BLOCKS)


def _validations(summary: RunSummary) -> Iterator[Course]:
    """Yield the courses of validation metrics whose better direction is known; losses first, because they say most."""
    names = [name for name in summary.curves if name.startswith("val/")]
    for name in sorted(names, key=lambda name: (not name.endswith("loss"), name)):
        direction, curve = better(name, summary.hooks), summary.curves[name]
        if direction is not None and curve.finite >= _MIN_CHECKS:
            course = Course.of(name, curve, 1 if direction == "low" else -1)
            if course is not None:
                yield course


def _has_diverged(loss: Course) -> bool:
    return loss.end > _highest_healthy(loss)


def _highest_healthy(loss: Course) -> float:
    """Return the value above which a training loss has diverged."""
    return loss.start + max(_NOISES * loss.noise, _MUCH * abs(loss.start))


def _diverged(loss: Course) -> Iterator[Alert]:
    step = loss.first_above(_highest_healthy(loss))
    yield _alert(
        "diverged", "error", loss, step,
        f"diverged: {loss.name} was {loss.text(loss.start)} at first, {loss.text(loss.best)} at best, around step "
        f"{loss.at(loss.best_at):,}, and is {loss.text(loss.end)} at the end",
    )  # fmt: skip


def _never_improved(loss: Course, summary: RunSummary) -> Iterator[Alert]:
    """Yield an alert for a loss that stays where it was, unless the model was good at the beginning."""
    if not loss.is_flat or _fell_back(loss) or _begins_trained(summary):
        return
    accuracies = {name: curve for name, curve in summary.curves.items() if _is_accuracy(name) and curve.finite}
    if any(float(np.nanmedian(curve.mean)) >= _KNOWN for curve in accuracies.values()):
        return
    known = [f", and {name} is {curve.last.value:.0%}" for name, curve in accuracies.items() if curve.last]
    yield _alert(
        "never_learned", "error" if accuracies else "warning", loss, None,
        f"never learned: {loss.name} was {loss.text(loss.start)} at first and is {loss.text(loss.end)} at the end"
        f"{''.join(known[-1:])}",
    )  # fmt: skip


def _begins_trained(summary: RunSummary) -> bool:
    """Return whether a run continues another one, or takes weights from a file."""
    return bool(summary.run.get("lineage") or _INIT_FROM.search(summary.config))


def _is_accuracy(name: str) -> bool:
    return name.startswith(("train/", "val/")) and name.rpartition("/")[2].lower() in ("accuracy", "acc")


def _overfits(course: Course, loss: Course | None) -> bool:
    """Whether a validation loss has risen for long while the training loss fell."""
    if course.sign < 0 or loss is None or course.lost <= max(_OVERFIT * abs(course.best), _NOISES * course.noise):
        return False
    then = loss.losses[max(int(np.searchsorted(loss.steps, course.at(course.best_at), side="right")) - 1, 0)]
    return bool(loss.end < then)


def _fell_back(course: Course) -> bool:
    """Whether much of what was gained is lost again at the end."""
    if course.gained <= max(_NOISES * course.noise, 1e-3 * abs(course.start)):
        return False
    return course.lost > max(_MUCH * course.gained, _NOISES * course.noise)


def _alert(kind: str, severity: Severity, course: Course, step: int | None, text: str) -> Alert:
    return Alert(kind, severity, step, text, {"curve": course.name})
