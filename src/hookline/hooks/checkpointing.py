"""Saving checkpoints: when, under which name, and which of them stay."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hookline.checkpoints.file_names import FileName
from hookline.checkpoints.retention import ALL, Kept, best_first, delete_checkpoints, point_to, surplus, would_be_kept
from hookline.errors import ConfigError, nearest
from hookline.events.policy import logger
from hookline.events.schedule import Quantity, Reading, Schedule
from hookline.hooks.metric_hook import MODES, MetricHook, Occasion, is_of_epochs, is_of_training, metric_key
from hookline.hooks.parameters import one_of, switch, text_or_none, whole_number, whole_number_or_none

BY_STEP = "step-{step:08d}"


@dataclass(frozen=True)
class Asked:
    """A checkpoint that was asked for and is not on disk yet; its name is made when it is written."""

    step: int
    epoch: int
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    name: str = ""
    validated: bool = False
    other: Sequence[str] = ()  # metrics that need not be there each time


class CheckpointHook(MetricHook):
    """Saves checkpoints by epochs, steps or time, or by a metric, of which it keeps the best; `ModelCheckpoint` is it.

    Without `monitor` it saves every `save_every_n_epochs` and every `save_every_n_steps` or `save_every` ("30 min",
    "1M tokens"), and keeps all, or the newest `save_top_k`.

    With `monitor` it looks at that metric after every validation (of every n-th epoch), or at the end of the epoch with
    `save_on_train_epoch_end`, and saves only what is among the best `save_top_k` (1 unless given; -1 for all), lowest
    or highest as `mode` says; `best_path` and the link ``best`` lead to the best one. Values that are not finite are
    never among them, and an old value is never taken for a new one. A metric of training (``train/…``) is looked at by
    steps where these are saved, else at the end of epochs. For any other metric saves by steps or time have no score:
    such a checkpoint stays while it is one of the newest two, which are never deleted. `save_last` saves at every look,
    and keeps the last one.

    `filename` may name metrics: ``epoch_{epoch}_loss_{val/loss:.2f}``; with `auto_insert_metric_name` their names
    stand before the values. `save_on_exception` saves when the run fails: between two steps as always; out of the
    middle of a step into ``exception/``, to go on after the batch that failed. A failure to save ends the run, unless
    the trainer's `on_save_error` says otherwise.
    """

    built_in = True
    name = "checkpoint"
    on_error = "raise"

    def __init__(
        self,
        save_every_n_epochs: int | None = 1,
        save_every_n_steps: int | None = None,
        save_every: str | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int | None = None,
        save_last: bool = False,
        save_on_train_epoch_end: bool | None = None,
        filename: str | None = None,
        auto_insert_metric_name: bool = True,
        save_on_exception: bool = False,
    ) -> None:
        self.save_every_n_epochs = whole_number_or_none(save_every_n_epochs, "save_every_n_epochs")
        self.save_every_n_steps = whole_number_or_none(save_every_n_steps, "save_every_n_steps")
        self.save_every = text_or_none(save_every, "save_every")
        self.monitor, self.mode = text_or_none(monitor, "monitor"), one_of(mode, MODES, "mode")
        self.save_top_k = (ALL if monitor is None else 1) if save_top_k is None else _top_k(save_top_k)
        self.save_last = switch(save_last, "save_last")
        self.save_on_exception = switch(save_on_exception, "save_on_exception")
        self.filename = text_or_none(filename, "filename")
        self.auto_insert_metric_name = switch(auto_insert_metric_name, "auto_insert_metric_name")
        self._file_name = FileName(filename or BY_STEP, with_names=auto_insert_metric_name and filename is not None)
        self._epochs = Schedule.parse(every=f"{save_every_n_epochs or 1} epochs")
        self._choose_occasions(save_on_train_epoch_end)
        self.kept: list[Kept] = []
        self._told_fields: set[str] = set()  # metrics of the file name that were not there when they should have been
        self._asked: Asked | None = None
        self._under_way: Asked | None = None  # the one that was given its name last, until it is durable
        self._written: set[str] = set()  # by this process, so that their bytes need not be read to be trusted
        self._directory: Path | None = None
        self._failed, self._saved_at = False, -1

    def _choose_occasions(self, at_epochs: bool | None) -> None:
        """Steps as their schedule says; beside them the end of epochs or validations, wherever the metric is new."""
        steps, of_training = self._step_schedule(), is_of_training(self.key)
        by_steps_only = of_training and steps is not None and not is_of_epochs(self.key)
        if at_epochs is None:
            at_epochs = self.monitor is None or (of_training and not by_steps_only)
        self.save_on_train_epoch_end = switch(at_epochs, "save_on_train_epoch_end")
        self.look_at(steps=steps, validation=not at_epochs and not by_steps_only, epochs=at_epochs)

    def _step_schedule(self) -> Schedule | None:
        """When to save inside an epoch; None for never."""
        if self.save_every is None:
            return None if self.save_every_n_steps is None else Schedule.parse(every=self.save_every_n_steps)
        if self.save_every_n_steps is not None:
            raise ConfigError("save_every", "give save_every or save_every_n_steps, not both")
        if Quantity.parse(self.save_every, "save_every").unit == "epochs":
            raise ConfigError("save_every", f"{self.save_every!r}: for epochs there is save_every_n_epochs")
        return Schedule.parse(every=self.save_every)

    # ---- asking for a checkpoint -----------------------------------------------------------------------------------

    def look(self, trainer: Any, occasion: Occasion) -> None:
        """Ask for a checkpoint, if one is due here and its score is good enough."""
        if not self._is_due(occasion):
            return
        self._forget_deleted()
        score = self._score(occasion)
        rivals = [*self.kept, *self._soon_kept(trainer)]
        good = score is not None and would_be_kept(score, rivals, self.save_top_k, self.mode)
        if good or self.save_last or occasion.what == "step":
            step, epoch, metrics = occasion.step, occasion.epoch, occasion.metrics
            seen = Asked(step, epoch, score, metrics, validated=occasion.validated, other=list(occasion.other))
            self._ask(trainer, seen)

    def _forget_deleted(self) -> None:
        """Somebody may have made room on the disk: what is gone rivals nothing, and no link may lead there."""
        directory, wanted = self._directory, self.wanted
        gone = [one for one in self.kept if directory is not None and _is_gone(directory / one.name)]
        self.kept = [one for one in self.kept if one not in gone]
        for one in gone:
            if one.name in wanted:  # what was too many, another checkpoint hook may have deleted
                logger.warning("hook %r: %s is gone from the disk and no longer ranked", self.called, one.name)

    def _soon_kept(self, trainer: Any) -> list[Kept]:
        """The one that is being written while training goes on: it counts, or a worse one would be saved after it."""
        soon, saving = self._under_way, getattr(trainer, "saving", None)
        return [Kept(soon.name, soon.step, soon.score)] if soon is not None and soon.name == saving else []

    def _is_due(self, occasion: Occasion) -> bool:
        """Steps come on the hook's schedule; of epochs and validations, those of every n-th epoch count.

        Without a number of epochs a metric is looked at whenever it is new; without a metric, epochs save nothing.
        """
        if occasion.what == "step":
            return True
        never = self.save_every_n_epochs is None and self.monitor is None
        return not never and self._epochs.due(Reading(epochs=occasion.epoch + 1), Reading())

    def _score(self, occasion: Occasion) -> float | None:
        """What the checkpoint is ranked by; without a metric the newest is the best."""
        if self.monitor is None:
            return float(occasion.step if self.mode == "max" else -occasion.step)
        if occasion.what == "step" and not self._is_by_steps and self.key not in occasion.metrics:
            return None  # it comes with validations or epochs; steps are saved whatever was measured there
        value = self.value(occasion)
        return value if value is not None and math.isfinite(value) else None

    @property
    def forgives(self) -> bool:
        """A metric that was there once may be missing now and then; one that never was is a slip."""
        return self._seen

    def _ask(self, trainer: Any, asked: Asked) -> None:
        before = self._asked
        if before is None or before.step != asked.step or asked.score is not None:  # a ranked one says more
            self._asked = asked
        trainer.save(self._make_name)

    def _make_name(self) -> str:
        """Called when the checkpoint is written, by when the step's validation may have been made."""
        asked, self._asked = self._asked, None
        if asked is not None:
            measured = self._validation.metrics if self._validation.step == asked.step else {}
            metrics = _both_spellings({**measured, **asked.metrics})
            self._tell_missing_fields(asked, metrics)
            self._under_way = replace(asked, name=self._file_name.fill(asked.epoch, asked.step, metrics))
        # None when somebody took it back: a run that went wrong in between. Whoever asks twice gets one name.
        return "" if self._under_way is None else self._under_way.name

    def _tell_missing_fields(self, asked: Asked, metrics: Mapping[str, float]) -> None:
        """A slip in the file name would be 'none' for ever; but a save by steps need not have what validations have."""
        for name in self._file_name.fields:
            due = (asked.validated or is_of_training(metric_key(name))) and metric_key(name) not in asked.other
            if due and name not in metrics and name not in self._told_fields:
                self._told_fields.add(name)
                where = f"{name!r} in filename is written as 'none'"
                nearby = nearest(metric_key(name), asked.metrics)
                logger.warning("hook %r: %s at step %d; %s", self.called, where, asked.step, nearby)

    def on_train_start(self, trainer: Any = None, resumed: bool = False) -> None:
        """Another run, maybe in another directory: nothing in it is known to be whole, nor is another run's ranked."""
        super().on_train_start(trainer)
        self._failed, self._saved_at = False, -1
        self._written.clear()
        if not resumed or self._directory != getattr(trainer, "checkpoint_dir", None):
            self.forget()
        elif self._directory is not None:  # what came later was set aside, and a link may have led there
            self._forget_deleted()
            self._point_links(self._directory)

    def forget(self) -> None:
        """Begin with an empty ranking."""
        super().forget()
        self.kept, self._asked, self._under_way, self._directory = [], None, None, None
        self._told_fields.clear()

    def on_exception(self) -> None:
        """Not yet: others may have to put the weights right first."""
        self._failed = True

    def on_train_end(self, trainer: Any) -> None:
        """After a failure, save what there is, beside the ranking, unless somebody has saved this step."""
        if self._failed and self.save_on_exception and self._saved_at != trainer.step:
            self._asked = self._under_way = None
            trainer.save()
        if not self._failed:
            self.tell_if_never_asked(trainer)

    # ---- keeping the best ------------------------------------------------------------------------------------------

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: str, step: int) -> None:
        """A checkpoint is durable. If it is ours, it takes its place, and then what is too many goes."""
        path, asked = Path(checkpoint_path), self._under_way
        self._written.add(path.name)
        self._saved_at = step
        if asked is None or asked.step != step or not _is_named(path.name, asked.name):
            return
        self._under_way, self._directory = None, path.parent
        self.kept.append(Kept(path.name, step, asked.score))
        self._point_links(path.parent)  # before anything is deleted: they never lead nowhere
        self._tell(trainer, self.kept[-1])
        self._delete_surplus(trainer, path.parent)

    def _tell(self, trainer: Any, new: Kept) -> None:
        """Say in the record which one is the best, when that is another one now."""
        if self.monitor is not None and self._best == new:
            self.note(trainer, "best_checkpoint", path=new.name, monitor=self.monitor, value=new.score)

    def _point_links(self, directory: Path) -> None:
        """``best`` and ``last``; a second checkpoint hook's have its name behind them."""
        own = self.called
        suffix = "" if own == self.name else "-" + re.sub("[^A-Za-z0-9_=-]", "_", own)
        best = self._best if self.monitor is not None else None
        for link, target in (("best", best), ("last", self.kept[-1] if self.save_last and self.kept else None)):
            try:
                if target is not None:
                    point_to(directory / f"{link}{suffix}", target.name)
            except OSError as error:  # a file system without links; the checkpoint itself is safe
                logger.warning("hook %r: cannot make the link %r: %s", own, link, error)

    def _delete_surplus(self, trainer: Any, directory: Path) -> None:
        needed = {name for other in _others(trainer, self) for name in other.wanted}
        needed |= getattr(trainer, "saved_by_hand", set())
        doomed = [one.name for one in self._surplus if one.name not in needed]
        try:
            gone = delete_checkpoints(directory, doomed, self._written)
        except OSError as error:  # they are tried again after the next save
            logger.warning("hook %r: a checkpoint cannot be deleted: %s", self.called, error)
            return
        self.kept = [one for one in self.kept if one.name not in gone]

    @property
    def _surplus(self) -> list[Kept]:
        return surplus(self.kept, self.save_top_k, self.mode, self.save_last)

    @property
    def wanted(self) -> set[str]:
        """The names of those that this hook wants to keep."""
        return {one.name for one in self.kept} - {one.name for one in self._surplus}

    @property
    def _best(self) -> Kept | None:
        return next(iter(best_first(self.kept, self.mode)), None) if self.save_top_k else None

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint so far: by the metric, or the newest where none is monitored."""
        best, directory = self._best, self._directory
        return None if best is None or directory is None else directory / best.name

    @property
    def best_score(self) -> float | None:
        """The monitored metric's value there."""
        best = self._best
        return None if best is None or self.monitor is None else best.score

    # ---- over a resume ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is on disk, and the checkpoint that is being written right now: this state is part of it."""
        asked = None if self._under_way is None else asdict(self._under_way)
        known = {"kept": [asdict(one) for one in self.kept], "asked": asked, "seen": self._seen, "about": self.about}
        return {**known, **self.validation_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was on disk; `on_checkpoint_load` looks what of it is still there."""
        if self.is_about_another(state):  # what was saved for that stays
            self.forget()
            return
        self.kept, self._seen = [Kept(**one) for one in state["kept"]], state["seen"]
        self._under_way = None if state["asked"] is None else Asked(**state["asked"])
        self.restore_validation(state)

    def on_checkpoint_load(self, checkpoint_path: str, path: str) -> None:
        """The loaded checkpoint joins those that it knew of; what this run does not have is forgotten, not deleted."""
        directory, loaded, asked = Path(path), Path(checkpoint_path).resolve().name, self._under_way
        if asked is not None:
            name = loaded if _is_named(loaded, asked.name) else asked.name
            self.kept.append(Kept(name, asked.step, asked.score))
        self.kept = [one for one in self.kept if one.name and (directory / one.name).is_dir()]
        self._asked, self._under_way, self._directory = None, None, directory


ModelCheckpoint = CheckpointHook


def _top_k(value: Any) -> int:
    return ALL if value == ALL and not isinstance(value, bool) else whole_number(value, "save_top_k", 0)


def _is_named(name: str, asked: str) -> bool:
    """Whether a checkpoint has the name asked for; one that was taken got a number behind it."""
    return bool(asked) and re.fullmatch(f"{re.escape(asked)}(-[0-9]+)?", name) is not None


def _is_gone(path: Path) -> bool:
    """Whether there is surely nothing; a disk that does not answer leaves it open."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _both_spellings(metrics: Mapping[str, float]) -> dict[str, float]:
    aliases = {f"eval/{key.removeprefix('val/')}": value for key, value in metrics.items() if key.startswith("val/")}
    return {**aliases, **metrics}


def _others(trainer: Any, hook: CheckpointHook) -> list[CheckpointHook]:
    """The run's other checkpoint hooks: what they keep is not ours to delete."""
    hooks = [entry.hook for entry in trainer.hooks.entries()]
    return [one for one in hooks if isinstance(one, CheckpointHook) and one is not hook]
