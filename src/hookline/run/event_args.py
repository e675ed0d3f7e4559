"""Compute the values of event arguments: each one that a hook may name is an attribute of `EventArgs`.

core/catalog.py says which event has which of them, and under which name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from hookline._tensors import copy_on_write, map_tensors
from hookline.core.base import StepContext
from hookline.errors import MissingArgument, TrainingError
from hookline.gradients.view import Gradients
from hookline.run.config_view import view_of
from hookline.run.outputs import UNKNOWN, single_numbers
from hookline.run.window import MicroBatch, without_nan

if TYPE_CHECKING:
    from hookline.run.run import Run

_OF_BATCH = (
    "batch", "phase", "live_loss", "detached_loss", "step_metrics", "_loss", "_metrics", "source",
    "val_metrics", "eval_metrics", "live_output", "live_target",
)  # fmt: skip


# A number that stays on its device until it is first read; everything that holds the list shares the read. Every step
# creates one, and creating an instance of a class takes three times as long.
DeviceNumber = list[torch.Tensor | float]


def read_number(number: DeviceNumber) -> float:
    """Return the number; the first read waits for the device."""
    number[0] = read = float(number[0])
    return read


class EventArgs:
    """The values of the current event. The loop writes plain attributes; properties are computed when they are read."""

    def __init__(self, run: Run) -> None:
        self.trainer, self.progress, self.grads = run, run.progress, Gradients(run.params)
        self.batch: Any = None
        self.forget_loss()
        self.forget_step()
        self.step_metrics: dict[str, Any] = {}  # what step_fn returned besides the loss
        # The model's, until the batch ends, if a hook or a metric needs them; `UNKNOWN` if they are not known.
        self.live_output: Any = UNKNOWN
        self.live_target: Any = UNKNOWN
        self.optimizer_idx = 0
        self.used_lr: float | None = None  # the rate that this step used, if it may have changed since
        self.phase = "train"
        self.resumed = False
        self.reason: str | None = None
        self.exception: BaseException | None = None
        self.checkpoint_path = ""
        self.val_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, Any] = {}
        self.last_loss: DeviceNumber | None = None  # The loss of the last completed step, as it is recorded.
        self.validated: tuple[int, dict[str, Any]] = -1, {}  # the step and the metrics of the last validation
        self.forget_epoch()
        self.validating: list[str | None] = []  # the hooks that called the validations in progress, outermost first
        # Where batch_idx and the loader are read from: the run's progress, or the batch of a validation.
        self.source: Any = run.progress
        self._train_batch: dict[str, Any] | None = None  # the training batch's values while other batches run
        self._state: dict[str, Any] = {}
        self._parameters = 0
        self._counted_for: tuple[int, int] | None = None  # the epoch, and how many tensors were trained

    def forget_loss(self) -> None:
        """There is no loss yet."""
        self.live_loss: torch.Tensor | None = None
        self.detached_loss: torch.Tensor | None = None
        self._loss: DeviceNumber = [math.nan]
        self._metrics: dict[str, Any] | None = None  # created when a hook names them

    def set_loss(self, loss: torch.Tensor) -> None:
        """Set the loss of the batch that runs, with its graph."""
        self.live_loss, self._metrics = loss, None
        self.detached_loss = detached = loss.detach()
        self._loss = [detached]

    # ---- the run -------------------------------------------------------------------------------------------------

    # With attrgetter, these cost no Python call: a hook that names `step` reads it at every event.
    step = property(attrgetter("progress.step"))
    epoch = property(attrgetter("progress.epoch"))
    batch_idx = property(attrgetter("source.batch_idx"))
    dataloader_idx = property(attrgetter("source.dataloader_idx"))
    dataloader_name = property(attrgetter("source.dataloader_name"))
    model = property(attrgetter("trainer.model"))
    device = property(attrgetter("trainer.device"))

    @property
    def tokens_seen(self) -> int:
        """Tokens of all ranks; what a due hook names is computed on all of them."""
        return self.trainer.agreement.tokens_seen()

    @property
    def config(self) -> Any:
        """The trainer's config, and where this run's checkpoints are."""
        directory = self.trainer.checkpoint_dir
        return view_of(self.trainer.config, None if directory is None else str(directory))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the event is about."""
        return self.trainer.optimizers[self.optimizer_idx]

    @property
    def optimizer_lr(self) -> float:
        """The learning rate of the optimizer that the event is about."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def lr(self) -> float:
        """The learning rate that the step uses or used."""
        return self.trainer.lr if self.used_lr is None else self.used_lr

    @property
    def path(self) -> str:
        """The directory of the run's checkpoints."""
        return str(self.trainer.checkpoint_dir)

    @property
    def state(self) -> dict[str, Any]:
        """The run as a dict: one dict for the life of the trainer, updated when it is read; hooks may add keys.

        This waits for the device, because two of the values are losses.
        """
        trainer, progress, parts = self.trainer, self.progress, self.trainer.parts()
        # Count once per epoch and per change of the trained tensors: walking a model takes longer than the rest.
        if "model" in parts and self._counted_for != (progress.epoch, len(trainer.params)):
            self._counted_for = progress.epoch, len(trainer.params)
            self._parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        latest = average = math.nan
        try:
            latest = read_number(self._loss if self._train_batch is None else self._train_batch["_loss"])
            average = trainer.stats.mean_loss()
        except RuntimeError:  # after a device error no loss can be read, and the closing events must still fire
            if trainer.status != "error":
                raise
        self._state.update(
            **parts,
            current_epoch=progress.epoch,
            current_batch_idx=max(progress.batch_idx, 0),
            latest_loss=latest,
            avg_loss=average,
            model_params=self._parameters,
            status=trainer.status,
        )
        return self._state

    @property
    def ctx(self) -> StepContext:
        """The step as a `StepContext`, whose numbers are on their device until a hook reads them."""
        return DeviceStepContext.of_step(self)

    @property
    def request_stop(self) -> Callable[..., None] | None:
        """Stops the run: called for a hook that raises StopTraining. None: the loop gets the exception."""
        return self.trainer.request_stop if self.trainer.stops_itself else None

    def begin_run(self) -> None:
        """Forget how the last run ended."""
        self.exception = self.reason = None
        self.forget_step()

    def end_run(self, reason: str) -> None:
        """Set the reason for on_train_end, and release the graph of the last loss, which stays readable."""
        self.reason, self.resumed = reason, False  # the next run of this trainer need not be a resumed run
        self.live_output = self.live_target = UNKNOWN  # These may belong to a failed batch.
        self.live_loss = self.detached_loss

    def set_checkpoint(self, path: str, resumed: bool = False) -> None:
        """Set the checkpoint that was written, or loaded to resume from it."""
        self.checkpoint_path, self.resumed = path, self.resumed or resumed

    # ---- the step ------------------------------------------------------------------------------------------------

    def forget_step(self) -> None:
        """Forget the last step: another one begins, or the counters were restored."""
        self.micro_batches: list[MicroBatch] = []  # The micro-batches of this step; empty if a step is one micro-batch.
        self.skip_reason: str | None = None  # if the optimizers must not step
        self.overflowed = False  # whether the step is skipped because its scaled gradients overflowed
        self._norm: DeviceNumber | None = None  # The norm of the step's gradients.
        self._clipped: torch.Tensor | float | None = None  # the norm before the last clipping

    # ---- losses and metrics ----------------------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """This micro-batch's loss; the first read waits for the device."""
        return read_number(self._loss)

    @property
    def metrics(self) -> dict[str, Any]:
        """One dict per event, which its hooks share."""
        if self._metrics is None:
            numbers = {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in self.step_metrics.items()
            }
            self._metrics = {"loss": self.loss, **numbers}
        return self._metrics

    def added_metrics(self) -> dict[str, Any]:
        """Return the single numbers that hooks added to this event's metrics."""
        if self._metrics is None:  # no hook named them at this batch
            return {}
        measured = {"loss", *self.step_metrics}
        return single_numbers({key: value for key, value in self._metrics.items() if key not in measured})

    def forget_epoch(self) -> None:
        """Drop the metrics of the epoch: they are computed when a hook names them."""
        self._epoch_metrics: dict[str, Any] | None = None
        self._measured: frozenset[str] = frozenset()

    @property
    def epoch_metrics(self) -> dict[str, Any]:
        """The epoch's means, the newest values of training, and a validation after its last step: one dict per event.

        Nothing from other validations is included, because a run that resumes after them would not have it.
        """
        if self._epoch_metrics is None:
            (step, validated), loss = self.validated, {}
            if self.live_loss is not None:
                loss = {"train/loss": self.trainer.step_loss()}
            self._epoch_metrics = {**self.trainer.latest_metrics(), **loss, **self.trainer.epoch_metrics()}
            self._epoch_metrics |= validated if step == self.step else {}
            self._measured = frozenset(self._epoch_metrics)
        return self._epoch_metrics

    def added_epoch_metrics(self) -> dict[str, Any]:
        """Return the single numbers that hooks added to the metrics of the epoch."""
        metrics = self._epoch_metrics or {}
        return single_numbers({key: value for key, value in metrics.items() if key not in self._measured})

    def mirror_metrics(self, name: str) -> None:
        """Copy keys that were added to `val_metrics` to `eval_metrics`, the event's other spelling, or back."""
        if name == "val_metrics":
            self.eval_metrics.update(replace_prefix(self.val_metrics, "val/", "eval/"))
        elif name == "eval_metrics":
            self.val_metrics.update(replace_prefix(self.eval_metrics, "eval/", "val/"))

    def note_metric(self, hook: str, on: str, key: str, old: Any, new: Any) -> None:
        """Record that a hook has replaced a validation metric; `key` may have either spelling."""
        what = next(iter(replace_prefix({key: None}, "eval/", "val/")))
        self.trainer.note("hook_wrote", hook=hook, on=on, what=what, old=old, new=new)

    # ---- the model's output ----------------------------------------------------------------------------------------

    @property
    def model_output(self) -> Any:
        """The model's output for this batch, as copy-on-write views; None if unknown."""
        return None if self.live_output is UNKNOWN else map_tensors(copy_on_write, self.live_output)

    @property
    def target(self) -> Any:
        """The target of the output, as copy-on-write views; None if unknown."""
        return None if self.live_target is UNKNOWN else map_tensors(copy_on_write, self.live_target)

    # ---- windows ---------------------------------------------------------------------------------------------------

    def window_tensor(self) -> torch.Tensor:
        """Return the step's loss on its device: in our trainer the weighted mean over the window's micro-batches."""
        if len(self.micro_batches) > 1:
            return self.trainer.accumulation.combine(self.micro_batches)
        assert self.detached_loss is not None
        return self.detached_loss

    def loss_of_step(self) -> DeviceNumber:
        """Return the step's loss, on its device until it is read; a single micro-batch's loss is read once for both."""
        return [self.window_tensor()] if len(self.micro_batches) > 1 else self._loss

    @property
    def window_loss(self) -> float:
        """The step's loss; waits for the device."""
        return read_number(self.loss_of_step())

    def step_means(self) -> dict[str, Any]:
        """Return the step's metrics: weighted means, like the loss, over the micro-batches that have them."""
        if len(self.micro_batches) <= 1:
            return self.step_metrics
        optional = self.trainer.optional_metrics
        sums: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        for part in (part for part in self.micro_batches if part.weight):
            for key, value in part.metrics.items():
                value, weight = without_nan(value, part.weight) if key in optional else (value, part.weight)
                sums[key], weights[key] = sums.get(key, 0.0) + value * weight, weights.get(key, 0.0) + weight
        return {
            key: total / weights[key] if isinstance(weights[key], torch.Tensor) or weights[key] else math.nan
            for key, total in sums.items()
        }

    # ---- gradients -------------------------------------------------------------------------------------------------

    def set_clipped_norm(self, norm: torch.Tensor, is_global: bool) -> None:
        """Store the norm that a clipping hook found; the global norm before the first one is the step's."""
        self._clipped = norm
        if is_global and self._norm is None:
            self._norm = [norm]

    @property
    def clipped_norm(self) -> float:
        """The norm before the clipping hook that ran last."""
        return math.nan if self._clipped is None else float(self._clipped)

    def norm_before_clipping(self) -> torch.Tensor | float | None:
        """Return this step's global norm if something clipped, on the device if nothing has read it; otherwise None."""
        return None if self._norm is None or self._clipped is None else self._norm[0]

    def measure_norm(self) -> DeviceNumber:
        """Return the norm of this step's gradients, before clipping; NaN if there are none."""
        if self._norm is None:
            self._norm = [self.grads.norm() if self.grads.tensors() else math.nan]
        return self._norm

    @property
    def grad_norm(self) -> float:
        """The global norm of this step's gradients, before clipping; the first read waits for the device."""
        return read_number(self.measure_norm())

    # ---- batches other than the training batch -----------------------------------------------------------------------

    @property
    def is_other_batch(self) -> bool:
        """Whether a batch other than the training batch runs: a validation, an inference or a replay."""
        return self._train_batch is not None

    @contextmanager
    def preserve_train_batch(self, phase: str) -> Iterator[None]:
        """Restore the values of the training batch after a block in which other batches run.

        Args:
            phase: The `phase` that hooks see inside the block.
        """
        values = {name: getattr(self, name) for name in _OF_BATCH}
        outer, self._train_batch = self._train_batch, self._train_batch or values
        self.phase = phase
        try:
            yield
        finally:
            self._train_batch = outer
            for name, value in values.items():
                setattr(self, name, value)

    @contextmanager
    def validation(self, caller: str | None) -> Iterator[None]:
        """Count a validation that a hook, or the run itself, calls.

        A hook may validate inside a validation, but not inside the one that it called: its own event would call it
        endlessly. The outermost validation is inside of none, whichever hook called it.
        """
        if caller in self.validating[1:]:
            who = "validate()" if caller is None else f"validate() by hook {caller!r}"
            raise TrainingError(
                f"{who} inside the validation that it called: that one fires the same events; let the hook remember "
                "that it is validating, or run the model in trainer.inference(), which fires none"
            )
        self.validating.append(caller)
        try:
            yield
        finally:
            self.validating.pop()


