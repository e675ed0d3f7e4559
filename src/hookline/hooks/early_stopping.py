"""Ending a run whose metric no longer improves, has reached its target, or has gone astray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

import torch

from hookline.errors import ConfigError
from hookline.events.schedule import Quantity, Schedule
from hookline.hooks.metric_hook import MODES, MetricHook, Occasion, better, is_of_training
from hookline.hooks.named_hook import is_of_the_run
from hookline.hooks.parameters import (
    number,
    number_or_none,
    one_of,
    switch,
    text,
    whole_number,
    whole_number_or_none,
)


class EarlyStopping(MetricHook):
    """Ends the run when `monitor` has not improved for `patience` checks.

    A check is made after every validation, or at the end of every epoch with `check_on_train_epoch_end`. A metric of
    training such as ``train/loss`` is checked at the end of epochs anyway, or every `check_every_n_steps`; at the end
    of an epoch that is its newest value, and ``train/epoch_loss`` is the mean. A check without a new value is none. An
    improvement is more than `min_delta`, which with ``min_delta_mode="rel"`` is a share of the best value so far.
    Before `warmup` (``"2 epochs"``, or a number of steps) nothing is checked. Reaching `target` ends the run at once,
    and so does being worse than `divergence_threshold`. `on_non_finite` says what NaN and infinity do: "stop", "count"
    as no improvement, or "ignore".

    With `restore_best_weights` the model ends with the weights that were best, unless the run fails. A copy of them is
    kept on the host and saved with checkpoints.
    """

    built_in = True
    name = "early_stopping"

    def __init__(
        self,
        monitor: str = "val/loss",
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        min_delta_mode: Literal["abs", "rel"] = "abs",
        check_on_train_epoch_end: bool = False,
        check_every_n_steps: int | None = None,
        warmup: int | str = 0,
        target: float | None = None,
        divergence_threshold: float | None = None,
        on_non_finite: Literal["stop", "count", "ignore"] = "stop",
        restore_best_weights: bool = False,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        self.monitor = text(monitor, "monitor")
        self.strict, self.verbose = switch(strict, "strict"), switch(verbose, "verbose")
        self.patience, self.mode = whole_number(patience, "patience", 0), one_of(mode, MODES, "mode")
        self.min_delta = number(min_delta, "min_delta", 0)
        self.min_delta_mode = one_of(min_delta_mode, ("abs", "rel"), "min_delta_mode")
        self.check_on_train_epoch_end = switch(check_on_train_epoch_end, "check_on_train_epoch_end")
        self.check_every_n_steps = whole_number_or_none(check_every_n_steps, "check_every_n_steps")
        self.warmup, self._warmup = warmup, _before(warmup)
        self.target = number_or_none(target, "target")
        self.divergence_threshold = number_or_none(divergence_threshold, "divergence_threshold")
        self.on_non_finite = one_of(on_non_finite, ("stop", "count", "ignore"), "on_non_finite")
        self.restore_best_weights = self.intervenes = switch(restore_best_weights, "restore_best_weights")
        self.best: float | None = None
        self.best_step = self.waited = 0
        self._best_weights: dict[str, Any] | None = None
        self._validated_weights: tuple[int, dict[str, Any]] | None = None  # with their step, for the end of the epoch
        self._failed = False
        self._choose_occasions()

    def _choose_occasions(self) -> None:
        steps, at_epochs = self.check_every_n_steps, self.check_on_train_epoch_end
        of_epochs = self.key.rpartition("/")[2] == "epoch_loss"  # others may be names that step_fn has chosen
        if steps is not None and (at_epochs or of_epochs or self.key.startswith("val/")):
            comes = "the end of an epoch" if of_epochs else "a validation"
            reason = "check_on_train_epoch_end is on" if at_epochs else f"{self.monitor} comes with {comes}"
            raise ConfigError("check_every_n_steps", f"is for metrics of training, such as train/loss; {reason}")
        at_epochs = at_epochs or (steps is None and is_of_training(self.key))
        schedule = None if steps is None else Schedule.parse(every=steps)
        self.look_at(steps=schedule, validation=steps is None and not at_epochs, epochs=at_epochs)

    @property
    def forgives(self) -> bool:
        """Unless it is strict."""
        return not self.strict

    # ---- one check -------------------------------------------------------------------------------------------------

    def look(self, trainer: Any, occasion: Occasion) -> None:
        """One check, if there is a new value and the warm-up is over."""
        value = self.value(occasion)
        if value is None or self._warms_up(occasion):
            return
        if not math.isfinite(value) and self.on_non_finite == "ignore":
            return
        out_of_patience = self._improved(trainer, value, occasion.step)  # first: what reaches the target is the best
        reason = self._at_once(value) or out_of_patience
        if reason is not None:
            self._say(f"stopping: {reason}")
            trainer.request_stop(reason)

    def _warms_up(self, occasion: Occasion) -> bool:
        done = occasion.epoch + 1 if self._warmup.unit == "epochs" else occasion.step
        return done <= self._warmup.amount

    def _at_once(self, value: float) -> str | None:
        """Why one look is enough to end the run."""
        if not math.isfinite(value):
            return f"{self.monitor} is {value}" if self.on_non_finite == "stop" else None
        if self.target is not None and self._on_target(value):
            return f"{self.monitor} {_shown(value)} has reached its target {_shown(self.target)}"
        limit = self.divergence_threshold
        if limit is not None and better(self.mode, limit, value):
            return f"{self.monitor} {_shown(value)} is worse than {_shown(limit)}, its divergence threshold"
        return None

    def _on_target(self, value: float) -> bool:
        return self.target is not None and not better(self.mode, self.target, value)

    def _improved(self, trainer: Any, value: float, step: int) -> str | None:
        """Compare with the best; why to stop, once there was patience enough."""
        if self._is_improvement(value):
            self._say(f"{self.monitor} improved to {_shown(value)}" + ("" if self.best is None else self._on_best()))
            self.best, self.best_step, self.waited = value, step, 0
            if self.restore_best_weights:
                self._best_weights = self._weights_at(step, trainer.model)
            return None
        self.waited += 1
        sentence = f"{self.monitor} has not improved{self._on_best()} for {_counted(self.waited, 'check')}"
        if self.waited >= self.patience:
            return sentence
        self._say(f"{sentence} of {self.patience}")
        return None

    def _is_improvement(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        delta = self.min_delta * (abs(self.best) if self.min_delta_mode == "rel" else 1.0)
        if self._on_target(value):  # the run ends with it, however little is gained
            delta = 0.0
        return better(self.mode, value, self.best - delta if self.mode == "min" else self.best + delta)

    def _on_best(self) -> str:
        return "" if self.best is None else f" on {_shown(self.best)}"

    def _say(self, sentence: str) -> None:
        if self.verbose:
            print(f"{self.called}: {sentence}", flush=True)

    # ---- the best weights ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any = None, resumed: bool = False) -> None:
        """Another run has another best."""
        super().on_train_start(trainer)
        self._failed = False
        if not resumed:
            self.forget()

    def forget(self) -> None:
        """Begin to wait anew."""
        super().forget()
        self.best, self.best_step, self.waited = None, 0, 0
        self._best_weights = self._validated_weights = None

    def on_validation_end(self, trainer: Any, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Where the check comes with the end of the epoch, `ema` will have put training's own weights back by then."""
        super().on_validation_end(trainer, step, epoch, metrics)
        if not is_of_the_run(trainer):
            return
        value = self._validation.metrics.get(self.key) if self._validation.step == step else None
        wanted = self.restore_best_weights and self._looks_at_epochs
        if wanted and value is not None and self._is_improvement(value):
            self._validated_weights = step, _copy_of(trainer.model)

    def _weights_at(self, step: int, model: torch.nn.Module) -> dict[str, Any]:
        """Those that were validated at the step, else the model's as it is."""
        kept, self._validated_weights = self._validated_weights, None
        return kept[1] if kept is not None and kept[0] == step else _copy_of(model)

    def on_exception(self) -> None:
        """Leave the weights as they are: whoever looks into the failure wants to see them."""
        self._failed = True

    def on_train_end(self, trainer: Any) -> None:
        """Put the best weights back, if that was asked for; the record says so."""
        if self._best_weights is not None and not self._failed:
            trainer.model.load_state_dict(self._best_weights)
            self.note(trainer, "best_weights_restored", saved_at=self.best_step, value=self.best)
            self._say(f"the model has the weights of step {self.best_step} again, the best ones")
        if not self._failed:
            self.tell_if_never_asked(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The best value, how long it was waited for another, and the weights that go with it."""
        state = {"best": self.best, "best_step": self.best_step, "waited": self.waited, "seen": self._seen}
        validated = {**self.validation_state(), "validated_weights": self._validated_weights, "about": self.about}
        return {**state, "best_weights": self._best_weights, **validated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting where the saved run was."""
        if self.is_about_another(state):
            self.forget()
            return
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
        self._seen, self._best_weights = state["seen"], state["best_weights"]
        self.restore_validation(state)
        self._validated_weights = state.get("validated_weights")


def _before(warmup: int | str) -> Quantity:
    quantity = Quantity.parse(warmup, "warmup")
    if quantity.unit not in ("steps", "epochs"):
        raise ConfigError("warmup", f"{warmup!r}: count in steps or epochs")
    return quantity


def _copy_of(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state on the host, in memory of its own."""
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)
        for name, value in model.state_dict().items()
    }


def _shown(value: float) -> str:
    return f"{value:.6g}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
