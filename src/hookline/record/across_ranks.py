"""The record of a run with several ranks: numbers are exchanged between the ranks before rank 0 writes them.

Until an exchange they stay with the rank that logged them, which may read them. An exchange takes one maximum and
one sum over the ranks for everything that was logged since the last one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from time import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.core.shared_part import SharedPart, Sizes
from hookline.ranks import Ranks, fingerprint
from hookline.record.metrics import REDUCTIONS, Entry, MetricBatch, metric_rows
from hookline.record.pending import Pending
from hookline.record.record import Record
from hookline.record.sinks import AddedSinks, Sink, SinkHandle

_NONE = float("-inf")  # the maximum of nothing
_Key = tuple[int, str, int]  # step, name, and the place among the metrics with this name in this step


class _Metric(NamedTuple):
    """What ranks tell each other about one logged number: everything but its value."""

    key: _Key
    epoch: int
    reduce: str
    time: float


class _Prepared(NamedTuple):
    """What is to be exchanged next."""

    logged: list[_Metric]  # describes the first of this rank's metrics
    parts: list[SharedPart]

    @property
    def metrics(self) -> list[_Metric]:
        """The metrics whose numbers are combined over the ranks."""
        return [metric for metric in self.logged if metric.reduce in REDUCTIONS]

    def fingerprint(self) -> int:
        shared = (f"{metric.key} {metric.reduce}" for metric in self.metrics)
        return fingerprint([*shared, *(f"{part.key} {part.sizes}" for part in self.parts)]) or 1


class SharedRecord(Record):
    """A record whose numbers are those of all ranks.

    Args:
        record: This rank's own one, which has not started; rank 0's writes the run's files.
        ranks: The ranks.
    """

    def __init__(self, record: Record, ranks: Ranks) -> None:
        super().__init__(record._storage, record._config, record._seed, record.run_id)
        self._secrets = record._secrets  # Its config no longer has the secrets that must be removed from strings.
        self._ranks = ranks
        self._is_first = ranks.rank == 0
        # The reduction of each metric, by name; "mean" for all others.
        self._reductions: dict[str, str | None] = {"resumed": None}
        self._own_sinks = AddedSinks()
        self._pending_metrics = deque()
        # This rank's metrics on the host that have not been exchanged; values that are still tensors were lost with
        # their device.
        self._arrived: list[Entry] = []
        self._parts: list[SharedPart] = []
        self._prepared: _Prepared | None = None

    def reduce_as(self, reductions: Mapping[str, str | None]) -> None:
        """Say how the ranks' numbers of some metrics are combined."""
        self._reductions.update(reductions)

    def log(self, step: int, epoch: int, name: str, value: Any, reduce: str | None = "mean") -> None:
        """Record a number; `reduce` says how to combine the ranks' numbers; None takes rank 0's."""
        if reduce != "mean" or name in self._reductions:
            self._reductions[name] = reduce
        if reduce is not None or self._is_first:
            super().log(step, epoch, name, value)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Record many values; other ranks do not keep the ones that only rank 0 records."""
        of_all = (entry for entry in entries if self._reductions.get(entry[2], "mean") is not None)
        super().extend(entries if self._is_first else of_all)

    def share(self, part: SharedPart) -> None:
        """Contribute numbers to the next exchange."""
        self._parts.append(part)

    def add_own_sink(self, sink: Sink) -> SinkHandle:
        """Pass this rank's metrics to a sink once they are on the host, before the exchange."""
        return self._own_sinks.add(sink)

    def flush(self, *, wait: bool = False) -> None:
        """Exchange and write everything if `wait`, which all ranks must do at the same point.

        Otherwise write what needs no exchange, and pass events to the sinks and this rank's metrics to its own ones. If
        the record is being closed, no exchange will follow, and rank 0 writes its own numbers.
        """
        if wait:
            self.exchange(self._ranks.all_equal(self.prepare()))
        else:
            self._copy_entries()
            self._read(self._pending_metrics, wait=False)
            if self._closed:
                self._write_own()
        self._read(self._pending, wait)
        self._deliver()

    def prepare(self) -> int:
        """Take what was logged so far for the next exchange, and return a fingerprint of what it is, never 0."""
        self._copy_entries()
        batches = [batch for batch in self._pending_metrics if isinstance(batch, MetricBatch)]
        entries = [*self._arrived, *(entry for batch in batches for entry in batch.entries)]
        before = [] if self._prepared is None else self._prepared.parts
        # Described now: until the exchange, a hook on one rank may log one of the names with another reduction.
        self._prepared, self._parts = _Prepared(self._describe(entries), [*before, *self._parts]), []
        return self._prepared.fingerprint()

    def exchange(self, names_agree: bool) -> None:
        """Combine what all ranks have prepared; rank 0 writes it.

        Args:
            names_agree: Whether all ranks have prepared numbers with the same names.
        """
        if self._prepared is None:  # a flush has exchanged it already, on all ranks
            return
        prepared, self._prepared = self._prepared, None
        count = len(prepared.logged)
        while len(self._arrived) < count and self._read_first(self._pending_metrics, wait=True):
            pass
        self._read(self._pending_metrics, wait=False)
        read = zip(prepared.logged, self._arrived, strict=False)  # more may have arrived since
        values = {metric.key: entry[3] for metric, entry in read if not isinstance(entry[3], Tensor)}
        metrics, sizes = prepared.metrics, {part.key: part.sizes for part in prepared.parts}
        if not names_agree:
            metrics, sizes = self._union(metrics, sizes)
        by_key = {part.key: part for part in prepared.parts}
        of_parts = [_PartOfAll(by_key[key], names) for key, names in sizes.items()]
        merged = self._merge([_MetricsOfAll(prepared.logged, metrics, values), *of_parts])
        del self._arrived[:count]  # not earlier: if another rank fails in the meantime, closing the record writes them
        if self._is_first:
            self._write("metrics", metric_rows(merged))
            self._read(self._pending, wait=False)
        self._deliver()

    def _receive(self, batch: Pending, rows: list[Any]) -> None:
        """Keep this rank's metrics for the next exchange, and pass them to its own sinks; write everything else."""
        if isinstance(batch, MetricBatch):
            self._arrived += batch.entries
            self._own_sinks.put("metrics", rows)
        else:
            super()._receive(batch, rows)

    def _deliver(self) -> None:
        """Pass rows that have arrived to this rank's own sinks, and rows that were written to the others."""
        self._own_sinks.deliver(self._report_sink)
        self._sinks.deliver(self._report_sink)

    def _write_own(self) -> None:
        """Write the metrics of this rank as they are, if it is rank 0."""
        entries, self._arrived = self._arrived, []
        if self._is_first:
            self._write("metrics", metric_rows(entry for entry in entries if not isinstance(entry[3], Tensor)))

    def _merge(self, shared: Sequence[_MetricsOfAll | _PartOfAll]) -> list[Entry]:
        """Take one maximum and one sum over the ranks for everything, and return the result."""
        own_maxima = [part.maxima() for part in shared]
        lengths = [*map(len, own_maxima)]

        def sums(maxima: Tensor) -> Tensor:
            of_each = zip(shared, torch.split(maxima, lengths), strict=True)
            return torch.cat([part.sums(highest) for part, highest in of_each])

        maxima, totals = self._ranks.exchange(torch.cat(own_maxima), sums)
        if self._closed:  # these were the run's last numbers
            self._ranks.stop_watching()
        of_each = zip(torch.split(maxima, lengths), torch.split(totals, [part.count for part in shared]), strict=True)
        return [entry for part, numbers in zip(shared, of_each, strict=True) for entry in part.finish(*numbers)]

    def _describe(self, entries: Sequence[Entry]) -> list[_Metric]:
        numbers: Counter[tuple[int, str]] = Counter()
        described = []
        for step, epoch, name, _, logged_at in entries:
            numbers[step, name] += 1
            reduce = self._reductions.get(name, "mean") or "first"
            described.append(_Metric((step, name, numbers[step, name]), epoch, reduce, logged_at))
        return described

    def _union(self, metrics: list[_Metric], sizes: dict[str, Sizes]) -> tuple[list[_Metric], dict[str, Sizes]]:
        """Return the metrics that any rank has, and the parts that all have, with their names.

        They are in the order of the lowest rank that has them, and a metric is reduced as that rank says.
        """
        all_metrics: dict[_Key, _Metric] = {}
        all_sizes: dict[str, dict[str, tuple[int, int]]] = {}
        having: Counter[str] = Counter()  # by part: the ranks that have it
        gathered = self._ranks.gather([metrics, sizes])
        for listed, parts in gathered:
            for metric in (_Metric(*fields) for fields in listed):
                all_metrics.setdefault(metric.key, metric)
            having.update(list(parts))
            for key, names in parts.items():
                known = all_sizes.setdefault(key, {})
                for name, (highest, added) in names.items():
                    known.setdefault(name, (highest, added))
        everywhere: dict[str, Sizes] = {key: names for key, names in all_sizes.items() if having[key] == len(gathered)}
        return list(all_metrics.values()), everywhere


