"""Summarize a run from its files, in bounded memory: curves, statistics per layer, events.

The report of a run, `hookline show` and `hookline compare` are based on one. Reading a run
needs NumPy and not torch, so that these commands start quickly.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline._bins import bins_per_octave, bins_per_sign
from hookline.errors import RecordError
from hookline.record.format import NOT_METRICS, Floats, MediaRow, SeriesHeader
from hookline.record.json_lines import warn_at_caller
from hookline.runs.curves import Curve, Steps, Values, as_arrays, sort_by_step
from hookline.runs.find import RunFiles
from hookline.runs.histograms import HistogramReader
from hookline.runs.media import read_newest_media
from hookline.runs.reader import columns_of_rows
from hookline.runs.step_parts import STEP_PARTS

NO_GOOD_CHECKPOINT = "no checkpoint has weights that are known to be finite"
MAX_MEDIA = 8  # the newest tables and images of each name
# How many values a table keeps of a run, and how many steps: of layers 600 kB, of histograms 1.6 MB.
_LAYER_LIMITS, _HISTOGRAM_LIMITS = (150_000, 400), (400_000, 100)
_MAX_HEADERS = 16  # Headers of a series: more than are produced by hooks that share one, or that change.
_MAX_NAMES = 10_000  # Layers with non-finite values: more than models have.
_OCTAVES = 48  # Octaves of the histograms in both directions, down from the largest value of a layer.
_NO_OCTAVE = -1000  # stands for the octave of the largest value of a layer that had none
_HISTOGRAM_COLUMNS = ("top", *(f"bin {index}" for index in range(2 * _OCTAVES + 1)))
_EMPTY_HISTOGRAM = np.array([_NO_OCTAVE, *[0] * (2 * _OCTAVES + 1)], np.float32)

_BY_THE_CLOCK = ("throughput/", "ranks/")  # metrics that differ between any two runs
_CLOCK_COLUMNS = frozenset({"time", "memory"})  # series of layers with one of these do, too

Array = NDArray[Any]


class Ranges:
    """Arrays of one shape over the steps of a run, merged where there are more than `most` of them.

    Args:
        most: How many arrays to keep.
        merge: Makes one array of two neighbors.
    """

    def __init__(self, most: int, merge: Callable[[Array, Array], Array]) -> None:
        self.width = 1
        self.last = 0  # the last step
        self.starts: list[int] = []  # the first step of each range
        self.arrays: list[Array] = []
        self.most, self.merge = most, merge

    def add(self, step: int, array: Array) -> None:
        """Add the array of a step, which may come late."""
        self.last = max(step, self.last)
        start = step - step % self.width
        place = bisect_left(self.starts, start)
        if place < len(self.starts) and self.starts[place] == start:
            self.arrays[place] = self.merge(self.arrays[place], array)
            return
        self.starts.insert(place, start)
        self.arrays.insert(place, array)
        if len(self.starts) > self.most:
            ranges = zip(self.starts, self.arrays, strict=True)
            self.width, self.starts, self.arrays = self.width * 2, [], []
            for start, array in ranges:
                self.add(start, array)


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
        """Return the table with neighboring ranges merged in pairs."""
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

    def halved(self) -> HistogramTable:
        """Return the table with neighboring ranges added up in pairs."""
        return replace(self, steps=self.steps[::2], counts=merge_pairs(self.counts, np.add))


class Numbers:
    """Every number of a run that does not depend on the clock, to compare runs bit for bit.

    It takes the rows in the order of the files; later lines of a step win.
    """

    def __init__(self) -> None:
        self.layers: dict[int, dict[SeriesHeader, Array]] = {}
        """By step: [names, columns], with a hash in place of each histogram, so that they take little memory."""
        self._parts: dict[str, list[tuple[Steps, Values]]] = {}

    def add_metrics(self, columns: dict[str, tuple[list[int], list[Any]]]) -> None:
        """Add rows of metrics.jsonl as columns."""
        for name, (steps, values) in columns.items():
            if name not in NOT_METRICS and not name.startswith(_BY_THE_CLOCK):
                self._parts.setdefault(name, []).append(as_arrays(steps, values))

    def add_layers(self, step: int, header: SeriesHeader, values: Floats) -> None:
        """Add a step of layers.jsonl."""
        if _CLOCK_COLUMNS.isdisjoint(header.columns):
            written = self.layers.setdefault(step, {})
            written.pop(header, None)  # what comes later overwrites, also where headers overlap
            written[header] = values if header.bins is None else _hashes(values)

    @property
    def metrics(self) -> dict[str, tuple[Steps, Values]]:
        """By metric: the steps in order, and the values."""
        return {
            name: sort_by_step(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
            for name, parts in self._parts.items()
        }

    @property
    def steps(self) -> Steps:
        """Every step at which a number was recorded."""
        return np.unique(
            np.concatenate([np.array([*self.layers], np.int64), *(steps for steps, _ in self.metrics.values())])
        )


def _hashes(histograms: Array) -> Array:
    """Return a hash of each histogram, [names, columns]."""
    hashes = [hash(counts.tobytes()) for of_name in histograms for counts in of_name]
    return np.array(hashes, np.int64).reshape(histograms.shape[:2])


class RunSummary:
    """A run in bounded memory.

    It takes at most 58 kB for each metric, 1 MB for each series of statistics per layer and 4 MB for each series of
    histograms, as long as a series has fewer than 40,000 values a step. A series whose layers change takes as much for
    each set of layers, of which it keeps 16. Events are few, so all are kept.

    Args:
        files: The files that it is read from.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.run = files.run  # the fields of run.json
        self.hooks: list[dict[str, Any]] = self.run.get("hooks", [])  # their descriptions; each has a name
        self.config = ""  # the text of config.yaml
        self.numbers = Numbers()  # every one of them, if it was read with them
        self.curves: dict[str, Curve] = {}
        self.times = Curve()  # when the rows of metrics were written, in seconds since 1970
        self.events: list[dict[str, Any]] = []
        self.media_lines: list[dict[str, Any]] = []  # The rows of media.jsonl, newest first.
        self.first_non_finite: dict[tuple[str, str], dict[str, int]] = {}
        """By series and column (nans, infs): the first step at which each layer had some."""
        self.ruined_since: dict[str, dict[str, int]] = {}
        """By series without these columns: the step since which a layer that had numbers has had none."""
        self._had_numbers: dict[str, tuple[SeriesHeader, Array]] = {}  # by series, at its last step
        self._layers: dict[str, dict[SeriesHeader, Ranges]] = {}  # by series
        self._histograms: dict[str, dict[SeriesHeader, Ranges]] = {}
        self._histogram_reader = HistogramReader()

    # ---- receiving rows ----------------------------------------------------------------------------------------------

    def add_metrics(self, columns: Mapping[str, tuple[list[int], list[Any]]]) -> None:
        """Add rows of metrics.jsonl as columns."""
        for name, (steps, values) in columns.items():
            if name == "time":
                self.times.extend(steps, values)
            if name not in NOT_METRICS:
                if name not in self.curves:
                    self.curves[name] = Curve()
                self.curves[name].extend(steps, values)

    def add_layers(self, step: int, header: SeriesHeader, values: Floats) -> None:
        """Add a step of layers.jsonl."""
        for row in self._histogram_reader.read(step, header, values):
            if row.tops is not None:  # otherwise it is unknown what the bins count
                series = row.series if row.column in ("count", "counts") else f"{row.series}: {row.column}"
                octaves = SeriesHeader(series, row.names, _HISTOGRAM_COLUMNS)
                counts = _in_octaves(row.counts, row.tops)
                _add_to_ranges(self._histograms, step, octaves, counts, _HISTOGRAM_LIMITS, _add_octaves)
        if header.bins is None:
            _add_to_ranges(self._layers, step, header, values, _LAYER_LIMITS, farther_from_zero)
            self._note_non_finite(step, header, values)

    def _note_non_finite(self, step: int, header: SeriesHeader, values: Floats) -> None:
        """Keep where values that are not finite came first, which ranges of steps do not show."""
        for column in ("nans", "infs"):
            if column not in header.columns:
                continue
            for index in np.flatnonzero(values[:, header.columns.index(column)] > 0).tolist():
                first_steps = self.first_non_finite.setdefault((header.series, column), {})
                name = header.names[index]
                if name in first_steps or len(first_steps) < _MAX_NAMES:
                    first_steps[name] = min(step, first_steps.get(name, step))
        if {"nans", "infs"}.isdisjoint(header.columns):
            self._note_ruined(step, header, np.asarray(np.isfinite(values).any(axis=1)))

    def _note_ruined(self, step: int, header: SeriesHeader, has_numbers: Array) -> None:
        """Keep since when layers have had no numbers; they may also have been left out of a step and come back."""
        known, before = self._had_numbers.get(header.series, (header, has_numbers))
        self._had_numbers[header.series] = header, has_numbers
        since = self.ruined_since.setdefault(header.series, {})
        for index in np.flatnonzero(before != has_numbers).tolist() if known == header else ():
            if has_numbers[index]:
                since.pop(header.names[index], None)
            elif len(since) < _MAX_NAMES:
                since[header.names[index]] = step

    # ---- what is known -----------------------------------------------------------------------------------------------

    def newest_media(self) -> Iterator[MediaRow]:
        """Yield the newest tables and images of each name; each file is opened only when needed."""
        return read_newest_media(self.files.path, self.media_lines, MAX_MEDIA)

    def checkpoints(self, *kinds: str) -> list[tuple[int, Path]]:
        """Return step and path of the checkpoints that events of these kinds name and that are still there."""
        listed: list[tuple[int, Path]] = []
        for event in self.events:
            step, path = event.get("step"), event.get("path")
            if event["kind"] in kinds and isinstance(path, str) and isinstance(step, int):
                place = self.files.path / "checkpoints" / Path(path).name  # the run may have been moved
                if os.path.isdir(place):  # noqa: PTH112 - unlike Path's, it never raises
                    listed.append((step, place))
        return listed

    @property
    def resumable(self) -> tuple[int, Path] | None:
        """The step to resume at, and what to resume: the run, or a checkpoint if the newest one has ruined weights."""
        saved = sorted(self.checkpoints("checkpoint_saved", "best_checkpoint"))
        good = [checkpoint for checkpoint in saved if checkpoint[0] <= self._good_until]
        if not good:
            return None
        step, path = good[-1]
        return step, self.files.path if path == saved[-1][1] else path

    @property
    def _good_until(self) -> float:
        """The last step after which the weights were good, as far as the losses tell; infinity unless they end ruined.

        The loss of a step is computed with the weights after the step before it.
        """
        is_stopped = str(self.run.get("reason")).startswith("stopped")  # by a hook that has kept the weights finite
        has_bad_weights = self.run.get("outcome") == "non_finite" and not is_stopped
        loss = self.curves.get("train/loss")
        if loss is None or loss.last is None:
            return -1 if has_bad_weights else math.inf
        if loss.non_finite is not None and not math.isfinite(loss.last.value) and not is_stopped:
            return loss.non_finite[0] - 2
        return loss.last.step - 1 if has_bad_weights else math.inf

    @property
    def step_seconds(self) -> dict[str, float]:
        """How long a step and its parts take on average over the run, by part, if the run has the throughput hook."""
        curves = {part: self.curves.get(f"throughput/{part}_seconds") for part in ("step", *STEP_PARTS)}
        averages = {part: None if curve is None else curve.average for part, curve in curves.items()}
        return {part: seconds for part, seconds in averages.items() if seconds is not None}

    @property
    def layers(self) -> dict[str, LayerTable]:
        """The statistics per layer, by series."""
        return {series: _one_table(ranges, np.nan) for series, ranges in self._layers.items()}

    @property
    def histograms(self) -> dict[str, HistogramTable]:
        """The histograms per layer, by series."""
        tables = {}
        for series, ranges in self._histograms.items():
            table = _one_table(ranges, _EMPTY_HISTOGRAM)
            tops = table.values[..., 0].max(axis=0)
            tables[series] = HistogramTable(table.names, tops, table.steps, _move_window(table.values, tops)[..., 1:])
        return tables

    # ---- reading files -----------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, directory: Path | str | RunFiles, *, media: bool = False, numbers: bool = False) -> RunSummary:
        """Read the files of a run, even of one that is running or was killed.

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
            warn_at_caller(str(error))
        for rows in files.metrics():
            columns = columns_of_rows(rows)
            summary.add_metrics(columns)
            if numbers:
                summary.numbers.add_metrics(columns)
        for step, header, values in files.layers():
            summary.add_layers(step, header, values)
            if numbers:
                summary.numbers.add_layers(step, header, values)
        if media:
            summary.media_lines = files.media_lines()
        summary.events = files.events()
        return summary


def _add_to_ranges(
    tables: dict[str, dict[SeriesHeader, Ranges]],
    step: int,
    header: SeriesHeader,
    values: Array,
    limits: tuple[int, int],
    merge: Callable[[Array, Array], Array],
) -> None:
    """Add the values of a step to the ranges of its series and header, which has as many as the limits allow."""
    ranges = tables.setdefault(header.series, {})
    if header not in ranges:
        # A model that skips layers at random has another header at nearly every step.
        if len(ranges) >= _MAX_HEADERS:
            del ranges[min(ranges, key=lambda known: ranges[known].last)]
        most_values, most_steps = limits
        ranges[header] = Ranges(min(max(most_values // max(values.size, 1), 4), most_steps), merge)
    ranges[header].add(step, values)


def merge_pairs(values: Array, merge: Callable[[Array, Array], Array]) -> Array:
    """Merge each two entries along the first axis; the last one of an odd number stays alone."""
    even = len(values) - len(values) % 2
    merged = merge(values[0:even:2], values[1:even:2])
    return np.concatenate([merged, values[even:]]).astype(values.dtype, copy=False)


def farther_from_zero(first: Array, second: Array) -> Array:
    """Return, element by element, the value farther from 0; NaN counts as no value."""
    with np.errstate(invalid="ignore"):
        return np.where((np.abs(second) > np.abs(first)) | np.isnan(first), second, first)


def _one_table(headers: Mapping[SeriesHeader, Ranges], empty: float | Array) -> LayerTable:
    """Make one table of all headers of a series, which several hooks may write to; `empty` fills what they lack."""
    names = tuple(dict.fromkeys(name for header in headers for name in header.names))
    columns = tuple(dict.fromkeys(column for header in headers for column in header.columns))
    steps = sorted({start for ranges in headers.values() for start in ranges.starts})
    row_of, column_of, step_of = ({key: index for index, key in enumerate(keys)} for keys in (names, columns, steps))
    values = np.full((len(steps), len(names), len(columns)), empty, np.float32)
    for header, ranges in headers.items():
        rows = [row_of[name] for name in header.names]
        across = [column_of[column] for column in header.columns]
        for start, array in zip(ranges.starts, ranges.arrays, strict=True):
            places = np.ix_([step_of[start]], rows, across)
            values[places] = ranges.merge(values[places], array[None])
    return LayerTable(names, columns, np.array(steps), values)


# ---- histograms in octaves -------------------------------------------------------------------------------------------
#
# An array of histograms is [names, 1 + bins] with the columns _HISTOGRAM_COLUMNS: the octave of the largest value,
# where the window of a name ends, then the bins as in `HistogramTable`.


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
    tops = np.maximum(first[..., 0], second[..., 0])
    added = _move_window(first, tops) + _move_window(second, tops)
    added[..., 0] = tops
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
