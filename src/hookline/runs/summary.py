"""Summarize a run from its files, in bounded memory: curves, statistics per layer, events.

The report of a run, `hookline show` and `hookline compare` are made from one. Reading a run
needs NumPy and not torch, so that these commands start quickly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline._bins import bins_per_octave, bins_per_sign
from hookline._console import logger
from hookline._step_parts import STEP_PARTS
from hookline.errors import RecordError
from hookline.record.format import NOT_METRICS, Floats, MediaRow, SeriesHeader
from hookline.runs.curves import Curve
from hookline.runs.find import RunFiles
from hookline.runs.histograms import HistogramReader, HistogramRow
from hookline.runs.media import read_newest_media
from hookline.runs.numbers import Numbers
from hookline.runs.reader import columns_of_rows

MAX_MEDIA = 8  # the newest tables and images of each name
_MAX_CELLS = 150_000  # of a table of layers over a run: 600 kB
_MAX_COUNTS = 400_000  # of a table of histograms: 1.6 MB
_MAX_HEADERS = 16  # of a series: more than hooks that share one, or change, make
_MAX_NAMES = 10_000  # of layers with values that are not finite: more than models have
_NON_FINITE_COLUMNS = ("nans", "infs")
_OCTAVES = 48  # of the histograms, in both directions, down from the largest value that a layer had
_NO_OCTAVE = -1000  # stands for the octave of the largest value of a layer that had none

Array = NDArray[Any]


class Ranges:
    """Arrays of one shape over the steps of a run, merged where there are more than `most` of them.

    Args:
        most: How many arrays to keep.
        merge: Makes one array of two neighbours.
    """

    def __init__(self, most: int, merge: Callable[[Array, Array], Array]) -> None:
        self.width = 1
        self.last = 0  # the last step
        self.starts: list[int] = []  # the first step of each range
        self.arrays: list[Array] = []
        self._most, self._merge = most, merge

    def add(self, step: int, array: Array) -> None:
        """Add the array of a step, which may come late."""
        start, self.last = step - step % self.width, max(step, self.last) if self.starts else step
        place = len(self.starts) if not self.starts or start > self.starts[-1] else bisect_left(self.starts, start)
        if place < len(self.starts) and self.starts[place] == start:
            self.arrays[place] = self._merge(self.arrays[place], array)
            return
        self.starts.insert(place, start)
        self.arrays.insert(place, array)
        if len(self.starts) > self._most:
            starts, arrays = self.starts, self.arrays
            last, self.width, self.starts, self.arrays = self.last, self.width * 2, [], []
            for start, array in zip(starts, arrays, strict=True):
                self.add(start, array)
            self.last = last


@dataclass(frozen=True)
class LayerTable:
    """Statistics per layer over a run: ``values[i, j, k]`` is column k of name j in the range that begins at steps[i].

    It is the value farthest from 0 in its range, NaN where nothing was recorded.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    steps: Array
    values: Floats

    def halved(self) -> LayerTable:
        """Return the table with each two ranges merged."""
        return replace(self, steps=self.steps[::2], values=merge_pairs(self.values, farther_from_zero))


@dataclass(frozen=True)
class HistogramTable:
    """Histograms per layer over a run: ``counts[i, j, k]`` counts the values of name j in bin k.

    Each name has its own window of octaves, which ends with the largest value that it had in the run. The bins are in
    the order of the values: one for each octave below 0, from the largest magnitude to the smallest, one for 0, and one
    for each octave above 0. The smallest octave of each sign holds everything below the window, too.
    """

    names: tuple[str, ...]
    tops: Array
    """The largest octave of each name: n for values above 2^n, up to 2^(n + 1)."""
    steps: Array
    counts: Array

    def edges(self, name: str) -> Array:
        """Return the edges of the bins of a name."""
        octaves = 2.0 ** (self.tops[self.names.index(name)] + np.arange(1 - _OCTAVES, 2.0))
        return np.concatenate([-octaves[::-1], octaves])

    def halved(self) -> HistogramTable:
        """Return the table with each two ranges added up."""
        return replace(self, steps=self.steps[::2], counts=merge_pairs(self.counts, np.add))


