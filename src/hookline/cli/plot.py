"""`hookline plot`: draw metrics of runs in the terminal, or write them as an SVG or PNG file."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline._console import printable
from hookline._words import nearest
from hookline.cli.arguments import JSON, REPEATED, RUNS, argument, flag
from hookline.cli.charts import draw_chart
from hookline.cli.formatting import bounded, check_output, open_console, paragraph, print_json
from hookline.cli.output import CommandOutput
from hookline.errors import HooklineError
from hookline.record.json_lines import writing
from hookline.runs.curves import Curve
from hookline.runs.find import RunFiles, run_labels
from hookline.runs.ranking import LOSSES, metric_order
from hookline.runs.reader import columns_of_rows
from hookline.runs.summary import RunSummary

LISTS_METRICS = "`hookline show RUN --metrics`"
_FEW, _MAX_SUGGESTED = 8, 3  # up to this number of metrics, the message lists all of them
FORMATS = (".svg", ".png")
_MAX_LABEL_LENGTH = 60  # characters in a file's legend

Curves = dict[str, dict[str, Curve]]  # by metric and label of the run

ARGUMENTS = (
    RUNS
    | argument(
        "--metric", "NAME", "draw this metric; without one, train/loss and val/loss (may be repeated)", **REPEATED
    )
    | flag("--log", "draw the values on a logarithmic axis")
    | argument("--output", "IMAGE", "write an .svg or .png file instead; needs matplotlib, hookline[plot]")
    | JSON
)


def run(options: argparse.Namespace) -> int:
    """Draw a chart for each metric, with the runs over each other."""
    files = options.runs
    suffix = None if options.output is None else Path(options.output).suffix.lower()
    if suffix is not None and suffix not in FORMATS:
        raise HooklineError(f"--output {options.output}: the name must end with {' or '.join(FORMATS)}")
    if options.output is not None:
        check_output(Path(options.output))
    labels = run_labels(files)
    known = {label: read_curves(record) for label, record in zip(labels, files, strict=True)}
    curves = choose(known, options.metric)
    if options.json:
        ids = dict(zip(labels, files, strict=True))
        print_json([{"metric": metric, "runs": _points(by_label, ids)} for metric, by_label in curves.items()])
    if options.output is not None:
        write_figure(Path(options.output), curves, labels, options.log)
        if not options.json:
            CommandOutput().write(f"{printable(options.output)}\n")
    elif not options.json:
        print_charts(curves, labels, options.log)
    return 0


def read_curves(record: RunFiles) -> dict[str, Curve]:
    """Read only the metrics from a run's record."""
    summary = RunSummary(record)
    for rows in record.metrics():
        summary.add_metrics(columns_of_rows(rows))
    record.warn_of_damage(ignore_torn=True)
    return summary.curves


def choose(known: Mapping[str, Mapping[str, Curve]], metrics: Sequence[str]) -> Curves:
    """Return the curves of the requested metrics, or of the losses; every metric has at least one."""
    names = {name for curves in known.values() for name in curves}
    if not names:
        raise HooklineError(f"{bounded(', '.join(known))}: no metric has been written yet")
    wanted = list(dict.fromkeys(metrics)) or [name for name in LOSSES if name in names]
    if not wanted:
        raise HooklineError(f"pass --metric; {nearest('', names, LISTS_METRICS)}")
    for name in wanted:
        if name not in names:
            raise HooklineError(f"--metric {name}: no such metric; {suggest_metric(name, names)}")
    return {name: {label: curves[name] for label, curves in known.items() if name in curves} for name in wanted}


def suggest_metric(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown metric: those that contain the given word, or the nearest."""
    valid = sorted(names, key=metric_order)
    containing = [metric for metric in valid if name.lower() in metric.lower()] if name else []
    if not containing or len(valid) <= _FEW:
        return nearest(name, valid, LISTS_METRICS)
    # "acc" more likely means train/accuracy than train/top2_accuracy.
    begin = [metric for metric in containing if metric.rpartition("/")[2].lower().startswith(name.lower())]
    near = " or ".join(map(repr, (begin or containing)[:_MAX_SUGGESTED]))
    return f"did you mean {near}? {LISTS_METRICS} lists all {len(valid)}"


def print_charts(curves: Curves, labels: Sequence[str], log: bool) -> None:
    """Draw every metric in the terminal, and name the runs that do not have it."""
    console = open_console()
    for metric, by_label in curves.items():
        draw_chart(console, {label: by_label.get(label) for label in labels}, title=metric, height=14, log=log)
        if missing := [label for label in labels if label not in by_label]:
            paragraph(console, f"without this metric: {bounded(', '.join(missing))}")


def _points(by_label: Mapping[str, Curve], files: Mapping[str, RunFiles]) -> list[dict[str, Any]]:
    """Return the points of each run for programs; with more than 800, the range and mean of equal ranges of steps."""
    return [
        {
            "run_id": files[label].run_id,
            "name": files[label].labels.name,
            "points": curve.points,
            "steps": curve.steps.tolist(),
            "lowest": curve.lowest.tolist(),
            "mean": curve.mean.tolist(),
            "highest": curve.highest.tolist(),
        }
        for label, curve in by_label.items()
    ]


def write_figure(path: Path, curves: Curves, labels: Sequence[str], log: bool) -> None:
    """Write the charts below each other to a file, with matplotlib; a run has the same color in all of them.

    Args:
        path: The file; its suffix says which format it has.
        curves: By metric and label of the run.
        labels: The labels of all runs.
        log: Whether the axes of values are logarithmic.

    Raises:
        HooklineError: If matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HooklineError("--output needs the package matplotlib: pip install 'hookline[plot]'") from error
    figure = Figure(figsize=(8, 4.5 * len(curves)), layout="constrained")
    axes = None
    for index, (metric, by_label) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(len(curves), 1, index, sharex=axes)
        for label, curve in by_label.items():
            color = f"C{labels.index(label)}"
            axes.plot(curve.steps, curve.mean, linewidth=1.2, color=color, label=_plain(label))
            axes.fill_between(curve.steps, curve.lowest, curve.highest, color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel="step", ylabel=_plain(metric), yscale="log" if log else "linear")
        axes.grid(alpha=0.3)
        axes.legend()
    with writing(path), warnings.catch_warnings(action="ignore"):  # Warnings about characters that the font lacks.
        figure.savefig(path, dpi=150)


def _plain(label: str) -> str:
    """Return a label that matplotlib takes as text: no formula between $, and no leading _, which would hide it."""
    text = printable(label[:_MAX_LABEL_LENGTH]).replace("\n", " ").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
