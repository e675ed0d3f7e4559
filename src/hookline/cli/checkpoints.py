"""`hookline checkpoints`: list the checkpoints of a run, and verify every byte of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal

from hookline.cli import FAILED
from hookline.cli.arguments import JSON, RUN
from hookline.cli.formatting import heading, open_console, paragraph, print_json
from hookline.errors import HooklineError, written
from hookline.record.format import RUN_FILE

if TYPE_CHECKING:
    from hookline.checkpoints.store import SavedCheckpoint

ARGUMENTS = RUN | JSON


def run(options: argparse.Namespace) -> int:
    """Verify and print every checkpoint of a run, newest first; return 1 if one is damaged."""
    from hookline.checkpoints.find import checkpoints_of
    from hookline.checkpoints.store import checkpoints_in

    checkpoints = checkpoints_in(checkpoints_of(options.run.path))
    if not checkpoints:
        is_run = (options.run.path / RUN_FILE).exists()
        remedy = "the run has not saved one yet" if is_run else "pass a run's directory, runs/<run_id>"
        raise HooklineError(f"no checkpoint in {options.run.path}; {remedy}")
    return verify_and_print(checkpoints, options.json)


def verify_and_print(checkpoints: Sequence[SavedCheckpoint], as_json: bool) -> int:
    """Verify and print checkpoints; return 1 if one is damaged."""
    reports = []
    console = open_console()
    for checkpoint in checkpoints:
        reports.append(describe(checkpoint))
        if not as_json:  # each as soon as it is verified, which may take minutes
            print_report(console, reports[-1])
    if as_json:
        print_json(reports)
    return 0 if all(report["good"] for report in reports) else FAILED


def describe(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Verify a checkpoint, and return its problems, or its step, epoch, size and time."""
    from hookline.checkpoints.store import MANIFEST

    path, problems = checkpoint.path, checkpoint.problems
    report: dict[str, Any] = {"name": path.name, "path": str(path), "problems": problems, "good": not problems}
    if problems:
        return report
    try:
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).astimezone()
    except OSError as error:  # another process may be deleting it
        return {**report, "gone": str(error)}
    manifest = checkpoint.manifest
    meta: dict[str, Any] = manifest["meta"]
    size = sum(file["bytes"] for file in manifest["files"].values())
    where: dict[str, Any] = {name: meta[name] for name in ("step", "epoch") if name in meta}
    return {**report, **where, "bytes": size, "saved": saved.isoformat(timespec="seconds")}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print a checkpoint with a line about it, or with its problems."""
    heading(console, report["name"], "good" if report["good"] else "damaged")
    lines = report["problems"]
    if "bytes" in report:
        where = ", ".join(f"{name} {written(report[name])}" for name in ("step", "epoch") if name in report)
        saved = f"{datetime.fromisoformat(report['saved']):%Y-%m-%d %H:%M:%S}"
        lines = [f"{where or 'no step'}, {decimal(report['bytes'])}, saved {saved}"]
    for line in lines or [report["gone"]]:
        paragraph(console, line)
