"""Judge by its curves whether a run learned: not if it diverged, never improved, lost what it had, or overfits.

A rule needs enough values, and a change far above their noise. Where a healthy run may look like that, there is no
alert: the losses of a GAN or of a policy do not fall, so the training loss of a run with several optimizers, with a
loss below 0, or that records rewards, is not judged; and a run that begins with trained weights need not improve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookline.record.events import Severity
from hookline.runs.curves import Curve
from hookline.runs.direction import better
from hookline.runs.summary import RunSummary
from hookline.runs.verdict import NO_LOSS, Alert

_TRAIN_LOSS = "train/loss"
_MIN_VALUES, _MIN_CHECKS = 40, 5  # fewer values of the training loss, or of a validation metric, are not judged
_BLOCKS = 20  # number of parts by whose medians a long curve is judged
_NOISES = 4.0  # how many times the noise a change must be
_MUCH, _NEARLY_ALL = 1 / 3, 0.75  # shares of the stake (`_stake`): losing this much is a warning, or an error
_CHANCE = 0.5  # the share of a score that may be chance, if the run began with a good one
_RISEN = 0.5  # how far above its beginning, relatively, a loss has diverged
_OVERFIT = 0.1  # how far above its lowest value, relatively, a validation loss must be
_TRIFLE = 0.01  # the share of a loss that is too small to matter or to count as learning
_LITTLE = 0.1  # the share of a loss or an accuracy that a run may gain by chance, if it has learned nothing
_LEVEL = 1e-3  # the share of a loss up to which it has not changed
_KNOWN = 0.6  # an accuracy that an untrained model rarely has
_GUESSED = 0.5  # an accuracy below which a model has not even learned a little about two classes
_REWARDS = frozenset({"reward", "rewards", "return", "returns"})  # words in the names of what a policy is trained for
_INIT_FROM = re.compile(r"^\s*init_from: (?!null)", re.MULTILINE)  # the option of a config.yaml

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """The course of a metric in a few levels; in `losses` low is always good, even if high is good in the metric."""

    name: str
    sign: int
    steps: NDArray[np.int64]
    losses: Values
    noise: float
    curve: tuple[NDArray[np.int64], Values]
    """The steps and the values from which the levels are computed, in the same direction."""
    first: float
    """The value at the very beginning."""
    begins_high: bool
    """Whether it is far worse there than elsewhere, which a level of many steps hides."""
    begins_low: bool
    """Whether it is far better there than in the whole first half: the first steps have ruined the model."""

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
        # Losses that a step has ruined have any size, so their logarithms are compared.
        sizes = np.log(np.maximum(points[1][: points[1].size // 2 + 1], np.finfo(np.float64).tiny))
        is_worse = values[: values.size // 2 + 1].min() > first + _RISEN * abs(first)
        begins_low = bool(is_worse and np.median(sizes) - sizes[0] > _NOISES * _noise(sizes))
        return cls(name, sign, steps, values, _noise(values), points, first, begins_high, begins_low)

    @property
    def start(self) -> float:
        """The first level, or the first value if the run was ruined before it reached a level."""
        return self.first if self.begins_low else float(self.losses[0])

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
        """How much worse the end is than the best level; 0 if the best level came too late to tell."""
        return self.end - self.best if self.best_at < self.losses.size - 3 else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether the last quarter is not better than the first, and no level is much better than the beginning."""
        quarter = max(len(self.losses) // 4, 1)
        first, last = (float(np.median(part)) for part in (self.losses[:quarter], self.losses[-quarter:]))
        doubt = max(3.5 * self.noise / math.sqrt(quarter), (_LEVEL if self.sign > 0 else _LITTLE) * abs(first))
        if self.sign > 0 and doubt > _LITTLE * abs(first):  # there is too much noise to tell
            return False
        is_level = first - last < doubt and self.start - self.best < _NOISES * max(self.noise, doubt)
        return is_level and not self.begins_high

    @property
    def is_falling(self) -> bool:
        """Whether the last quarter is clearly better than the one before it."""
        half = self.losses[self.losses.size // 2 :]
        quarter = max(half.size // 2, 1)
        before, last = float(np.median(half[:quarter])), float(np.median(half[-quarter:]))
        return before - last > max(3.5 * self.noise / math.sqrt(quarter), _TRIFLE * abs(before))

    def text(self, loss: float) -> str:
        """Return a level as the metric has it."""
        return f"{self.sign * loss:.4g}"

    def at(self, index: int) -> int:
        """Return the step of a level."""
        return int(self.steps[index])

    def first_above(self, limit: float) -> int:
        """Return the first step after the best level with a value above a limit; the last step if there is none."""
        (steps, values), begin = self.curve, -1 if self.begins_low else self.at(self.best_at)
        above = steps[(steps > begin) & (values > limit)]
        return int(above[0] if above.size else steps[-1])

    def last_below(self, limit: float, step: int) -> int | None:
        """Return the last step before another one with a value up to a limit; None if there is none."""
        steps, values = self.curve
        below = steps[(steps < step) & (values <= limit)]
        return int(below[-1]) if below.size else None


def _spread(values: Values) -> float:
    """Return the standard deviation of values without their outliers."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _noise(values: Values) -> float:
    """Return how much neighbors differ, without the trend."""
    return _spread(np.diff(values)) / math.sqrt(2) if values.size > 1 else 0.0


def find_learning_alerts(summary: RunSummary) -> Iterator[Alert]:
    """Yield what the curves of a run say against it, at most one alert for each cause."""
    if summary.run.get("optimizers") and summary.files.step and not any(map(_is_measure, summary.curves)):
        text = f"neither {_TRAIN_LOSS} nor a validation was recorded, so it is unknown whether the model learned"
        yield Alert(NO_LOSS, "info", None, text)
    loss = _training_loss(summary)
    checks = [*_validations(summary)]
    # A model that fits perfectly has a loss near 0, which may be twice as high as its best and means nothing.
    trifle = 0.0 if loss is None else _TRIFLE * abs(loss.start)
    worse = [check for check in checks if check.lost > (trifle if check.name.endswith("loss") else 0.0)]
    if loss is not None:
        is_ruined = loss.begins_low or _has_diverged(loss)
        yield from _diverged(loss) if is_ruined else _never_improved(loss, checks, summary)
    # The run went back to its best weights by itself.
    is_restored = any(event["kind"] == "best_weights_restored" for event in summary.events)
    overfit = next((course for course in worse if _overfits(course, loss)), None)
    if overfit is not None and loss is not None:
        yield _alert(
            "overfitting", "info" if is_restored else "warning", overfit, overfit.at(overfit.best_at),
            f"overfits: {overfit.name} rose from {overfit.text(overfit.best)} at step {overfit.at(overfit.best_at):,} "
            f"to {overfit.text(overfit.end)} while {loss.name} fell to {loss.text(loss.end)}",
        )  # fmt: skip
    # Overfitting already explains why the losses rise.
    fallen = [course for course in worse if _fell_back(course) and (overfit is None or course.sign < 0)]
    if not fallen and not checks and loss is not None and _fell_back(loss) and not _has_diverged(loss):
        fallen = [loss]
    if fallen:
        worst = max(fallen, key=lambda course: course.lost / _stake(course))
        severity: Severity = "error" if worst.lost >= _NEARLY_ALL * _stake(worst) else "warning"
        others = [course.name for course in fallen if course is not worst]
        so_are = f"; so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
        limit = worst.best + _MUCH * _stake(worst)
        step = worst.first_above(limit)
        yield _alert(
            "worse_than_best", "info" if is_restored else severity, worst, step,
            f"got worse and did not recover: {worst.name} was {worst.text(worst.best)} at step "
            f"{worst.at(worst.best_at):,} and is {worst.text(worst.end)} at the end{so_are}",
            good_until=worst.last_below(limit, step),
        )  # fmt: skip


def _training_loss(summary: RunSummary) -> Course | None:
    """Return the course of the training loss; None if there is too little of it, or it need not fall.

    Losses below 0 are those of policies and critics, whose level says nothing about what was learned. The loss of a
    critic rises with the rewards that it predicts.
    """
    curve, optimizers = summary.curves.get(_TRAIN_LOSS), summary.run.get("optimizers", ())
    if curve is None or curve.finite < _MIN_VALUES or len(optimizers) > 1:
        return None
    if any(not _REWARDS.isdisjoint(re.split(r"[^a-z]+", name.lower())) for name in summary.curves):
        return None
    if curve.least is not None and curve.least.value < 0:
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
    # The noise of a ruined run says nothing about its beginning.
    noise = 0.0 if loss.begins_low else _NOISES * loss.noise
    return loss.start + max(noise, _RISEN * abs(loss.start))


def _diverged(loss: Course) -> Iterator[Alert]:
    if loss.begins_low:
        between = f"rose to {loss.text(float(loss.losses.max()))}"
    else:
        between = f"{loss.text(loss.best)} at best, around step {loss.at(loss.best_at):,},"
    severity: Severity = "error" if _has_diverged(loss) else "warning"
    text = f"{loss.name} was {loss.text(loss.start)} at first, {between} and is {loss.text(loss.end)} at the end"
    yield _alert("diverged", severity, loss, loss.first_above(_highest_healthy(loss)), f"diverged: {text}")


def _never_improved(loss: Course, checks: Sequence[Course], summary: RunSummary) -> Iterator[Alert]:
    """Yield an alert for a loss that stays where it was, unless the model was good at the beginning."""
    if _fell_back(loss) or _begins_trained(summary):
        return
    accuracies = {name: curve for name, curve in summary.curves.items() if _is_accuracy(name) and curve.finite}
    if any(float(np.nanmedian(curve.mean)) >= _KNOWN for curve in accuracies.values()):
        return
    # With wrong labels, the loss of bad initial weights falls to chance level, where the accuracy is all the time.
    flat = [course for course in _accuracies(accuracies) if course.is_flat]
    if not loss.is_flat and not flat:
        return
    # A few noisy batches may hide that a model learns, but then a loss falls until the end.
    losses = [loss, *(course for course in checks if course.sign > 0)]
    if any(course.is_falling for course in losses) and not any(course.name.startswith("val/") for course in flat):
        return
    judged = loss if loss.is_flat else flat[0]
    # An accuracy of single batches says little, and one above guessing between two classes may be the best possible.
    validated = [curve for name, curve in accuracies.items() if name.startswith("val/")]
    is_validated = bool(validated) and all(float(np.nanmedian(curve.mean)) < _GUESSED for curve in validated)
    is_certain = is_validated and (judged is loss or loss.gained < _LITTLE * abs(loss.first))
    known = [f", and {name} is {curve.last.value:.0%}" for name, curve in accuracies.items() if curve.last]
    yield _alert(
        "never_learned", "error" if is_certain else "warning", judged, None,
        f"never learned: {judged.name} was {judged.text(judged.start)} at first and is {judged.text(judged.end)} at "
        f"the end{''.join(known[-1:]) if judged is loss else ''}",
    )  # fmt: skip


def _accuracies(curves: Mapping[str, Curve]) -> Iterator[Course]:
    """Yield the courses of accuracies that have enough values, and did not fall."""
    for name, curve in curves.items():
        is_validation = name.startswith("val/")
        if curve.finite >= (_MIN_CHECKS if is_validation else _MIN_VALUES):
            course = Course.of(name, curve, -1, None if is_validation else _BLOCKS)
            if course is not None and not _fell_back(course):
                yield course


def _begins_trained(summary: RunSummary) -> bool:
    """Return whether a run continues another one, takes weights from a file, or got a model that had been trained."""
    run = summary.run
    return bool(run.get("lineage") or run.get("begins_trained") or _INIT_FROM.search(summary.config))


def _is_measure(name: str) -> bool:
    """Whether a metric may show whether a run learned: a training loss, or anything that a validation measured."""
    return name == _TRAIN_LOSS or name.startswith("val/")


def _is_accuracy(name: str) -> bool:
    return name.startswith(("train/", "val/")) and name.rpartition("/")[2].lower() in ("accuracy", "acc")


def _overfits(course: Course, loss: Course | None) -> bool:
    """Whether a validation loss has risen for long while the training loss fell."""
    if course.sign < 0 or loss is None or course.lost <= max(_OVERFIT * abs(course.best), _NOISES * course.noise):
        return False
    then = loss.losses[max(int(np.searchsorted(loss.steps, course.at(course.best_at), side="right")) - 1, 0)]
    return bool(loss.end < then)


def _stake(course: Course) -> float:
    """Return what a metric had to lose: what it gained, or more if its first value was already good."""
    if course.name == _TRAIN_LOSS:
        return course.gained
    return max(course.gained, abs(course.best) * (1.0 if course.sign > 0 else _CHANCE))


def _fell_back(course: Course) -> bool:
    """Whether much of what the metric had to lose (`_stake`) is lost at the end."""
    if course.name == _TRAIN_LOSS and course.gained <= max(_NOISES * course.noise, _LEVEL * abs(course.start)):
        return False
    return course.lost > max(_MUCH * _stake(course), _NOISES * course.noise)


def _alert(
    kind: str, severity: Severity, course: Course, step: int | None, text: str, good_until: int | None = None
) -> Alert:
    return Alert(kind, severity, step, text, {"curve": course.name}, good_until=good_until)