class GivenArgs:
    """A run's event arguments, except for those that an object has: a call by hand, a saved step, a user's own run."""

    def __init__(self, args: EventArgs, given: Any) -> None:
        self._args, self._given = args, given

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._given, name):
            return getattr(self._given, name)
        if not self._args.trainer.knows(name):
            raise MissingArgument(f"{name!r} was not passed")  # dispatch reports to which hooks
        return getattr(self._args, name)


class DeviceStepContext(StepContext):
    """The `StepContext` of a run: loss and grad_norm are read from their device when a hook first asks for them.

    A hook may keep it, and read it later or in another thread. Copies and pickles are plain `StepContext` objects.
    """

    _loss: DeviceNumber
    _norm: DeviceNumber

    @classmethod
    def of_step(cls, args: EventArgs) -> DeviceStepContext:
        """Make the context of the step that is ending."""
        self = cls.__new__(cls)
        self.step, self.lr, self.tokens_seen = args.step, args.lr, args.tokens_seen
        self.model, self.optimizer = args.model, args.trainer.optimizers[0]
        self._loss = args.loss_of_step()
        self._norm = args.measure_norm()
        return self

    @cached_property
    def loss(self) -> float:  # type: ignore[override]
        return read_number(self._loss)

    @cached_property
    def grad_norm(self) -> float:  # type: ignore[override]
        return read_number(self._norm)

    def __eq__(self, other: object) -> bool:
        return copy(self) == (copy(other) if isinstance(other, StepContext) else other)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepContext, tuple(getattr(self, item.name) for item in fields(StepContext))


def replace_prefix(metrics: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the metrics with another prefix; keys without the old one stay as they are."""
    return {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in metrics.items()}
