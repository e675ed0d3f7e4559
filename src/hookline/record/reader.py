"""Reading a record back, also one whose writer was killed in the middle of a line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from hookline.errors import RecordError

_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_TEXT_FIELDS = frozenset({
    "time", "kind", "name", "hook", "event", "by", "reason", "message", "error", "text", "run_id",
})  # fmt: skip


def read_json(path: Path | str) -> dict[str, Any]:
    """One JSON object from a file. Raises `RecordError` when it is missing or is no JSON object."""
    record = _parse(_read(Path(path)))
    if record is None:
        raise RecordError(f"{path} is not a JSON object; it is damaged or was not written by Hookline")
    return record


def read_jsonl(path: Path | str) -> tuple[list[dict[str, Any]], bool]:
    """The whole records of a file, and whether any line was torn (its writer was killed while writing it).

    The strings that stand for non-finite numbers are numbers again, except in fields that hold text.
    """
    lines = [line for line in _read(Path(path)).split(b"\n") if line]
    parsed = [_parse(line) for line in lines]
    records = [_with_numbers(record) for record in parsed if record is not None]
    return records, len(records) < len(lines)


def whole_records(path: Path | str) -> list[dict[str, Any]]:
    """The whole records of a file, for readers that return something else; a torn line is warned of."""
    records, torn = read_jsonl(path)
    if torn:
        message = f"{path}: a line was torn, its writer was killed while writing it; the whole ones were read"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return records


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """One record per step, in order of first appearance; later lines of a step win, field by field.

    A resumed run repeats the steps after its checkpoint; a step may span lines (its validation comes later). A line
    that was torn by a kill is left out with a `RuntimeWarning`.
    """
    steps: dict[Any, dict[str, Any]] = {}
    for record in whole_records(Path(run_dir) / "metrics.jsonl"):
        if "step" not in record:
            continue
        if "resumed" in record:  # the run went back to here: later steps of an earlier attempt are no more
            steps = {step: earlier for step, earlier in steps.items() if step <= record["step"]}
        steps.setdefault(record["step"], {}).update(record)
    return list(steps.values())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"cannot read {path}: {reason}. A run's directory is runs/<run_id>") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _with_numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) and key not in _TEXT_FIELDS else value
        for key, value in record.items()
    }
