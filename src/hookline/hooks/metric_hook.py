"""Hooks that wait for a metric: they look at it when it has been measured, and never at an old value.

There are three occasions: a step, a validation and the end of an epoch. Each comes with what was measured at that very
step. A validation's metrics are still new at the end of the epoch that it was made in, if no step came in between.
Two kinds of numbers come with some steps only, and the newest counts: a loader's loss, if it was measured since the
last look; and at the end of an epoch what its steps measured, beside the epoch's means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hookline.errors import MetricMissing, nearest
from hookline.events.policy import logger
from hookline.events.schedule import Schedule
from hookline.hooks.named_hook import NamedHook, is_of_the_run

MODES = ("min", "max")


@dataclass(frozen=True)
class Occasion:
    """A moment at which there are new metrics."""

    what: str  # 'step', 'validation' or 'epoch'
    step: int
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    validated: bool = False  # whether a validation's are among them
    awaited: bool = True  # whether, if not, a validation can still come
    other: Collection[str] = ()  # metrics that need not be there each time

    def __str__(self) -> str:
        moment = {"step": "at", "validation": "after the validation at", "epoch": "at the end of the epoch,"}[self.what]
        return f"{moment} step {self.step}"


class MetricHook(NamedHook):
    """What checkpoints and early stopping share: `look` is called at the occasions that `look_at` chose."""

    monitor: str | None = None
    mode: str = "min"

    _validation = Occasion("validation", -1, -1)
    _batch: tuple[int, Mapping[str, float]] = (-1, {})
    _looked = -1  # the last step that was looked at
    _looks_at_steps = _looks_at_validation = _looks_at_epochs = _told_missing = False
    _seen = False  # whether the monitored metric was there once
    _asked_since: int | None = None  # the step at which the run began, as long as nobody has asked for the metric

    def look_at(self, *, steps: Schedule | None, validation: bool, epochs: bool) -> None:
        """Choose the occasions, in the constructor: steps that are not looked at are not heard, and cost nothing."""
        self._looks_at_steps, self._looks_at_validation, self._looks_at_epochs = steps is not None, validation, epochs
        if steps is None:
            self.on_step_end = self.on_train_batch_end = None  # type: ignore[assignment]
        else:
            self.schedule = steps

    def look(self, trainer: Any, occasion: Occasion) -> None:
        """Do what there is to do at an occasion."""
        raise NotImplementedError

    def on_train_start(self, trainer: Any = None, resumed: bool = False) -> None:
        """Say at once if the metric can only come by somebody's hand: to wait for it would look like a healthy run."""
        self._asked_since = getattr(trainer, "step", 0)
        if self._waits_for_validation and _validates_by_hand_only(trainer):
            problem = f"{self.monitor!r} is measured by validations, and this run makes none of its own"
            remedy = "give validate_every, or call trainer.validate() from a hook"
            logger.warning("hook %r: %s (validate_every is null); %s", self.called, problem, remedy)

    def tell_if_never_asked(self, trainer: Any) -> None:
        """Say at the end that the occasion never came, unless somebody stopped the run before it could."""
        steps = 0 if self._asked_since is None else getattr(trainer, "step", 0) - self._asked_since
        if self.monitor is not None and steps > 0 and getattr(trainer, "stop_reason", None) is None:
            what = "validation" if self._waits_for_validation else "occasion"
            words = "hook %r: %s was never looked at: in %d steps no %s came that it waits for"
            logger.warning(words, self.called, self.monitor, steps, what)

    @property
    def _waits_for_validation(self) -> bool:
        looks = self._looks_at_validation or self._looks_at_epochs
        return looks and self.monitor is not None and not is_of_training(self.key)

    # ---- the occasions ---------------------------------------------------------------------------------------------

    def on_train_batch_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep what step_fn and other hooks measured, for the end of the step; heard on the hook's schedule only."""
        found = numbers(metrics)
        self._batch = step, {**{f"train/{key}": value for key, value in found.items()}, **found}

    def on_step_end(self, trainer: Any, step: int, epoch: int, loss: float) -> None:
        """A step to look at."""
        of_step, batch = self._batch
        means: dict[str, Any] = getattr(getattr(trainer, "moment", None), "step_means", dict)()  # as in the record
        found = {f"train/{key}": value for key, value in numbers(means).items()}
        others = _losses_of_loaders(trainer, "loss")
        newest = _of_loop(trainer, "newest_metrics", self._looked) if others else {}
        found.update({key: newest[key] for key in others if key in newest})
        metrics = {**(batch if of_step == step else {}), **found, "loss": loss, "train/loss": loss}
        self._looked = step
        self.look(trainer, Occasion("step", step, epoch, metrics, other=others))

    def on_validation_end(self, trainer: Any, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics for the end of the epoch, and look at them if that is asked for.

        A validation that somebody makes before or after the run, or inside another one, decides nothing.
        """
        if not is_of_the_run(trainer):
            return
        self._validation = Occasion("validation", step, epoch, numbers(metrics), validated=True)
        self._seen = self._seen or self.key in self._validation.metrics
        if self._looks_at_validation:
            self.look(trainer, self._validation)

    def on_epoch_end(self, trainer: Any, step: int, epoch: int, state: Mapping[str, Any]) -> None:
        """Look if that is asked for; else see whether there will ever be something to look at."""
        if self._looks_at_epochs:
            latest, mean = _loss_of_step(trainer, state), state.get("avg_loss")
            metrics = numbers({"loss": latest, "train/loss": latest, "train/epoch_loss": mean})
            metrics = {**_of_loop(trainer, "newest_metrics"), **_of_loop(trainer, "epoch_metrics"), **metrics}
            validated = self._validation.step == step
            found = {**metrics, **self._validation.metrics} if validated else metrics
            others = _losses_of_loaders(trainer, "loss", "epoch_loss")
            self.look(trainer, Occasion("epoch", step, epoch, found, validated, _will_validate(trainer), others))
        elif self._looks_at_validation and self._validation.step < 0 and not _will_validate(trainer):
            self._miss(f"{self.called} waits for a validation, and there are no val_loaders")

    def validation_state(self) -> dict[str, Any]:
        """For a checkpoint: the last look, and the last validation, which the end of its epoch may have to look at."""
        return {"validation": asdict(self._validation), "looked": self._looked}

    def restore_validation(self, state: Mapping[str, Any]) -> None:
        """Know of both again; checkpoints of an earlier version say nothing of them."""
        self._looked = state.get("looked", -1)
        self._validation = Occasion(**state["validation"]) if "validation" in state else type(self)._validation

    # ---- the metric ------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The monitored metric under the name that `metrics` has for it."""
        return metric_key(self.monitor or "")

    def value(self, occasion: Occasion) -> float | None:
        """The monitored metric's new value; None where none was to be expected, or none is there and it is forgiven."""
        self._asked_since = None
        if self.key in occasion.metrics:
            self._seen = True
            return occasion.metrics[self.key]
        if self._is_expected(occasion):
            at_steps = occasion.what == "epoch" and self._is_by_steps
            hint = "; what hooks add to a batch's metrics is there at steps" if at_steps else ""
            nearby = nearest(self.key, [*occasion.metrics, *occasion.other])
            self._miss(f"there is no metric {self.monitor!r} {occasion}{hint}; {nearby}")
        return None

    @property
    def _is_by_steps(self) -> bool:
        """Whether its metric is measured by steps."""
        return is_of_training(self.key) and not is_of_epochs(self.key)

    @property
    def about(self) -> list[str | None]:
        """What its state is about; saved with it."""
        return [self.monitor, self.mode]

    def is_about_another(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved state is about another metric, whose values say nothing of this one; told if so."""
        about = list(state.get("about", self.about))  # checkpoints of an earlier version say nothing of it
        if about == self.about:
            return False
        words = "hook %r: the checkpoint's state is about %s (%s); it begins anew with %s (%s)"
        logger.warning(words, self.called, *about, *self.about)
        return True

    def _is_expected(self, occasion: Occasion) -> bool:
        """Metrics of training come with the steps, where these are looked at; all others come with a validation."""
        if self.key in occasion.other:
            return False
        if occasion.what == "step":
            return True
        if is_of_training(self.key):
            return not self._looks_at_steps
        return occasion.validated or not occasion.awaited

    def forget(self) -> None:
        """Another run begins: what was measured in the last one is not this one's."""
        self._validation, self._batch = MetricHook._validation, MetricHook._batch
        self._seen = self._told_missing = False
        self._looked = -1

    @property
    def forgives(self) -> bool:
        """Whether a metric that should be there and is not is warned of, once. Else it ends the run, in any case."""
        return False

    def _miss(self, problem: str) -> None:
        if not self.forgives:
            raise MetricMissing(problem)
        if not self._told_missing:
            self._told_missing = True
            logger.warning("hook %r: %s", self.called, problem)


def metric_key(monitor: str) -> str:
    """A metric's name as `metrics` has it at `on_validation_end`: ``eval/…`` is ``val/…``."""
    return f"val/{monitor.removeprefix('eval/')}" if monitor.startswith("eval/") else monitor


def is_of_training(key: str) -> bool:
    """Whether a metric is measured by steps of training."""
    return key == "loss" or key.startswith("train/")


def is_of_epochs(key: str) -> bool:
    """Whether it is the mean over an epoch, which comes with its end: `train/epoch_loss`, `train/books/epoch_loss`."""
    return key.startswith("train/") and key.rpartition("/")[2].startswith("epoch_")


def _loss_of_step(trainer: Any, state: Mapping[str, Any]) -> Any:
    """The loss of the step that was made last, as it is recorded; `latest_loss` is that of its last micro-batch."""
    moment = getattr(trainer, "moment", None)
    return moment.window_loss if moment is not None and moment.window else state.get("latest_loss")


def _of_loop(trainer: Any, name: str, *arguments: Any) -> Any:
    """What the loop says that there is; other people's loops say nothing."""
    return getattr(getattr(trainer, "loop", None), name, lambda *_: {})(*arguments)


def _losses_of_loaders(trainer: Any, *kinds: str) -> list[str]:
    """Names of losses that only some steps or epochs have: those of each of several loaders."""
    return [f"train/{name}/{kind}" for name in _of_loop(trainer, "loader_names") for kind in kinds]


def _will_validate(trainer: Any) -> bool:
    return bool(getattr(trainer, "val_loaders", True))


def _validates_by_hand_only(trainer: Any) -> bool:
    """Whether there is something to validate on, and no plan when; of other people's loops that is not known."""
    options = getattr(trainer, "options", None)
    return _will_validate(trainer) and options is not None and getattr(options, "validation_period", True) is None


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those metrics that are one number each, as floats."""
    found = {}
    for key, value in metrics.items():
        if not isinstance(value, str):
            try:
                found[key] = float(value)
            except (TypeError, ValueError, RuntimeError):  # hooks may pass each other anything
                continue
    return found


def better(mode: str, value: float, other: float) -> bool:
    """Whether a value is strictly better than another."""
    return value < other if mode == "min" else value > other
