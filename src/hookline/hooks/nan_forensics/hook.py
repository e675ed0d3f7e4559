"""`nan_forensics`: at the first loss or gradient that is not finite, find its origin and write a crash folder."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from hookline import _checks
from hookline._console import logger
from hookline.activations.gradient_flow import gradient_norms
from hookline.core.run_control import RunControl
from hookline.gradients.view import Gradients
from hookline.hooks.base import NamedHook
from hookline.hooks.nan_forensics.diagnosis import Diagnosis, diagnose
from hookline.hooks.nan_forensics.dump import RecordedBatch, write_crash


class NanForensics(NamedHook):
    """Names the module a non-finite loss or gradient came from, and writes a crash folder that can be replayed.

    The batch is run again on the same weights and random states with hooks on every module; then `crash` is the
    folder's path and `autopsy` what was found. The folder is in the run's directory (`crashes/step-…`), and `hookline
    replay` runs it again. A `fast_dev_run` writes no folder and only reports.

    Each optimizer step waits once for the device; on a schedule (``every=10``) that is rarer, and the report later.
    Each micro-batch stays in memory, on its device, until its step is over: with accumulation, all of a window.

    Args:
        gradients: Whether to check gradients too. Under fp16 only the loss is checked, because non-finite gradients
            are normal there and the GradScaler skips such steps.
        state: Whether to write the weights; a folder without them is small, and a replay has to get them elsewhere.
        stop_run: Whether to end the run and skip the bad step, so that the weights stay the last good ones.
        keep: How many crashes to write if the run continues.
    """

    built_in = True
    name = "nan_forensics"
    may_skip = True

    def __init__(self, gradients: bool = True, state: bool = True, stop_run: bool = True, keep: int = 1) -> None:
        self.gradients, self.state = _checks.boolean(gradients, "gradients"), _checks.boolean(state, "state")
        self.stop_run, self.keep = _checks.boolean(stop_run, "stop_run"), _checks.integer(keep, "keep", at_least=1)
        self.crash: Path | None = None
        self.autopsy: Diagnosis | None = None
        self._found = 0
        self._recorded: list[RecordedBatch] = []  # of the current step

    def on_train_start(self) -> None:
        """Start over."""
        self._found, self._recorded, self.crash, self.autopsy = 0, [], None, None

    def close(self) -> None:
        """Release the batches of a step that did not end."""
        self._recorded = []

    def on_train_batch_start(self, trainer: RunControl, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        """Record what the forward pass starts from; drop batches of a step whose end was not due."""
        self._recorded = [one for one in self._recorded if one.step == trainer.step]
        if self._found < self.keep:
            state = trainer.random_state()
            self._recorded.append(RecordedBatch(batch, batch_idx, dataloader_name, state, trainer.step))

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Record the loss."""
        if self._recorded:
            self._recorded[-1].loss = loss.detach()

    def on_gradients_ready(self, trainer: RunControl, grads: Gradients) -> None:
        """Check losses and gradients before the optimizer changes the weights."""
        recorded, self._recorded = [one for one in self._recorded if one.step == trainer.step], []
        if not recorded:
            return
        checked = grads if self.gradients and not trainer.uses_grad_scaler else None
        # One read from the device for all: whatever is not finite makes the sum not finite.
        total = sum(one.loss.double() for one in recorded if one.loss is not None)
        if checked:
            total = total + checked.norm()
        if not math.isfinite(float(total)):
            bad = next((one for one in recorded if one.loss is not None and not math.isfinite(one.loss.item())), None)
            if bad is not None and bad.loss is not None:
                self._investigate(trainer, [bad], f"loss {bad.loss.item()}")
            # If every loss is finite, any micro-batch may be to blame; a norm that merely overflowed is fine.
            elif checked and not all(map(math.isfinite, gradient_norms(checked.tensors()))):
                self._investigate(trainer, recorded, "non-finite gradients")

    def _investigate(self, trainer: RunControl, suspects: list[RecordedBatch], reason: str) -> None:
        """Find the first micro-batch that goes wrong when run again; if none does, take the last.

        Even if that fails, the step is skipped and the run ends, if that is configured.
        """
        self._found, self.autopsy = self._found + 1, None
        try:
            for suspect in suspects:
                self.autopsy = diagnose(trainer, suspect.batch, suspect.random_state, by=self.registered_name)
                if not self.autopsy.finite:
                    break
            assert self.autopsy is not None
            self._report(trainer, suspect, reason, self.autopsy)
        finally:
            if self.stop_run:
                trainer.skip_step(reason)
                found = self.autopsy or "the examination failed"
                trainer.request_stop(f"{reason}: {found}", by=self.registered_name)

    def _report(
        self, trainer: RunControl, recorded: RecordedBatch, reason: str, diagnosis: Diagnosis, write: bool = True
    ) -> None:
        """Write a crash folder, a note and a warning; a trial run writes no folder."""
        if trainer.is_trial_run or not write:
            logger.warning("step %d: %s; %s", trainer.step, reason, diagnosis)
            self.note(trainer, "non_finite", reason=reason, autopsy=str(diagnosis))
            return
        root = (trainer.run_dir or Path(tempfile.mkdtemp(prefix="hookline-"))) / "crashes"
        self.crash = write_crash(root, trainer, recorded, reason, diagnosis, self.state)
        logger.warning("step %d: %s; %s; the crash is in %s", trainer.step, reason, diagnosis, self.crash)
        self.note(trainer, "crash", reason=reason, autopsy=str(diagnosis), path=str(self.crash))
