"""`nan_forensics`: at the first loss or gradient that is not finite, find its origin and write a crash folder.

`debug_training` opens the debugger instead.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hookline._console import logger, print_line
from hookline._parameters import PositiveInt
from hookline._tensors import is_sharded
from hookline.activations.debug import at_terminal, describe_tensors
from hookline.errors import RankError, error_text
from hookline.gradients.gradient_flow import gradient_norms
from hookline.gradients.view import Gradients
from hookline.hooks.base import NamedHook
from hookline.hooks.nan_forensics.diagnosis import Diagnosis, diagnose, name_batch_tensors, nonfinite_names
from hookline.hooks.nan_forensics.dump import RecordedBatch, write_crash
from hookline.run.control import RunControl


class NanForensics(NamedHook):
    """Names the module a non-finite loss or gradient came from, and writes a crash folder that can be replayed.

    The batch is run again on the same weights and random states with hooks on every module; then `crash` is the
    folder's path and `autopsy` the finding. The folder is in the run's directory (`crashes/step-…`), and `hookline
    replay` runs it again. A `fast_dev_run` writes no folder and only reports.

    Each optimizer step waits once for the device, and for the other ranks if there are several. On a schedule
    (``every=10``) it waits less often, but the weights may be NaN before the hook looks, and then it cannot find the
    first bad batch. The rank that had the batch writes the folder; the others note which rank it was. For a sharded
    model (FSDP2), all ranks run only the forward pass again, not the backward pass. Each micro-batch stays in memory,
    on its device, until its step is over: with accumulation, all of a window.

    In a loop that does not say how its loss is computed, the calls of the model are run again instead. That finds the
    module of the forward pass, but not problems in the loss or the backward pass.

    Args:
        gradients: Whether to check gradients too. Under fp16 only the loss is checked, because non-finite gradients
            are normal there and the GradScaler skips such steps.
        state: Whether to write the weights; a folder without them is small, but a replay needs them from elsewhere.
        stop_run: Whether to end the run and skip the bad step, so that the weights stay the last good ones.
        keep: How many crashes to write if the run continues.
    """

    built_in = True
    name = "nan_forensics"
    same_on_all_ranks = True
    explains_non_finite = True
    needs: tuple[str, ...] = ("can_rerun",)

    def __init__(
        self, gradients: bool = True, state: bool = True, stop_run: bool = True, keep: PositiveInt = 1
    ) -> None:
        self.gradients, self.state, self.stop_run, self.keep = gradients, state, stop_run, keep
        if stop_run:
            self.needs = (*self.needs, "can_stop", "can_skip_steps")
        self.crash: Path | None = None
        self.autopsy: Diagnosis | None = None
        self._found = 0
        self._recorded: list[RecordedBatch] = []  # The batches of the current step.

    def on_train_start(self) -> None:
        """Start over."""
        self._found, self._recorded, self.crash, self.autopsy = 0, [], None, None

    def close(self) -> None:
        """Release the batches of a step that did not end."""
        self._recorded = []

    def on_train_batch_start(self, trainer: RunControl, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        """Record the state before the forward pass; drop batches of a step whose end was not due."""
        self._recorded = self._of_step(trainer.step)
        if self._found < self.keep and trainer.reruns_batches:
            state = trainer.random_state()
            self._recorded.append(RecordedBatch(batch, batch_idx, dataloader_name, state, trainer.step))

    def _of_step(self, step: int) -> list[RecordedBatch]:
        return [recorded for recorded in self._recorded if recorded.step == step]

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Record the loss."""
        if self._recorded:
            self._recorded[-1].loss = loss.detach()

    def on_gradients_ready(self, trainer: RunControl, grads: Gradients, batch_idx: int) -> None:
        """Check losses and gradients before the optimizer changes the weights."""
        recorded, self._recorded = self._of_step(trainer.step), []
        given = [batch.loss for batch in recorded]
        if not trainer.reruns_batches and self._found < self.keep:
            where, given = (batch_idx, "train"), [part.loss for part in trainer.window()]
            recorded = [RecordedBatch(call, *where, state, trainer.step) for call, state in trainer.calls]
        if not recorded:
            return
        # Without the loss, running the model again distinguishes scaled gradients that overflow from a NaN.
        checked = grads if not given or (self.gradients and not trainer.uses_grad_scaler) else None
        # One read from the device for all of them: any non-finite value makes the sum non-finite.
        total = sum(loss.double() for loss in given if loss is not None)
        if checked:
            total = total + checked.norm()
        # All ranks take part, because only the one that had the batch can find the origin.
        if not trainer.ranks.decide(not math.isfinite(float(total))):
            return
        losses = [0.0 if loss is None else loss.item() for loss in given]
        bad = next(([place, f"loss {loss}"] for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
        by_rank = trainer.ranks.gather(bad)
        # If every loss is finite, any micro-batch may be to blame; a norm that merely overflowed is fine.
        if any(by_rank) or (checked and not all(map(math.isfinite, gradient_norms(checked.tensors())))):
            self._investigate(trainer, recorded, by_rank, grads)

    def _investigate(
        self, trainer: RunControl, recorded: list[RecordedBatch], by_rank: list[Any], grads: Gradients
    ) -> None:
        """Find the origin on the ranks that had the batches, and let the others note which ranks these are.

        Even if that fails, the step is skipped and the run ends, if that is configured.

        Args:
            trainer: The run.
            recorded: The micro-batches of the step.
            by_rank: The place of the first micro-batch whose loss is not finite, and that loss, of each rank; None for
                a rank on which all are finite. If all are None, gradients are not finite.
            grads: The gradients.
        """
        ranks, is_shared, failure = trainer.ranks, any(map(is_sharded, trainer.params.values())), None
        here = ranks.rank if len(by_rank) > 1 else 0  # a rank of a user's own loop acts alone
        bad_here, suspect = by_rank[here], recorded[-1]
        self._found, self.autopsy = self._found + 1, None
        try:
            if is_shared:
                suspect = self._examine_together(trainer, recorded, by_rank, grads)
            elif bad_here or not any(by_rank):
                is_known = bad_here and trainer.reruns_batches  # a backward pass may belong to several calls
                suspect = self._examine(trainer, [recorded[bad_here[0]]] if is_known else recorded)
                if self._explain_call(trainer, grads) and not bad_here:
                    return
        except Exception as error:
            if is_shared and ranks.world_size > 1:  # the others wait inside the forward pass
                raise RankError(f"the batch of a bad step cannot be run again: {error_text(error)}") from error
            failure = error  # raised at the end: the others wait in the next line
        is_bad = bool(bad_here) or (not is_shared and self.autopsy is not None and not self.autopsy.finite)
        found_on = [rank for rank, is_its in enumerate(ranks.gather(is_bad)) if is_its] or [0]
        reason = bad_here[1] if bad_here else "non-finite gradients"
        try:
            if here in found_on and self.autopsy is not None:
                self._report(trainer, suspect, reason, self.autopsy)
        except Exception as error:
            failure = failure or error
        said = ranks.gather([f"{reason}: {self.autopsy or 'the examination failed'}", str(self.crash or "")])
        summary, crash = said[found_on[0]]
        if len(by_rank) > 1:
            summary = f"rank {found_on[0]}: {summary}"
            if here not in found_on:
                logger.warning(
                    "step %d: %s%s", trainer.step, summary, f"; the crash is saved in {crash}" if crash else ""
                )
                self.note(trainer, "non_finite", reason=summary, path=crash or None)
        if self.stop_run:
            trainer.skip_step(reason)
            trainer.request_stop(summary, by=self.registered_name)
        if failure is not None:
            raise failure

    def _examine(self, trainer: RunControl, suspects: list[RecordedBatch]) -> RecordedBatch:
        """Return the first micro-batch that goes wrong when run again; if none does, the last."""
        for suspect in suspects:
            self.autopsy = diagnose(trainer, suspect.batch, suspect.random_state, self.registered_name)
            if not self.autopsy.finite:
                break
        return suspect

    def _explain_call(self, trainer: RunControl, grads: Gradients) -> bool:
        """Add the gradients to what running the model alone showed; return whether a GradScaler explains them."""
        autopsy = self.autopsy
        if autopsy is None or autopsy.loss is not None or not autopsy.finite:
            return False
        if trainer.uses_grad_scaler:
            self._found -= 1
            return True
        self.autopsy = replace(autopsy, gradients=nonfinite_names(dict(grads.items())))
        return False

    def _examine_together(
        self, trainer: RunControl, recorded: list[RecordedBatch], by_rank: list[Any], grads: Gradients
    ) -> RecordedBatch:
        """Do the same for a sharded model: all ranks run the same number of forward passes, and no backward pass."""
        bad_here, suspect = by_rank[trainer.ranks.rank], recorded[-1]
        for place in sorted({bad[0] for bad in by_rank if bad}):
            candidate = recorded[min(place, len(recorded) - 1)]
            diagnosis = diagnose(trainer, candidate.batch, candidate.random_state, self.registered_name, backward=False)
            if bad_here and place == bad_here[0]:
                suspect, self.autopsy = candidate, diagnosis
        if not any(by_rank):
            loss, batch = float("nan" if suspect.loss is None else suspect.loss), name_batch_tensors(suspect.batch)
            bad = nonfinite_names(dict(grads.items()))
            self.autopsy = Diagnosis(loss=loss, batch=nonfinite_names(batch), gradients=bad)
        return suspect

    def _report(
        self, trainer: RunControl, recorded: RecordedBatch, reason: str, diagnosis: Diagnosis, write: bool = True
    ) -> None:
        """Write a crash folder, a note and a warning; a trial run writes no folder."""
        if trainer.is_trial_run or not write:
            logger.warning("step %d: %s; %s", trainer.step, reason, diagnosis)
            self.note(trainer, "non_finite", reason=reason, autopsy=str(diagnosis), module=diagnosis.origin)
            return
        root = (trainer.run_dir or Path(tempfile.mkdtemp(prefix="hookline-"))) / "crashes"
        self.crash = write_crash(root, trainer, recorded, reason, diagnosis, self.state)
        logger.warning("step %d: %s; %s; the crash is saved in %s", trainer.step, reason, diagnosis, self.crash)
        origin = {"autopsy": str(diagnosis), "module": diagnosis.origin}
        self.note(trainer, "crash", reason=reason, path=str(self.crash), **origin)


class DebugHook(NanForensics):
    """Opens the debugger at a non-finite loss or gradient; without a terminal it writes a crash folder instead.

    The debugger opens before the optimizer step, with `trainer`, `batch`, `autopsy` and `reason` as local variables;
    quitting it ends the run. For conditions on activations use the forward hook ``debug``.

    Args:
        break_on_nan: Whether to open the debugger or write a folder; otherwise the hook only reports the finding.
        log_shapes: Print the shapes of a batch's tensors whenever they change.
        state: Whether the crash folder contains the weights.
        stop_run: Whether to end the run and skip the bad step.
    """

    built_in = True
    name = "debug_training"

    def __init__(
        self, break_on_nan: bool = True, log_shapes: bool = False, state: bool = True, stop_run: bool = False
    ) -> None:
        super().__init__(state=state, stop_run=stop_run)
        self.break_on_nan, self.log_shapes = break_on_nan, log_shapes
        self._shapes: dict[str, str] = {}

    def on_train_batch_start(self, trainer: RunControl, batch: Any, batch_idx: int, dataloader_name: str) -> None:
        """Record the batch, and print its shapes if they changed."""
        super().on_train_batch_start(trainer, batch, batch_idx, dataloader_name)
        if not self.log_shapes:
            return
        shapes = {name: describe_tensors(tensor)[0] for name, tensor in name_batch_tensors(batch).items()}
        if shapes != self._shapes:
            self._shapes = shapes
            print_line(f"from batch {batch_idx}: " + "; ".join(f"{name}: {text}" for name, text in shapes.items()))

    def _report(
        self, trainer: RunControl, recorded: RecordedBatch, reason: str, diagnosis: Diagnosis, write: bool = True
    ) -> None:
        """Open the debugger at a terminal, otherwise write a crash folder."""
        write = self.break_on_nan and not at_terminal()
        super()._report(trainer, recorded, reason, diagnosis, write)
        if self.break_on_nan and not write:
            _open_debugger(trainer, recorded.batch, diagnosis, reason)


def _open_debugger(trainer: RunControl, batch: Any, autopsy: Diagnosis, reason: str) -> None:
    """Open the debugger in a frame whose local variables are worth examining."""
    breakpoint()
