"""The record of a run on several ranks: numbers are exchanged between the ranks before rank 0 writes them.

Until an exchange they stay with the rank that logged them. An exchange takes one maximum and one sum over the ranks for
everything that was logged since the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.ranks import OneProcess, all_equal, fingerprint
from hookline.record.metrics import REDUCTIONS, Entry, MetricBatch, metric_rows
from hookline.record.record import Record, SharedPart
from hookline.record.sinks import FileStorage, MemoryStorage, RankStorage

_NONE = float("-inf")  # the maximum of nothing


class _Metric(NamedTuple):
    """One logged number, as ranks tell each other of it: everything but its value."""

    step: int
    epoch: int
    name: str
    number: int  # of those with this name in this step
    reduce: str
    time: float

    @property
    def key(self) -> tuple[int, str, int]:
        return self.step, self.name, self.number


class SharedRecord(Record):
    """A record whose numbers are those of all ranks.

    Args:
        storage: Where this rank writes: the run's files for rank 0.
        config: The run's resolved config.
        seed: The run's seed.
        run_id: The run's id.
        ranks: The ranks.
    """

    def __init__(
        self,
        storage: FileStorage | RankStorage | MemoryStorage,
        config: Mapping[str, Any] | None,
        seed: int | None,
        run_id: str,
        ranks: OneProcess,
    ) -> None:
        super().__init__(storage, config, seed, run_id)
        self._ranks = ranks
        self._reductions: dict[str, str | None] = {}  # by the name of a metric; "mean" if it is not among them
        self._parts: list[SharedPart] = []
        self._prepared: tuple[MetricBatch, list[SharedPart]] | None = None

    @classmethod
    def of(cls, record: Record, ranks: OneProcess) -> SharedRecord:
        """Make the shared record of a rank's own one, which has not started."""
        return cls(record._storage, record._config, record._seed, record.run_id, ranks)

    def reduce_as(self, reductions: Mapping[str, str | None]) -> None:
        """Say how the ranks' numbers of some metrics become one."""
        self._reductions.update(reductions)

    def log(self, step: int, epoch: int, name: str, value: Any, reduce: str | None = "mean") -> None:
        """Record a number; `reduce` says how the ranks' numbers become one: None takes that of rank 0."""
        if reduce != "mean" or name in self._reductions:
            self._reductions[name] = reduce
        super().log(step, epoch, name, value)

    def share(self, part: SharedPart) -> None:
        """Hand in numbers for the next exchange."""
        self._parts.append(part)

    def flush(self, *, wait: bool = False) -> None:
        """Exchange and write everything if `wait`, which all ranks must do at the same point; else do nothing."""
        if wait:
            mark = self.prepare()
            self.exchange(all_equal(self._ranks.total([mark, mark * mark]), self._ranks.world_size))
            super().flush(wait=True)

    def prepare(self) -> int:
        """Take what was logged so far for the next exchange, and return a fingerprint of what it is, never 0."""
        entries, parts = [], self._parts
        if self._prepared is not None:
            entries, parts = self._prepared[0].entries, [*self._prepared[1], *parts]
        count = len(self._entries)
        self._prepared, self._parts = (MetricBatch([*entries, *self._entries[:count]]), parts), []
        del self._entries[:count]
        metrics = (str(one.key) for one in self._described(self._prepared[0].entries))
        return fingerprint([*metrics, *(f"{part.key} {part.sizes}" for part in parts)]) or 1

    def exchange(self, names_agree: bool) -> None:
        """Bring what was prepared together; rank 0 writes it.

        Args:
            names_agree: Whether all ranks have prepared numbers with the same names.
        """
        if self._prepared is None:  # a flush has exchanged it already, on all ranks
            return
        (batch, parts), self._prepared = self._prepared, None
        entries = batch.read()
        if batch.lost:
            self._storage.report_loss(batch.lost[0], len(batch.lost))
        own = {one.key: (one, entry[3]) for one, entry in zip(self._described(entries), entries, strict=True)}
        listed = [(part.key, part.sizes) for part in parts]
        metrics = [one for one, _ in own.values()]
        if not names_agree:
            metrics, listed = self._union(metrics, listed)
        shared = [one for one in metrics if one.reduce in REDUCTIONS]
        by_key = {part.key: part for part in parts}
        peaked = [one for one in shared if one.reduce in ("max", "min")]
        added = [one for one in shared if one.reduce in ("mean", "sum")]

        def value(one: _Metric, absent: float) -> float:
            return float(own[one.key][1]) if one.key in own else absent

        highest = [-value(one, -_NONE) if one.reduce == "min" else value(one, _NONE) for one in peaked]
        of_parts = [
            by_key[key].maxima() if key in by_key else torch.full((size,), _NONE, dtype=torch.float64)
            for key, (size, _) in listed
        ]

        def sums(maxima: Tensor) -> Tensor:
            numbers = [[value(one, 0.0), float(one.key in own)] for one in added]
            found, begin = [torch.tensor(numbers, dtype=torch.float64).reshape(-1)], len(peaked)
            for key, (size, count) in listed:
                part = by_key.get(key)
                none = torch.zeros(count, dtype=torch.float64)
                found.append(none if part is None else part.sums(maxima[begin : begin + size]))
                begin += size
            return torch.cat(found)

        maxima, totals = self._ranks.exchange(torch.cat([torch.tensor(highest, dtype=torch.float64), *of_parts]), sums)
        peaks = zip(peaked, maxima[: len(peaked)].tolist(), strict=True)
        results = {one.key: -peak if one.reduce == "min" else peak for one, peak in peaks}
        for one, (total, count) in zip(added, totals[: 2 * len(added)].reshape(-1, 2).tolist(), strict=True):
            results[one.key] = total if one.reduce == "sum" else total / count
        begin, start = len(peaked), 2 * len(added)
        for key, (size, count) in listed:
            if key in by_key:
                by_key[key].finish(maxima[begin : begin + size], totals[start : start + count])
            begin, start = begin + size, start + count
        if self._ranks.rank == 0:
            merged: list[Entry] = []
            for one in metrics:
                if one.reduce in REDUCTIONS:
                    merged.append((one.step, one.epoch, one.name, results[one.key], one.time))
                elif one.key in own:
                    merged.append((one.step, one.epoch, one.name, own[one.key][1], one.time))
            self._write("metrics", metric_rows(merged))
            super().flush()  # layers, and what sinks wait for

    def _described(self, entries: Sequence[Entry]) -> list[_Metric]:
        numbers: Counter[tuple[int, str]] = Counter()
        described = []
        for step, epoch, name, _, time in entries:
            numbers[step, name] += 1
            reduce = self._reductions.get(name, "mean") or "first"
            described.append(_Metric(step, epoch, name, numbers[step, name], reduce, time))
        return described

    def _union(
        self, metrics: list[_Metric], parts: list[tuple[str, tuple[int, int]]]
    ) -> tuple[list[_Metric], list[tuple[str, tuple[int, int]]]]:
        """Return what any rank has, in the order of the lowest rank that has it."""
        all_metrics: dict[tuple[int, str, int], _Metric] = {}
        all_parts: dict[str, tuple[int, int]] = {}
        for listed, others in self._ranks.gather([metrics, parts]):
            for one in (_Metric(*fields) for fields in listed):
                all_metrics.setdefault(one.key, one)
            for key, (size, count) in others:
                all_parts.setdefault(key, (size, count))
        return list(all_metrics.values()), list(all_parts.items())
