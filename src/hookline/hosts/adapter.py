"""The code that the adapters to Lightning, transformers and Ignite share: hooks in another trainer's loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hookline._console import logger
from hookline.errors import HooklineError
from hookline.hosts.attach import Attached, check_model, check_options, plain_section
from hookline.hosts.foreign import ForeignRun, StepFn
from hookline.hosts.truth import Host
from hookline.run.manager import HookManager
from hookline.run.outputs import single_numbers
from hookline.run.step_log import GRAD_NORM, LOSS, LR

_AXES = {"step", "epoch", "time"}  # The fields of a row of metrics besides its numbers.
_OF_STEPS = {LOSS, LR, GRAD_NORM}  # Hosts log these at their own intervals, and some print each row they log.
_OF_VALIDATION = re.compile("^(val|valid|eval|test)[/_]")


class HostedHooks:
    """Hooks in the loop of another trainer, which reports its progress to them.

    Args:
        config: A hooks config: the path of a YAML file, or a dict.
        hooks: More hooks, or a `HookManager`.
        step_fn: ``(model, batch) -> loss``, which lets hooks such as `nan_forensics` run a batch again.
        output_dir: The directory that gets the run's directory; None keeps the record in memory.
        allow: Prefixes under which a config from a file may name dotted paths.
    """

    host: Host
    run: ForeignRun
    """The run that hooks get as `trainer`; after training, the last run."""

    def __init__(
        self,
        config: Any = None,
        *,
        hooks: Iterable[Any] | HookManager = (),
        step_fn: StepFn | None = None,
        output_dir: str | Path | None = "runs",
        allow: Iterable[str] = (),
    ) -> None:
        check_options(config, hooks, None, None, step_fn, output_dir)
        self._options: dict[str, Any] = {
            "config": config, "hooks": hooks if isinstance(hooks, HookManager) else list(hooks), "step_fn": step_fn,
            "output_dir": output_dir, "allow": list(allow),
        }  # fmt: skip
        self._attached: Attached | None = None
        self._saved: Mapping[str, Any] | None = None  # the state of a checkpoint that was loaded before the run
        self._validation: ExitStack | None = None
        self._from_host: set[str] = set()  # names of metrics that need not be sent back

    # ---- the run -----------------------------------------------------------------------------------------------------

    def begin_run(
        self,
        model: torch.nn.Module,
        optimizers: Any,
        *,
        wrapped: Any = None,
        scaler: Any = None,
        clips: float | None = None,
        lacks: Iterable[str] = (),
        step: int = 0,
    ) -> ForeignRun:
        """Attach the hooks to the model and the optimizers of the host, and begin the run.

        Args:
            model: The model whose modules hooks select.
            optimizers: Its optimizers, as `attach` takes them.
            wrapped: The model as the host calls it.
            scaler: The host's GradScaler.
            clips: The norm or value to which the host clips gradients before its optimizer steps.
            lacks: Capabilities that this run does not have.
            step: The steps that the host made earlier, which count if no hook state was saved.
        """
        self.end_run(HooklineError("training was restarted before it ended"))
        check_model(model if wrapped is None else wrapped)
        host = replace(self.host, cannot=self.host.cannot | set(lacks))
        attached = Attached(model, optimizers, scaler=scaler, host=host, **self._options)
        self.run = run = attached.run
        run.resume_from, self._saved = self._saved, None
        if run.resume_from is None:
            run.progress.step = run.progress.steps_done = step
            if step and list(run.hooks):
                logger.warning("%s resumes after step %d without saved hook state: hooks start fresh", host.title, step)
        if clips and (run.hooks.slots.on_gradients_ready or run.hooks.slots.on_update):
            words = f"{host.title} clips gradients at {clips} before hooks get them; {host.clipping}"
            logger.warning("%s", words)
        self._from_host.clear()
        attached.begin()
        self._attached = attached
        run.also_save = self.save_in_host
        run.record.add_own_sink(self)
        return run

    def end_run(self, error: BaseException | None = None) -> None:
        """End the run, with the exception that ends the host's loop; nothing is left on model and optimizers."""
        attached, self._attached = self._attached, None
        validation, self._validation = self._validation, None
        if attached is None:
            return
        if validation is not None and error is not None:  # It has no results, so its end event is not fired.
            with suppress(BaseException):
                validation.__exit__(type(error), error, error.__traceback__)
        elif validation is not None:
            validation.close()
        attached.end(error)

    def watch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host. An exception ends the run: hosts have no event that covers all of them."""
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            self.end_run(error)
            raise

    @property
    def attached(self) -> Attached:
        """The hooks of the training in progress."""
        if self._attached is None:
            raise HooklineError(f"no training by {self.host.title} is in progress")
        return self._attached

    @property
    def is_running(self) -> bool:
        """Whether a run is in progress."""
        return self._attached is not None

    def obey(self) -> None:
        """Stop the host if a hook has asked for it."""
        if self.run.run_status.stops:
            self.stop_host()

    # ---- what an adapter does in its own way -------------------------------------------------------------------------

    def stop_host(self) -> None:
        """Let the host's loop end."""
        raise NotImplementedError

    def save_in_host(self, path: Path) -> None:
        """Let the host save, too.

        Args:
            path: The checkpoint that the run has written.
        """

    def send_to_host(self, numbers: Mapping[str, float], step: int) -> None:
        """Pass numbers of a step to the host's logger."""

    # ---- validations -------------------------------------------------------------------------------------------------

    def begin_validation(self) -> None:
        """Fire on_validation_start, unless the validation has begun or is not a part of training."""
        if self.is_running and self._validation is None:
            self._validation = ExitStack()
            self._validation.enter_context(self.attached.validation())

    def end_validation(self, metrics: Mapping[str, Any]) -> None:
        """Fire on_validation_end, with the host's results as ``val/…``, and carry out the hooks' requests."""
        if not self.is_running:
            return
        self.begin_validation()
        for name, value in single_numbers(metrics).items():
            ours = f"val/{_OF_VALIDATION.sub('', name)}"
            self.attached.log(ours, value)
            self._from_host.add(ours)
        validation, self._validation = self._validation, None
        assert validation is not None
        validation.close()
        self.obey()

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def log_from_host(self, metrics: Mapping[str, Any]) -> None:
        """Record the numbers that the host has logged in training."""
        numbers = single_numbers(metrics)
        self._from_host.update(numbers)
        for name, value in numbers.items():
            self.run.log(name, value)

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send what hooks log to the host's logger: the hooks are a sink of their record."""
        known = _AXES | _OF_STEPS | self._from_host
        for row in rows:
            if numbers := {name: value for name, value in row.items() if name not in known}:
                self.send_to_host(numbers, row["step"])

    # ---- the host's checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the state of the hooks, for the host's checkpoint."""
        if "run" not in vars(self):
            return {}
        if self.is_running:
            self.run.settle_step()
        return {name: plain_section(section) for name, section in self.run.state_sections().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a checkpoint's state for the next run."""
        self._saved = state_dict or None


def replace_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Wrap a method of one object in a function; return a callable that removes it."""
    attribute = vars(owner).get(name)
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
    return partial(delattr, owner, name) if attribute is None else partial(setattr, owner, name, attribute)
