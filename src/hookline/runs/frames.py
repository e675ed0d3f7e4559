"""Load a run's record as columns of plain lists, for data frames and table files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hookline._bins import bin_edges
from hookline._limits import has_too_many_gaps
from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.format import Floats, MediaRow, SeriesHeader
from hookline.runs.histograms import HistogramReader
from hookline.runs.layers import SeriesTable, read_layer_tables
from hookline.runs.media import read_media
from hookline.runs.named import find_files
from hookline.runs.reader import RunReader, rows_of_steps

Columns = dict[str, list[Any]]  # equally long
_Counted = dict[tuple[int, str, str], tuple[Floats, float]]
"""By step, name and column of a histogram: its counts, and the octave in which its bins end."""

_FIRST = ("step", "epoch", "time")
_NUMBERS = frozenset({bool, int, float})


@dataclass(frozen=True)
class LoadedRun:
    """The record of a run at the time when it was read.

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
        """The tables and images, read on first use."""
        return read_media(self.path)


def load_run(path: Path | str | None) -> LoadedRun:
    """Read the whole record of a run.

    Lines that are torn or damaged are left out with a `RuntimeWarning`; a run before its first step has empty columns.
    Raises `RecordError` if the directory is not a run, or one of its files cannot be read.

    >>> pandas.DataFrame(load_run("runs/20261115-092219-8k69kgy6").metrics).plot(x="step", y="train/loss")
    """
    return load_files(find_files(path))


def load_files(reader: RunReader) -> LoadedRun:
    """Read the whole record of a run from its files, as `load_run` does."""
    run, config = reader.run, reader.config  # first: without run.json the directory is not a run
    metrics = columns_of(rows_of_steps(reader), _FIRST)
    events, layers = reader.events(), _read_layers(reader)
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
    """Convert numbers of several types to one: a column of a data frame has one type."""
    types = {type(value) for value in values} - {type(None)}
    if len(types) < 2 or not types <= _NUMBERS:
        return values
    number = float if float in types else int
    try:
        return [None if value is None else number(value) for value in values]
    except OverflowError:  # an integer that no float can hold, which Hookline never writes
        return values


def _read_layers(reader: RunReader) -> dict[str, Columns]:
    """Read every series as columns: histograms with the edges of their bins, if a monitor wrote where these are."""
    histograms, by_series = HistogramReader(), dict[str, _Counted]()

    def rows() -> Iterator[tuple[int, SeriesHeader, Floats]]:
        for step, header, values in reader.layers():
            for row in histograms.read(step, header, values):
                if row.tops is not None:
                    counted = zip(row.names, row.counts, row.tops.tolist(), strict=True)
                    keyed = {(step, name, row.column): (counts, top) for name, counts, top in counted}
                    by_series.setdefault(row.series, {}).update(keyed)
            yield step, header, values

    return {
        name: _histogram_columns(table, by_series[name]) if name in by_series else _long_columns(table)
        for name, table in read_layer_tables(rows()).items()
    }


def _histogram_columns(table: SeriesTable, counted: _Counted) -> Columns:
    """Return a row for each bin that is not empty.

    The histograms of one layer have different edges, and those of several hooks different numbers of bins, so each has
    its own rows.
    """
    columns: Columns = {title: [] for title in ("step", "name", "low", "high")}
    titles: dict[str, str] = {}
    for column in dict.fromkeys([*table.columns, *(column for *_, column in counted)]):
        titles[column] = strict_json.free_name(column, columns)
        columns[titles[column]] = []
    names = dict.fromkeys(name for _, name, _ in counted)
    name_at, column_at = ({key: index for index, key in enumerate(keys)} for keys in (names, titles))
    for step, name, column in sorted(counted, key=lambda key: (key[0], name_at[key[1]], column_at[key[2]])):
        counts, top = counted[step, name, column]
        places = counts.nonzero()[0]
        low, high = (ends[places].tolist() for ends in bin_edges(len(counts), top))
        values = [int(count) if count.is_integer() else count for count in counts[places].tolist()]
        cells = {"step": [step] * len(low), "name": [name] * len(low), "low": low, "high": high, titles[column]: values}
        for title, column_cells in columns.items():
            column_cells += cells.get(title, [None] * len(low))
    return {title: _of_one_type(cells) for title, cells in columns.items()}


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
