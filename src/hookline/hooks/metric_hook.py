"""`MetricHook`: the base of hooks that follow a metric, such as early stopping and checkpoints by score.

A source (a step, a validation or an epoch) measures a metric at a step. Each such `Measurement` reaches the hook
once, so an old value is never taken for a new one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from hookline._words import nearest
from hookline.core.schedule import Schedule
from hookline.errors import ConfigError, MetricMissing
from hookline.hooks.base import NamedHook, counts_for_run
from hookline.run.control import RunControl
from hookline.runs.direction import better


@dataclass(frozen=True)
class Measurement:
    """The metrics that one source measured at one step.

    At the end of an epoch these are the epoch's means, the newest value of each training metric, and the metrics of a
    validation at the same step.
    """

    source: Literal["step", "validation", "epoch"]
    step: int
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    validated: bool = False
    """Whether validation metrics are among them."""
    awaits_validation: bool = False
    """Whether a later validation can still measure a metric that is missing here."""
    optional: Collection[str] = ()
    """Names that may be missing: only some steps and epochs have the loss of each loader."""

    def __str__(self) -> str:
        at = {"step": "at", "validation": "after the validation at", "epoch": "at the end of the epoch,"}[self.source]
        return f"{at} step {self.step}"


def find_mode(monitor: str, mode: Literal["min", "max"] | None) -> Literal["min", "max"]:
    """Return whether lower ("min") or higher values of a metric are better, according to `mode` or to its name.

    Raises:
        ConfigError: If the name says neither.
    """
    if mode is not None:
        return mode
    direction = better(monitor)
    if direction is None:
        why = f"the name {monitor!r} does not say whether lower or higher values are better"
        raise ConfigError("mode", f"{why}; check the name, or set mode to 'min' or 'max'")
    return "min" if direction == "low" else "max"


class MetricHook(NamedHook):
    """Calls `evaluate` with every measurement of the sources that the constructor chose by `evaluate_at`."""

    same_on_all_ranks = True  # it decides based on numbers of all ranks
    monitor: str | None = None
    mode: str = "min"
    strict: bool | None = None
    """Whether a missing metric ends the run under any failure policy, or only causes one warning.

    By default only a metric that was never measured ends it, because that one is probably misspelt.
    """

    _validation = Measurement("validation", -1, -1)  # The last validation; step -1 before the first.
    _batch_metrics: tuple[int, Mapping[str, float]] = (-1, {})  # The step, and the metrics of its last micro-batch.
    _last_step = -1  # the last step that was evaluated
    _at_steps = _at_validations = _at_epochs = False
    _was_found = False  # whether a measurement has had the metric
    _started_at: int | None = None  # the step at which the run began, until the first evaluation
    _failed = False  # whether an exception ended the run

    def evaluate_at(
        self, *, steps: Schedule | None, validations: bool, epochs: bool, counts_epochs: bool = False
    ) -> None:
        """Choose the sources; call it in the constructor, so that a hook without steps does not listen to them.

        Args:
            steps: When to evaluate steps, if at all.
            validations: Whether to evaluate validations.
            epochs: Whether to evaluate the ends of epochs.
            counts_epochs: Whether the hook would wait forever in a loop without epochs, for another reason.
        """
        self._at_steps, self._at_validations, self._at_epochs = steps is not None, validations, epochs
        if self._at_validations or self._needs_validation:
            self.needs = (*self.needs, "can_validate")
        if counts_epochs or (epochs and steps is None):
            self.needs = (*self.needs, "knows_batches")
        if steps is None:
            self.on_step_end = self.on_train_batch_end = None  # type: ignore[assignment]
        else:
            self.schedule = steps

    def evaluate(self, trainer: RunControl, measurement: Measurement) -> None:
        """Act on a measurement."""
        raise NotImplementedError

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl, resumed: bool = False) -> None:
        """Warn if only a hook's own call of `validate` can measure the metric, because the run would look healthy."""
        self._started_at, self._failed = trainer.step, False
        if self._needs_validation and trainer.has_validation and not trainer.validates_on_schedule:
            problem = f"{self.monitor!r} is measured by validations, but none are scheduled (validate_every is null)"
            self.warn(f"{problem}; set validate_every, or call trainer.validate() from a hook")

    def before_first_step(self, trainer: RunControl, measured: Mapping[str, float] | None) -> None:
        """Reject a metric that no validation will measure.

        Raises:
            MetricMissing: Unless `strict` allows a missing metric.
        """
        # A user's hook may add the metric to a validation, or validate on other data: then the first epoch shows it.
        others = [entry for entry in trainer.hooks.entries() if entry.enabled_for_ranks and not entry.built_in]
        adds = any(event.startswith("on_validation_") for entry in others for event in entry.listeners)
        validates = any("trainer" in listener.wanted for entry in others for listener in entry.listeners.values())
        if not trainer.has_validation:
            if (self._at_validations or self._needs_validation) and not validates:
                self._handle_missing(f"{self.registered_name} needs a validation, but there are no val_loaders")
        elif self._needs_validation and not adds and measured is not None and self.key not in measured:
            nearby = nearest(self.key, measured)
            self._handle_missing(f"metric {self.monitor!r} is not measured by validations; {nearby}")

    def on_train_batch_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the measurements of `step_fn` and other hooks until the end of the step."""
        numbers = floats(metrics)
        self._batch_metrics = step, {**{f"train/{key}": value for key, value in numbers.items()}, **numbers}

    def on_step_end(self, trainer: RunControl, step: int, epoch: int, loss: float) -> None:
        """Evaluate a step: its loss, its means, and the losses of loaders measured since the last evaluation."""
        metrics = dict(self._batch_metrics[1]) if self._batch_metrics[0] == step else {}
        metrics |= {f"train/{key}": value for key, value in floats(trainer.step_metrics()).items()}
        # A loader need not have had a batch in this step, so its newest loss counts, unless it was evaluated before.
        by_loader = [f"train/{name}/loss" for name in trainer.loader_names]
        latest = trainer.latest_metrics(self._last_step) if by_loader else {}
        metrics |= {key: latest[key] for key in by_loader if key in latest}
        metrics |= {"loss": loss, "train/loss": loss}
        self._drop_unknown_loss(trainer, metrics)
        self._last_step = step
        # All ranks evaluate the same steps, and must come to the same decision.
        metrics = trainer.means_of_ranks(metrics)
        self.evaluate(trainer, Measurement("step", step, epoch, metrics, optional=by_loader))

    def on_validation_end(self, trainer: RunControl, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Evaluate a validation, or keep its metrics for the end of the epoch."""
        if not counts_for_run(trainer):
            return
        self._validation = Measurement("validation", step, epoch, floats(metrics), validated=True)
        self._was_found = self._was_found or self.key in self._validation.metrics
        if self._at_validations:
            self.evaluate(trainer, self._validation)

    def on_epoch_end(self, trainer: RunControl, step: int, epoch: int) -> None:
        """Evaluate an epoch, or fail if the hook waits for validations and there can be none."""
        if self._at_epochs:
            loss, validated = trainer.step_loss(), self._validation.step == step  # the loss is over all ranks here
            metrics = {**trainer.latest_metrics(), **trainer.epoch_metrics(), "loss": loss, "train/loss": loss}
            self._drop_unknown_loss(trainer, metrics)
            metrics |= self._validation.metrics if validated else {}
            optional = [f"train/{name}/{kind}" for name in trainer.loader_names for kind in ("loss", "epoch_loss")]
            awaits = trainer.has_validation and not validated
            self.evaluate(trainer, Measurement("epoch", step, epoch, metrics, validated, awaits, optional))
        elif self._at_validations and self._validation.step < 0 and not trainer.has_validation:
            self._handle_missing(f"{self.registered_name} needs a validation, but there are no val_loaders")

    def on_exception(self) -> None:
        """Store that the run failed; `on_train_end` acts on it, after other hooks."""
        self._failed = True

    def warn_if_never_evaluated(self, trainer: RunControl) -> None:
        """Warn at the end of a run, unless it was stopped, if nothing measured the metric."""
        steps = 0 if self._started_at is None else trainer.step - self._started_at
        if self.monitor is not None and steps > 0 and trainer.stop_reason is None and not self._failed:
            what = "validation" if self._needs_validation else "evaluation"
            self.warn(f"{self.monitor!r} was never evaluated: no {what} happened in {steps} steps")

    @property
    def _needs_validation(self) -> bool:
        at_ends = self._at_validations or self._at_epochs
        return at_ends and self.monitor is not None and not is_training_metric(self.key)

    # ---- the metric --------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The monitored metric under the name that `metrics` has for it."""
        return metric_key(self.monitor or "")

    def monitored_value(self, measurement: Measurement) -> float | None:
        """Return the monitored metric's value, or None if it is missing and that is allowed.

        Raises:
            MetricMissing: If the metric should have been measured, unless `strict` allows a missing metric.
        """
        self._started_at = None
        key = self.key
        if key in measurement.metrics:
            self._was_found = True
            return measurement.metrics[key]
        at_step, of_training = measurement.source == "step", is_training_metric(key)
        # A training metric that is evaluated at steps need not be there at the end of epochs and validations.
        may_be_missing = measurement.awaits_validation if at_step or not of_training else self._at_steps
        if key not in measurement.optional and not may_be_missing:
            from_hooks = measurement.source == "epoch" and is_step_metric(key)
            hint = "; metrics that hooks add to a batch are evaluated only at steps" if from_hooks else ""
            nearby = nearest(key, [*measurement.metrics, *measurement.optional])
            self._handle_missing(f"metric {self.monitor!r} was not measured {measurement}{hint}; {nearby}")
        return None

    def _drop_unknown_loss(self, trainer: RunControl, metrics: dict[str, float]) -> None:
        """Drop the NaN that stands for the loss of a loop which has reported none."""
        if math.isnan(metrics["loss"]) and not trainer.has_loss:
            del metrics["loss"], metrics["train/loss"]
            if self.key in ("loss", "train/loss", "train/epoch_loss"):
                remedy = trainer.remedy(["knows_loss"])
                self._handle_missing(f"metric {self.monitor!r} is unknown, because the loop reports no loss: {remedy}")

    def report_non_finite(self, trainer: RunControl, measurement: Measurement, value: float) -> None:
        """Warn and record, once in a run, that the metric is NaN or infinite."""
        if "non-finite" not in self._warned_once:
            self.note(trainer, "metric_not_finite", monitor=self.monitor, value=str(value))
        self.warn(f"{self.monitor} is {value} {measurement}", once="non-finite")

    def _handle_missing(self, problem: str) -> None:
        if self.strict or (self.strict is None and not self._was_found):
            raise MetricMissing(problem)
        self.warn(problem, once="missing")

    # ---- state -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop the measurements, because another run begins."""
        self._validation, self._batch_metrics = MetricHook._validation, MetricHook._batch_metrics
        self._was_found, self._last_step, self._warned_once = False, -1, frozenset()

    @property
    def monitored(self) -> list[str | None]:
        """The metric and mode of the state; saved with it."""
        return [self.monitor, self.mode]

    def measurement_state(self) -> dict[str, Any]:
        """Return the last evaluated step and the last validation, which the end of its epoch may have to evaluate."""
        last = self._validation
        validation = {
            "what": "validation", "step": last.step, "epoch": last.epoch, "metrics": dict(last.metrics),
            "validated": last.validated, "awaited": True, "other": (),
        }  # fmt: skip
        return {"validation": validation, "looked": self._last_step}

    def load_measurement_state(self, state: Mapping[str, Any]) -> bool:
        """Restore the measurements; if the state is for another metric, start over and return False."""
        saved = list(state["about"])
        if saved != self.monitored:
            words = "the checkpoint's state is for {} ({}); starting over with {} ({})"
            self.warn(words.format(*saved, *self.monitored))
            self.reset()
            return False
        self._was_found, self._last_step = state["seen"], state["looked"]
        names = ("step", "epoch", "metrics", "validated")
        self._validation = Measurement("validation", *(state["validation"][name] for name in names))
        return True


def metric_key(monitor: str) -> str:
    """Return a metric's name as `metrics` has it at `on_validation_end`: ``eval/…`` is ``val/…``."""
    return f"val/{monitor.removeprefix('eval/')}" if monitor.startswith("eval/") else monitor


def is_training_metric(key: str) -> bool:
    """Return whether training measures a metric, at its steps or as the mean over an epoch."""
    return key == "loss" or key.startswith("train/")


def is_step_metric(key: str) -> bool:
    """Return whether training steps measure a metric; they do not measure `train/epoch_loss`."""
    return is_training_metric(key) and not key.rpartition("/")[2].startswith("epoch_")


def floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are one number each, as floats; hooks may put anything among them."""
    numbers = {}
    for key, value in metrics.items():
        if not isinstance(value, str):
            with suppress(TypeError, ValueError, RuntimeError):  # lists and tensors of several numbers
                numbers[key] = float(value)
    return numbers


def is_better(mode: str, value: float, other: float) -> bool:
    """Return whether a value is strictly better than another one; NaN never is."""
    return value < other if mode == "min" else value > other
