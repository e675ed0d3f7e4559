"""The state of a run: `Progress`, which checkpoints save, and `RunStatus`, which says whether and how the run ends.

Only the loop advances `Progress` directly, because a call per counter would cost it 1 to 2 µs each. Every other part
of the trainer changes both objects by their methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import monotonic
from typing import Any, Literal, NamedTuple

from hookline.ranks import OneProcess

SIGNAL = "signal"
Count = Literal["skipped_steps", "non_finite_losses", "failed_saves", "lr_changes", "hook_failures"]


class Progress:
    """How far the run is. It is also the clock that schedules read."""

    SAVED = (
        "step", "steps_done", "epoch", "epoch_over", "batch_idx", "batches_before", "tokens_seen", "loader_batches",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step = 0  # optimizer steps begun
        self.steps_done = 0  # optimizer steps completed
        self.epoch = 0
        self.epoch_over = False  # on_epoch_end has fired and the next epoch has not begun
        self.batch_idx = -1  # micro-batches of this epoch, from 0
        self.batches_before = 0  # micro-batches of earlier epochs
        self.tokens_seen = 0  # by this rank
        self.ranks = OneProcess()
        self.loader_batches: dict[str, int] = {}  # micro-batches of each training loader, if there are several
        self.dataloader_idx, self.dataloader_name = 0, "train"
        self.position: dict[str, Any] | None = None  # where the loaders were, inside an epoch that has begun
        self._loader_names: list[str] = []
        self._seconds_before = 0.0  # of earlier attempts
        self._started = monotonic()
        self._agreed_seconds: float | None = None  # with several ranks
        self._agreed_tokens = 0

    # ---- the clock that schedules read -----------------------------------------------------------------------------

    # Other names of the same counters; made of attrgetter, reading one costs no Python call.
    steps = property(attrgetter("step"))
    loader = property(attrgetter("dataloader_name"))

    @property
    def tokens(self) -> int:
        """Tokens of all ranks, as far as they have agreed."""
        return self._agreed_tokens if self._agreed_seconds is not None else self.tokens_seen

    @property
    def batches(self) -> int:
        """Micro-batches of the run."""
        return self.batches_before + self.batch_idx + 1

    @property
    def epochs(self) -> int:
        """Epochs begun."""
        return self.epoch + 1

    @property
    def seconds(self) -> float:
        """The duration of the run, earlier attempts included; that of rank 0, as it was when ranks last agreed."""
        return self.own_seconds if self._agreed_seconds is None else self._agreed_seconds

    @property
    def own_seconds(self) -> float:
        """The duration of the run by this process's clock."""
        return self._seconds_before + monotonic() - self._started

    @property
    def by_loader(self) -> dict[str, int]:
        """Micro-batches of each training loader."""
        return {self._loader_names[0]: self.batches} if len(self._loader_names) == 1 else self.loader_batches

    # ---- changes -----------------------------------------------------------------------------------------------------

    def set_loaders(self, names: Sequence[str]) -> None:
        """Set the names of the training loaders."""
        self._loader_names = list(names)

    def begin_run(self, position: dict[str, Any] | None) -> None:
        """Start the clock of another run, at a position in the data; a step that was not completed does not count."""
        self._started, self._agreed_seconds = monotonic(), self._seconds_before if self.ranks.act_together else None
        self.position, self.step = position, self.steps_done

    def set_agreed(self, seconds: float, tokens: int) -> None:
        """Set the clock and the tokens that all ranks have agreed on; schedules read these."""
        self._agreed_seconds, self._agreed_tokens = seconds, tokens

    def begin_epoch(self) -> None:
        """Start an epoch: the next one, if one has ended."""
        self.epoch += self.epoch_over
        self.batches_before += self.batch_idx + 1
        self.batch_idx, self.epoch_over = -1, False

    def end_epoch(self) -> None:
        """End the epoch; the position is now the start of the next one."""
        self.epoch_over, self.position = True, None

    def enter_loader(self, index: int, name: str) -> None:
        """Note the loader that the next batch comes from, and count the batch if there are several loaders."""
        self.dataloader_idx, self.dataloader_name = index, name
        if len(self._loader_names) > 1:
            # A new dict each time: a checkpoint that is still being written may hold the old one.
            self.loader_batches = {**self.loader_batches, name: self.loader_batches.get(name, 0) + 1}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; after a failure in the middle of a step, without that step."""
        counters = {name: getattr(self, name) for name in self.SAVED}
        return {**counters, "step": self.steps_done, "tokens_seen": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any], position: dict[str, Any] | None) -> None:
        """Restore the counters and the position in the data."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        self._seconds_before, self.position = state["seconds"], position
        self._agreed_tokens = state["tokens_seen"]
        if self.ranks.act_together:  # schedules must be due at the same steps on all of them
            self._agreed_seconds = state["seconds"]
        if self.ranks.rank:  # rank 0 counts what all ranks had counted
            self.tokens_seen = 0


class Stop(NamedTuple):
    """A request to end the run, and the hook that made it; `SIGNAL` stands in place of a hook's name."""

    reason: str
    by: str | None
    rank: int = 0


class RunStatus:
    """Whether the run is in progress, how it ends, and what went wrong in it."""

    SAVED = ("skipped_steps", "non_finite_losses")

    def __init__(self) -> None:
        self.status = "training"
        self.running = False
        self.run_ended = False  # a run has ended and nothing has begun since
        self.stops: list[Stop] = []  # those that were requested, in their order
        self.failed_on_ranks: dict[str, list[int]] = {}  # the hooks that have failed on other ranks; known at the end
        self.loaded_stop: Mapping[str, Any] | None = None  # the stop that the loaded checkpoint was saved with
        self.skipped_steps = self.non_finite_losses = self.failed_saves = self.lr_changes = self.hook_failures = 0
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Begin a run."""
        self.running, self.run_ended, self.status = True, False, "training"
        self.stops, self.loaded_stop, self.failed_on_ranks = [], None, {}

    def close(self, failed: bool) -> None:
        """Note that the last step is done, or that an exception ends the run; the closing events come next."""
        self.status = "error" if failed else "completed"

    def end(self) -> None:
        """End the run, after its last event."""
        self.running, self.run_ended = False, True

    @contextmanager
    def manual_step(self) -> Iterator[None]:
        """Count as running during a step outside of a run: its events must not start another one."""
        self.running, self.run_ended = True, False
        try:
            yield
        finally:
            self.running = False

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops; the first reason counts."""
        return self.stops[0].reason if self.stops else None

    @property
    def stopped_by(self) -> str | None:
        """The hook that asked for it, or `SIGNAL`."""
        return self.stops[0].by if self.stops else None

    @property
    def signal(self) -> str | None:
        """The name of the signal that ends the run on all ranks, if one does."""
        return next((stop.reason for stop in self.stops if stop.by == SIGNAL), None)

    @property
    def lasting_stop(self) -> Stop | None:
        """The stop that ends the run: a signal ends only this attempt."""
        return next((stop for stop in self.stops if stop.by != SIGNAL), None)

    def count(self, what: Count, more: int = 1) -> None:
        """Count one more, or several."""
        setattr(self, what, getattr(self, what) + more)

    def first_time(self, what: str) -> bool:
        """Return True the first time something is to be reported."""
        is_first = what not in self._reported
        self._reported.add(what)
        return is_first

    def state_dict(self) -> dict[str, Any]:
        """Return the counts that checkpoints save."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts; a saved stop is stored, and stops nothing yet."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        self.loaded_stop = state.get("stop")  # checkpoints of earlier versions have none
