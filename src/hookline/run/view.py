"""`RunView`: a run as hooks see it, what it can do, and which hooks it rejects because it cannot do enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._names import unwrap_module
from hookline.core.catalog import CAPABILITIES, CATALOG, MOST_LISTED, Event
from hookline.core.entry import Entry
from hookline.errors import RegistrationError
from hookline.record.record import Record
from hookline.run.rng import rng_state

if TYPE_CHECKING:
    from hookline.ranks import Ranks
    from hookline.run.agreement import Agreement, SaveName
    from hookline.run.control import ModelCall
    from hookline.run.engine import Engine
    from hookline.run.epoch_stats import EpochStats
    from hookline.run.event_args import EventArgs
    from hookline.run.manager import HookManager
    from hookline.run.progress import Progress
    from hookline.run.status import RunStatus
    from hookline.run.window import MicroBatch, Window


class RunView:
    """A run as hooks see it."""

    # ---- what it can do ----------------------------------------------------------------------------------------------

    # A hook that needs more is refused when it is registered (`Hook.needs`, and the column of the event catalog). A
    # host overrides the answers that are not true of it.
    can_skip_steps = True
    """Whether `skip_step` keeps the optimizers from stepping."""
    can_stop = True
    """Whether `request_stop` ends the run."""
    can_save = False
    """Whether `save` writes checkpoints, from which the run can be resumed."""
    can_validate = False
    """Whether the run has validations, whose events are fired."""
    knows_validation_batches = False
    """Whether the batches of its validations are known, and what the model returned for them."""
    can_rerun = False
    """Whether `rerunning` runs a batch again as training ran it, or at least a call of the model."""
    reruns_batches = True
    """Whether it can run a batch again; otherwise only `calls`, which have no loss."""
    calls: Sequence[tuple[ModelCall, dict[str, Any]]] = ()
    """The model's calls of this step with the random streams before them, if batches cannot be run again."""
    knows_loss = True
    """Whether the loss is known, because its backward pass goes through the run."""
    knows_batches = True
    """Whether the batches are known, because they go through the run."""
    knows_windows = True
    """Whether it is known which micro-batches make up a step, as `window` returns them."""
    has_unscaled_gradients = True
    """Whether gradients can be read and changed as the optimizer uses them, before any clipping."""

    def fires(self, event: Event) -> bool:
        """Return whether this host can fire an event."""
        return not event.needs or bool(getattr(self, event.needs))

    def check_needs(self, entry: Entry) -> None:
        """Reject a hook that needs more than this host can do, or that listens only to events that it never fires.

        Raises:
            RegistrationError: The message says what the hook needs, and which events it would wait for.
        """
        lacking, waits = [name for name in entry.needs if not getattr(self, name)], ""
        never = [event for event in entry.listeners if not self.fires(CATALOG[event])]
        if not lacking and never and len(never) == len(entry.listeners):
            lacking = list(dict.fromkeys(CATALOG[event].needs for event in never))
            waits = f" to fire {' and '.join(never[:MOST_LISTED])}, which is all that it listens to"
        if lacking:
            words = " and ".join(f"{CAPABILITIES[name]} (`{name}`)" for name in lacking)
            problem = f"{entry.name!r} needs a run that {words}{waits}; {self.title} cannot"
            remedy = self.remedy(lacking)
            raise RegistrationError(f"{problem}. {remedy[0].upper()}{remedy[1:]}")

    @property
    def title(self) -> str:
        """The name of this run in messages."""
        return type(self).__name__

    def remedy(self, lacking: Sequence[str]) -> str:
        """Return the remedy for a hook that needs more than this host can do, given the `CAPABILITIES` it lacks."""
        return "Leave the hook out, or train with hookline's trainer, which can do everything that hooks may need"

    # ---- its parts ---------------------------------------------------------------------------------------------------

    # The objects that a run consists of; `Run` creates them, and hooks do not use them, which a test enforces.
    progress: Progress
    run_status: RunStatus
    event_args: EventArgs
    engine: Engine
    agreement: Agreement
    stats: EpochStats
    accumulation: Window
    reruns = 0
    """How often a batch was run again; this overwrites buffers and restores them."""

    # ---- what is trained ---------------------------------------------------------------------------------------------

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    """The optimizers; writing a group's lr takes effect."""
    schedulers: Sequence[Any] = ()
    """The learning-rate schedulers that the run steps; none if its loop does."""
    params: dict[str, torch.nn.Parameter]
    """The trained parameters by name: those that the optimizers own."""
    config: Any
    hook_data: dict[str, Any]
    """A dict that hooks share; the loop does not use it."""
    ranks: Ranks
    """The processes of the run: `rank`, `world_size`, `local_rank` and a `group` for collectives."""
    hooks: HookManager
    """The registry through which the run fires its events."""

    def stepping_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers of this step; a loop may step some of them alone."""
        return self.optimizers

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function, if the run calls one."""
        return None

    @property
    def device(self) -> torch.device:
        """The device the model is trained on."""
        return self.engine.device

    @property
    def hook_manager(self) -> HookManager:
        """The registry of the hooks; equal to `hooks`."""
        return self.hooks

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; the last one outside of a step."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.progress.epoch

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps in the run, if known."""
        return None

    @property
    def total_epochs(self) -> int | None:
        """The number of epochs after which the run ends, if epochs limit it."""
        return None

    @property
    def epoch_batches(self) -> int | None:
        """The number of micro-batches of an epoch, if known."""
        return None

    @property
    def running(self) -> bool:
        """Whether a run is in progress, from before on_train_start to after on_train_end."""
        return self.run_status.running

    @property
    def run_ended(self) -> bool:
        """Whether a run has ended and nothing has begun since."""
        return self.run_status.run_ended

    @property
    def status(self) -> str:
        """'training', 'completed' or 'error'."""
        return self.run_status.status

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop, if it was."""
        return self.run_status.stops[0].reason if self.run_status.stops else None

    @property
    def stopped_by(self) -> str | None:
        """The hook that asked it to stop, or 'signal'; None if `request_stop` was called outside of a hook."""
        return self.run_status.stops[0].by if self.run_status.stops else None

    @property
    def is_trial_run(self) -> bool:
        """Whether the run only checks that everything works (`fast_dev_run`)."""
        return False

    @property
    def validations_in_progress(self) -> int:
        """How many validations are in progress: 2 inside a validation that a hook starts during another one."""
        return len(self.event_args.validating)

    @property
    def has_validation(self) -> bool:
        """Whether there is data to validate on."""
        return self.can_validate

    @property
    def validates_on_schedule(self) -> bool:
        """Whether the run validates by itself, rather than only when a hook calls `validate`."""
        return self.can_validate

    @property
    def uses_grad_scaler(self) -> bool:
        """Whether a GradScaler decides if the optimizer steps."""
        return self.engine.scaler is not None

    @property
    def gradients_overflowed(self) -> bool:
        """Whether the current step is skipped because its scaled gradients overflowed; no transform has seen them."""
        return self.event_args.overflowed

    @property
    def skipped_steps(self) -> int:
        """Steps that an optimizer skipped."""
        return self.run_status.skipped_steps

    @property
    def non_finite_losses(self) -> int:
        """Losses that were NaN or infinite, counted at the end of each epoch."""
        return self.run_status.non_finite_losses

    @property
    def failed_saves(self) -> int:
        """Checkpoints that could not be written."""
        return self.run_status.failed_saves

    @property
    def lr_changes(self) -> int:
        """Assignments to `lr`."""
        return self.run_status.lr_changes

    @property
    def hook_failures(self) -> int:
        """Exceptions of hooks."""
        return self.run_status.hook_failures + self.run_status.failures_elsewhere

    # ---- directories and checkpoints ---------------------------------------------------------------------------------

    @cached_property
    def record(self) -> Record:
        """The record of the current or last run; before the first run a record in memory, created when it is needed.

        `record.add_sink` passes its rows on.
        """
        return Record.in_memory()

    @property
    def run_id(self) -> str | None:
        """The run's id, once it has begun."""
        return self.record.run_id if self.running or self.run_dir is not None else None

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None if nothing is written."""
        return self.record.path if "record" in vars(self) else None  # reading `record` would create one

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory that holds the run's checkpoints; None if nothing is written."""
        return None if self.run_dir is None else self.run_dir / "checkpoints"

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written in the background, if any."""
        return None

    requested_checkpoints: AbstractSet[str] = frozenset()
    """Names of checkpoints that were requested by `save`, which no retention policy may delete."""
    _requests: tuple[SaveName, ...] = ()  # names of the checkpoints to write at the next boundary

    @property
    def pending_save(self) -> str | None:
        """Why the next step boundary writes a checkpoint: "signal", "request", or None if it writes none."""
        return "request" if self._requests else None

    def unsaved_parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Return shape, dtype and sum of bits of the frozen parameters that checkpoints omit; often none."""
        return {}

    def describe(self) -> Mapping[str, Any]:
        """Return the run's configuration as the record stores it."""
        optimizers = []
        for optimizer in self.optimizers:
            defaults = getattr(optimizer, "defaults", {}).items()
            plain = {key: value for key, value in defaults if isinstance(value, (int, float, str, tuple))}
            optimizers.append({"class": type(optimizer).__name__, **plain})
        hooks = [{"name": hook.name, "enabled": hook.enabled, **hook.parameters} for hook in self.hooks.list_hooks()]
        parameters = sum(param.numel() for param in self.model.parameters())
        model = {"class": type(unwrap_module(self.model)).__name__, "parameters": parameters}
        return {"model": model, "optimizers": optimizers, "hooks": hooks}

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def loader_names(self) -> Sequence[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""
        return ()

    @property
    def loader_batches(self) -> dict[str, int]:
        """Micro-batches of each training loader so far."""
        return dict(self.progress.by_loader)

    def window(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the current step; empty if a step is one micro-batch."""
        return self.event_args.micro_batches

    def step_metrics(self) -> dict[str, Any]:
        """Return the step's means of the numbers that `step_fn` returned besides the loss."""
        return self.event_args.step_means()

    def step_loss(self) -> float:
        """Return the loss of the last completed step as it is recorded, the mean over its window; waits for the device.

        Where the ranks have averaged it, it is their mean.
        """
        loss = self.stats.loss_over_ranks(self.step)
        if loss is None:
            last = self.event_args.last_loss
            loss = self.event_args.window_loss if last is None else float(last[0])
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether the batch that runs or ran last has a loss; a user's own loop may report none."""
        return self.event_args.detached_loss is not None

    @property
    def in_window(self) -> bool:
        """Whether more micro-batches of the current step follow."""
        return self.accumulation.count > 0 and not self.accumulation.is_complete

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means of the current epoch so far, by recorded name; waits for the device."""
        return self.stats.means()

    def latest_metrics(self, since: int | None = None) -> dict[str, float]:
        """Return the newest value of each training metric, of steps after `since`, or of this epoch."""
        return self.stats.latest(since)

    def refresh_state(self) -> dict[str, Any]:
        """Return the run as a dict, as hooks get it as `state`; waits for the device."""
        return self.event_args.state

    def count_tokens(self, batch: Any, /) -> int:
        """Return the number of tokens in a batch."""
        return 0

    @property
    def rank_tokens(self) -> int:
        """The tokens in the batches of this rank so far."""
        return self.progress.tokens_seen

    @property
    def data_ranks(self) -> int:
        """How many ranks train on separate batches; the ranks of a tensor-parallel group count once."""
        return self.ranks.world_size // self.engine.copies

    @property
    def counts_batch(self) -> bool:
        """Whether this rank counts its batch in a sum over the ranks; False if a lower rank has the same batch."""
        return bool(self.agreement.count_once(1))

    @property
    def loss_share(self) -> float:
        """The weight of this rank's gradients in the gradients of all ranks' mean loss.

        A rank's loss is the mean over its own batch, unless it is multiplied by its weight before the backward pass.
        """
        return 1.0 if self.accumulation.is_weighted else 1.0 / self.data_ranks

    def random_state(self) -> dict[str, Any]:
        """Return the state of every random stream that training draws from."""
        return rng_state()
