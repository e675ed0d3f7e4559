"""Load a run's record as columns of plain lists, which data frames and files of tables are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.record import strict_json
from hookline.record.config_yaml import read_config
from hookline.record.json_lines import directory_of, read_json
from hookline.record.media_reader import MediaRow, read_media
from hookline.record.packing import WINDOW_COLUMNS, bin_edges
from hookline.record.reader import LayerSeries, read_events, read_metrics, read_written_layers
from hookline.record.runs import check_format

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

    Lines torn by a kill are left out with a `RuntimeWarning`; a run before its first step has empty columns. Raises
    `RecordError` if the directory is not a run, or one of its files cannot be read.

    >>> pandas.DataFrame(load_run("runs/20261115-092219-8k69kgy6").metrics).plot(x="step", y="train/loss")
    """
    directory = directory_of(path)
    run = read_json(directory / "run.json")  # first: without it the directory is not a run
    check_format(directory, run)
    return LoadedRun(
        directory,
        run,
        read_config(directory / "config.yaml"),
        columns_of(read_metrics(directory), _FIRST),
        read_events(directory),
        _columns_of_layers(read_written_layers(directory)),
    )


def columns_of(rows: Sequence[dict[str, Any]], first: Iterable[str] = ()) -> Columns:
    """Return rows as columns, in the order of their first appearance after `first`; None where a row has no value."""
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
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


def _columns_of_layers(read: Mapping[str, tuple[LayerSeries, torch.Tensor]]) -> dict[str, Columns]:
    found = {}
    for name, (series, written) in read.items():
        columns = _histogram_columns(name, read) if series.values.dim() == 4 else None
        found[name] = _long_columns(series, written) if columns is None else columns
    return found


def _histogram_columns(name: str, read: Mapping[str, tuple[LayerSeries, torch.Tensor]]) -> Columns | None:
    """Return a row for each bin of a monitor's histograms that is not empty; None if the edges of bins are unknown.

    Where the bins end is in the statistics of the same step. A histogram without them, as a kill may leave one, is left
    out. The histograms of one layer have different edges, so that each has its own rows.
    """
    series, written = read[name]
    rows = []
    for index, column in enumerate(series.columns):
        ends, top_column = WINDOW_COLUMNS.get((name, column), ("", ""))
        if ends not in read or top_column not in read[ends][0].columns:
            continue
        tops = _tops(*read[ends], top_column)
        for step, layer in written[:, :, index].nonzero().tolist():
            top = tops.get((series.steps[step], series.names[layer]))
            if top is not None:
                counts = series.values[step, layer, index].numpy()
                places = counts.nonzero()[0]
                edges = bin_edges(len(counts), places, np.full(len(places), top, np.float32))
                values = [int(one) if one.is_integer() else one for one in counts[places].tolist()]
                rows.append((step, layer, index, edges[0].tolist(), edges[1].tolist(), values))
    if not rows:
        return None
    found: Columns = {title: [] for title in ("step", "name", "low", "high")}
    titles = []
    for column in series.columns:
        titles.append(strict_json.free_name(column, found))
        found[titles[-1]] = []
    for step, layer, index, low, high, values in sorted(rows, key=lambda row: row[:3]):
        found["step"] += [series.steps[step]] * len(low)
        found["name"] += [series.names[layer]] * len(low)
        found["low"] += low
        found["high"] += high
        for title in titles:
            found[title] += values if title == titles[index] else [None] * len(low)
    return {title: _of_one_type(cells) for title, cells in found.items()}


def _tops(series: LayerSeries, written: torch.Tensor, column: str) -> dict[tuple[int, str], float]:
    """Return the octave in which histograms end, by step and name, where it was written."""
    index = series.columns.index(column)
    values = series.values[:, :, index].tolist()
    places = (written[:, :, index] & series.values[:, :, index].isfinite()).nonzero().tolist()
    return {(series.steps[step], series.names[name]): values[step][name] for step, name in places}


def _long_columns(series: LayerSeries, written: torch.Tensor) -> Columns:
    """Return one row per step and name, for histograms also per bin, where any statistic was written."""
    rows = written.any(dim=2)
    values, has_value = series.values[rows], written[rows]  # [rows, columns] or [rows, columns, bins]
    bins = values.shape[2] if values.dim() == 3 else 1
    places = [(series.steps[step], series.names[name]) for step, name in rows.nonzero().tolist()]
    columns: Columns = {
        "step": [step for step, _ in places for _ in range(bins)],
        "name": [name for _, name in places for _ in range(bins)],
    }
    if values.dim() == 3:
        columns["bin"] = list(range(bins)) * len(places)
    for index, name in enumerate(series.columns):
        numbers = values[:, index].flatten().tolist()
        known = has_value[:, index].repeat_interleave(bins).tolist()
        # A statistic may have the name of one of the columns above.
        columns[strict_json.free_name(name, columns)] = [
            number if there else None for number, there in zip(numbers, known, strict=True)
        ]
    return columns
