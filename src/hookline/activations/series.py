"""The numbers of a monitor over steps: one table per step from each source, and a bounded history of tables."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._device import HostCopy, cached_table
from hookline._tensors import is_sharded
from hookline._words import nearest
from hookline.core.shared_part import SharedPart, Sizes
from hookline.errors import HooklineError, got
from hookline.stats.collector import HostQueue, StepCollector, StepRows
from hookline.stats.distributed import is_copy
from hookline.stats.histograms import Histograms, histograms_in, percentiles, summarize_with_histograms
from hookline.stats.rows import INFS, NANS, STATISTICS, summarize


class StepTable(NamedTuple):
    """The numbers of one step on the host: ``values[i, j]`` is column j of module ``names[i]``.

    A table of histograms has one more dimension, the bins. Step 0 means a call outside of a run; a name then occurs
    once per call.
    """

    step: int
    names: Sequence[str]
    columns: tuple[str, ...]
    values: Tensor
    totals: Mapping[str, float] = {}
    """Numbers over all modules, by name."""

    @property
    def is_histogram(self) -> bool:
        return self.values.dim() > 2

    def row(self, index: int) -> dict[str, float]:
        """Return one row by column."""
        return dict(zip(self.columns, self.values[index].tolist(), strict=True))

    def align(self, names: Sequence[str]) -> Tensor:
        """Return the values with one row per given name, NaN for names that this step lacks."""
        if tuple(self.names) == tuple(names):
            return self.values
        indices = {name: index for index, name in enumerate(names)}
        aligned = self.values.new_full((len(names), *self.values.shape[1:]), float("nan"))
        aligned[[indices[name] for name in self.names]] = self.values
        return aligned


UseTable = Callable[[StepTable], Mapping[str, float]]
"""Receives the table of all ranks, and returns metrics to record at its step."""


class MonitoredState(NamedTuple):
    """A monitor's measurements of one module in one step; without a run, in one call."""

    name: str
    step: int
    values: dict[str, float]
    """By metric."""


class TensorStatistics(StepCollector):
    """Statistics of the tensors that are added.

    Args:
        statistics: Names from `STATISTICS`.
        points: Percentiles, from 0 to 100; they are computed from histograms.
        histogram: Whether there are tables of histograms, too.
        prefix: Distinguishes the columns of gradients.
    """

    def __init__(self, statistics: Sequence[str], points: Sequence[float], histogram: bool, prefix: str = "") -> None:
        super().__init__(summarize_with_histograms if points or histogram else summarize)
        self._indices = tuple(STATISTICS.index(name) for name in statistics)
        self._points, self._histogram, self._prefix = points, histogram, prefix
        columns = (*statistics, *(f"p{point:g}" for point in points), *["histogram_top"] * histogram)
        self._columns = tuple(prefix + column for column in columns)
        self._copies: dict[str, bool] = {}  # By module, whether another rank also has this rank's part of a DTensor.
        self._newest: StepRows | None = None

    def note_part(self, name: str, tensor: Tensor) -> None:
        """Note whether this rank's part of a DTensor counts; all other tensors measured by a stand-in do."""
        if is_sharded(tensor):
            self._copies[name] = is_copy(tensor)

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """Yield the tables of complete steps; the histograms of a step follow its statistics."""
        for rows in self.drain() if wait else self.ready():
            self._newest = rows
            yield from self._tables(rows)

    def share(self, key: str, epoch: int, has_same_batch: bool, scale: float, use: UseTable) -> list[SharedPart]:
        """Remove and return all steps so far, to be merged with those of the other ranks; nothing waits.

        Args:
            key: The monitor's name; the same on all ranks.
            epoch: The epoch.
            has_same_batch: Whether this rank's outputs, except for parts of DTensors, are copies of what another rank
                has measured.
            scale: The factor by which values of the merged rows are multiplied.
            use: Called with the tables of all ranks.
        """
        copies = dict(self._copies)

        def use_rows(rows: StepRows) -> Mapping[str, float]:
            self._newest = rows
            return {name: total for table in self._tables(rows) for name, total in use(table).items()}

        return [
            sent.share(
                f"{key} {self._prefix}outputs",
                epoch,
                with_histograms=bool(self._points or self._histogram),
                is_copy=lambda module: copies.get(module, has_same_batch),
                scale=scale,
                use=use_rows,
            )
            for sent in self.take()
        ]

    def current(self) -> list[StepTable]:
        """Return the values that have arrived of an incomplete step."""
        rows = self.incomplete()
        return [] if rows is None else list(self._tables(rows))

    def histogram(self, name: str) -> Histograms:
        """Return the newest histogram of one module."""
        rows = self.incomplete() or self._newest
        names = [] if rows is None else list(map(str, rows.keys))
        if rows is None or name not in names:
            raise HooklineError(f"no histogram of {name!r} yet; {nearest(name, names)}")
        last = len(names) - 1 - names[::-1].index(name)
        return histograms_in(rows.rows[last : last + 1])

    def _tables(self, arrived: StepRows) -> Iterator[StepTable]:
        names, rows = list(map(str, arrived.keys)), arrived.rows
        parts = [rows.index_select(1, cached_table(rows.device, self._indices))]
        if self._points:
            parts.append(percentiles(histograms_in(rows), self._points))
        if self._histogram:
            parts.append(rows[:, -1:])
        totals = {f"{self._prefix}non_finite": rows[:, NANS : INFS + 1].sum().item()}
        yield StepTable(arrived.step, names, self._columns, torch.cat(parts, dim=1), totals)
        if self._histogram:
            counts = rows[:, len(STATISTICS) : -1].unsqueeze(1)
            yield StepTable(arrived.step, names, (f"{self._prefix}counts",), counts)


