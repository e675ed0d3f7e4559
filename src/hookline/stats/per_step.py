"""From tensors while a model runs to one row per key and step on the host, a flush later."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.stats.bundle import Bundle, Tied
from hookline.stats.collector import Collector, Measure
from hookline.stats.columns import COUNT
from hookline.stats.flush import Arrival, Flush
from hookline.stats.statistics import summarize
from hookline.stats.wide_rows import merge_rows

MOST_GATHERED = 4096  # tensors; small ones cost more in bookkeeping than in memory


class StepRows(NamedTuple):
    """The rows of one step on the host, one for each key."""

    step: int
    keys: list[Hashable]
    rows: Tensor


class PerStep:
    """Gathers tensors and gives the rows of each step once it is complete; no call waits for the device but `drain`.

    Whatever a key was added with during a step (a module that runs several times, several micro-batches) is merged into
    one row. Step 0 stands for no step at all: there, every tensor keeps a row of its own.
    """

    def __init__(self, measure: Measure = summarize) -> None:
        self._measure = measure
        self._collectors: dict[torch.device, Collector] = {}
        self._flush = Flush()
        self._bundle = Bundle()  # of rows that others make
        self._open: list[Arrival] = []  # of the step that may not be complete
        self._step = self._ended = self._gathered = 0

    def add(self, key: Hashable, tensor: Tensor, step: int) -> None:
        """Gather one tensor of a step."""
        if step != self._step:
            self._go_to(step)
        collector = self._collectors.get(tensor.device)
        if collector is None:
            collector = self._collectors[tensor.device] = Collector(measure=self._measure)
        collector.add(key, tensor)
        self._gathered += 1
        if self._gathered >= MOST_GATHERED:
            self.send()

    def add_rows(self, keys: Sequence[Hashable], rows: Tensor, step: int) -> None:
        """Take rows that others made on the device; one whose count is NaN is none.

        They cross to the host with those of the next steps, unless tensors are gathered, too.
        """
        if step != self._step:
            self._go_to(step)
        if self._bundle.add(step, keys, rows):
            self._send_bundle()

    def send(self) -> None:
        """Read what was gathered, before somebody frees it, and start the copy to the host."""
        self._gathered = 0
        for collector in self._collectors.values():
            if len(collector):
                keys, rows = collector.finish()
                if keys:  # none where all were overwritten in place
                    self._send_bundle()  # first: steps arrive in their order
                    self._flush.send(self._step, keys, rows)

    def end_step(self, step: int) -> None:
        """Nothing more comes for this step."""
        self.send()
        self._ended = step

    def ready(self) -> Iterator[StepRows]:
        """The complete steps that have arrived, oldest first; never waits."""
        yield from self._complete(self._flush.ready())

    def drain(self) -> Iterator[StepRows]:
        """The complete steps, oldest first; waits for what is still on its way."""
        self.send()
        self._send_bundle()
        yield from self._complete(self._flush.drain())

    def incomplete(self) -> StepRows | None:
        """What has arrived of the step that is under way."""
        return _merged(self._open) if self._open else None

    def discard(self) -> None:
        """Forget what was gathered and not yet read."""
        for collector in self._collectors.values():
            collector.discard()

    def _go_to(self, step: int) -> None:
        self.send()
        self._step = step
        if 0 < step <= self._ended:  # the run went back to an earlier step
            self._ended = step - 1

    def _send_bundle(self) -> None:
        if len(self._bundle):
            tied, rows = self._bundle.tie_up()
            self._flush.send(tied[0].step, tied, rows)

    def _complete(self, arrivals: Iterator[Arrival]) -> Iterator[StepRows]:
        for arrival in _of_single_steps(arrivals):
            if self._open and arrival.step != self._open[0].step:
                yield self._close()
            self._open.append(arrival)
        if self._open and not len(self._flush) and self._is_over(self._open[0].step):
            yield self._close()

    def _is_over(self, step: int) -> bool:
        return step <= self._ended and not self._bundle.has_of(step)

    def _close(self) -> StepRows:
        arrivals, self._open = self._open, []
        return _merged(arrivals)


def _of_single_steps(arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """The same with bundles untied, and without rows that are none."""
    for arrival in arrivals:
        if not isinstance(arrival.keys, Tied):
            yield arrival
        else:
            parts = map(Arrival._make, arrival.keys.apart(arrival.rows))
            yield from filter(None, map(_measured, parts)) if arrival.rows[:, COUNT].isnan().any() else parts


def _measured(arrival: Arrival) -> Arrival | None:
    """The arrival without rows that are none."""
    kept = (~arrival.rows[:, COUNT].isnan()).nonzero().flatten().tolist()
    return Arrival(arrival.step, [arrival.keys[place] for place in kept], arrival.rows[kept]) if kept else None


def _merged(arrivals: Sequence[Arrival]) -> StepRows:
    step = arrivals[0].step
    keys = [key for arrival in arrivals for key in arrival.keys]
    rows = torch.cat([arrival.rows for arrival in arrivals]) if len(arrivals) > 1 else arrivals[0].rows
    return StepRows(step, *one_row_each(keys, rows)) if step else StepRows(step, keys, rows)


def one_row_each(keys: list[Hashable], rows: Tensor) -> tuple[list[Hashable], Tensor]:
    """The same with the rows of equal keys merged, in the order of first appearance."""
    if len(set(keys)) == len(keys):
        return keys, rows
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    calls: dict[Hashable, int] = {}
    nth: list[int] = []
    for key in keys:
        nth.append(calls.get(key, 0))
        calls[key] = nth[-1] + 1
    parts = rows.new_zeros((max(nth) + 1, len(places), rows.shape[1]))
    parts[nth, [places[key] for key in keys]] = rows
    return list(places), merge_rows(parts)
