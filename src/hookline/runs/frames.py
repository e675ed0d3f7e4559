"""Load a run's record as columns of plain lists, which data frames and files of tables are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hookline._bins import bin_edges
from hookline._sizes import has_too_many_gaps
from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.format import WINDOW_COLUMNS, MediaRow
from hookline.runs.layers import SeriesTable, read_layer_tables
from hookline.runs.media import read_media
from hookline.runs.named import find_run
from hookline.runs.reader import RunReader, rows_of_steps

Columns = dict[str, list[Any]]  # equally long

_FIRST = ("step", "epoch", "time")
_NUMBERS = frozenset({bool, int, float})


@dataclass(frozen=True)
class LoadedRun:
    """The record of a run, as it was when it was read.

    ``pandas.DataFrame(run.metrics)`` and ``polars.DataFrame(run.layers["activations"])`` make data frames of it.
    """

    path: Path
    """The run's directory."""
    run: dict[str, Any] = field(repr=False)
    """The fields of run.json."""
    config: Any = field(repr=False)
    """What config.yaml contains."""
    metrics: Columns = field(repr=False)
    """The columns step, epoch, time and one per metric; None where a step has no value."""
    events: list[dict[str, Any]] = field(repr=False)
    """The events of all ranks in the order of their times."""
    layers: dict[str, Columns] = field(repr=False)
    """By series: the columns step, name and one per statistic; None where it was not written.

    Histograms of monitors have a row for each bin that is not empty, with the columns low and high, between which the
    counted values are; those of other series have a row for each bin, with its number as bin.
    """

    @cached_property
    def media(self) -> list[MediaRow]:
        """The tables and images, read when they are first asked for."""
        return read_media(self.path)


def load_run(path: Path | str | None) -> LoadedRun:
    """Read the whole record of a run.

    Lines that are torn or damaged are left out with a `RuntimeWarning`; a run before its first step has empty columns.
    Raises `RecordError` if the directory is not a run, or one of its files cannot be read.

    >>> pandas.DataFrame(load_run("runs/20261115-092219-8k69kgy6").metrics).plot(x="step", y="train/loss")
    """
    reader = RunReader(find_run(path))
    run, config = reader.run, reader.config  # first: without run.json the directory is not a run
    metrics = columns_of(rows_of_steps(reader), _FIRST)
    events, tables = reader.events(), read_layer_tables(reader)
    layers = {
        name: _long_columns(table) if table.values.ndim == 3 else _histogram_columns(name, tables)
        for name, table in tables.items()
    }
    reader.warn_of_damage()
    return LoadedRun(reader.path, run, config, metrics, events, layers)


def columns_of(rows: Sequence[dict[str, Any]], first: Iterable[str] = ()) -> Columns:
    """Return rows as columns, in the order of their first appearance after `first`; None where a row has no value."""
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    places, values = len(names) * len(rows), sum(map(len, rows))
    if has_too_many_gaps(places, values):
        have = f"{len(names):,} names in {len(rows):,} rows, a table of {places:,} places for {values:,} values"
        raise RecordError(f"the rows have {have}; log rare values under one name, or read the run as rows")
    return {name: _of_one_type([row.get(name) for row in rows]) for name in names}


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return numbers of several types as numbers of one: a column of a data frame has one type."""
    types = {type(value) for value in values} - {type(None)}
    if len(types) < 2 or not types <= _NUMBERS:
        return values
    number = float if float in types else int
    try:
        return [None if value is None else number(value) for value in values]
    except OverflowError:  # an integer that no float can hold, which Hookline never writes
        return values


def _histogram_columns(name: str, tables: Mapping[str, SeriesTable]) -> Columns:
    """Return a row for each bin of a monitor's histograms that is not empty; for others one for each bin.

    Where the bins end is in the statistics of the same step. A histogram without them, as a kill may leave one, is left
    out. The histograms of one layer have different edges, so that each has its own rows.
    """
    table = tables[name]
    rows = []
    for index, column in enumerate(table.columns):
        ends, top_column = WINDOW_COLUMNS.get((name, column), ("", ""))
        if ends not in tables or top_column not in tables[ends].columns:
            continue
        tops = _tops(tables[ends], top_column)
        for step, layer in np.argwhere(table.written[:, :, index]).tolist():
            top = tops.get((table.steps[step], table.names[layer]))
            if top is not None:
                counts = table.values[step, layer, index]
                places = counts.nonzero()[0]
                low, high = bin_edges(len(counts), top)
                values = [int(count) if count.is_integer() else count for count in counts[places].tolist()]
                rows.append((step, layer, index, low[places].tolist(), high[places].tolist(), values))
    if not rows:
        return _long_columns(table)
    columns: Columns = {title: [] for title in ("step", "name", "low", "high")}
    titles = []
    for column in table.columns:
        titles.append(strict_json.free_name(column, columns))
        columns[titles[-1]] = []
    for step, layer, index, low, high, values in sorted(rows, key=lambda row: row[:3]):
        columns["step"] += [table.steps[step]] * len(low)
        columns["name"] += [table.names[layer]] * len(low)
        columns["low"] += low
        columns["high"] += high
        for title in titles:
            columns[title] += values if title == titles[index] else [None] * len(low)
    return {title: _of_one_type(cells) for title, cells in columns.items()}


def _tops(table: SeriesTable, column: str) -> dict[tuple[int, str], float]:
    """Return the octave in which histograms end, by step and name, where it was written."""
    index = table.columns.index(column)
    values = table.values[:, :, index]
    places = np.argwhere(table.written[:, :, index] & np.isfinite(values)).tolist()
    return {(table.steps[step], table.names[name]): float(values[step, name]) for step, name in places}


def _long_columns(table: SeriesTable) -> Columns:
    """Return one row per step and name, for histograms also per bin, where any statistic was written."""
    rows = table.written.any(axis=2)
    values, has_value = table.values[rows], table.written[rows]  # [rows, columns] or [rows, columns, bins]
    bins = values.shape[2] if values.ndim == 3 else 1
    places = [(table.steps[step], table.names[name]) for step, name in np.argwhere(rows).tolist()]
    columns: Columns = {
        "step": [step for step, _ in places for _ in range(bins)],
        "name": [name for _, name in places for _ in range(bins)],
    }
    if values.ndim == 3:
        columns["bin"] = list(range(bins)) * len(places)
    for index, name in enumerate(table.columns):
        numbers = values[:, index].flatten().tolist()
        known = has_value[:, index].repeat(bins).tolist()
        # A statistic may have the name of one of the columns above.
        columns[strict_json.free_name(name, columns)] = [
            number if there else None for number, there in zip(numbers, known, strict=True)
        ]
    return columns