class CallCosts:
    """Time and memory of module calls, added up over a step; without a run, one row per call."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._step = 0
        self._rows: dict[tuple[str, int], list[Any]] = {}  # By module and, without a run, the number of the row.
        self._complete: list[StepTable] = []

    def add(self, name: str, seconds: float, memory: int, step: int) -> None:
        """Add the cost of one call."""
        self._add(name, [seconds if column == "time" else float(memory) for column in self._columns], step)

    def _add(self, name: str, values: list[Any], step: int) -> None:
        if step != self._step:
            self.end_step(self._step)
            self._step = step
        key = name, 0 if step else len(self._rows)
        earlier = self._rows.get(key)
        self._rows[key] = values if earlier is None else [a + b for a, b in zip(earlier, values, strict=True)]

    def end_step(self, step: int) -> None:
        """Mark a step as complete."""
        self._complete += self.current()
        self._rows = {}

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """Yield the tables of complete steps; never waits, because costs are measured on the host."""
        if not self._step:  # without a run, no event ends a step
            self.end_step(0)
        tables, self._complete = self._complete, []
        yield from tables

    def current(self) -> list[StepTable]:
        """Return the numbers of the current step so far."""
        if not self._rows:
            return []
        values = torch.tensor([self._totals(row) for row in self._rows.values()], dtype=torch.float64)
        return [StepTable(self._step, tuple(name for name, _ in self._rows), self._columns, values)]

    def _totals(self, row: list[Any]) -> list[float]:
        return row


class FunctionValues(CallCosts):
    """The results of your functions on outputs: the mean over the calls of a step; without a run, one row per call.

    Args:
        functions: Functions of a tensor that return one number, by column. A number on a device stays there until the
            step is read.
    """

    def __init__(self, functions: Mapping[str, Callable[[Tensor], Any]]) -> None:
        super().__init__(tuple(functions))
        self._functions = functions

    def measure(self, name: str, output: Tensor, step: int) -> None:
        """Add the values of one output.

        Raises:
            HooklineError: If a function returns anything but one number; the message names it.
        """
        values = [_one_number(column, function(output)) for column, function in self._functions.items()]
        self._add(name, [*values, 1.0], step)  # The last number counts the calls.

    def _totals(self, row: list[Any]) -> list[float]:
        return [float(value) / row[-1] for value in row[:-1]]  # Waits for the device.


def _one_number(column: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().reshape(()).to(torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise HooklineError(f"metrics: the function {column!r} must return one number, {got(value)}") from None


# ---- dead units ------------------------------------------------------------------------------------------------------


class DeadUnits:
    """Keeps the maximum of every unit on its device, and counts dead units at the end of each window.

    A unit that contains a NaN does not count as dead.

    Args:
        window: The number of steps in a window.
        unit_dim: The dimension of the units; by default the last one, for images (four or more dimensions) the second.
    """

    def __init__(self, window: int, unit_dim: int | None = None) -> None:
        self._window, self._unit_dim = window, unit_dim
        self._maxima: dict[str, Tensor] = {}  # The maxima of the current window, by module.
        self._steps = 0
        self._flush = HostQueue()
        self._last_window: dict[str, Tensor] = {}
        self._has_ended_window = False

    def add(self, name: str, output: Tensor) -> None:
        """Take the maxima of one output of a module."""
        if output.dim() == 0 or output.numel() == 0:
            return
        output = output.detach()
        if output.dtype.itemsize == 1:  # torch has no maximum of float8
            output = output.to(torch.bfloat16)
        default = 1 if output.dim() >= 4 else -1
        unit_dim = (default if self._unit_dim is None else self._unit_dim) % output.dim()
        others = [dim for dim in range(output.dim()) if dim != unit_dim]
        maxima = output.amax(dim=others) if others else output.clone()
        earlier = self._maxima.get(name)
        if earlier is not None and earlier.shape == maxima.shape:
            maxima = torch.maximum(earlier.to(maxima.device), maxima)
        self._maxima[name] = maxima

    def end_step(self, step: int) -> None:
        """Count the step; at the end of a window, start copying its result to the host, one copy per device."""
        self._steps += 1
        if self._steps >= self._window:
            self._end_window(step)

    def _end_window(self, step: int) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, maxima in self._maxima.items():
            by_device.setdefault(maxima.device, {})[name] = maxima
        for tensors in by_device.values():
            sizes = [(name, len(maxima)) for name, maxima in tensors.items()]
            self._flush.send(step, sizes, torch.cat(list(tensors.values())) <= 0)
        self._maxima, self._steps, self._has_ended_window = {}, 0, True

    def complete(self, wait: bool) -> Iterator[StepTable]:
        """Yield the counts of complete windows, each at its last step."""
        for arrival in self._flush.ready(wait):
            sizes: Any = arrival.keys
            flags = torch.split(arrival.rows, [size for _, size in sizes])
            dead = {name: flag for (name, _), flag in zip(sizes, flags, strict=True)}
            self._last_window.update(dead)
            yield _count(arrival.step, dead)

    def share(self, key: str, epoch: int, use: UseTable, last_step: int | None = None) -> list[SharedPart]:
        """Remove and return the complete windows, to be merged with those of the other ranks; nothing waits.

        Args:
            key: The monitor's name; the same on all ranks.
            epoch: The epoch.
            use: Called with the table of all ranks.
            last_step: The step at which the run has ended; the first window then counts even if it is incomplete.
        """
        if last_step is not None and not self._has_ended_window and self._maxima:
            self._end_window(last_step)

        windows: dict[int, list[tuple[Any, HostCopy]]] = {}
        for step, sizes, flags in self._flush.take():
            windows.setdefault(step, []).append((sizes, flags))
        return [self._part(f"{key} dead_units", step, epoch, copies, use) for step, copies in windows.items()]

    def _part(
        self, kind: str, step: int, epoch: int, copies: Sequence[tuple[Any, HostCopy]], use: UseTable
    ) -> SharedPart:
        """Return the units of a window that are alive on this rank; a unit is dead if it is alive on no rank.

        Args:
            kind: The kind of the numbers; the same on all ranks.
            step: The last step of the window.
            epoch: Its epoch.
            copies: Modules with their numbers of units, and which of these are dead, on the way to the host.
            use: Called with the table of all ranks.
        """
        # With the number of units, because it may differ between ranks.
        widths = {f"{units} {name}": (units, 0) for sizes, _ in copies for name, units in sizes}

        def alive() -> Tensor:
            return torch.cat([torch.zeros(0).double(), *((~dead.wait()).double() for _, dead in copies)])

        def finish(sizes: Sizes, alive: Tensor, sums: Tensor) -> Mapping[str, float]:
            flags = torch.split(alive, [units for units, _ in sizes.values()])
            names = (name.partition(" ")[2] for name in sizes)
            dead = {name: of_module == 0 for name, of_module in zip(names, flags, strict=True)}
            self._last_window.update(dead)
            return use(_count(step, dead))

        return SharedPart(kind, step, epoch, widths, finish, maxima=alive)

    def current(self) -> list[StepTable]:
        """Return the counts of the first window so far, or none once a window is complete."""
        return [] if self._last_window or not self._maxima else [_count(0, self.by_module())]

    def by_module(self) -> dict[str, Tensor]:
        """Return which units are dead in the last complete window, or in the first one if none is complete."""
        return self._last_window or {name: (maxima <= 0).cpu() for name, maxima in self._maxima.items()}

    def discard(self) -> None:
        """Release the maxima of the current window."""
        self._maxima = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the current window."""
        return {"highest": dict(self._maxima), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a window."""
        self._maxima, self._steps = dict(state["highest"]), state["steps"]


def _count(step: int, dead: dict[str, Tensor]) -> StepTable:
    counts = torch.tensor([[float(flags.sum()), float(len(flags))] for flags in dead.values()], dtype=torch.float64)
    return StepTable(step, tuple(dead), ("dead_units", "units"), counts)


Source = TensorStatistics | CallCosts | FunctionValues | DeadUnits
"""One kind of measurement, taken while the model runs and returned as tables when steps are complete."""


# ---- over steps ------------------------------------------------------------------------------------------------------


class History:
    """The tables of the last steps: for each kind of table, identified by its columns, `limit` values per module."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: defaultdict[tuple[str, ...], deque[tuple[int, StepTable]]] = defaultdict(deque)  # By kind.
        self._rows: Counter[tuple[str, ...]] = Counter()  # The number of rows in the tables of a kind.
        self._numbers = count()  # Numbers the tables in the order in which they came.

    def add(self, table: StepTable) -> None:
        """Append a table, unless it has histograms; the oldest ones of its kind are dropped."""
        if table.is_histogram:
            return
        kind, tables = table.columns, self._tables[table.columns]
        tables.append((next(self._numbers), table))
        self._rows[kind] += len(table.names)
        enough = self._limit * len(set(table.names))
        while self._rows[kind] - len(tables[0][1].names) >= enough:
            self._rows[kind] -= len(tables.popleft()[1].names)

    def tables(self) -> list[StepTable]:
        """Return all tables, oldest first."""
        return [table for _, table in sorted(chain(*self._tables.values()), key=itemgetter(0))]

    def plus(self, tables: Iterable[StepTable]) -> History:
        """Return a history that also has these tables of the current step."""
        history = History(self._limit)
        for table in (*self.tables(), *tables):
            history.add(table)
        return history

    def latest(self) -> dict[str, dict[str, float]]:
        """Return the newest values of every module."""
        newest: dict[str, dict[str, float]] = {}
        for tables in self._tables.values():
            rows = {name: (table, index) for _, table in tables for index, name in enumerate(table.names)}
            for name, (table, index) in rows.items():
                newest.setdefault(name, {}).update(table.row(index))
        return newest

    def of(self, name: str) -> list[tuple[int, dict[str, float]]]:
        """Return (step, values) of one module, oldest first; different kinds of one step are joined.

        Without a run there are rows of calls instead of steps; kinds with the same number of rows are joined call by
        call.
        """
        tables = [table for table in self.tables() if name in table.names]
        calls = Counter(table.columns for table in tables if not table.step for other in table.names if other == name)
        most_calls = max(calls.values(), default=0)
        entries: dict[tuple[Any, ...], dict[str, float]] = {}
        numbers: Counter[tuple[Any, ...]] = Counter()  # Numbers the rows, by step and kind.
        for table in tables:
            alone = not table.step and calls[table.columns] != most_calls
            for index in [index for index, other in enumerate(table.names) if other == name]:
                number = numbers[table.step, table.columns]
                numbers[table.step, table.columns] += 1
                key = table.step, number, table.columns if alone else None
                entries.setdefault(key, {}).update(table.row(index))
        return [(key[0], values) for key, values in entries.items()][-self._limit :]

    def states(self) -> list[MonitoredState]:
        """Return the kept values of all modules, oldest first."""
        names = dict.fromkeys(name for table in self.tables() for name in table.names)
        states = [MonitoredState(name, *entry) for name in names for entry in self.of(name)]
        return sorted(states, key=lambda state: state.step)
