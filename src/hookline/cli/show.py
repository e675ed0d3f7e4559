"""`hookline show`: one run at a glance: where it came from, how it ended, its curves, alerts, costs and checkpoints."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hookline._fs import relative_to_here
from hookline.cli.charts import draw_chart
from hookline.cli.formatting import cut, duration_text, heading, labelled, open_console, paragraph, print_json, table
from hookline.record.alerts import Alert, find_alerts
from hookline.record.curves import Curve, Point
from hookline.record.runs import RUNNING, RunFiles
from hookline.record.summary import RunSummary
from hookline.report import REPORT
from hookline.report.run_fields import last_attempt_seconds, run_fields

_MOST_ALERTS, _MOST_METRICS, _MOST_HOOKS, _MOST_TAKEN = 12, 14, 6, 3
_FIRST = ("train/loss", "val/loss")
_STYLES = {"error": "red", "warning": "yellow", "info": ""}
_ANATOMY = {  # where a step's time goes, by metric
    "throughput/data_wait_seconds": "waiting for data",
    "throughput/forward_backward_seconds": "forward and backward",
    "throughput/optimizer_seconds": "optimizer",
    "throughput/hooks_seconds": "hooks",
}


def run(options: argparse.Namespace) -> int:
    """Print everything about a run that fits a screen or two."""
    files = RunFiles.read(options.run)
    summary = RunSummary.read(files.path)
    alerts = find_alerts(summary)
    if options.json:
        print_json(describe(files, summary, alerts))
        return 0
    console = open_console()
    print_origin(console, files, summary)
    print_alerts(console, alerts, summary)
    print_curves(console, summary)
    print_metrics(console, summary)
    print_costs(console, files, summary)
    print_checkpoints(console, files, summary)
    return 0


def describe(files: RunFiles, summary: RunSummary, alerts: list[Alert]) -> dict[str, Any]:
    """Return a run for programs."""
    last, best = find_checkpoints(files.path, summary)
    return {
        "run_id": files.run_id,
        "path": str(files.path),
        "labels": files.labels.to_json(),
        "outcome": files.outcome,
        "steps": files.step,
        "seconds": files.seconds,
        "run": files.run,
        "alerts": [asdict(alert) for alert in alerts],
        "metrics": {name: describe_curve(curve) for name, curve in summary.curves.items()},
        "events": dict(summary.event_counts),
        "checkpoints": {"last": None if last is None else str(last), "best": None if best is None else str(best)},
        "resume": resume_command(files),
    }


def describe_curve(curve: Curve) -> dict[str, Any]:
    """Return the numbers of a curve that say the most."""
    points = {"last": curve.last, "lowest": curve.least, "highest": curve.greatest}
    return {
        "points": curve.points,
        **{key: None if point is None else asdict(point) for key, point in points.items()},
        "non_finite": None if curve.non_finite is None else curve.non_finite[1],
    }


# ---- where the run came from, and how it ended -----------------------------------------------------------------------


def print_origin(console: Console, files: RunFiles, summary: RunSummary) -> None:
    """Print the name, outcome and provenance of a run."""
    run, labels = run_fields(summary), files.labels
    heading(console, cut(labels.name or files.run_id), cut(files.run_id) if labels.name else "")
    steps = "" if files.step is None else f", {files.step:,} step{'' if files.step == 1 else 's'}"
    seconds = "" if files.seconds is None else f" in {duration_text(files.seconds)}"
    reason = f" ({cut(str(run['reason']))})" if run.get("reason") else ""
    labelled(console, "outcome", f"{cut(files.outcome.replace('_', '-'), 60)}{reason}{steps}{seconds}")
    if labels.tags:
        labelled(console, "tags", cut(", ".join(labels.tags)))
    if labels.notes:
        labelled(console, "notes", cut(labels.notes, 1000))
    labelled(console, "started", _started(files))
    git, environment = run["git"], run["environment"]
    changed = ", with changes that are not committed" if git.get("dirty") else ""
    labelled(console, "code", f"git {str(git.get('commit', 'unknown'))[:12]}{changed}")
    seed = "" if run.get("seed") is None else f", seed {cut(str(run['seed']), 30)}"
    labelled(console, "config", f"{str(run.get('config_hash', 'unknown'))[:12]}{seed}")
    gpus = environment.get("gpus")
    cores = f"{environment.get('cpu_count', '?')} CPU cores"
    devices = ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else cores
    versions = f"hookline {environment.get('hookline', '?')}, torch {environment.get('torch', '?')}"
    labelled(console, "machine", cut(f"{environment.get('hostname', '?')}, {devices}, {versions}"))
    lineage = run.get("lineage")
    if isinstance(lineage, Mapping):
        labelled(console, "from", cut(f"run {lineage.get('run_id')}, step {lineage.get('step')}"))
    attempts = run["attempts"]
    if len(attempts) > 1:
        ends = ", ".join(str(one.get("outcome") or "killed") for one in attempts[:-1])
        labelled(console, "attempts", f"{len(attempts)}; those before the last one ended as: {cut(ends)}")
    if (report := files.path / REPORT).is_file():
        labelled(console, "report", str(relative_to_here(report)))


def _started(files: RunFiles) -> str:
    return "unknown" if files.started is None else f"{files.started:%Y-%m-%d %H:%M:%S}"


# ---- alerts and curves -----------------------------------------------------------------------------------------------


def print_alerts(console: Console, alerts: list[Alert], summary: RunSummary) -> None:
    """Print what deserves attention, the worst first."""
    console.print()
    heading(console, "alerts", "" if alerts else "none")
    for alert in alerts[:_MOST_ALERTS]:
        at = "" if alert.step is None else f"step {alert.step:,}: "
        labelled(console, alert.severity, f"{at}{cut(alert.text)}", style=_STYLES[alert.severity])
    if len(alerts) > _MOST_ALERTS:
        paragraph(console, f"and {len(alerts) - _MOST_ALERTS} more; --json has all", indent=0)
    off = [hook["name"] for hook in summary.hooks if hook.get("enabled") is False and hook.get("failures")]
    if off:
        paragraph(console, f"switched off: {cut(', '.join(map(str, off)))}", indent=0)


def print_curves(console: Console, summary: RunSummary) -> None:
    """Draw the losses over each other."""
    drawn = {
        name: (curve.steps, curve.lowest, curve.highest)
        for name, curve in ((name, summary.curves.get(name)) for name in _FIRST)
        if curve is not None and curve.points > 1
    }
    if drawn:
        console.print()
        draw_chart(console, drawn, title="loss")


def print_metrics(console: Console, summary: RunSummary) -> None:
    """Print the last, lowest and highest value of the metrics that say the most."""
    if not summary.curves:
        return
    console.print()
    names = sorted(summary.curves, key=_importance)
    heading(console, "metrics")
    rows = []
    for name in names[:_MOST_METRICS]:
        curve = summary.curves[name]
        last = "-" if curve.last is None else f"{curve.last.value:.4g}"
        rows.append(([cut(name, 60), last, _point(curve.least), _point(curve.greatest)], ""))
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns: dict[str, dict[str, Any]] = {
        "metric": {"overflow": "fold"},
        "last": right,
        "lowest (step)": right,
        "highest (step)": right,
    }
    table(console, columns, rows)
    if len(names) > _MOST_METRICS:
        paragraph(console, f"and {len(names) - _MOST_METRICS} more; `hookline plot` draws any of them", indent=0)


def _importance(name: str) -> tuple[int, str]:
    if name in _FIRST:
        return _FIRST.index(name), name
    prefixes = ("val/", "train/", "lr", "throughput/samples", "throughput/tokens", "throughput/steps", "throughput/")
    ranks = [index for index, prefix in enumerate(prefixes) if name.startswith(prefix)]
    return (len(_FIRST) + (ranks[0] if ranks else len(prefixes)), name)


def _point(point: Point | None) -> str:
    return "-" if point is None else f"{point.value:.4g} ({point.step:,})"


# ---- time and checkpoints --------------------------------------------------------------------------------------------


def print_costs(console: Console, files: RunFiles, summary: RunSummary) -> None:
    """Print the slowest hooks, and where a step's time goes if the run recorded it."""
    costs = summary.costs
    seconds = last_attempt_seconds(files.path, files.run)
    if costs:
        console.print()
        heading(console, "slowest hooks")
        rows = []
        for one in sorted(costs, key=lambda one: -one["seconds"])[:_MOST_HOOKS]:
            share = f"{one['seconds'] / seconds:.1%}" if seconds else "-"
            rows.append(([cut(str(one.get("hook")), 100), f"{one['seconds']:.3f} s", share], ""))
        whole = "of the last attempt" if len(run_fields(summary)["attempts"]) > 1 else "of the run"
        table(console, {"hook": {}, "time": {"justify": "right"}, whole: {"justify": "right"}}, rows)
    parts = {text: summary.curves[name].last for name, text in _ANATOMY.items() if name in summary.curves}
    known = {text: point.value for text, point in parts.items() if point is not None}
    if len(known) > 1:
        shown = ", ".join(f"{text} {value * 1e3:.3g} ms" for text, value in known.items())
        labelled(console, "a step", shown, indent=0)


