"""Where the run is: every argument that hooks may name is an attribute here, computed when somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from hookline.core.run_control import MicroBatch
from hookline.events.context import StepContext
from hookline.gradients.norms import total_norm
from hookline.trainer.forward import is_numpy_number

if TYPE_CHECKING:
    from hookline.gradients.view import Gradients
    from hookline.trainer.trainer import Trainer

Of = Callable[[], torch.Tensor | None]  # the loss that something was computed for, as long as it is there


def nothing() -> None:
    """Nothing has been computed yet."""


class RunMoment:
    """The loop writes the plain attributes; properties are the lazy ones. It is also the clock that schedules read."""

    def __init__(self, trainer: Trainer, grads: Gradients) -> None:
        self.trainer = trainer
        self.grads = grads
        self.step = 0
        self.steps_done = 0  # of these, how many are complete
        self.epoch = 0
        self.batches_before = 0  # micro-batches of earlier epochs
        self.batch_idx = -1
        self.epoch_over = False  # the epoch's end has been told and the next one has not begun
        self.position: dict[str, Any] | None = None  # where the loaders were, inside an epoch that was begun
        self.tokens_seen = 0
        self.batch: Any = None
        self.dataloader_idx = 0
        self.dataloader_name = "train"
        self.loader_batches: dict[str, int] = {}  # micro-batches of each training loader, when there are several
        self.optimizer_idx = 0
        self.phase = "train"
        self.resumed = False
        self.reason: str | None = None
        self.exception: BaseException | None = None
        self.checkpoint_path = ""
        self.used_lr: float | None = None  # what this step used, where it may have been moved since
        self.val_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, Any] = {}
        self.live_loss: torch.Tensor | None = None
        self.window: list[MicroBatch] = []  # of this step; a plain step is one and leaves it empty
        self.step_metrics: dict[str, Any] = {}  # what step_fn returned beside the loss
        self.skip_reason: str | None = None
        self.skip_asked_at = -1  # the step that a guard asked to leave out
        self.set_aside: dict[str, Any] | None = None  # the training batch, while other batches run
        self.validating: list[str | None] = []  # who asked for the validations under way, each inside the one before
        self.elapsed_before = 0.0
        self._started = monotonic()
        # What was computed is kept with what it was computed for, so that a new batch has nothing to reset. A loss is
        # not kept alive for that: its graph would be, until somebody reads the next one.
        self._loss = math.nan
        self._loss_of: Of = nothing
        self._metrics: dict[str, Any] = {}
        self._metrics_of: Of = nothing
        self._norm: torch.Tensor | float = math.nan
        self._norm_of = self._kept_of = self._clipped_at = 0
        self.kept_gradients: list[torch.Tensor] = []

    # ---- the clock ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.step

    @property
    def batches(self) -> int:
        return self.batches_before + self.batch_idx + 1

    @property
    def loader(self) -> str:
        return self.dataloader_name

    @property
    def by_loader(self) -> dict[str, int]:
        """Micro-batches of each training loader."""
        names = list(self.trainer.train_loaders)
        return {names[0]: self.batches} if len(names) == 1 else self.loader_batches

    @property
    def epochs(self) -> int:
        return self.epoch + 1

    @property
    def tokens(self) -> int:
        return self.tokens_seen

    @property
    def seconds(self) -> float:
        """How long the run has run, earlier attempts included."""
        return self.elapsed_before + monotonic() - self._started

    # ---- the run -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        return self.trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[self.optimizer_idx]

    @property
    def lr(self) -> float:
        return self.trainer.lr if self.used_lr is None else self.used_lr

    @property
    def optimizer_lr(self) -> float:
        """Of the optimizer that the event is about."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def device(self) -> torch.device:
        return self.trainer.device

    @property
    def config(self) -> Any:
        return self.trainer.config

    @property
    def path(self) -> str:
        return str(self.trainer.checkpoint_dir)

    @property
    def state(self) -> dict[str, Any]:
        return self.trainer.refresh_state()

    def request_stop(self, reason: str, by: str | None = None) -> None:
        self.trainer.request_stop(reason, by)

    def begin_run(self) -> None:
        """Another run: its clock starts; what ended the last one, and a step it did not complete, are forgotten."""
        self._started = monotonic()
        self.exception = self.reason = None
        self.step = self.steps_done
        self.forget_step()

    def forget_step(self) -> None:
        """The counters were put back: what was kept under a step's number is not that step's any more."""
        self.skip_asked_at, self._norm_of, self._kept_of = -1, 0, 0
        self.release_gradients()
        self.window.clear()

    def enter_epoch(self) -> None:
        """The position is the start of an epoch: the next one, if one has ended."""
        self.epoch += self.epoch_over
        self.batches_before += self.batch_idx + 1
        self.batch_idx, self.epoch_over = -1, False

    # ---- losses --------------------------------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """This micro-batch's loss: waits for the device, once."""
        if self.live_loss is not None and self._loss_of() is not self.live_loss:
            self._loss, self._loss_of = self.live_loss.item(), ref(self.live_loss)
            if not math.isfinite(self._loss):
                self.trainer.saw_non_finite_loss(self._loss)
        return self._loss

    def release_graph(self) -> None:
        """The last loss stays readable; its graph need not outlive the run."""
        if self.live_loss is not None:
            live, self.live_loss = self.live_loss, self.live_loss.detach()
            known = ref(self.live_loss)
            self._loss_of = known if self._loss_of() is live else nothing
            self._metrics_of = known if self._metrics_of() is live else nothing

    @property
    def training(self) -> dict[str, Any]:
        """What is known of the training batch, also while validation runs."""
        return self.set_aside if self.set_aside is not None else vars(self)

    @property
    def training_loss(self) -> float:
        """The last training batch's loss."""
        if self.set_aside is None:
            return self.loss
        tensor = self.set_aside["live_loss"]
        return math.nan if tensor is None else float(tensor)

    @property
    def metrics(self) -> dict[str, Any]:
        """One dict per event, shared by its hooks."""
        if not self.metrics_read:
            numbers = {key: _number(value) for key, value in self.step_metrics.items()}
            self._metrics = {"loss": self.loss, **numbers}
            self._metrics_of = nothing if self.live_loss is None else ref(self.live_loss)
        return self._metrics

    @property
    def metrics_read(self) -> bool:
        """Whether somebody named `metrics` at this batch."""
        return self._metrics_of() is self.live_loss

    def added_metrics(self) -> dict[str, Any]:
        """What hooks added to this event's metrics and a record can hold: single numbers."""
        added = {key: value for key, value in self._metrics.items() if key != "loss" and key not in self.step_metrics}
        return numbers_of(added)

    def mirror_metrics(self, name: str) -> None:
        """A key added under one spelling of the validation event is there under the other, too."""
        if name == "val_metrics":
            self.eval_metrics.update(respelled(self.val_metrics, "val/", "eval/"))
        elif name == "eval_metrics":
            self.val_metrics.update(respelled(self.eval_metrics, "eval/", "val/"))

    def window_tensor(self) -> torch.Tensor:
        """The step's loss on its device: the weighted mean over the window's micro-batches."""
        if len(self.window) <= 1:
            assert self.live_loss is not None
            return self.live_loss
        return _weighted_mean(self.window)

    def step_means(self) -> dict[str, Any]:
        """What step_fn returned beside the loss: weighted means, as of the loss, over the micro-batches that had it."""
        if len(self.window) <= 1:
            return self.step_metrics
        sums: dict[str, Any] = {}
        weights: dict[str, float] = {}
        for part in self.window:
            for key, value in part.metrics.items():
                sums[key], weights[key] = sums.get(key, 0.0) + value * part.weight, weights.get(key, 0.0) + part.weight
        return {key: total / weights[key] for key, total in sums.items() if weights[key]}

    def losses_by_loader(self) -> dict[str, torch.Tensor]:
        """The same for the micro-batches of each loader."""
        if len(self.window) <= 1:
            return {self.dataloader_name: self.window_tensor().detach()}
        parts: dict[str, list[MicroBatch]] = {}
        for part in self.window:
            parts.setdefault(part.loader, []).append(part)
        return {name: _weighted_mean(some) for name, some in parts.items() if any(part.weight for part in some)}

    def micro_losses(self) -> list[tuple[str, torch.Tensor]]:
        """The loader and the loss of each of the step's micro-batches."""
        if self.window:
            return [(part.loader, part.loss) for part in self.window]
        return [(self.dataloader_name, self.window_tensor().detach())]

    @property
    def window_loss(self) -> float:
        return self.loss if len(self.window) <= 1 else float(self.window_tensor())

    # ---- gradients -------------------------------------------------------------------------------------------------

    def clipped(self, norm: torch.Tensor, is_global: bool) -> None:
        """A clip link has run; the global norm before the first one is the step's."""
        self._clipped, self._clipped_at = norm, self.step
        if is_global and self._norm_of != self.step:
            self._norm, self._norm_of = norm, self.step

    def norm_before_clipping(self) -> torch.Tensor | float | None:
        """This step's global norm where something clipped, on the device if nobody has read it; else None."""
        return self._norm if self._clipped_at == self._norm_of == self.step else None

    @property
    def clipped_norm(self) -> float:
        return float(self._clipped)

    def keep_gradients(self) -> None:
        """Hold on to the gradient tensors, which outlive zero_grad, in case somebody asks for their norm."""
        if self._norm_of != self.step:
            self.kept_gradients, self._kept_of = self.grads.tensors(), self.step

    def release_gradients(self) -> None:
        """Let go of them, or the next backward would need the memory of two sets."""
        self.kept_gradients = []

    @property
    def grad_norm(self) -> float:
        """Global norm of this step's gradients, before clipping; nan once on_step_end is over."""
        if self._norm_of != self.step:
            tensors = self.kept_gradients if self._kept_of == self.step else self.grads.tensors()
            self._norm = total_norm(tensors) if tensors else math.nan
            self._norm_of = self.step
        if not isinstance(self._norm, float):
            self._norm = float(self._norm)
        return self._norm

    @property
    def ctx(self) -> StepContext:
        return LazyStepContext(self)


