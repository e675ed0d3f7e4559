"""`RunControl`: the object that hooks get as `trainer`: what they see (run/view.py), log and control.

`Run` is a `RunControl`, for our trainer and for any other training loop. Hooks use only these names of a run.
Capabilities that a host may lack have a default here, and in `RunView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from hookline._words import nearest
from hookline.errors import HooklineError, cut
from hookline.record.metrics import REDUCTIONS
from hookline.run.rng import preserve_rng, restore_rng
from hookline.run.status import Stop
from hookline.run.view import RunView

if TYPE_CHECKING:
    from hookline.core.shared_part import SharedPart


@dataclass
class ModelCall:
    """A call of the model as a loop made it, to repeat it where nothing knows how the loss is computed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    """The dtype of the autocast that the call was made in, if it was."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Self:
        """Return the call that is being made."""
        is_on = torch.is_autocast_enabled(device.type)
        return cls(args, kwargs, torch.get_autocast_dtype(device.type) if is_on else None)

    def repeat(self, model: torch.nn.Module, device: torch.device) -> Any:
        """Call a model in the same way, and return its output."""
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            return model(*self.args, **self.kwargs)


class RunControl(RunView):
    """A run as hooks see it, log to it and control it: their argument `trainer`."""

    # ---- logging -----------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, step: int | None = None, reduce: str | None = "mean") -> None:
        """Record a number or a one-element tensor; never waits for the device or for other ranks.

        Args:
            name: The metric.
            value: Its value.
            step: The step it belongs to, if it is not the current one.
            reduce: How to combine the values of several ranks: 'mean', 'sum', 'max', 'min', or None for rank 0's own.
        """
        if reduce is not None and reduce not in REDUCTIONS:
            raise HooklineError(f"log({name!r}): reduce={reduce!r}; {nearest(str(reduce), REDUCTIONS)}, or None")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise HooklineError(f"log({name!r}): expected one number, got a tensor of shape {tuple(value.shape)}")
        self.record.log(self.progress.step if step is None else step, self.progress.epoch, name, value, reduce)

    def log_layers(
        self, series: str, names: Sequence[str], columns: Sequence[str], values: torch.Tensor, step: int | None = None
    ) -> None:
        """Record numbers per layer; never waits for the device.

        Args:
            series: The name of the series.
            names: The layers.
            columns: The statistics.
            values: The numbers, [names, columns] or [names, columns, bins].
            step: The step they belong to, if it is not the current one.
        """
        self.record.log_layers(series, self.progress.step if step is None else step, names, columns, values)

    def log_table(
        self,
        name: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        *,
        step: int | None = None,
        kind: str | None = None,
    ) -> None:
        """Record a table; with several ranks, only rank 0's is recorded.

        Args:
            name: Its name.
            columns: The titles of its columns.
            rows: The cells of each row: strings (cut after 1,000 characters), numbers, booleans or None, at most 10,000
                in all. A two-dimensional tensor or array is read directly, which waits for its device.
            step: The step it belongs to, if it is not the current one.
            kind: The kind of table, such as "confusion_matrix", for viewers that draw it differently.

        Raises:
            RecordError: If a row or a cell does not fit, or there are too many.
        """
        at = self.progress.step if step is None else step
        self.record.log_table(at, self.progress.epoch, name, columns, rows, kind)

    def log_image(self, name: str, image: Any, *, step: int | None = None) -> None:
        """Record an image; with several ranks, only rank 0's is recorded.

        A tensor on a device is copied without waiting for it, and encoded when the record is written.

        Args:
            name: Its name.
            image: A tensor or NumPy array [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 channels, of uint8 or of floats
                from 0 to 1; a PIL image; or a matplotlib figure. At most 4096 x 4096 pixels.
            step: The step it belongs to, if it is not the current one.

        Raises:
            RecordError: If it is not an image, or is too large.
        """
        self.record.log_image(self.progress.step if step is None else step, self.progress.epoch, name, image)

    def note(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Write a decision into events.jsonl, if a run is in progress; at the current step unless given."""
        if self.running:
            self.record.event(kind, self.progress.step if step is None else step, **fields)

    def share(self, part: SharedPart) -> None:
        """Contribute numbers of this rank, to be recorded with those of the other ranks at the next exchange.

        Call it at the same events on all ranks. In one process the numbers are used and recorded at once.
        """
        self.record.share(part)

    def means_of_ranks(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the ranks of numbers of the current step; with several, all must call it and wait."""
        window = self.accumulation
        weighted = {name: [window.weigh(value), window.rank_weight] for name, value in metrics.items()}
        added = {name: numbers.tolist() for name, numbers in self.ranks.add_up(weighted).items()}
        return {name: total / weight for name, (total, weight) in added.items() if weight}

    # ---- control -----------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group of the first optimizer; assigning scales every group by the same ratio."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        by = self.hooks.calling_hook()
        self.note("lr_changed", by=by, old=self.lr, new=value)
        self.agreement.note_assignment("lr", value, by)
        self.run_status.lr_changes += 1
        ratio = value / self.lr if self.lr else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = value if ratio is None else group["lr"] * ratio

    def request_stop(self, reason: str, by: str | None = None) -> None:
        """End the run cleanly once the current step is complete; the first reason counts.

        A stop that is requested in a validation takes effect after it, at the same boundary.
        """
        reason, by = cut(str(reason)), by or self.hooks.calling_hook()
        self.note("stop_requested", reason=reason, by=by)
        self.agreement.request_stop(Stop(reason, by, self.ranks.rank))
        self.request_boundary()

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested. Assigning True requests one, as in Lightning; `request_stop` takes a reason."""
        return bool(self.run_status.stops)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if not value:
            raise HooklineError("should_stop: a requested stop cannot be undone, so only True can be assigned")
        self.request_stop("should_stop was set")

    def request_boundary(self) -> None:
        """Check for requests after the current step. A signal handler calls this, so it only assigns."""
        self._next_boundary = 0

    def skip_step(self, reason: str) -> None:
        """Skip the optimizer step of the current window; for guards in the update chain.

        Raises:
            RankError: With several ranks, if the hook declares neither `may_skip` nor `same_on_all_ranks`.
        """
        self.agreement.request_skip(cut(str(reason)))

    def save(self, name: str | Callable[[], str] | None = None) -> None:
        """Write a checkpoint at the next step boundary, named after its step unless a name is given."""
        raise HooklineError(f"a run in {type(self).__name__} cannot save checkpoints")

    def validate(self) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""
        raise HooklineError(f"a run in {type(self).__name__} cannot validate by itself")

    @contextmanager
    def inference(self) -> Iterator[torch.nn.Module]:
        """Run the model from a hook in eval mode without grad; random streams are preserved, forward hooks are off.

        >>> with trainer.inference() as model:
        ...     model(batch)
        """
        allow, is_collective = self.hooks.collectives.allow, self.engine.forward_is_collective
        allowed = allow("inference() of a sharded model") if is_collective else nullcontext()
        with allowed, self.other_batches("inference"), self.hooks.silenced(), self.engine.autocast():
            yield self.engine.eval_model(self.model)

    @contextmanager
    def other_batches(self, phase: str) -> Iterator[None]:
        """Run batches other than the training batch, in eval mode; its arguments and random streams are preserved.

        Args:
            phase: The `phase` that hooks see inside the block.
        """
        with self.event_args.preserve_train_batch(phase), preserve_rng(), eval_mode(self.model):
            try:
                yield
            finally:
                self.engine.free_whole_weights(self.model)

    @contextmanager
    def rerunning(self, random_state: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
        """Run a batch again as in training, with the same weights and random streams, and leave no trace.

        Modules stay in their modes and the model runs eagerly, so that foreign hooks on any module fire; the run's own
        hooks do not. Buffers that the forward pass updates (running means) are restored afterwards.

        >>> with trainer.rerunning(state) as forward:
        ...     loss = forward(batch)  # with its graph; of a `ModelCall` the model's output

        Args:
            random_state: The random streams that every call starts from, as `random_state` returned them.
        """
        model = self.engine.eval_model(self.model)  # a wrapper would wait for other ranks, which do not run this batch
        compute = self.compute_again(model) if self.reruns_batches else None
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

        def forward(batch: Any) -> Any:
            restore_rng(random_state)
            with torch.enable_grad():
                if isinstance(batch, ModelCall):
                    return batch.repeat(model, self.device)
                assert compute is not None
                return compute(self.engine.place(batch))

        with self.event_args.preserve_train_batch("train"), preserve_rng(), self.hooks.silenced():
            try:
                yield forward
            finally:
                self.reruns += 1
                self.engine.free_whole_weights(model)
                with torch.no_grad():
                    for buffer, copy in buffers:
                        buffer.copy_(copy)

    def compute_again(self, model: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
        """Return the function that computes the loss of a batch with a model, for `rerunning`."""
        raise HooklineError(f"a run in {type(self).__name__} cannot run a batch again: it does not know the loss")


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into eval mode without grad; afterwards every module is in its previous mode, even frozen ones."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