class _MetricsOfAll:
    """The metrics in an exchange: for each a maximum, or a sum and the number of ranks that have it.

    Args:
        logged: The entries that this rank has logged.
        metrics: The metrics that any rank has, which are combined.
        values: The values of this rank.
    """

    def __init__(self, logged: Sequence[_Metric], metrics: Sequence[_Metric], values: Mapping[_Key, Any]) -> None:
        self._all = {metric.key: metric for metric in (*logged, *metrics)}
        self._peaks = [metric for metric in metrics if metric.reduce in ("max", "min")]
        self._added = [metric for metric in metrics if metric.reduce in ("mean", "sum")]
        self._own = values
        self.count = 2 * len(self._added)

    def maxima(self) -> Tensor:
        rows = [
            _sign(metric) * _as_float(self._own[metric.key]) if metric.key in self._own else _NONE
            for metric in self._peaks
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def sums(self, maxima: Tensor) -> Tensor:
        rows = [[_as_float(self._own.get(metric.key, 0.0)), metric.key in self._own] for metric in self._added]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1)

    def finish(self, maxima: Tensor, sums: Tensor) -> list[Entry]:
        values = dict(self._own)
        for metric, peak in zip(self._peaks, maxima.tolist(), strict=True):
            values[metric.key] = _sign(metric) * peak
        for metric, (total, count) in zip(self._added, sums.reshape(-1, 2).tolist(), strict=True):
            values[metric.key] = total if metric.reduce == "sum" or not count else total / count
        for metric in (*self._peaks, *self._added):
            is_integer = type(self._own.get(metric.key)) is int and metric.reduce != "mean"
            if is_integer and math.isfinite(values[metric.key]):  # another rank's number may be NaN
                values[metric.key] = round(values[metric.key])
        known = ((*metric.key[:2], metric) for metric in self._all.values() if metric.key in values)
        return [(step, metric.epoch, name, values[metric.key], metric.time) for step, name, metric in known]


