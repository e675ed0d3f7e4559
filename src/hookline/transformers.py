"""Hooks in the Trainer of transformers: `Trainer(…, callbacks=[hookline.transformers.Hooks("hooks.yaml")])`."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline._console import logger
from hookline.checkpoints.store import SavedCheckpoint, write_checkpoint
from hookline.errors import CheckpointError, HooklineError
from hookline.hosts.adapter import HostedHooks, replace_method
from hookline.hosts.attach import inner_optimizer
from hookline.hosts.truth import TRANSFORMERS
from hookline.hosts.versions import check_version

check_version("transformers", (5, 0))

from transformers import Trainer, TrainerCallback  # noqa: E402 - an error of ours says what is missing

__all__ = ["Hooks"]

FOLDER = "hookline"  # The folder of hooks in a checkpoint of the Trainer.
_OWN_LOGS = {"loss", "learning_rate", "epoch", "total_flos", "num_input_tokens_seen"}  # ours belong to each step


class Hooks(HostedHooks, TrainerCallback):
    """Hooks as a callback of the Trainer; `hookline events --host transformers` explains the events there.

    >>> trainer = transformers.Trainer(model, args, callbacks=[hookline.transformers.Hooks("hooks.yaml")])
    """

    host = TRANSFORMERS

    _trainer: Any = None
    _is_logging = False  # whether the Trainer is logging our own numbers

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make an exception that leaves `train` end the run, because callbacks do not learn about it."""
        self._trainer = calling_trainer()
        replace_method(self._trainer, "train", self.watch)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Begin the run, with the state of the checkpoint that the Trainer resumes from."""
        trainer = calling_trainer()
        if self._trainer is not trainer:  # `add_callback` reports nothing, and `train` is already in progress.
            self.on_init_end(args, state, control)
        self._epoch_has_ended = False
        self.load_state_dict(self._find_state(args, state.global_step) if state.global_step else {})
        self.begin_run(
            trainer.model,
            inner_optimizer(optimizer),
            wrapped=trainer.model_wrapped,
            scaler=getattr(trainer.accelerator, "scaler", None),
            clips=args.max_grad_norm,
            lacks=() if args.eval_strategy != "no" else ("can_validate",),
            step=state.global_step,
        )
        for name, wrapper in (("compute_loss", self._compute_loss), ("training_step", self._training_step)):
            self.run.until_end.callback(replace_method(trainer, name, wrapper))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run."""
        self.end_run()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an epoch."""
        self.attached.begin_epoch(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an epoch; if the Trainer validates now, after that."""
        self.run.settle()
        self._epoch_has_ended = control.should_evaluate
        if control.should_evaluate:
            self.begin_validation()
        else:
            self.attached.end_epoch()
            self.obey()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count the loss of a micro-batch once its backward pass is done; an exception ends the run."""
        self._is_open = False
        loss = self.watch(original, *args, **kwargs)  # After `add_callback`, none of our other code sees an exception.
        if self._is_open:
            self.run.backward_ends()
        return loss

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin a micro-batch, and pass on its loss as it was before the Trainer divided and scaled it."""
        is_first = self.run.model.training and not self._is_open
        if not is_first:
            return original(model, inputs, *args, **kwargs)
        self._is_open = True
        self.run.next_batch(inputs)
        result = original(model, inputs, *args, **kwargs)
        trainer, count = self._trainer, kwargs.get("num_items_in_batch")
        adds_up = getattr(trainer, "loss_is_scaled_for_ga", None)  # transformers 5.0 does not have it
        if adds_up is None:
            adds_up = trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and count is not None)
        self.run.losses_add_up = bool(adds_up)
        self.run.backward_begins(result[0] if isinstance(result, tuple) else result)
        return result

    _is_open = False  # whether a micro-batch has begun in this training step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Record a step that the GradScaler has skipped."""
        if getattr(optimizer, "step_was_skipped", False):
            self.run.step_overflowed(inner_optimizer(optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step; its scheduler has stepped."""
        self.run.settle()
        self.obey()
        if control.should_evaluate:
            self.begin_validation()

    # ---- validations, metrics and checkpoints ------------------------------------------------------------------------

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """End a validation, and the epoch that it belongs to."""
        if not self.is_running:
            return
        self.end_validation({name: value for name, value in (metrics or {}).items() if name not in _OWN_LOGS})
        if self._epoch_has_ended:
            self._epoch_has_ended = False
            self.attached.end_epoch()
            self.obey()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record what the Trainer logs in training, unless it is ours."""
        if self.is_running and not self._is_logging:
            names = [name for name in logs or () if name not in _OWN_LOGS and not name.startswith("eval_")]
            self.log_from_host({name: logs[name] for name in names})

    def send_to_host(self, numbers: Mapping[str, float], step: int) -> None:
        """Let the Trainer log numbers, for its history and every reporter: they take the step from its state."""
        state = self._trainer.state
        now = state.global_step, state.epoch
        if step != state.global_step:  # The record is written every few steps.
            state.global_step, state.epoch = step, state.epoch and state.epoch * step / state.global_step
        self._is_logging = True
        try:
            self._trainer.log(dict(numbers))
        finally:
            self._is_logging = False
            state.global_step, state.epoch = now

    def stop_host(self) -> None:
        """Set `should_training_stop`."""
        self._trainer.control.should_training_stop = True

    def save_in_host(self, path: Path) -> None:
        """Make the Trainer save after this step, too, in its own checkpoint directory."""
        self._trainer.control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of the hooks into the checkpoint that the Trainer has saved."""
        if not self.is_running or not state.is_world_process_zero:
            return
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        try:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            write_checkpoint(directory, FOLDER, self.state_dict(), {"step": state.global_step})
        except CheckpointError as error:
            logger.warning("%s has no hook state: %s", directory, error)

    def _find_state(self, args: Any, step: int) -> dict[str, Any]:
        """Return the hook state in the checkpoint of a step; the Trainer does not say which one it loads."""
        given = args.resume_from_checkpoint
        places = [Path(given)] if isinstance(given, str) else []
        for place in [*places, Path(args.output_dir) / f"checkpoint-{step}"]:
            if (place / FOLDER).is_dir():
                saved = SavedCheckpoint(place / FOLDER).verified()
                return {name: saved.section(name) for name in saved.names}
        return {}


def calling_trainer() -> Any:
    """Return the Trainer that calls a callback, which gets everything but the Trainer.

    Raises:
        HooklineError: If no Trainer calls it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise HooklineError("hookline.transformers.Hooks is a callback: pass callbacks=[…] to a transformers.Trainer")
