"""`ForeignCheckpoints`: the checkpoints of a run whose loop Hookline does not own: weights, optimizers, hooks' state.

They exclude state that the loop keeps itself, such as its data and its schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline._names import plain_state_dict
from hookline._text import counted
from hookline.checkpoints.store import SavedCheckpoint, write_checkpoint
from hookline.errors import CheckpointError
from hookline.run.agreement import SaveName
from hookline.run.hook_state import hooks_state, load_hooks_state
from hookline.run.rng import restore_rng, rng_state
from hookline.run.run import Run
from hookline.run.saved_parts import check_groups, check_kind, load_saved_weights


class ForeignCheckpoints(Run):
    """A run that writes checkpoints after its steps, and can continue from them."""

    also_save: Callable[[Path], None] | None = None
    """The host's own way of saving, called for each checkpoint."""
    after_step_state: dict[str, Any] | None = None
    """Random streams and buffers as the step left them; a checkpoint of the step has these even if written later."""

    def save(self, name: SaveName = None) -> None:
        """Write a checkpoint after the current step."""
        self.agreement.request_save(name)
        self.request_boundary()

    def save_requested(self) -> None:
        """Write the checkpoints that were requested; a failure is recorded, and the loop continues to train."""
        step = self.progress.steps_done
        for name in self.requested_names(self.take_requests()):
            with self.report_failed_save(step):
                path = self._write_checkpoint(name)
                self.report_saved(path, step)
                if self.also_save is not None:
                    self.also_save(path)

    def _write_checkpoint(self, name: str) -> Path:
        directory = self.checkpoint_dir
        if directory is None:
            raise CheckpointError("this run keeps no record on disk, so there is no directory for a checkpoint")
        self.step_log.flush()
        self.record.sync()
        scaler = self.engine.scaler
        after = self.after_step_state or {"rng": rng_state(), "buffers": {}}
        weights = plain_state_dict(self.model)
        sections = {
            "model": weights | {name: value for name, value in after["buffers"].items() if name in weights},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": after["rng"],
            **self.state_sections(),
        }
        meta = {"run_id": self.run_id, "step": self.progress.steps_done, "epoch": self.progress.epoch}
        return write_checkpoint(directory, name, sections, {**meta, "lineage": self.record.run.get("lineage")})

    def state_sections(self) -> dict[str, Any]:
        """Return Hookline's own part of a checkpoint: counters and hook state."""
        return {"progress": self.progress.state_dict(), "counts": self.run_status.state_dict(), **hooks_state(self)}

    def load_sections(self, sections: Mapping[str, Any]) -> None:
        """Restore what `state_sections` returned, and fire on_checkpoint_load."""
        self.progress.load_state_dict(sections["progress"], None)
        self.run_status.load_state_dict(sections["counts"])
        self.event_args.forget_step()
        self.event_args.resumed = True
        load_hooks_state(self, sections)
        if handler := self.hooks.slots.on_checkpoint_load:
            handler(self.event_args)

    def load_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Restore weights, optimizers, loss scale, counters, random streams and hooks from a checkpoint."""
        path = saved.path
        missing = {"model", "optimizers", "rng", "progress", "hooks"} - set(saved.names)
        if missing:
            raise CheckpointError(f"{path} cannot be continued: it has no {', '.join(sorted(missing))}")
        sections = {name: saved.section(name) for name in saved.names}
        then, now = len(sections["optimizers"]), len(self.optimizers)
        if then != now:
            raise CheckpointError(f"{path} has {counted(then, 'optimizer')}, but this loop has {now}; attach {then}")
        for optimizer, state in zip(self.optimizers, sections["optimizers"], strict=True):
            check_kind(optimizer, state)
        load_saved_weights(self.model, sections["model"])
        for optimizer, state in zip(self.optimizers, sections["optimizers"], strict=True):
            check_groups(optimizer, state)
            optimizer.load_state_dict(state)
        if self.engine.scaler is not None and sections.get("scaler"):
            self.engine.scaler.load_state_dict(sections["scaler"])
        self.event_args.set_checkpoint(str(path), resumed=True)
        self.load_sections(sections)
        self.last_saved_step = self.progress.steps_done
        restore_rng(sections["rng"])
