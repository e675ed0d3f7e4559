"""NaN forensics: at the first loss or gradient that is not finite, find where it came from and keep the evidence."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from hookline.activations.flow import gradient_norms
from hookline.errors import HooklineError
from hookline.events.policy import logger
from hookline.gradients.view import Gradients
from hookline.hooks.autopsy import Autopsy, examine
from hookline.hooks.crash import Scene, write_crash
from hookline.hooks.named_hook import NamedHook, is_trial
from hookline.hooks.parameters import switch, whole_number


class NanForensics(NamedHook):
    """At the first non-finite loss or gradient, names the module it came from and writes a crash folder to replay.

    The batch is run again on the same weights and random streams with hooks on every module; `crash` is then the
    folder's path and `autopsy` what was found. It lies in the run's directory (`crashes/step-…`), and `hookline replay`
    runs it again. `state` puts the weights into it, without which it is small and cannot be replayed by itself. A
    `fast_dev_run` writes no folder; the finding is told.

    With `stop_run` the run ends, and the bad step is left out: the weights stay the last good ones. `keep` is how many
    crashes are kept where it goes on. Under fp16 non-finite gradients are everyday life and the GradScaler's business;
    only the loss is looked at.

    Each optimizer step waits once for the device; a schedule (``every=10``) makes that rarer and the finding later.
    Until its step is over each micro-batch is held in memory, on its device: under accumulation, all of a window's.
    """

    built_in = True
    name = "nan_forensics"

    def __init__(self, gradients: bool = True, state: bool = True, stop_run: bool = True, keep: int = 1) -> None:
        self.gradients, self.state = switch(gradients, "gradients"), switch(state, "state")
        self.stop_run, self.keep = switch(stop_run, "stop_run"), whole_number(keep, "keep")
        self.crash: Path | None = None
        self.autopsy: Autopsy | None = None
        self._found = 0
        self._scenes: list[Scene] = []  # of one step, the last one heard

    def on_train_start(self, trainer: Any) -> None:
        if not hasattr(trainer, "rerunning"):
            raise HooklineError(f"{self.called} runs batches again, which {type(trainer).__name__} cannot do")
        self._found, self._scenes, self.crash, self.autopsy = 0, [], None, None

    def close(self) -> None:
        """A run that failed in the middle of a step leaves batches behind."""
        self._scenes = []

    def on_train_batch_start(self, trainer: Any, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        """Keep what the batch's forward pass will start from; a step whose end was not heard is past."""
        self._scenes = [scene for scene in self._scenes if scene.step == trainer.step]
        if self._found < self.keep:
            self._scenes.append(Scene(batch, batch_idx, dataloader_name, trainer.random_state(), trainer.step))

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self._scenes:
            self._scenes[-1].loss = loss.detach()

    def on_gradients_ready(self, trainer: Any, grads: Gradients) -> None:
        """Before the optimizer uses them: the weights are still those of the forward pass."""
        scenes, self._scenes = [scene for scene in self._scenes if scene.step == trainer.step], []
        if not scenes:
            return
        looked_at = grads if self.gradients and not _scaled(trainer) else None
        if not _all_finite(scenes, looked_at):
            self._look_closely(trainer, scenes, looked_at)

    def _look_closely(self, trainer: Any, scenes: list[Scene], grads: Gradients | None) -> None:
        """Which micro-batch it was, or may have been; a norm that merely overflowed is no trouble."""
        for scene in scenes:
            if scene.loss is not None and not math.isfinite(scene.loss.item()):
                return self._investigate(trainer, [scene], f"loss {scene.loss.item()}")
        if grads is not None and not all(map(math.isfinite, gradient_norms(grads.tensors()))):
            self._investigate(trainer, scenes, "non-finite gradients")
        return None

    def _investigate(self, trainer: Any, suspects: list[Scene], reason: str) -> None:
        """Find out and keep the evidence; leave the step out if the run is to end, whatever comes of that."""
        self._found, self.autopsy = self._found + 1, None
        try:
            scene, self.autopsy = self._first_bad(trainer, suspects)
            self._keep_evidence(trainer, scene, reason, self.autopsy)
        finally:
            if self.stop_run:
                trainer.skip_step(reason)
                trainer.request_stop(f"{reason}: {self.autopsy or 'the examination failed'}", by=self.called)

    def _first_bad(self, trainer: Any, suspects: list[Scene]) -> tuple[Scene, Autopsy]:
        """The first micro-batch that goes wrong when it is run again by itself; if none does, the last."""
        for scene in suspects:
            autopsy = examine(trainer, scene.batch, scene.random_state, by=self.called)
            if not autopsy.finite:
                break
        return scene, autopsy

    def _keep_evidence(self, trainer: Any, scene: Scene, reason: str, autopsy: Autopsy) -> None:
        """A crash folder, a note in the record and a line on the console; a trial writes nothing and only tells."""
        if is_trial(trainer):
            logger.warning("step %d: %s; %s", trainer.step, reason, autopsy)
            self.note(trainer, "non_finite", reason=reason, autopsy=str(autopsy))
            return
        self.crash = write_crash(crash_root(trainer), trainer, scene, reason, autopsy, self.state)
        logger.warning("step %d: %s; %s; the crash is kept in %s", trainer.step, reason, autopsy, self.crash)
        self.note(trainer, "crash", reason=reason, autopsy=str(autopsy), path=str(self.crash))


def _scaled(trainer: Any) -> bool:
    """Whether a GradScaler judges the gradients."""
    return getattr(getattr(trainer, "engine", None), "scaler", None) is not None


def _all_finite(scenes: list[Scene], grads: Gradients | None) -> bool:
    """One read from the device for all of them: what is not finite makes the sum not finite."""
    total = sum(scene.loss.double() for scene in scenes if scene.loss is not None)
    if grads:
        total = total + grads.norm()
    return math.isfinite(float(total))


def crash_root(trainer: Any) -> Path:
    """Where crashes go: the run's directory, or a temporary one when the run keeps no record on disk."""
    return Path(trainer.run_dir or tempfile.mkdtemp(prefix="hookline-")) / "crashes"
