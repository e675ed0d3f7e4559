"""`hookline show`: one run at a glance: the verdict and its story, how it ended, its curves, costs and checkpoints."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hookline._console import printable
from hookline._fs import relative_to_here
from hookline._text import counted, duration_text
from hookline.cli.arguments import JSON, RUN, flag
from hookline.cli.charts import MIN_POINTS, draw_chart
from hookline.cli.command_lines import recorded_resume_command, report_command
from hookline.cli.formatting import bounded, heading, labeled, open_console, paragraph, point_text, print_json, table
from hookline.errors import RecordError
from hookline.report import REPORT
from hookline.runs.alerts import find_alerts
from hookline.runs.config import is_whole
from hookline.runs.find import RUNNING, RunFiles
from hookline.runs.ranking import LOSSES, metric_order
from hookline.runs.step_parts import STEP_PARTS
from hookline.runs.stories import first_of_each_kind
from hookline.runs.summary import NO_GOOD_CHECKPOINT, RunSummary
from hookline.runs.verdict import Alert, Verdict, judge

_MAX_PARTS, _MAX_ALERTS, _MAX_METRICS, _MAX_HOOKS = 6, 6, 6, 3  # together with a chart they fill a screen
_MIN_SECONDS = 0.001  # Cheaper hooks are not listed.
UNKNOWN = "unknown"  # instead of a commit
_HEALTH_STYLES = {"healthy": "bold green", "not judged": "bold", "look at this": "bold yellow", "broken": "bold red"}
_STYLES = {"error": "red", "warning": "yellow", "info": ""}

ARGUMENTS = RUN | flag("--metrics", "print all metrics of the run, and nothing else") | JSON


def run(options: argparse.Namespace) -> int:
    """Print the verdict on a run and why, and what fits a screen."""
    files = options.run
    summary = RunSummary.read(files)
    alerts = find_alerts(summary)
    verdict = judge(alerts)
    if options.json:
        print_json(describe(files, summary, alerts, verdict))
        return 0
    console = open_console()
    if options.metrics:
        print_metrics(console, summary, most=None)
        return 0
    print_verdict(console, verdict, alerts)
    print_origin(console, files)
    print_alerts(console, alerts, summary)
    print_curves(console, summary)
    console.print()
    print_metrics(console, summary, _MAX_METRICS)
    print_costs(console, files, summary)
    print_checkpoints(console, files, summary)
    return 0


def describe(files: RunFiles, summary: RunSummary, alerts: list[Alert], verdict: Verdict) -> dict[str, Any]:
    """Return a run for programs."""
    last, best = find_checkpoints(summary)
    resumable = summary.resumable if is_resumable(files, last or best) else None
    return {
        "run_id": files.run_id,
        "path": str(files.path),
        "labels": files.labels.to_json(),
        "verdict": verdict,
        "outcome": files.outcome,
        "steps": files.step,
        "seconds": files.seconds,
        "run": files.run,
        "alerts": alerts,
        "metrics": {
            name: {
                "points": curve.points,
                "last": curve.last,
                "lowest": curve.least,
                "highest": curve.greatest,
                "non_finite": None if curve.non_finite is None else curve.non_finite[1],
            }
            for name, curve in summary.curves.items()
        },
        "events": dict(Counter(event["kind"] for event in summary.events)),
        "checkpoints": {"last": None if last is None else str(last), "best": None if best is None else str(best)},
        "resume": None if resumable is None else resume_command(files, resumable[1]),
    }


# ---- where the run came from, and how it ended -----------------------------------------------------------------------


def print_verdict(console: Console, verdict: Verdict, alerts: list[Alert]) -> None:
    """Print whether the run can be trusted and, if not, the story of the first alert, which decided."""
    console.print(Text(bounded(verdict.health), style=_HEALTH_STYLES[verdict.health]))
    if verdict.reason:
        story = alerts[0]
        parts = story.parts or (story,)
        told = first_of_each_kind(parts)[:_MAX_PARTS]
        for part in told:
            labeled(console, "" if part.step is None else f"step {part.step:,}", bounded(part.text))
        if len(parts) > len(told):
            paragraph(console, f"and {len(parts) - len(told)} more; --json has all")
    console.print()


def print_origin(console: Console, files: RunFiles) -> None:
    """Print the name and outcome of a run, and where it came from."""
    run, labels = files.run, files.labels
    heading(console, bounded(labels.name or files.run_id), bounded(files.run_id) if labels.name else "")
    steps = "" if files.step is None else f", {counted(files.step, 'step')}"
    seconds = "" if files.seconds is None else f" in {duration_text(files.seconds)}"
    labeled(console, "outcome", f"{_ending(files)}{steps}{seconds}")
    if labels.tags:
        labeled(console, "tags", bounded(", ".join(labels.tags)))
    if labels.notes:
        labeled(console, "notes", bounded(labels.notes, 1000))
    started = "unknown" if files.started is None else f"{files.started:%Y-%m-%d %H:%M:%S}"
    seed = "" if run.get("seed") is None else f", seed {bounded(str(run['seed']), 30)}"
    commit = str(run.get("git", {}).get("commit", UNKNOWN))[:12]
    changed = " with uncommitted changes" if run.get("git", {}).get("dirty") else ""
    code = "not in a git repository" if commit == UNKNOWN else f"git {commit}{changed}"
    labeled(console, "started", bounded(f"{started}, {code}{seed}"))
    if lineage := run.get("lineage"):
        labeled(console, "from", bounded(f"run {lineage.get('run_id')}, step {lineage.get('step')}"))
    attempts = run.get("attempts", [])
    if len(attempts) > 1:
        ends = ", ".join(str(attempt.get("outcome") or "killed") for attempt in attempts[:-1])
        labeled(console, "attempts", f"{len(attempts)}; the earlier ones ended as: {bounded(ends)}")
    if (report := files.path / REPORT).is_file():
        labeled(console, "report", str(relative_to_here(report)))
    elif command := report_command(files):
        labeled(console, "report", f"`{command}` writes it")


def _ending(files: RunFiles) -> str:
    """Return the outcome and, in parentheses, the reason; "stopped by HOOK: why" begins with the outcome."""
    outcome, reason = bounded(files.outcome.replace("_", "-"), 60), bounded(files.run.get("reason") or "")
    if files.outcome == "non_finite" and reason.startswith("stopped by "):
        reason = reason.partition(": ")[0]  # the verdict has the rest
    if reason.startswith(f"{outcome} "):
        outcome, _, reason = reason.partition(": ")
    return f"{outcome} ({reason})" if reason else outcome


# ---- alerts and curves -----------------------------------------------------------------------------------------------


def print_alerts(console: Console, alerts: list[Alert], summary: RunSummary) -> None:
    """Print the other alerts, the worst first; the verdict shows the first one unless it is a notice."""
    others = alerts if judge(alerts).health == "healthy" else alerts[1:]
    off = [hook["name"] for hook in summary.hooks if hook.get("enabled") is False and hook.get("failures")]
    if not others and not off:
        return
    console.print()
    heading(console, "alerts" if len(others) == len(alerts) else "also")
    for alert in others[:_MAX_ALERTS]:
        at = "" if alert.step is None else f"step {alert.step:,}: "
        severity = "notice" if alert.severity == "info" else alert.severity
        labeled(console, severity, f"{at}{bounded(alert.text)}", style=_STYLES[alert.severity])
    if len(others) > _MAX_ALERTS:
        paragraph(console, f"and {len(others) - _MAX_ALERTS} more; --json has all", indent=0)
    if off:
        paragraph(console, f"disabled: {bounded(', '.join(map(str, off)))}", indent=0)


def print_curves(console: Console, summary: RunSummary) -> None:
    """Overlay the losses in one chart."""
    drawn = {name: curve for name in LOSSES if (curve := summary.curves.get(name)) is not None and curve.finite}
    if any(curve.finite >= MIN_POINTS for curve in drawn.values()):
        console.print()
        draw_chart(console, drawn, title="loss")


def print_metrics(console: Console, summary: RunSummary, most: int | None) -> None:
    """Print the last, lowest and highest value of the most important metrics, or of all of them."""
    if not summary.curves:
        heading(console, "metrics", "none")
        return
    names = sorted(summary.curves, key=metric_order)
    heading(console, "metrics")
    rows = []
    for name in names[:most]:
        curve = summary.curves[name]
        extremes = point_text(curve.least), point_text(curve.greatest)
        rows.append(([bounded(name, 60), point_text(curve.last, with_step=False), *extremes], ""))
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = {"metric": {"overflow": "fold"}} | dict.fromkeys(("last", "lowest (step)", "highest (step)"), right)
    table(console, columns, rows)
    if most is not None and len(names) > most:
        paragraph(console, f"and {len(names) - most} more; --metrics lists all, `hookline plot` draws any", indent=0)


# ---- time and checkpoints --------------------------------------------------------------------------------------------


def print_costs(console: Console, files: RunFiles, summary: RunSummary) -> None:
    """Print the slowest hooks, and where a step's time goes if the run recorded it; each on a line."""
    costs = sorted(files.run.get("costs", []), key=lambda cost: -cost["seconds"])[:_MAX_HOOKS]
    seconds = files.last_attempt_seconds
    shares = [
        f"{bounded(cost['hook'], 100)} {cost['seconds']:.3f} s"
        + (f" ({cost['seconds'] / seconds:.1%})" if seconds else "")
        for cost in costs
        if cost["seconds"] >= _MIN_SECONDS
    ]
    phrases = {"step": "a step"} | {name: part.phrase for name, part in STEP_PARTS.items()}
    times = [f"{phrases[part]} {seconds * 1e3:.3g} ms" for part, seconds in summary.step_seconds.items()]
    if shares or len(times) > 1:
        console.print()
    if shares:
        labeled(console, "slowest hooks", ", ".join(shares), indent=0)
    if len(times) > 1:
        labeled(console, "mean time", ", ".join(times), indent=0)


