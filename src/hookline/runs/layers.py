"""Read the series of layers.jsonl whole, as tables over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline._limits import has_too_many_gaps
from hookline._words import nearest
from hookline.errors import RecordError
from hookline.record.format import Floats, SeriesHeader
from hookline.runs.named import find_files

if TYPE_CHECKING:
    import torch

_Steps = dict[int, dict[SeriesHeader, Floats]]  # the values of a series that were read so far


@dataclass(frozen=True)
class LayerSeries:
    """One series: ``values[i, j, k]`` is column k of name j at ``steps[i]``; NaN where nothing was written.

    A series of histograms has one more dimension, the bins.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[int, ...]
    values: torch.Tensor

    def of(self, name: str, column: str) -> torch.Tensor:
        """Return one column of one name over the steps.

        >>> read_layers(run_dir)["activations"].of("blocks.0.mlp", "std")
        """
        return self.values[:, _index(name, self.names, "name"), _index(column, self.columns, "column")]


def read_layers(run_dir: Path | str | None) -> dict[str, LayerSeries]:
    """Read every series of a run by its name; empty if the run wrote none.

    If a step was written twice, as by a resumed run, the later values count. If several hooks wrote histograms of one
    series in different resolutions, those of the last one count; `load_run` has all of them. Lines that are torn or
    damaged are left out with a `RuntimeWarning`, as in `read_metrics`.
    """
    import torch

    reader = find_files(run_dir)
    tables = read_layer_tables(reader.layers())
    reader.warn_of_damage()
    return {
        name: LayerSeries(table.names, table.columns, table.steps, torch.from_numpy(table.values))
        for name, table in tables.items()
    }


class SeriesTable(NamedTuple):
    """A series as `LayerSeries` has it, in NumPy, with what was written of it."""

    names: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[int, ...]
    values: Floats
    written: NDArray[np.bool_]
    """[steps, names, columns]: whether there is a value, because a NaN may be one, too."""


def read_layer_tables(rows: Iterable[tuple[int, SeriesHeader, Floats]]) -> dict[str, SeriesTable]:
    """Make a table of every series from the rows that `RunReader.layers` yields, by name."""
    by_series: dict[str, _Steps] = {}
    for step, header, values in rows:
        written = by_series.setdefault(header.series, {}).setdefault(step, {})
        written.pop(header, None)  # later values overwrite earlier ones, even where headers overlap
        written[header] = values
    return {name: _merge_headers(steps) for name, steps in by_series.items()}


def _merge_headers(written: _Steps) -> SeriesTable:
    """Make one table of all headers; usually there is one, and two if a hook was changed during the run."""
    headers = list(dict.fromkeys(header for by_header in written.values() for header in by_header))
    bins = headers[-1].bins if headers else None
    headers = [header for header in headers if header.bins == bins]
    names = tuple(dict.fromkeys(name for header in headers for name in header.names))
    columns = tuple(dict.fromkeys(column for header in headers for column in header.columns))
    steps = sorted(step for step, by_header in written.items() if not by_header.keys().isdisjoint(headers))
    shape = (len(steps), *SeriesHeader("", names, columns, bins).shape)
    in_file = sum(block.size for by_header in written.values() for block in by_header.values())
    places = max(math.prod(shape), math.prod(shape[:3]))  # the mask also has places for histograms without bins
    if has_too_many_gaps(places, in_file):
        have = f"{in_file:,} values for a table of {places:,}"
        raise RecordError(f"layers.jsonl has {have}: it is damaged or was not written by Hookline")
    values, mask = np.full(shape, np.nan, np.float32), np.zeros(shape[:3], np.bool_)
    row_of, column_of = ({key: index for index, key in enumerate(keys)} for keys in (names, columns))
    for index, step in enumerate(steps):
        for header, block in written[step].items():
            if header.bins == bins:
                rows = [row_of[name] for name in header.names]
                places_of = np.ix_([index], rows, [column_of[column] for column in header.columns])
                values[places_of], mask[places_of] = block, True
    return SeriesTable(names, columns, tuple(steps), values, mask)


def _index(name: str, choices: tuple[str, ...], kind: str) -> int:
    if name not in choices:
        raise RecordError(f"this series has no {kind} {name!r}; {nearest(name, choices)}")
    return choices.index(name)
