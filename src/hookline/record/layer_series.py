"""Reading layers.jsonl back: every series as one tensor, whatever its writer did between the lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hookline.errors import RecordError, nearest
from hookline.record.layers import Table
from hookline.record.packing import unpack
from hookline.record.reader import whole_records

_HEADER = {"series", "name", "names", "columns"}


@dataclass(frozen=True)
class LayerSeries:
    """One series: ``values[i, j, k]`` is column k of name j at ``steps[i]``; NaN where nothing was written.

    A series of histograms has one dimension more, the bins.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[int, ...]
    values: torch.Tensor

    def of(self, name: str, column: str) -> torch.Tensor:
        """One column of one name over the steps.

        >>> read_layers(run_dir)["activations"].of("blocks.0.mlp", "std")
        """
        return self.values[:, _place(name, self.names, "name"), _place(column, self.columns, "column")]


def read_layers(run_dir: Path | str) -> dict[str, LayerSeries]:
    """Every series of a run by its name; empty when the run wrote none.

    Of a step that was written twice, as by a resumed run, the later values count. Lines torn by a killed process are
    left out with a `RuntimeWarning`, as `read_metrics` does.
    """
    path = Path(run_dir) / "layers.jsonl"
    if not path.exists() and path.parent.is_dir():
        return {}
    found: dict[str, _Series] = {}
    tables: dict[Any, Table] = {}
    for record in whole_records(path):
        if not all(isinstance(record.get(key, 0), int) for key in ("series", "step", "resumed")):
            continue  # not a line of ours
        if "resumed" in record:
            for series in found.values():
                series.go_back(record["resumed"])
        elif record.keys() >= _HEADER:
            tables[record["series"]] = _table(record)
        elif "step" in record and (values := _values(record, tables.get(record.get("series")))) is not None:
            table = tables[record["series"]]
            found.setdefault(table.series, _Series()).add(record["step"], table, values)
    return {name: series.finished() for name, series in found.items()}


@dataclass
class _Series:
    """What has been read of a series: per step, the tables that were written."""

    steps: dict[int, dict[Table, torch.Tensor]] = field(default_factory=dict)

    def add(self, step: int, table: Table, values: torch.Tensor) -> None:
        written = self.steps.setdefault(step, {})
        written.pop(table, None)  # what comes later lies on top
        written[table] = values

    def go_back(self, step: int) -> None:
        self.steps = {known: written for known, written in self.steps.items() if known <= step}

    def finished(self) -> LayerSeries:
        """All tables in one: usually there is one, two where a hook was changed in mid-run."""
        tables = list(dict.fromkeys(table for written in self.steps.values() for table in written))
        bins = tables[-1].bins if tables else None
        tables = [table for table in tables if table.bins == bins]
        names = tuple(dict.fromkeys(name for table in tables for name in table.names))
        columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
        steps = sorted(step for step, written in self.steps.items() if not written.keys().isdisjoint(tables))
        values = torch.full((len(steps), *Table("", names, columns, bins).shape), float("nan"))
        places = {table: _places(table, names, columns) for table in tables}
        for index, step in enumerate(steps):
            for table, written in self.steps[step].items():
                if table in places:
                    values[index][places[table]] = written
        return LayerSeries(names, columns, tuple(steps), values)


def _places(table: Table, names: tuple[str, ...], columns: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a table's rows and columns lie in the whole."""
    rows = {name: index for index, name in enumerate(names)}
    across = {column: index for index, column in enumerate(columns)}
    return (
        torch.tensor([rows[name] for name in table.names], dtype=torch.long).unsqueeze(1),
        torch.tensor([across[column] for column in table.columns], dtype=torch.long).unsqueeze(0),
    )


def _table(header: dict[str, Any]) -> Table:
    return Table(header["name"], tuple(header["names"]), tuple(header["columns"]), header.get("bins"))


def _values(record: dict[str, Any], table: Table | None) -> torch.Tensor | None:
    """The numbers of one line; None for one that is damaged or whose header is."""
    if table is None:
        return None
    found = unpack(record, torch.Size(table.shape).numel())
    return None if found is None else torch.from_numpy(found).reshape(table.shape)


def _place(name: str, known: tuple[str, ...], kind: str) -> int:
    if name not in known:
        raise RecordError(f"this series has no {kind} {name!r}; {nearest(name, known)}")
    return known.index(name)