def print_checkpoints(console: Console, files: RunFiles, summary: RunSummary) -> None:
    """Print the last and the best checkpoint, and how to resume."""
    last, best = find_checkpoints(summary)
    console.print()
    heading(console, "checkpoints", "" if last or best else "none")
    for label, path in (("last", last), ("best", best)):
        if path is not None:
            labeled(console, label, str(relative_to_here(path)))
    if not is_resumable(files, last or best):
        return
    if summary.resumable is None:
        labeled(console, "resume", NO_GOOD_CHECKPOINT)
        return
    _, source = summary.resumable
    run = str(relative_to_here(source))
    in_code = f"in code: trainer.fit(resume={run!r}); in a loop with attach: hl.load({run!r})"
    # On one line, however long, so that it can be copied.
    console.print(f"    {'resume':<10} {printable(resume_command(files, source) or in_code)}", soft_wrap=True)


def find_checkpoints(summary: RunSummary) -> tuple[Path | None, Path | None]:
    """Return the newest and the best checkpoint that are still there."""
    kinds = [summary.checkpoints(kind) for kind in ("checkpoint_saved", "best_checkpoint")]
    last, best = (saved[-1][1] if saved else None for saved in kinds)
    return last, best


def is_resumable(files: RunFiles, checkpoint: Path | None) -> bool:
    """Return whether a run can be continued: it ended before it was complete, and has a checkpoint."""
    return checkpoint is not None and files.outcome not in (RUNNING, "completed")


def resume_command(files: RunFiles, source: Path) -> str | None:
    """Return the command that continues a run; None for a run from code, which no command can build."""
    try:
        config = files.config
    except RecordError:
        return None
    return recorded_resume_command(source, files.run) if is_whole(config) else None
