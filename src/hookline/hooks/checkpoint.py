"""`checkpoint`: save checkpoints by epochs, steps, time or a metric, and decide which of them stay on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from hookline._parameters import NonEmptyStr, PositiveInt
from hookline._words import nearest
from hookline.checkpoints.names import NameTemplate
from hookline.checkpoints.retention import (
    KEEP_ALL,
    RankedCheckpoint,
    best_first,
    delete_checkpoints,
    is_among_best,
    update_link,
    wanted_names,
)
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import CheckpointError, ConfigError
from hookline.hooks.base import period
from hookline.hooks.metric_hook import (
    Measurement,
    MetricHook,
    find_mode,
    is_step_metric,
    is_training_metric,
    metric_key,
)
from hookline.run.control import RunControl

DEFAULT_NAME = "step-{step:08d}"


@dataclass(frozen=True)
class Request:
    """A checkpoint that was requested and is not on disk yet; it gets its name when it is written.

    The hook's state holds these fields under these names.
    """

    step: int
    epoch: int
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    name: str = ""
    validated: bool = False
    other: Sequence[str] = ()
    """Metrics that may be missing."""


class CheckpointHook(MetricHook):
    """Saves checkpoints and keeps the newest or the best of them; also known as `ModelCheckpoint`.

    With `monitor`, a checkpoint is saved only if it is among the best `save_top_k`; `best_path` and the link ``best``
    lead to the best one. A value that is not finite is reported once and ranked as the worst. A training metric
    (``train/…``) is evaluated at the steps that are saved, otherwise at the end of epochs. For any other metric,
    checkpoints by steps or time have no score and stay while they are among the newest two, which are never deleted.

    A run that ends cleanly without having saved anything saves its last step, unless the hook has neither `monitor`,
    `save_last` nor a schedule. A failure to save ends the run, unless the trainer's `on_save_error` says otherwise.

    Args:
        save_every_n_epochs: Save after every n-th epoch; with `monitor`, evaluate only validations of those epochs.
        save_every_n_steps: Save every n steps.
        save_every: Save by another unit: "30 min", "1M tokens".
        monitor: The metric to rank checkpoints by.
        mode: "min" or "max": whether lower or higher values are better. By default the metric's name decides:
            ``val/loss`` "min", ``val/accuracy`` "max". Required if the name suggests neither.
        save_top_k: Number of checkpoints to keep; -1 keeps all. The default is 1 with `monitor`, otherwise -1.
        save_last: Save at every evaluation and at the end of a run that ends cleanly, and always keep the last one,
            under the link ``last``.
        save_on_train_epoch_end: Evaluate at the end of epochs instead of after validations.
        filename: A template, which may name metrics: ``epoch_{epoch}_loss_{val/loss:.2f}``.
        auto_insert_metric_name: Write ``name=`` before each value of `filename`.
        save_on_exception: Save when the run fails: between two steps as always; in the middle of a step into
            ``exception/``, to resume after the batch that failed. The step counts if an optimizer has stepped. A run
            with several ranks is not saved, because the ranks may be at different steps.
        keep_previous: Keep the checkpoint before the newest, too, because it is needed if the disk damages the newest.
            Without it, `save_top_k=1` leaves one on disk.
        every: How often to save, instead of the three `save_every…` parameters: 500 steps, "2 epochs", "30 min".

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    built_in = True
    name = "checkpoint"
    needs: tuple[str, ...] = ("can_save",)
    every_aliases = ("save_every_n_epochs", "save_every_n_steps", "save_every")
    on_error = "raise"

    def __init__(
        self,
        save_every_n_epochs: PositiveInt | None = 1,
        save_every_n_steps: PositiveInt | None = None,
        save_every: NonEmptyStr | None = None,
        monitor: NonEmptyStr | None = None,
        mode: Literal["min", "max"] | None = None,
        save_top_k: Annotated[int, Ge(KEEP_ALL)] | None = None,
        save_last: bool = False,
        save_on_train_epoch_end: bool | None = None,
        filename: NonEmptyStr | None = None,
        auto_insert_metric_name: bool = True,
        save_on_exception: bool = False,
        keep_previous: bool = True,
        every: int | str | None = None,
    ) -> None:
        self.save_every_n_epochs, self.save_every_n_steps = save_every_n_epochs, save_every_n_steps
        self.save_every: str | None = save_every
        if (given := period(self, every)) is not None:
            self.save_every_n_epochs = int(given.amount) if given.unit == "epochs" else None
            self.save_every = None if given.unit == "epochs" else str(given)
        self.monitor, self.keep_previous, self.save_last = monitor, keep_previous, save_last
        self.mode = (mode or "min") if monitor is None else find_mode(monitor, mode)
        default = KEEP_ALL if monitor is None else 1
        self.save_top_k = default if save_top_k is None else save_top_k
        self.unsaved_hint = "" if save_last else "save_last: true also saves the end of training"
        self.save_on_exception, self.filename = save_on_exception, filename
        self.auto_insert_metric_name = auto_insert_metric_name
        self._file_name = NameTemplate(filename or DEFAULT_NAME, with_names=auto_insert_metric_name and bool(filename))
        steps = self._step_schedule()
        # A metric of steps is evaluated at the steps that are saved; other metrics are not known there.
        only_steps = steps is not None and is_step_metric(self.key)
        at_epochs = save_on_train_epoch_end
        if at_epochs is None:
            at_epochs = self.monitor is None or (is_training_metric(self.key) and not only_steps)
        self.save_on_train_epoch_end = at_epochs
        self.evaluate_at(
            steps=steps, validations=not at_epochs and not only_steps, epochs=at_epochs,
            counts_epochs=steps is None and (self.save_every_n_epochs or 1) > 1,
        )  # fmt: skip
        self.kept: list[RankedCheckpoint] = []
        self._requested: Request | None = None
        self._writing: Request | None = None  # The request that was named last, until its checkpoint is durable.
        # The steps of checkpoints that this process wrote since the run began. Retention trusts these without reading
        # them again, and a failed run does not save their steps twice.
        self._written: dict[str, int] = {}
        self._directory: Path | None = None

    def _step_schedule(self) -> Schedule | None:
        if self.save_every is not None and self.save_every_n_steps is not None:
            raise ConfigError("save_every", "pass either save_every or save_every_n_steps, not both")
        if self.save_every is not None and Quantity.parse(self.save_every, "save_every").unit == "epochs":
            raise ConfigError("save_every", f"{self.save_every!r}: for epochs use save_every_n_epochs")
        every = self.save_every_n_steps if self.save_every is None else self.save_every
        return None if every is None else Schedule.parse(every=every)

    # ---- requesting a checkpoint -------------------------------------------------------------------------------------

    def evaluate(self, trainer: RunControl, measurement: Measurement) -> None:
        """Request a checkpoint, if one is due here and its score is good enough."""
        at_step = measurement.source == "step"
        # Steps come on the hook's schedule; epochs and validations count every n-th epoch.
        has_epochs = self.save_every_n_epochs is not None or self.monitor is not None
        if not at_step and not (has_epochs and (measurement.epoch + 1) % (self.save_every_n_epochs or 1) == 0):
            return
        self._forget_deleted(trainer)
        score, kept = self._score(trainer, measurement), list(self.kept)
        # The one that is being written in the background counts, too; otherwise a worse one would be saved after it.
        if self._writing is not None and self._writing.name == trainer.saving:
            kept.append(RankedCheckpoint(self._writing.name, self._writing.step, self._writing.score))
        is_good = score is not None and is_among_best(score, kept, self.save_top_k, self.mode)
        if not (is_good or self.save_last or at_step):
            return
        # If a step is requested twice, the request with a score is the more specific one.
        if self._requested is None or self._requested.step != measurement.step or score is not None:
            self._requested = Request(
                measurement.step, measurement.epoch, score, measurement.metrics,
                validated=measurement.validated, other=list(measurement.optional),
            )  # fmt: skip
        trainer.save(partial(self._make_name, trainer))

    def _forget_deleted(self, trainer: RunControl) -> None:
        """Drop checkpoints from the ranking that a person or another hook has deleted from the disk."""
        gone, wanted = trainer.ranks.first(self._find_deleted), self.wanted
        self.kept = [checkpoint for checkpoint in self.kept if checkpoint.name not in gone]
        for name in gone:
            if name in wanted:  # a surplus one may have been deleted by another checkpoint hook
                self.warn(f"{name} was deleted from disk, so it is no longer ranked")

    def _find_deleted(self) -> list[str]:
        """Return the checkpoints of the ranking that are not on disk."""
        gone: list[str] = []
        if self._directory is None:
            return gone
        for checkpoint in self.kept:
            try:
                (self._directory / checkpoint.name).stat()
            except FileNotFoundError:
                gone.append(checkpoint.name)
            except OSError:  # a disk that does not answer may come back
                pass
        return gone

    def _score(self, trainer: RunControl, measurement: Measurement) -> float | None:
        """Return the value that ranks the checkpoint; without a metric, the newest is the best."""
        if self.monitor is None:
            return float(measurement.step if self.mode == "max" else -measurement.step)
        if measurement.source == "step" and not is_step_metric(self.key) and self.key not in measurement.metrics:
            return None  # validations or epochs measure the metric; steps are saved without a score
        value = self.monitored_value(measurement)
        if value is not None and not math.isfinite(value):
            self.report_non_finite(trainer, measurement, value)
            return math.nan  # an infinity must not be the best in one of the modes
        return value

    def _make_name(self, trainer: RunControl) -> str:
        """Name the requested checkpoint when it is written; its step may have been validated by then.

        The trainer calls this once per request. The name is empty if a failed run took the request back.
        """
        request, self._requested = self._requested, None
        if request is not None:
            validation = self._validation.metrics if self._validation.step == request.step else {}
            metrics = {**validation, **request.metrics}
            # In the template, a validation metric may be called eval/… as well as val/….
            metrics = {f"eval/{key[4:]}": value for key, value in metrics.items() if key.startswith("val/")} | metrics
            self._warn_missing_fields(request, metrics)
            fill = partial(self._file_name.fill, request.epoch, request.step, metrics)
            self._writing = replace(request, name=trainer.ranks.first(fill))
        return "" if self._writing is None else self._writing.name

    def _warn_missing_fields(self, request: Request, metrics: Mapping[str, float]) -> None:
        """Warn once about each metric in the file name that should exist but does not; it is probably misspelt."""
        for name in self._file_name.fields:
            key = metric_key(name)
            # A save by steps need not have the metrics of validations.
            expected = (request.validated or is_training_metric(key)) and key not in request.other
            if expected and name not in metrics:
                problem = f"{name!r} in filename is written as 'none' at step {request.step}"
                self.warn(f"{problem}; {nearest(key, request.metrics)}", once=name)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl, resumed: bool = False) -> None:
        """Start with an empty ranking, unless the run is resumed in the same directory."""
        super().on_train_start(trainer)
        self._written.clear()
        # A ranking of another directory would delete what another run saved.
        if not resumed or self._directory != trainer.checkpoint_dir:
            self.reset()
        elif self._directory is not None:  # later checkpoints were set aside, and a link may have pointed to one
            self._forget_deleted(trainer)
            trainer.record.defer(partial(self._update_links, trainer, self._directory))

    def reset(self) -> None:
        """Forget all checkpoints; they stay on disk."""
        super().reset()
        self.kept, self._requested, self._writing, self._directory = [], None, None, None

    def after_last_step(self, trainer: RunControl) -> None:
        """Request a checkpoint of a run that ends cleanly, if its last step has to be saved.

        A request by a signal is enough for all checkpoint hooks. Any other pending request is enough for hooks that do
        not have to save the end. `on_train_end` would be too late, because early stopping may have restored the weights
        of another step by then.
        """
        pending = trainer.pending_save
        if pending == "signal" or (pending is not None and not self.save_last):
            return
        is_scheduled = self._at_steps or self.monitor is not None or self.save_every_n_epochs is not None
        saved = (*self.kept, self._requested, self._writing)
        steps = {*(item.step for item in saved if item is not None), *self._written.values()}
        is_saved = trainer.step in steps if self.save_last else bool(steps)
        is_wanted = self.save_last or (is_scheduled and self.save_top_k)
        if is_wanted and not is_saved and trainer.step and trainer.checkpoint_dir is not None:
            self._requested = Request(trainer.step, trainer.epoch)
            trainer.save(partial(self._make_name, trainer))

    def on_train_end(self, trainer: RunControl) -> None:
        """Save a failed run, outside of the ranking, unless this step is saved already."""
        self.warn_if_never_evaluated(trainer)
        # Not at `on_exception`, where other hooks may have to restore the weights first.
        if self._failed and self.save_on_exception and trainer.step not in self._written.values():
            self._requested = self._writing = None
            if trainer.ranks.world_size > 1:  # the others may be at another step, and may not have failed
                self.warn("save_on_exception: a run with several processes is not saved after a failure")
            else:
                trainer.save()

    # ---- retention ---------------------------------------------------------------------------------------------------

    def on_checkpoint_save(self, trainer: RunControl, checkpoint_path: str, step: int) -> None:
        """Rank a checkpoint of this hook once it is durable, then delete surplus ones."""
        path, request = Path(checkpoint_path), self._writing
        self._written[path.name] = step
        if request is None or request.step != step or not _has_name(path.name, request.name):
            return
        self._writing, self._directory = None, path.parent
        self.kept.append(RankedCheckpoint(path.name, step, request.score))
        self._update_links(trainer, path.parent)  # before anything is deleted, so that they never dangle
        if self.monitor is not None and self._best == self.kept[-1]:
            self.note(trainer, "best_checkpoint", path=path.name, monitor=self.monitor, value=request.score)
        # Keep every checkpoint that any checkpoint hook wants, or that a call of `save` requested.
        hooks = [self, *(entry.hook for entry in trainer.hooks.entries())]
        wanted = {name for hook in hooks if isinstance(hook, CheckpointHook) for name in hook.wanted}
        wanted |= trainer.requested_checkpoints
        names = [checkpoint.name for checkpoint in self.kept if checkpoint.name not in wanted]
        deleted = trainer.ranks.first(partial(self._delete, path.parent, names))
        self.kept = [checkpoint for checkpoint in self.kept if checkpoint.name not in deleted]

    def _delete(self, directory: Path, names: Sequence[str]) -> list[str]:
        """Delete checkpoints, and return those that do not exist any more."""
        try:
            return delete_checkpoints(directory, names, self._written, self.keep_previous)
        except (OSError, CheckpointError) as error:  # the next save tries again
            self.warn(f"a checkpoint cannot be deleted: {error}")
            return []

    def _update_links(self, trainer: RunControl, directory: Path) -> None:
        """Point ``best`` and ``last`` to their checkpoints; a second hook's links end with its name."""
        if trainer.ranks.rank != 0:
            return
        name = self.registered_name
        suffix = "" if name == self.name else "-" + re.sub("[^A-Za-z0-9_=-]", "_", name)
        best = self._best if self.monitor is not None else None
        last = self.kept[-1] if self.save_last and self.kept else None
        for link, target in (("best", best), ("last", last)):
            try:
                if target is not None:
                    update_link(directory / f"{link}{suffix}", target.name)
            except OSError as error:  # a file system without links; the checkpoint itself is safe
                self.warn(f"cannot make the link {link!r}: {error}")

    @property
    def wanted(self) -> set[str]:
        """The names of the checkpoints that this hook wants to keep."""
        return wanted_names(self.kept, self.save_top_k, self.mode, self.save_last)

    @property
    def _best(self) -> RankedCheckpoint | None:
        best = next(iter(best_first(self.kept, self.mode)), None) if self.save_top_k else None
        return None if best is None or best.score is None or not math.isfinite(best.score) else best

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint so far: by the metric, or the newest if none is monitored."""
        best = self._best
        return None if best is None or self._directory is None else self._directory / best.name

    @property
    def best_score(self) -> float | None:
        """The monitored metric's value of the best checkpoint."""
        best = self._best
        return None if best is None or self.monitor is None else best.score

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints on disk and the one being written now, which contains this state."""
        return {
            "kept": [asdict(checkpoint) for checkpoint in self.kept],
            "asked": None if self._writing is None else asdict(self._writing),
            "seen": self._was_found, "about": self.monitored, **self.measurement_state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `on_checkpoint_load` checks what is still on disk."""
        if self.load_measurement_state(state):  # another metric's checkpoints stay on disk
            self.kept = [RankedCheckpoint(**fields) for fields in state["kept"]]
            self._writing = None if state["asked"] is None else Request(**state["asked"])

    def on_checkpoint_load(self, trainer: RunControl, checkpoint_path: str, path: str) -> None:
        """Add the loaded checkpoint to the ranking, and forget those that are not in this run's directory."""
        directory, loaded, request = Path(path), Path(checkpoint_path).resolve().name, self._writing
        if request is not None:
            name = loaded if _has_name(loaded, request.name) else request.name
            self.kept.append(RankedCheckpoint(name, request.step, request.score))
        self._requested, self._writing, self._directory = None, None, directory
        gone = trainer.ranks.first(self._find_deleted)
        self.kept = [checkpoint for checkpoint in self.kept if checkpoint.name and checkpoint.name not in gone]


ModelCheckpoint = CheckpointHook


def _has_name(name: str, requested: str) -> bool:
    """Return whether a checkpoint has the requested name; if it was taken, a number was appended."""
    return bool(requested) and re.fullmatch(f"{re.escape(requested)}(-[0-9]+)?", name) is not None
