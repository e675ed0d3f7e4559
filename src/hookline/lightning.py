"""Hooks in Lightning: `lightning.Trainer(callbacks=[hookline.lightning.Hooks("hooks.yaml")])`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hookline.hosts.adapter import HostedHooks
from hookline.hosts.truth import LIGHTNING
from hookline.hosts.versions import check_version

check_version("lightning", (2, 6))

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402 - our own error says what is missing

__all__ = ["Hooks"]


class Hooks(HostedHooks, Callback):
    """Hooks as a callback of Lightning; `hookline events --host lightning` explains the events there.

    >>> trainer = lightning.Trainer(callbacks=[hookline.lightning.Hooks("hooks.yaml")])
    """

    host = LIGHTNING
    state_key = "hookline"

    _trainer: Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the state of an earlier checkpoint; Lightning loads another one after this."""
        self._saved = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run: weights and optimizers are restored, and the sanity check is over."""
        self._trainer = trainer
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._tried: tuple[torch.optim.Optimizer, int] | None = None  # an optimizer that is to step; the steps before
        optimizers = trainer.optimizers
        self.begin_run(
            pl_module,
            optimizers if len(optimizers) == 1 else {str(index): each for index, each in enumerate(optimizers)},
            wrapped=trainer.model,
            scaler=self._scaler,
            clips=trainer.gradient_clip_val,
            lacks=() if trainer.enable_validation else ("can_validate",),
            step=trainer.global_step,
        )
        self.run.losses_add_up = False
        self._known: dict[str, Any] = dict(trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        self.end_run()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the run with the exception."""
        self.end_run(exception)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch."""
        self.attached.begin_epoch(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an epoch, after its validation."""
        self.log_from_host(self._news())
        self.attached.end_epoch()
        self.obey()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch."""
        self.run.next_batch(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Pass on the loss as it was before Lightning divided and scaled it."""
        if self._scaler is not None:
            loss = loss / self._scaler.scale(loss.new_ones(()))  # The scale stays on its device.
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.run.backward_begins(loss if divisor == 1 else loss * divisor)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the loss."""
        self.run.backward_ends()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note that an optimizer will step, if a GradScaler may skip that. The optimizer's hooks show if it does."""
        if self._scaler is not None:
            self._notice_skip()
            self._tried = optimizer, self.run.optimizer_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the micro-batch, and the step if there was one; its schedulers have stepped."""
        self._notice_skip()
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval and trainer.global_step % interval == 0:
            self.log_from_host(self._news())
        self.run.settle()
        self.obey()

    def _notice_skip(self) -> None:
        """Record a step that the GradScaler has skipped: its optimizer was to step, and did not."""
        tried, self._tried = self._tried, None
        if tried is not None and tried[1] == self.run.optimizer_steps:
            self.run.step_overflowed(tried[0])

    # ---- validations, metrics and checkpoints ------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a validation, unless it is the sanity check or not a part of training."""
        if self.is_running:
            self._known = dict(trainer.callback_metrics)
            self.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the validation, with the metrics that the module logged."""
        if self.is_running:
            self.end_validation(self._news())

    def _news(self) -> dict[str, Any]:
        """Return what the module has logged since the last call; Lightning keeps the metrics of all loops together."""
        metrics, known = dict(self._trainer.callback_metrics), self._known
        self._known = metrics
        return {name: value for name, value in metrics.items() if known.get(name) is not value}

    def stop_host(self) -> None:
        """Set `should_stop`."""
        self._trainer.should_stop = True

    def save_in_host(self, path: Path) -> None:
        """Save Lightning's checkpoint, for `fit(ckpt_path=…)`, next to ours; delete those without one of ours."""
        self._trainer.save_checkpoint(path.with_name(f"{path.name}.ckpt"))
        for file in path.parent.glob("*.ckpt"):
            if not file.with_suffix("").is_dir():
                file.unlink(missing_ok=True)

    def send_to_host(self, numbers: Mapping[str, float], step: int) -> None:
        """Pass numbers to Lightning's loggers, for which the first step is 0."""
        for each in self._trainer.loggers:
            each.log_metrics(dict(numbers), step=max(step - 1, 0))