def _as_float(value: Any) -> float:
    """Return a number as a float; an integer that is too large for one becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _sign(metric: _Metric) -> int:
    """Return the factor of a metric where maxima are taken: a minimum is the maximum of the negated values."""
    return -1 if metric.reduce == "min" else 1


class _PartOfAll:
    """A part in an exchange, whose names are those of all ranks.

    Args:
        part: The numbers that this rank has added.
        sizes: The names that any rank has.
    """

    def __init__(self, part: SharedPart, sizes: Sizes) -> None:
        self._part, self._sizes = part, sizes
        self._is_whole = list(part.sizes.items()) == list(sizes.items())
        self.count = sum(count for _, count in sizes.values())

    def maxima(self) -> Tensor:
        return self._spread(self._part.maxima(), 0, _NONE)

    def sums(self, maxima: Tensor) -> Tensor:
        if not self._is_whole:
            by_name = self._split(maxima, self._sizes, 0)
            maxima = torch.cat([by_name[name] for name in self._part.sizes] or [maxima[:0]])
        return self._spread(self._part.sums(maxima), 1, 0.0)

    def finish(self, maxima: Tensor, sums: Tensor) -> list[Entry]:
        part, now = self._part, time()
        values = part.finish(self._sizes, maxima, sums)
        return [(part.step, part.epoch, name, value, now) for name, value in values.items()]

    def _spread(self, values: Tensor, which: int, absent: float) -> Tensor:
        """Return this rank's numbers in the order of all names, with `absent` for names that it does not have."""
        if self._is_whole:
            return values
        by_name = self._split(values, self._part.sizes, which)
        none = torch.tensor([absent], dtype=torch.float64)
        parts = [by_name.get(name, none.expand(size[which])) for name, size in self._sizes.items()]
        return torch.cat(parts or [none[:0]])

    @staticmethod
    def _split(values: Tensor, sizes: Sizes, which: int) -> dict[str, Tensor]:
        return dict(zip(sizes, torch.split(values, [size[which] for size in sizes.values()]), strict=True))