class LazyStepContext(StepContext):
    """A `StepContext` whose loss and grad_norm are computed when first read."""

    def __init__(self, moment: RunMoment) -> None:
        self._moment = moment
        self.step = moment.step
        self.lr = moment.lr
        self.tokens_seen = moment.tokens_seen
        self.model = moment.model
        self.optimizer = moment.trainer.optimizers[0]

    def _read(self, name: str, attribute: str) -> float:
        now = self._moment.step
        if now != self.step:
            raise RuntimeError(f"ctx.{name} of step {self.step} was not read in on_step_end; step {now} is under way")
        return float(getattr(self._moment, attribute))

    @property
    def loss(self) -> float:  # type: ignore[override]
        if "_loss" not in self.__dict__:
            self._loss = self._read("loss", "window_loss")
        return self._loss

    @property
    def grad_norm(self) -> float:  # type: ignore[override]
        if "_norm" not in self.__dict__:
            self._norm = self._read("grad_norm", "grad_norm")
        return self._norm


def _weighted_mean(parts: list[MicroBatch]) -> torch.Tensor:
    total = sum(part.weight for part in parts)
    return torch.stack([part.loss * (part.weight / total) for part in parts]).sum()


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def numbers_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Those metrics that are one number; hooks may pass each other anything, but a record holds numbers."""
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, (int, float)) or is_numpy_number(value) or _one_element(value)
    }


def _one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def respelled(metrics: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The same metrics with another prefix; other keys stay as they are."""
    return {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in metrics.items()}
