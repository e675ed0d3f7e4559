"""`early_stopping`: end a run whose metric no longer improves, has reached its target, or diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal
from weakref import ref

import torch

from hookline._console import print_line
from hookline._names import load_plain_state_dict, plain_state_dict
from hookline._parameters import NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveInt
from hookline._text import counted
from hookline.checkpoints.frozen import fingerprint
from hookline.checkpoints.shards import copy_to_host, like
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import ConfigError
from hookline.hooks.base import counts_for_run, period
from hookline.hooks.metric_hook import Measurement, MetricHook, find_mode, is_better, is_training_metric
from hookline.run.control import RunControl


class EarlyStopping(MetricHook):
    """Ends the run when `monitor` has not improved for `patience` checks.

    The model's weights are left alone unless `restore_best_weights` is set. A check without a new value of the metric
    does not count.

    Args:
        monitor: The metric. A training metric, such as ``train/loss``, is checked at the end of epochs, where its
            newest value counts, or every `check_every_n_steps`; ``train/epoch_loss`` is the mean of the epoch.
        patience: Number of consecutive checks without improvement after which the run ends.
        mode: "min" or "max": whether lower or higher values are better. By default the metric's name decides:
            ``val/loss`` "min", ``val/accuracy`` "max". Required if the name suggests neither.
        min_delta: A change counts as an improvement only if it is larger than this.
        min_delta_mode: "rel" makes `min_delta` a share of the best value so far.
        check_on_train_epoch_end: Check at the end of every epoch instead of after every validation.
        check_every_n_steps: Check a training metric at these steps.
        warmup: When the checks begin, such as ``"2 epochs"`` or a number of steps.
        target: Reaching this value ends the run at once.
        divergence_threshold: A value worse than this ends the run at once.
        on_non_finite: How to handle NaN and infinity: "stop" the run, "count" as no improvement, or "ignore".
        restore_best_weights: Give the model the weights of the best check at the end, unless the run fails. A copy of
            them is kept on the host and saved with checkpoints.
        strict: Whether a missing metric ends the run; otherwise it causes a warning.
        verbose: Print a line for each check.
        min_epochs: Do not stop before this many epochs are complete, unless the metric diverges or is not finite.
        every: How often to check, instead of after every validation: "1 epoch", or 100 steps for a training metric.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "early_stopping"
    needs: tuple[str, ...] = ("can_stop",)
    every_aliases = ("check_on_train_epoch_end", "check_every_n_steps")

    def __init__(
        self,
        monitor: NonEmptyStr = "val/loss",
        patience: NonNegativeInt = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: NonNegativeFloat = 0.0,
        min_delta_mode: Literal["abs", "rel"] = "abs",
        check_on_train_epoch_end: bool = False,
        check_every_n_steps: PositiveInt | None = None,
        warmup: int | str = 0,
        target: float | None = None,
        divergence_threshold: float | None = None,
        on_non_finite: Literal["stop", "count", "ignore"] = "stop",
        restore_best_weights: bool = False,
        strict: bool = True,
        verbose: bool = False,
        min_epochs: NonNegativeInt = 0,
        every: int | str | None = None,
    ) -> None:
        self.monitor, self.mode, self.strict, self.verbose = monitor, find_mode(monitor, mode), strict, verbose
        self.patience, self.min_delta, self.min_delta_mode = patience, min_delta, min_delta_mode
        self.check_on_train_epoch_end, self.check_every_n_steps = check_on_train_epoch_end, check_every_n_steps
        self.min_epochs, self.target, self.divergence_threshold = min_epochs, target, divergence_threshold
        self.on_non_finite = on_non_finite
        self.restore_best_weights = self.intervenes = restore_best_weights
        given = period(self, every, ("steps", "epochs"))
        if given is not None and given.unit == "steps":
            self.check_every_n_steps = int(given.amount)
        elif given is not None:
            if given.amount != 1:
                raise ConfigError("every", f"{every!r}: checks run at the end of each epoch or at steps")
            self.check_on_train_epoch_end = True
        self.warmup, self._warmup = warmup, Quantity.parse(warmup, "warmup", ("steps", "epochs"))
        self.best: float | None = None
        self.best_step = self.waited = 0
        self._waiting: str | None = None  # a reason to stop that waits for the end of the epoch `min_epochs`
        self._best_weights: dict[str, Any] | None = None
        self._validated_weights: tuple[int, dict[str, Any]] | None = None  # with their step, until the epoch ends
        self._trainer: Callable[[], RunControl | None] = lambda: None  # a weak reference
        steps, at_epochs = self.check_every_n_steps, self.check_on_train_epoch_end
        # Other names that begin with "epoch_" may be metrics of step_fn, which steps do measure.
        is_epoch_loss = self.key.rpartition("/")[2] == "epoch_loss"
        if steps is not None and (at_epochs or is_epoch_loss or self.key.startswith("val/")):
            source = "the end of an epoch" if is_epoch_loss else "a validation"
            reason = "check_on_train_epoch_end is on" if at_epochs else f"{self.monitor} comes with {source}"
            raise ConfigError("check_every_n_steps", f"is for metrics of training, such as train/loss; {reason}")
        at_epochs = at_epochs or (steps is None and is_training_metric(self.key))
        schedule = None if steps is None else Schedule.parse(every=steps)
        self.evaluate_at(
            steps=schedule, validations=steps is None and not at_epochs, epochs=at_epochs,
            counts_epochs=min_epochs > 0 or (self._warmup.unit == "epochs" and self._warmup.amount > 0),
        )  # fmt: skip

    # ---- one check ---------------------------------------------------------------------------------------------------

    def evaluate(self, trainer: RunControl, measurement: Measurement) -> None:
        """Make one check, if there is a new value and the warm-up is over."""
        value = self.monitored_value(measurement)
        done = measurement.epoch + 1 if self._warmup.unit == "epochs" else measurement.step
        if value is None or done <= self._warmup.amount:
            return
        if not math.isfinite(value):
            self.report_non_finite(trainer, measurement, value)
            if self.on_non_finite == "ignore":
                return
        # Compare with the best value first: the one that reaches the target is the best.
        reason, can_wait = self._compare_with_best(trainer, value, measurement.step), True
        limit = self.divergence_threshold
        if not math.isfinite(value) and self.on_non_finite == "stop":
            reason, can_wait = f"{self.monitor} is {value}", False
        elif math.isfinite(value) and self._reaches_target(value):
            reason = f"{self.monitor} {value:.6g} has reached its target {self.target:.6g}"
        elif math.isfinite(value) and limit is not None and is_better(self.mode, limit, value):
            reason = f"{self.monitor} {value:.6g} is worse than {limit:.6g}, its divergence threshold"
            can_wait = False
        is_early = measurement.epoch + (measurement.source == "epoch") < self.min_epochs
        self._waiting = reason if can_wait and is_early else None
        if reason is not None and self._waiting is None:
            self._stop(trainer, reason)

    def _stop(self, trainer: RunControl, reason: str) -> None:
        self._waiting = None
        self._print(f"stopping: {reason}")
        trainer.request_stop(reason)

    def on_epoch_end(self, trainer: RunControl, step: int, epoch: int) -> None:
        """Check at the end of epochs if configured, then stop if only `min_epochs` prevented it."""
        super().on_epoch_end(trainer, step, epoch)
        if self._waiting is not None and epoch + 1 >= self.min_epochs:
            self._stop(trainer, self._waiting)

    def _reaches_target(self, value: float) -> bool:
        return self.target is not None and not is_better(self.mode, self.target, value)

    def _compare_with_best(self, trainer: RunControl, value: float, step: int) -> str | None:
        """Update the best value or count a check without improvement; return the reason to stop, if any."""
        on_best = "" if self.best is None else f" on {self.best:.6g}"
        if self._is_improvement(value):
            self._print(f"{self.monitor} improved to {value:.6g}{on_best}")
            self.best, self.best_step, self.waited = value, step, 0
            if self.restore_best_weights:
                # By the end of an epoch `ema` has restored training's weights; the validated ones were copied before.
                validated, self._validated_weights = self._validated_weights, None
                is_current = validated is not None and validated[0] == step
                self._best_weights = validated[1] if validated and is_current else _copy_to_host(trainer.model)
            return None
        self.waited += 1
        sentence = f"{self.monitor} has not improved{on_best} for {counted(self.waited, 'check')}"
        if self.waited >= self.patience:
            return sentence
        self._print(f"{sentence} of {self.patience}")
        return None

    def _is_improvement(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        delta = self.min_delta * (abs(self.best) if self.min_delta_mode == "rel" else 1.0)
        if self._reaches_target(value):  # the run ends here, so any gain counts
            delta = 0.0
        return is_better(self.mode, value, self.best - delta if self.mode == "min" else self.best + delta)

    def _print(self, sentence: str) -> None:
        if self.verbose:
            print_line(f"{self.registered_name}: {sentence}")

    # ---- the best weights --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl, resumed: bool = False) -> None:
        """Start over, unless the run is resumed."""
        super().on_train_start(trainer)
        self._trainer = ref(trainer)
        if resumed:
            self._complete_weights(trainer.model)
        else:
            self.reset()

    def reset(self) -> None:
        """Forget the best value and its weights."""
        super().reset()
        self.best, self.best_step, self.waited, self._waiting = None, 0, 0, None
        self._best_weights = self._validated_weights = None

    def on_validation_end(self, trainer: RunControl, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Copy the validated weights if the check comes later: `ema` restores training's weights before that."""
        super().on_validation_end(trainer, step, epoch, metrics)
        if not (self.restore_best_weights and self._at_epochs and counts_for_run(trainer)):
            return
        value = self._validation.metrics.get(self.key) if self._validation.step == step else None
        if value is not None and self._is_improvement(value):
            self._validated_weights = step, _copy_to_host(trainer.model)

    def on_train_end(self, trainer: RunControl) -> None:
        """Restore the best weights, if requested; a failed run keeps its weights for inspection."""
        self.warn_if_never_evaluated(trainer)
        if self._best_weights is not None and not self._failed:
            now = plain_state_dict(trainer.model)
            best = {name: like(value, now.get(name)) for name, value in self._best_weights.items()}
            load_plain_state_dict(trainer.model, best)
            self.note(trainer, "best_weights_restored", saved_at=self.best_step, value=self.best)
            self._print(f"restored the best weights, those of step {self.best_step}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the checks since then, and the weights that belong to it.

        Frozen parameters that the checkpoint omits, because the model comes with them, are omitted here, too.
        """
        trainer, best, validated = self._trainer(), self._best_weights, self._validated_weights
        unsaved = {} if trainer is None or best is None is validated else trainer.unsaved_parameters()
        return {
            "best": self.best, "best_step": self.best_step, "waited": self.waited, "seen": self._was_found,
            "best_weights": best and _without(unsaved, best), **self.measurement_state(),
            "validated_weights": validated and (validated[0], _without(unsaved, validated[1])), "about": self.monitored,
            **({} if self._waiting is None else {"waiting": self._waiting}),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, unless it is for another metric."""
        if self.load_measurement_state(state):
            self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
            self._best_weights, self._validated_weights = state["best_weights"], state["validated_weights"]
            self._waiting = state.get("waiting")

    def _complete_weights(self, model: torch.nn.Module) -> None:
        """Add the parameters that loaded weights lack: the model has them now, and a later step may change them."""
        validated = self._validated_weights
        for weights in filter(None, (self._best_weights, validated and validated[1])):
            weights.update(_copy_to_host(model, weights))


def _copy_to_host(model: torch.nn.Module, without: Container[str] = ()) -> dict[str, Any]:
    return {name: copy_to_host(value) for name, value in plain_state_dict(model).items() if name not in without}


def _without(unsaved: Mapping[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that differ from the parameters that the checkpoint leaves out."""
    return {
        name: value for name, value in weights.items() if name not in unsaved or fingerprint(value) != unsaved[name]
    }