class RunSummary:
    """A run in bounded memory.

    It takes at most 52 kB for each metric, 1 MB for each series of statistics per layer and 4 MB for each series of
    histograms, as long as a series has fewer than 40,000 values a step. A series whose layers change takes as much for
    each set of layers, of which it keeps 16. Events are few, so all are kept.

    Args:
        files: The files that it is read from.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.config = ""  # the text of config.yaml
        self.numbers = Numbers()  # every one of them, if it was read with them
        self.curves: dict[str, Curve] = {}
        self.times = Curve()  # seconds since 1970 at each step
        self.events: list[dict[str, Any]] = []
        self.media_lines: list[dict[str, Any]] = []  # those of media.jsonl, the newest first
        self.first_non_finite: dict[tuple[str, str], dict[str, int]] = {}
        """By series and column (nans, infs): the first step at which each layer had some."""
        self._layers: dict[SeriesHeader, Ranges] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Ranges] = {}
        self._histogram_reader = HistogramReader()

    # ---- receiving rows ----------------------------------------------------------------------------------------------

    def write_metrics(self, rows: Iterable[dict[str, Any]], /) -> None:
        """Add rows of metrics.jsonl."""
        self._add_metrics(columns_of_rows([*rows]))

    def _add_metrics(self, columns: Mapping[str, tuple[list[int], list[Any]]]) -> None:
        for name, (steps, values) in columns.items():
            if name == "time":
                self.times.extend(steps, values)
            elif name not in NOT_METRICS:
                curve = self.curves.get(name)
                if curve is None:
                    curve = self.curves[name] = Curve()
                curve.extend(steps, values)

    def write_events(self, rows: Iterable[dict[str, Any]], /) -> None:
        """Add rows of events.jsonl."""
        self.events += rows

    def _add_layers(self, step: int, header: SeriesHeader, values: Floats) -> None:
        for row in self._histogram_reader.read(step, header, values):
            self._add_histograms(row)
        if header.bins is not None:
            return
        ranges = self._layers.get(header)
        if ranges is None:
            cells = max(len(header.names) * len(header.columns), 1)
            _make_room(self._layers, header.series)
            ranges = self._layers[header] = Ranges(min(max(_MAX_CELLS // cells, 4), 400), farther_from_zero)
        ranges.add(step, values)
        self._note_non_finite(step, header, values)

    def _note_non_finite(self, step: int, header: SeriesHeader, values: Floats) -> None:
        """Keep where values that are not finite came first, which ranges of steps do not tell."""
        for column in _NON_FINITE_COLUMNS:
            if column in header.columns:
                first_steps = self.first_non_finite.setdefault((header.series, column), {})
                for index in np.flatnonzero(values[:, header.columns.index(column)] > 0).tolist():
                    name = header.names[index]
                    if step < first_steps.get(name, math.inf) and (
                        name in first_steps or len(first_steps) < _MAX_NAMES
                    ):
                        first_steps[name] = step

    def _add_histograms(self, row: HistogramRow) -> None:
        """Add histograms whose windows are known: each counts the octaves below its largest value."""
        if row.tops is None:
            return
        series = row.series if row.column in ("count", "counts") else f"{row.series}: {row.column}"
        key = (series, row.names)
        if key not in self._histograms:
            _make_room(self._histograms, series)
            most = _MAX_COUNTS // (max(len(row.names), 1) * (2 * _OCTAVES + 2))
            self._histograms[key] = Ranges(min(max(most, 4), 100), _add_octaves)
        self._histograms[key].add(row.step, _in_octaves(row.counts, row.tops))

    # ---- what is known -----------------------------------------------------------------------------------------------

    @property
    def event_counts(self) -> Counter[str]:
        """How many events there are of each kind."""
        return Counter(event["kind"] for event in self.events)

    def newest_media(self) -> Iterator[MediaRow]:
        """Yield the newest tables and images of each name; the file of each is opened when it is asked for."""
        return read_newest_media(self.files.path, self.media_lines, MAX_MEDIA)

    @property
    def run(self) -> dict[str, Any]:
        """The fields of run.json."""
        return self.files.run

    @property
    def hooks(self) -> list[dict[str, Any]]:
        """The descriptions of the run's hooks; each has a name."""
        hooks: list[dict[str, Any]] = self.run.get("hooks", [])
        return hooks

    @property
    def step_seconds(self) -> dict[str, float]:
        """How long a step and its parts take on average over the run, by part, if the run has the throughput hook."""
        curves = {part: self.curves.get(f"throughput/{part}_seconds") for part in ("step", *STEP_PARTS)}
        averages = {part: None if curve is None else curve.average for part, curve in curves.items()}
        return {part: seconds for part, seconds in averages.items() if seconds is not None}

    @property
    def layers(self) -> dict[str, LayerTable]:
        """The statistics per layer, by series."""
        by_series: dict[str, list[tuple[SeriesHeader, Ranges]]] = {}
        for header, ranges in self._layers.items():
            by_series.setdefault(header.series, []).append((header, ranges))
        return {series: _one_table(parts) for series, parts in by_series.items()}

    @property
    def histograms(self) -> dict[str, HistogramTable]:
        """The histograms per layer, by series."""
        by_series: dict[str, list[tuple[tuple[str, ...], Ranges]]] = {}
        for (series, names), ranges in self._histograms.items():
            by_series.setdefault(series, []).append((names, ranges))
        return {series: _one_histogram_table(parts) for series, parts in by_series.items()}

    # ---- reading files -----------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        directory: Path | str | RunFiles,
        *,
        media: bool = False,
        numbers: bool = False,
    ) -> RunSummary:
        """Read the files of a run, also of one that is running or was killed.

        Args:
            directory: The run's directory, or its files.
            media: Whether to read tables and images, which only reports show.
            numbers: Whether to keep every number, to compare runs bit for bit.

        Raises:
            RecordError: If the directory is not a run, or one of its files cannot be read.
        """
        files = directory if isinstance(directory, RunFiles) else RunFiles.read(directory)
        summary = cls(files)
        try:
            summary.config = files.config_bytes.decode("utf-8", "replace")
        except RecordError as error:
            logger.warning("%s", error)
        for rows in files.metrics():
            columns = columns_of_rows(rows)
            summary._add_metrics(columns)
            if numbers:
                summary.numbers.add_metrics(columns)
        for step, header, values in files.layers():
            summary._add_layers(step, header, values)
            if numbers:
                summary.numbers.add_layers(step, header, values)
        if media:
            summary.media_lines = files.media_lines()
        summary.write_events(files.events())
        return summary


