"""`RunControl`: what a hook gets as its argument `trainer`.

Our trainer implements it, and so can any other training loop. Hooks use nothing else of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from hookline.core.registry import HookRegistry
    from hookline.ranks import OneProcess


class MicroBatch(NamedTuple):
    """One micro-batch of the current accumulation window."""

    loss: torch.Tensor
    weight: float
    batch_idx: int
    loader: str
    metrics: dict[str, Any]
    """Numbers that `step_fn` returned beside the loss."""


Sizes = Mapping[str, tuple[int, int]]
"""How many maxima and how many sums there are, by name; the same for a name on all ranks."""


class SharedPart(Protocol):
    """Numbers of one step that a hook hands in for the exchange, such as statistics rows.

    Every rank hands in a part with the same key, or what the others have is left out. Their names may differ. Maxima
    are taken first: what is to be added up may depend on them, as the bins of a histogram do.
    """

    key: str
    """What it is: parts of the ranks with the same key belong together."""
    step: int
    epoch: int
    sizes: Sizes
    """The names that this rank has, in the order of its numbers."""

    def maxima(self) -> torch.Tensor:
        """Return the numbers whose maximum over the ranks is taken, float64 on the host; may wait for a device."""

    def sums(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the numbers to add up, float64 on the host, given the maxima over all ranks."""

    def finish(self, sizes: Sizes, maxima: torch.Tensor, sums: torch.Tensor) -> Mapping[str, float]:
        """Use what the ranks have together; called on every rank.

        Args:
            sizes: The names that any rank has.
            maxima: The maxima over the ranks, in their order.
            sums: The sums over the ranks, in their order.

        Returns:
            Metrics to record at the step.
        """


