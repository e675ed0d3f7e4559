"""Read a record, also one whose writer was killed in the middle of a line."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hookline._words import nearest
from hookline.errors import RecordError
from hookline.record.json_lines import NON_FINITE, RESERVED, directory_of, warn_of_torn_line
from hookline.record.packing import SeriesHeader
from hookline.record.rows import read_event_rows, read_layer_rows, read_rows

_MOST_GAPS = 1000  # places of a table per value in the file: hooks that change leave some places without a value
_Steps = dict[int, dict[SeriesHeader, torch.Tensor]]  # the values of a series that were read so far


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def read_metrics(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's metrics: one row per step, in order of first appearance; later lines of a step win, per field.

    A resumed run repeats the steps after its checkpoint, and a step may have several lines, because its validation
    comes later. The line that marks where it resumed is not a row. A line that was torn by a kill is left out with a
    `RuntimeWarning`.
    """
    path, incomplete = directory_of(run_dir) / "metrics.jsonl", list[str]()
    steps: dict[int, dict[str, Any]] = {}
    for rows in read_rows(path, incomplete):
        for row in rows:
            if type(row.get("step")) is not int or row.keys() - RESERVED == {"resumed"}:
                continue
            row.pop("resumed", None)
            for name, value in row.items():  # all metrics are numbers, also one that is named `error`
                if isinstance(value, str):
                    row[name] = NON_FINITE.get(value, value)
            steps.setdefault(row["step"], {}).update(row)
    if incomplete:
        warn_of_torn_line(path)
    return list(steps.values())


# ---- events.jsonl ----------------------------------------------------------------------------------------------------


def read_events(run_dir: Path | str | None) -> list[dict[str, Any]]:
    """Read a run's events in the order of their times; those that concern one rank other than 0 have its `rank`."""
    directory, incomplete = directory_of(run_dir), list[str]()
    events = read_event_rows(directory, incomplete)
    for file in incomplete:
        warn_of_torn_line(directory / file)
    return events


# ---- layers.jsonl ----------------------------------------------------------------------------------------------------


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

    If a step was written twice, as by a resumed run, the later values count. Lines torn by a kill are left out with a
    `RuntimeWarning`, as in `read_metrics`.
    """
    return {name: series for name, (series, _) in read_written_layers(run_dir).items()}


def read_written_layers(run_dir: Path | str | None) -> dict[str, tuple[LayerSeries, torch.Tensor]]:
    """Read every series with a mask [steps, names, columns] of what was written, because a NaN may be a value, too."""
    directory = directory_of(run_dir)
    path = directory / "layers.jsonl"
    if not os.path.lexists(path) and os.path.isdir(directory):  # noqa: PTH112 - unlike Path's, it never raises
        return {}
    found: dict[str, _Steps] = {}
    incomplete: list[str] = []
    for step, header, values in read_layer_rows(path, incomplete):
        written = found.setdefault(header.series, {}).setdefault(step, {})
        written.pop(header, None)  # what comes later overwrites, also where headers overlap
        written[header] = torch.from_numpy(values)
    if incomplete:
        warn_of_torn_line(path)
    return {name: _merge_headers(steps) for name, steps in found.items()}


def _merge_headers(written: _Steps) -> tuple[LayerSeries, torch.Tensor]:
    """Make one series of all headers, and a mask of what was written.

    Usually there is one header, and two if a hook was changed during the run.
    """
    headers = list(dict.fromkeys(header for by_header in written.values() for header in by_header))
    bins = headers[-1].bins if headers else None
    headers = [header for header in headers if header.bins == bins]
    names = tuple(dict.fromkeys(name for header in headers for name in header.names))
    columns = tuple(dict.fromkeys(column for header in headers for column in header.columns))
    steps = sorted(step for step, by_header in written.items() if not by_header.keys().isdisjoint(headers))
    shape = (len(steps), *SeriesHeader("", names, columns, bins).shape)
    in_file = sum(own.numel() for by_header in written.values() for own in by_header.values())
    places = max(math.prod(shape), math.prod(shape[:3]))  # the mask has places also for histograms of no bins
    if places > _MOST_GAPS * max(in_file, _MOST_GAPS):  # a small file must not fill the memory
        have = f"{in_file:,} values for a table of {places:,}"
        raise RecordError(f"layers.jsonl has {have}: it is damaged or was not written by Hookline")
    values, mask = torch.full(shape, float("nan")), torch.zeros(shape[:3], dtype=torch.bool)
    row_of, column_of = ({one: index for index, one in enumerate(all_)} for all_ in (names, columns))
    for index, step in enumerate(steps):
        for header, own in written[step].items():
            if header.bins == bins:
                rows = torch.tensor([row_of[name] for name in header.names], dtype=torch.long)
                across = torch.tensor([column_of[column] for column in header.columns], dtype=torch.long)
                values[index][rows.unsqueeze(1), across.unsqueeze(0)] = own
                mask[index][rows.unsqueeze(1), across.unsqueeze(0)] = True
    return LayerSeries(names, columns, tuple(steps), values), mask


def _index(name: str, choices: tuple[str, ...], kind: str) -> int:
    if name not in choices:
        raise RecordError(f"this series has no {kind} {name!r}; {nearest(name, choices)}")
    return choices.index(name)
