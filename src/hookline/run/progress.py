"""`Progress`: how far a run has come; checkpoints save it, and schedules read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any

from hookline.errors import CheckpointError, shown


class Progress:
    """How far the run is. It is also the clock that schedules read."""

    SAVED = (
        "step", "steps_done", "epoch", "epoch_over", "batch_idx", "batches_before", "tokens_seen", "loader_batches",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step = 0  # optimizer steps begun
        self.steps_done = 0  # optimizer steps completed
        self.epoch = 0
        self.epoch_over = False  # the epoch has no further batch, and the next epoch has not begun
        self.batch_idx = -1  # micro-batches of this epoch, from 0
        self.batches_before = 0  # micro-batches of earlier epochs
        self.tokens_seen = 0  # by this rank
        self.loader_batches: dict[str, int] = {}  # micro-batches of each training loader, if there are several
        self.dataloader_idx, self.dataloader_name = 0, "train"
        self.position: dict[str, Any] | None = None  # where the loaders were, inside an epoch that has begun
        self._loader_names: list[str] = []
        self._seconds_before = 0.0  # The duration of earlier attempts.
        self._started = monotonic()
        self._agreed_seconds: float | None = None  # with several ranks
        self._agreed_tokens = 0

    # ---- the clock that schedules read -----------------------------------------------------------------------------

    # Other names of the same counters; with attrgetter, reading one costs no Python call.
    steps = property(attrgetter("step"))
    loader = property(attrgetter("dataloader_name"))

    @property
    def tokens(self) -> int:
        """Tokens of all ranks, as of their last agreement."""
        return self._agreed_tokens if self._agreed_seconds is not None else self.tokens_seen

    @property
    def batches(self) -> int:
        """Micro-batches of the run."""
        return self.batches_before + self.batch_idx + 1

    @property
    def epochs(self) -> int:
        """The number of epochs that have begun."""
        return self.epoch + 1

    @property
    def epochs_done(self) -> int:
        """Epochs that are over."""
        return self.epoch + self.epoch_over

    @property
    def seconds(self) -> float:
        """The duration of the run, including earlier attempts; rank 0's duration, as of the last agreement."""
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

    def begin_run(self, position: dict[str, Any] | None = None) -> None:
        """Start the clock of another run, at a position in the data; a step that was not completed does not count."""
        self._started, self._agreed_seconds = monotonic(), None
        self.position, self.step = position, self.steps_done

    def set_agreed(self, seconds: float | None = None, tokens: int | None = None) -> None:
        """Set the clock and the tokens that the ranks have agreed on, for schedules; by default the saved ones."""
        self._agreed_seconds = self._seconds_before if seconds is None else seconds
        self._agreed_tokens = self._agreed_tokens if tokens is None else tokens

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
        if len(self._loader_names) != 1:  # a user's own loop has named none
            # A new dict each time: a checkpoint that is still being written may hold the old one.
            self.loader_batches = {**self.loader_batches, name: self.loader_batches.get(name, 0) + 1}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; after a failure in the middle of a step, without that step."""
        counters = {name: getattr(self, name) for name in self.SAVED}
        return {**counters, "step": self.steps_done, "tokens_seen": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any], position: dict[str, Any] | None) -> None:
        """Restore the counters and the position in the data. Raises `CheckpointError` if one is not a counter."""
        is_of: dict[str, Any] = {"epoch_over": bool, "loader_batches": dict, "seconds": (int, float)}
        for name in (*self.SAVED, "seconds"):
            if not isinstance(state[name], is_of.get(name, int)):
                raise CheckpointError(
                    f"the checkpoint's progress has {name} {shown(state[name])}; use another checkpoint"
                )
        for name in self.SAVED:
            setattr(self, name, state[name])
        self._seconds_before, self.position = state["seconds"], position
        self._agreed_tokens = state["tokens_seen"]