class RunControl(Protocol):
    """A run as hooks see and control it."""

    # ---- what is trained ---------------------------------------------------------------------------------------------

    model: torch.nn.Module
    config: Any
    hook_data: dict[str, Any]
    """A dict that hooks share; the loop does not use it."""
    loss_fn: Any

    @property
    def device(self) -> torch.device:
        """The device the model is trained on."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers; writing a group's lr takes effect."""

    @property
    def params(self) -> Mapping[str, torch.nn.Parameter]:
        """The trained parameters by name: those that the optimizers own."""

    @property
    def ranks(self) -> OneProcess:
        """The processes of the run: `rank`, `world_size`, `local_rank` and a `group` for collectives."""

    @property
    def hooks(self) -> HookRegistry:
        """The registry through which the run fires its events."""

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current optimizer step, from 1; the last one outside of a step."""

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps the run will make, if it can be known."""

    @property
    def running(self) -> bool:
        """Whether a run is in progress, from before on_train_start to after on_train_end."""

    @property
    def status(self) -> str:
        """'training', 'completed' or 'error'."""

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop, if it was."""

    @property
    def stopped_by(self) -> str | None:
        """Which hook asked it to stop, or 'signal'; None if `request_stop` was called outside of a hook."""

    @property
    def is_trial_run(self) -> bool:
        """Whether the run only checks that everything works (`fast_dev_run`)."""

    @property
    def validations_in_progress(self) -> int:
        """How many validations are in progress: 2 inside a validation that a hook starts during another one."""

    @property
    def has_validation(self) -> bool:
        """Whether there is data to validate on."""

    @property
    def validates_on_schedule(self) -> bool:
        """Whether the run validates by itself, rather than only when a hook calls `validate`."""

    @property
    def uses_grad_scaler(self) -> bool:
        """Whether a GradScaler decides if the optimizer steps."""

    @property
    def gradients_overflowed(self) -> bool:
        """Whether the GradScaler found non-finite gradients in the current step, which is therefore skipped."""

    # ---- directories and checkpoints ---------------------------------------------------------------------------------

    @property
    def run_id(self) -> str | None:
        """The run's id, once it has begun."""

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None if nothing is written."""

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory that holds the run's checkpoints; None if nothing is written."""

    @property
    def saving(self) -> str | None:
        """The name of the checkpoint that is being written in the background, if any."""

    @property
    def requested_checkpoints(self) -> AbstractSet[str]:
        """Names of checkpoints that were requested by `save`, which no retention policy may delete."""

    def unsaved_parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Return shape, dtype and sum of bits of the frozen parameters that checkpoints leave out; often none."""

    def save(self, name: str | Callable[[], str] | None = None) -> None:
        """Write a checkpoint at the next step boundary, named after its step unless a name is given."""

    def describe(self) -> Mapping[str, Any]:
        """Return the run's configuration as the record stores it."""

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group of the first optimizer; assigning scales every group by the same ratio."""

    @lr.setter
    def lr(self, value: float) -> None: ...

    @property
    def loader_names(self) -> Sequence[str]:
        """The training loaders whose losses are recorded separately; empty with a single loader."""

    def window(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the current step; empty if a step is one micro-batch."""

    def step_metrics(self) -> dict[str, Any]:
        """Return the step's means of what `step_fn` returned beside the loss."""

    def step_loss(self) -> float:
        """Return the loss of the last step as it is recorded, the mean over its window; waits for the device."""

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means of the current epoch so far, by recorded name; waits for the device."""

    def latest_metrics(self, since: int | None = None) -> dict[str, float]:
        """Return the newest value of each training metric, of steps after `since` or else of this epoch."""

    def count_tokens(self, batch: Any, /) -> int:
        """Return the number of tokens in a batch."""

    def means_of_ranks(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the means of numbers over the ranks, by name; with several ranks all must call it, and wait."""

    @property
    def rank_tokens(self) -> int:
        """The tokens in the batches of this rank so far."""

    @property
    def data_ranks(self) -> int:
        """How many ranks train on batches of their own and average their gradients; 1 in one process."""

    def log(self, name: str, value: Any, step: int | None = None, reduce: str | None = "mean") -> None:
        """Record a number or a one-element tensor, at the current step unless given, without waiting for the device.

        `reduce` says how the values of several ranks become one: 'mean', 'sum', 'max', 'min', or None for rank 0's own.
        """

    def log_layers(
        self, series: str, names: Sequence[str], columns: Sequence[str], values: torch.Tensor, step: int | None = None
    ) -> None:
        """Record numbers per layer, a row per name and a column per statistic, without waiting for the device."""

    def log_table(
        self,
        name: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        *,
        step: int | None = None,
        kind: str | None = None,
    ) -> None:
        """Record a table of texts and numbers; of several ranks, rank 0's is recorded."""

    def log_image(self, name: str, image: Any, *, step: int | None = None) -> None:
        """Record a tensor, an array, a PIL image or a matplotlib figure as an image; of several ranks, rank 0's."""

    def share(self, part: SharedPart) -> None:
        """Hand in numbers of this rank that are recorded together with those of the other ranks, at the next exchange.

        Call it at the same events on all ranks, and only with several of them.
        """

    def note(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write a decision into events.jsonl, if a run is in progress."""

    # ---- control -----------------------------------------------------------------------------------------------------

    def request_stop(self, reason: str, by: str | None = None) -> None:
        """End the run in order once the current step is complete."""

    def skip_step(self, reason: str) -> None:
        """Skip the optimizer step of the current window; for guards in the update chain."""

    def validate(self) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""

    def inference(self) -> AbstractContextManager[torch.nn.Module]:
        """Run the model in eval mode and without grad; random states and forward hooks are restored afterwards."""

    def random_state(self) -> dict[str, Any]:
        """Return the state of every random generator that training draws from."""

    def rerunning(self, random_state: dict[str, Any]) -> AbstractContextManager[Callable[[Any], torch.Tensor]]:
        """Run a batch again as training ran it, from the given random states; yields ``batch -> loss``."""