def _make_room(tables: dict[Any, Ranges], series: str) -> None:
    """Drop the table of a series that was written the longest time ago if the series has as many as it may.

    A model that skips layers at random has another header at nearly every step.
    """
    own = [header for header in tables if header[0] == series]
    if len(own) >= _MAX_HEADERS:
        del tables[min(own, key=lambda header: tables[header].last)]


def merge_pairs(values: Array, merge: Callable[[Array, Array], Array]) -> Array:
    """Merge each two entries along the first axis; the last one of an odd number stays alone."""
    even = len(values) - len(values) % 2
    merged = merge(values[0:even:2], values[1:even:2])
    return np.concatenate([merged, values[even:]]).astype(values.dtype, copy=False)


def farther_from_zero(first: Array, second: Array) -> Array:
    """Return by element the value that is farther from 0; NaN counts as none."""
    with np.errstate(invalid="ignore"):
        return np.where((np.abs(second) > np.abs(first)) | np.isnan(first), second, first)


def _one_table(parts: Sequence[tuple[SeriesHeader, Ranges]]) -> LayerTable:
    """Make one table of all headers of a series: several hooks may write to one."""
    names = tuple(dict.fromkeys(name for header, _ in parts for name in header.names))
    columns = tuple(dict.fromkeys(column for header, _ in parts for column in header.columns))
    steps = sorted({start for _, ranges in parts for start in ranges.starts})
    row_of, column_of, step_of = ({key: index for index, key in enumerate(keys)} for keys in (names, columns, steps))
    values = np.full((len(steps), len(names), len(columns)), np.nan, np.float32)
    for header, ranges in parts:
        rows = [row_of[name] for name in header.names]
        across = [column_of[column] for column in header.columns]
        for start, array in zip(ranges.starts, ranges.arrays, strict=True):
            places = np.ix_([step_of[start]], rows, across)
            values[places] = farther_from_zero(values[places], array)
    return LayerTable(names, columns, np.array(steps), values)


