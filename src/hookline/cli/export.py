"""`hookline export`: write the record of a run as tables, for spreadsheets and data frames."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline._console import printable
from hookline._text import counted
from hookline.cli.arguments import JSON, RUN, argument
from hookline.cli.formatting import print_json
from hookline.cli.output import CommandOutput
from hookline.errors import HooklineError, error_text
from hookline.record import strict_json
from hookline.record.json_lines import writing
from hookline.runs.frames import Columns, LoadedRun, columns_of, load_files

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet evaluates a cell that begins with one of these
_MAX_NAME_LENGTH = 100  # characters of a series in a file's name
_TYPES_OF_COLUMNS = ({bool}, {int}, {float}, {str})
_INT64 = range(-(2**63), 2**63)

ARGUMENTS = (
    RUN
    | argument("--to", "FORMAT", "csv, parquet or jsonl", required=True, choices=("csv", "parquet", "jsonl"))
    | argument("--output", "FOLDER", "write the files into this directory, new or empty (<run_id>-export)")
    | JSON
)


def run(options: argparse.Namespace) -> int:
    """Write one file per table, and print each file with its number of rows."""
    write = _parquet_writer() if options.to == "parquet" else {"csv": _write_csv, "jsonl": _write_jsonl}[options.to]
    loaded = load_files(options.run)
    run_id = loaded.run.get("run_id", loaded.path.name)
    directory = Path(f"{_safe(str(run_id))}-export" if options.output is None else options.output)
    _make_empty(directory)
    output, files = CommandOutput(), []
    for name, columns in _tables(loaded).items():
        path, rows = directory / f"{name}.{options.to}", len(next(iter(columns.values()), []))
        with writing(path):
            write(path, {strict_json.simplify(title): cells for title, cells in columns.items()})
        files.append({"path": str(path), "table": name, "rows": rows})
        if not options.json:
            output.write(f"{printable(str(path))}: {counted(rows, 'row')}\n")
    if options.json:
        print_json(files)
    return 0


def _tables(loaded: LoadedRun) -> dict[str, Columns]:
    """Return every table of a run by its file name without the suffix."""
    tables = {"metrics": loaded.metrics}
    taken = set()
    for series, columns in loaded.layers.items():
        name, count = f"layers-{_safe(series)}", 2
        unique = name
        while unique.lower() in taken:  # some file systems do not distinguish A from a
            unique, count = f"{name}-{count}", count + 1
        taken.add(unique.lower())
        tables[unique] = columns
    tables["events"] = columns_of(loaded.events, ("time", "kind", "step"))
    return tables


def _safe(name: str) -> str:
    """Return a name that is safe to use in a file name, whatever its origin."""
    return re.sub("[^A-Za-z0-9._=-]", "_", name)[:_MAX_NAME_LENGTH]


def _make_empty(directory: Path) -> None:
    """Create a directory. Raises `HooklineError` if it has files already."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        in_use = any(directory.iterdir())
    if in_use:
        raise HooklineError(f"{directory} is not empty; remove it, or choose another directory with --output")


# ---- formats ---------------------------------------------------------------------------------------------------------


def _write_jsonl(path: Path, columns: Mapping[str, list[Any]]) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        for cells in zip(*columns.values(), strict=True):
            file.write(f"{strict_json.dumps(dict(zip(columns, cells, strict=True)))}\n")


def _write_csv(path: Path, columns: Mapping[str, list[Any]]) -> None:
    with path.open("x", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(_csv_cell, columns))
        writer.writerows(map(_csv_cell, cells) for cells in zip(*columns.values(), strict=True))


def _csv_cell(value: Any) -> Any:
    """Return a number as it is, None as an empty cell, and everything else as text that no spreadsheet runs."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    text = _text(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _text(value: Any) -> str:
    """Return a string without halves of surrogate pairs, and everything else as JSON."""
    return str(strict_json.simplify(value)) if isinstance(value, str) else strict_json.dumps(value)


def _parquet_writer() -> Callable[[Path, Mapping[str, list[Any]]], None]:
    """Import pyarrow and return the function that writes a file with it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise HooklineError("--to parquet needs the package pyarrow: pip install 'hookline[parquet]'") from error

    def write(path: Path, columns: Mapping[str, list[Any]]) -> None:
        try:
            table = pyarrow.table({title: pyarrow.array(_of_one_type(cells)) for title, cells in columns.items()})
            with path.open("xb") as file:
                pyarrow.parquet.write_table(table, file)
        except pyarrow.ArrowException as error:
            raise HooklineError(f"cannot write {path}: {error_text(error)}") from error

    return write


def _of_one_type(cells: list[Any]) -> list[Any]:
    """Return cells of one type as they are, and all others as text: a column of Parquet has one type."""
    there = [cell for cell in cells if cell is not None]
    types = {type(cell) for cell in there}
    is_plain = not types or (types in _TYPES_OF_COLUMNS and (types != {int} or all(cell in _INT64 for cell in there)))
    if is_plain and types != {str}:
        return cells
    return [None if cell is None else _text(cell) for cell in cells]
