"""Measure where each rank spends its steps, and report a rank that is persistently slower than the others.

All ranks finish a step at the same time, because they wait for each other in its collectives. So the slowest rank is
not the one with the longest steps, but the one that spends the most time outside of collectives: reading data, in the
forward pass under DDP, in its hooks, and in the optimizer. The rank that arrives last has the shortest backward pass,
because the others spend the rest of theirs waiting. Under FSDP2 this is true of the forward pass, too. Times are host
times, and nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline._console import logger
from hookline.core.shared_part import SharedPart, Sizes

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

IN_A_ROW = 5  # A rank is reported once it was the slowest in this many exchanges.
SLOWER = 0.2  # How much slower than the mean of the others it must be, as a share of that mean.
OF_STEP = 0.05  # The smallest difference that matters, as a share of the duration of a step.


class RankTimes:
    """The host times of this rank since the last exchange, and which rank was the slowest in the exchanges so far."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._mark: float | None = None  # when what is being measured began; None between two steps
        self._in_backward = False
        self._in_a_row = (-1, 0)  # the rank that was slower, and in how many exchanges
        self._has_warned = False
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self.data = self.forward = self.backward = 0.0
        self.other = 0.0  # Everything else: hooks, the optimizer, and backward passes that reduce nothing.

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def measure(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the forward pass with a clock around it."""

        def timed(batch: Any) -> Any:
            if self._mark is None:  # a step made by hand, whose batch was not read from a loader
                return compute(batch)
            began = perf_counter()
            self.other += began - self._mark
            result = compute(batch)
            self._mark, self._in_backward = perf_counter(), True
            self.forward += self._mark - began
            return result

        return timed

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return batches with a clock around the reading of each."""
        try:
            began = perf_counter()
            for batch in batches:
                now = perf_counter()
                if self._mark is not None:
                    self.other += began - self._mark
                self._mark, self._in_backward = now, False
                self.data += now - began
                yield batch
                began = perf_counter()
        finally:
            self.end_step()
            del batches  # the traceback of a failure must not keep the workers of a DataLoader

    def end_backward(self) -> None:
        """Note that the gradients of a step are complete, and count the step."""
        if self._mark is not None and self._in_backward:
            now = perf_counter()
            self.backward += now - self._mark
            self._mark, self._in_backward = now, False
            self.steps += 1

    def end_step(self) -> None:
        """Stop the clock until the next batch, because what comes next is not part of a step."""
        if self._mark is not None:
            self.other += perf_counter() - self._mark
            self._mark = None

    # ---- exchanging --------------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Contribute the times since the last exchange. All ranks have taken the same steps."""
        if not self.steps:
            return
        trainer, model, ranks = self._trainer, self._trainer.model, self._trainer.ranks
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        forward_waits = not is_ddp or next(model.buffers(), None) is not None  # DDP broadcasts buffers in it
        totals = (self.data, self.other, self.forward, self.backward)
        data, other, forward, backward = (seconds / self.steps for seconds in totals)
        busy, step = data + other + (0.0 if forward_waits else forward), trainer.progress.step
        self._reset()

        def maxima() -> Tensor:
            """Return the time outside of collectives, and negated those of forward and backward: the shortest count."""
            return torch.tensor([busy, -forward, -backward], dtype=torch.float64)

        def sums(maxima: Tensor) -> Tensor:
            """Return the times to be averaged, and all times of this rank if it is the slowest."""
            slowest, least_forward, least_backward = maxima.tolist()
            waiting = backward + least_backward + (forward + least_forward if forward_waits else 0.0)
            working = other + forward + backward - waiting
            numbers = [1.0, ranks.rank, data, working, waiting, busy] if busy >= slowest else [0.0] * 6
            return torch.tensor([busy, waiting, *numbers], dtype=torch.float64)

        def finish(sizes: Sizes, maxima: Tensor, sums: Tensor) -> Mapping[str, float]:
            """Return the times of the slowest rank, and how long the ranks wait on average."""
            all_busy, all_waiting, count, rank, data, working, waiting, busy = sums.tolist()
            if count != 1:  # two ranks were equally slow, to the last bit
                return {}
            others = (all_busy - busy) / (ranks.world_size - 1)
            self.judge(step, int(rank), busy, others, data + working + waiting)
            return {
                "ranks/slowest": int(rank),
                "ranks/slowest_data_seconds": data,
                "ranks/slowest_forward_backward_seconds": working,
                "ranks/slowest_waiting_seconds": waiting,
                "ranks/mean_waiting_seconds": all_waiting / ranks.world_size,
            }

        trainer.record.share(SharedPart("times", step, trainer.progress.epoch, {"times": (3, 8)}, finish, maxima, sums))

    def judge(self, step: int, rank: int, busy: float, others: float, step_seconds: float) -> None:
        """Warn, once, about a rank that was slower than the others in several exchanges in a row.

        Args:
            step: The step of the exchange.
            rank: The slowest rank.
            busy: The seconds per step that it spends outside of collectives.
            others: The mean of these seconds over the other ranks.
            step_seconds: The duration of a step.
        """
        is_slower = busy > (1 + SLOWER) * others and busy - others > OF_STEP * step_seconds
        before, count = self._in_a_row
        self._in_a_row = (rank, count + 1 if rank == before else 1) if is_slower else (-1, 0)
        if self._in_a_row[1] >= IN_A_ROW and not self._has_warned:
            self._has_warned = True
            words = "rank %d is slower than the others: %.3g s per step outside of collectives; they take %.3g s"
            logger.warning(words + " and wait for it; see ranks/… in metrics.jsonl", rank, busy, others)
            if self._trainer.ranks.rank == 0:
                self._trainer.note("slow_rank", step, slow_rank=rank, seconds=busy, others=others)
