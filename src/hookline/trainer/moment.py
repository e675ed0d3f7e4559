"""Where the run is: every argument that hooks may name is an attribute here, computed when somebody reads it."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from hookline.events.context import StepContext

if TYPE_CHECKING:
    from hookline.gradients.view import Gradients
    from hookline.trainer.trainer import Trainer


class RunMoment:
    """The loop writes the plain attributes; properties are the lazy ones. It is also the clock that schedules read."""

    def __init__(self, trainer: Trainer, grads: Gradients) -> None:
        self.trainer = trainer
        self.grads = grads
        self.step = 0
        self.epoch = 0
        self.batches = 0
        self.batch_idx = -1
        self.tokens_seen = 0
        self.batch: Any = None
        self.dataloader_idx = 0
        self.dataloader_name = "train"
        self.optimizer_idx = 0
        self.phase = "train"
        self.resumed = False
        self.reason: str | None = None
        self.exception: BaseException | None = None
        self.checkpoint_path = ""
        self.lr = math.nan
        self.val_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, Any] = {}
        self.live_loss: torch.Tensor | None = None
        self.detached_loss: torch.Tensor | None = None
        self.window: list[tuple[torch.Tensor, float]] = []  # losses and weights of this step's micro-batches
        self.step_metrics: dict[str, Any] = {}  # what step_fn returned beside the loss
        self.skip_reason: str | None = None
        self.elapsed_before = 0.0
        self._started = monotonic()
        self._loss: float | None = None
        self._metrics: dict[str, Any] | None = None
        self._norm: torch.Tensor | float | None = None
        self._kept: list[torch.Tensor] | None = None

    # ---- the clock ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.step

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

    # ---- losses --------------------------------------------------------------------------------------------------

    def begin_batch(self, index: int, name: str, batch: Any) -> None:
        """Another micro-batch: forget what was computed for the last one."""
        self.batches += 1
        self.batch_idx += 1
        self.dataloader_idx, self.dataloader_name, self.batch = index, name, batch
        self._loss = self._metrics = None

    def set_loss(self, loss: torch.Tensor) -> None:
        self.live_loss = loss
        self.detached_loss = loss.detach()
        self._loss = self._metrics = None

    @property
    def loss(self) -> float:
        """This micro-batch's loss: waits for the device, once."""
        if self._loss is None:
            if self.detached_loss is None:
                return math.nan
            self._loss = self.detached_loss.item()
            if not math.isfinite(self._loss):
                self.trainer.saw_non_finite_loss(self._loss)
        return self._loss

    @property
    def metrics(self) -> dict[str, Any]:
        """One dict per event, shared by its hooks."""
        if self._metrics is None:
            numbers = {key: _number(value) for key, value in self.step_metrics.items()}
            self._metrics = {"loss": self.loss, **numbers}
        return self._metrics

    def added_metrics(self) -> dict[str, Any]:
        """What hooks added to this event's metrics."""
        if self._metrics is None or len(self._metrics) == 1 + len(self.step_metrics):
            return {}
        return {key: value for key, value in self._metrics.items() if key != "loss" and key not in self.step_metrics}

    def mirror_metrics(self, name: str) -> None:
        """A key added under one spelling of the validation event is there under the other, too."""
        if name == "val_metrics":
            self.eval_metrics.update(respelled(self.val_metrics, "val/", "eval/"))
        elif name == "eval_metrics":
            self.val_metrics.update(respelled(self.eval_metrics, "eval/", "val/"))

    def window_tensor(self) -> torch.Tensor:
        """The step's loss on its device: the weighted mean over the window's micro-batches."""
        if len(self.window) == 1:
            return self.window[0][0]
        losses = torch.stack([loss for loss, _ in self.window])
        weights = torch.tensor([weight for _, weight in self.window], device=losses.device, dtype=losses.dtype)
        return (losses * weights).sum() / weights.sum()

    @property
    def window_loss(self) -> float:
        return self.loss if len(self.window) == 1 else float(self.window_tensor())

    # ---- gradients -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Another window: its number, and no gradients of the last one."""
        self.step += 1
        self.window.clear()
        self._norm = self._kept = self.skip_reason = None

    def clipped(self, norm: torch.Tensor) -> None:
        """A clip link has run; the norm before the first one is the step's."""
        self._clipped = norm
        if self._norm is None:
            self._norm = norm

    @property
    def clipped_norm(self) -> float:
        return float(self._clipped)

    def keep_gradients(self) -> None:
        """Hold on to the gradient tensors, which outlive zero_grad, in case somebody asks for their norm."""
        if self._norm is None:
            self._kept = self.grads.tensors()

    @property
    def grad_norm(self) -> float:
        """Global norm of this step's gradients, before clipping."""
        if self._norm is None:
            tensors = self._kept if self._kept is not None else self.grads.tensors()
            self._norm = torch.nn.utils.get_total_norm(tensors) if tensors else math.nan
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

    def _read(self, name: str) -> float:
        if self._moment.step != self.step:
            raise RuntimeError(f"ctx.{name} of step {self.step} was not read in on_step_end, and step {self._moment.step} is under way")
        return float(getattr(self._moment, name))

    @property
    def loss(self) -> float:  # type: ignore[override]
        if "_loss" not in self.__dict__:
            self._loss = self._read("window_loss")
        return self._loss

    @property
    def grad_norm(self) -> float:  # type: ignore[override]
        if "_norm" not in self.__dict__:
            self._norm = self._read("grad_norm")
        return self._norm


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def respelled(metrics: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The same metrics with another prefix; other keys stay as they are."""
    return {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in metrics.items()}