def print_checkpoints(console: Console, files: RunFiles, summary: RunSummary) -> None:
    """Print the last and the best checkpoint, and how to resume."""
    last, best = find_checkpoints(files.path, summary)
    console.print()
    heading(console, "checkpoints", "" if last or best else "none")
    for label, path in (("last", last), ("best", best)):
        if path is not None:
            labelled(console, label, str(relative_to_here(path)))
    if last is not None and files.outcome != RUNNING:
        labelled(console, "resume", resume_command(files))


def find_checkpoints(directory: Path, summary: RunSummary) -> tuple[Path | None, Path | None]:
    """Return the newest and the best checkpoint that are still there."""
    last = best = None
    for event in summary.events:
        if event.get("kind") in ("checkpoint_saved", "best_checkpoint") and isinstance(event.get("path"), str):
            path = directory / "checkpoints" / Path(event["path"]).name  # the run may have been moved
            if os.path.isdir(path):  # noqa: PTH112 - unlike Path's, it never raises
                last = path if event["kind"] == "checkpoint_saved" else last
                best = path if event["kind"] == "best_checkpoint" else best
    return last, best


def resume_command(files: RunFiles) -> str:
    """Return the command that continues a run from its newest checkpoint."""
    return f"hookline resume {shlex.quote(str(relative_to_here(files.path)))}"