def _one_histogram_table(parts: Sequence[tuple[tuple[str, ...], Ranges]]) -> HistogramTable:
    """Make one table of the histograms of a series, which several hooks may write to; 0 where nothing was counted."""
    names = tuple(dict.fromkeys(name for own, _ in parts for name in own))
    steps = sorted({start for _, ranges in parts for start in ranges.starts})
    row_of, step_of = ({key: index for index, key in enumerate(keys)} for keys in (names, steps))
    arrays = np.zeros((len(steps), len(names), 2 * _OCTAVES + 2), np.float32)
    arrays[..., 0] = _NO_OCTAVE
    for own, ranges in parts:
        rows = [row_of[name] for name in own]
        for start, array in zip(ranges.starts, ranges.arrays, strict=True):
            arrays[step_of[start], rows] = _add_octaves(arrays[step_of[start], rows], array)
    tops = arrays[..., 0].max(axis=0)
    return HistogramTable(names, tops, np.array(steps), _move_window(arrays, tops)[..., 1:])


# ---- histograms in octaves -------------------------------------------------------------------------------------------
#
# An array of histograms is [names, 1 + bins]: the octave of the largest value, where the window of a name ends, then
# the bins as in `HistogramTable`.


def _in_octaves(counts: Floats, ends: Array) -> Array:
    """Return counts [names, bins], as in `hookline._bins`, in bins of whole octaves.

    NaN and infinities are left out; the statistics have their numbers.

    Args:
        counts: The counts.
        ends: The octave in which the counts of each name end.
    """
    names, bins = counts.shape
    per_sign = bins_per_sign(bins)
    begins = np.arange(0, per_sign, bins_per_octave(bins))
    octaves = np.zeros((names, 2 * _OCTAVES + 2), np.float32)
    octaves[:, 0] = ends
    negative, positive = _signs(octaves)
    octaves[:, 1 + _OCTAVES] = counts[:, per_sign + 1]
    negative[:, : len(begins)] = np.add.reduceat(counts[:, 1 : 1 + per_sign], begins, axis=1)
    positive[:, : len(begins)] = np.add.reduceat(counts[:, per_sign + 2 : 2 * per_sign + 2][:, ::-1], begins, axis=1)
    # Beside a NaN or an infinity the counts end far above the largest finite value.
    used = (negative + positive) > 0
    return _move_window(octaves, np.where(used.any(axis=1), octaves[:, 0] - used.argmax(axis=1), _NO_OCTAVE))


def _add_octaves(first: Array, second: Array) -> Array:
    """Add two arrays of histograms, in windows that end with the larger of their largest values."""
    tops = np.maximum(first[:, 0], second[:, 0])
    added = _move_window(first, tops) + _move_window(second, tops)
    added[:, 0] = tops
    return added


def _move_window(histograms: Array, tops: Array) -> Array:
    """Return histograms [..., names, 1 + bins] in windows that end with other octaves, one for each name."""
    down = (tops - histograms[..., 0])[..., None].astype(np.int64)
    if not down.any():
        return histograms
    moved = histograms.copy()
    moved[..., 0] = tops
    octaves = np.arange(_OCTAVES)
    sources = octaves - down
    is_inside = (sources >= 0) & (sources < _OCTAVES)
    sources = np.clip(sources, 0, _OCTAVES - 1)
    is_below = octaves >= _OCTAVES - 1 - down
    for before, after in zip(_signs(histograms), _signs(moved), strict=True):
        after[...] = np.where(is_inside, np.take_along_axis(before, sources, axis=-1), 0)
        after[..., -1] = np.where(is_below, before, 0).sum(axis=-1)
    return moved


def _signs(histograms: Array) -> tuple[Array, Array]:
    """Return views of the bins below and above 0, both from the largest magnitude down."""
    return histograms[..., 1 : 1 + _OCTAVES], histograms[..., : 1 + _OCTAVES : -1]
