"""What commands, the page and readers for users say of the runs in tests/golden_reading/records, as texts.

``python tests/helpers/reading.py DIRECTORY [NAME]`` writes the texts, or one of them, into a directory.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import hookline
from hookline.cli import COMMANDS, main

RUNS = Path(__file__).resolve().parents[1] / "golden_reading" / "records"
RICH, OTHER, DIVERGING, FAILED, KILLED, RESUMED, RANKS = sorted(path.name for path in RUNS.iterdir())
NAMES = {
    "rich": RICH, "other": OTHER, "diverging": DIVERGING, "failed": FAILED, "killed": KILLED, "resumed": RESUMED,
    "ranks": RANKS,
}  # fmt: skip
FLOAT = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")
WIDTHS = (80, 120)


@contextlib.contextmanager
def runs_folder() -> Iterator[None]:
    """Work in a directory whose folder `runs` has a copy of the runs, with the times of their files, in UTC."""
    before, zone = Path.cwd(), os.environ.get("TZ")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RUNS, Path(folder, "runs"))
        for run in Path(folder, "runs").iterdir():
            for file in run.rglob("*"):
                os.utime(file, (last_time(run), last_time(run)))
        os.chdir(folder)
        os.environ["TZ"] = "UTC"
        time.tzset()
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
            time.tzset()


def last_time(run: Path) -> float:
    """Return the time of the last complete row of metrics.jsonl, which git does not keep as the file's."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return float(rows[-1]["time"])


def command(*arguments: str, columns: int = 80) -> str:
    """Return what a command prints, with its exit code if that is not 0."""
    out, err = io.StringIO(), io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS=str(columns))
    with width, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the torn line of the killed run
        try:
            code = main(list(arguments))
        except SystemExit as exit:
            code = exit.code
    text = out.getvalue() + err.getvalue() + (f"exit code {code}\n" if code else "")
    return FLOAT.sub(rounded, text.replace(str(Path.cwd()), "."))


def rounded(match: re.Match[str]) -> str:
    """Return a number with at most ten digits: the last ones of a sum depend on the processor."""
    return repr(float(f"{float(match[0]):.10g}")) if len(match[0]) > 12 else match[0]


def export(run: str, kind: str) -> str:
    """Return the tables that a command writes, one after the other."""
    folder = Path(f"{run}-{kind}")
    text = command("export", f"runs/{run}", "--to", kind, "--output", str(folder))
    for path in sorted(folder.iterdir()):
        text += f"== {path.name}\n{FLOAT.sub(rounded, path.read_text())}"
    return text


def page_data(*names: str) -> str:
    """Return the data of a report as indented JSON."""
    command("report", *(f"runs/{NAMES[name]}" for name in names), "--output", "page.html")
    (text,) = re.findall(
        r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', Path("page.html").read_text(), re.S
    )
    page = json.loads(text)
    page["written"] = "now"
    page.pop("marks")  # the table of events, which is tested by itself
    return FLOAT.sub(rounded, json.dumps(page, indent=1)).replace(str(Path.cwd()), ".")


def read_all(name: str) -> str:
    """Return what the functions for users read of a run, a row per line."""
    path = Path("runs", NAMES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the torn line of the killed run
        run, metrics = hookline.load_run(path), hookline.read_metrics(path)
    lines = [f"run {run.run}", f"config {run.config}"]
    lines += [f"metric {name} {column}" for name, column in run.metrics.items()]
    lines += [f"event {event}" for event in run.events]
    lines += [
        f"layers {series} {name} {column}" for series, rows in run.layers.items() for name, column in rows.items()
    ]
    lines += [f"media {row}" for row in run.media]
    lines += [f"read_metrics {row}" for row in metrics]
    lines += [f"read_layers {name} {series}" for name, series in hookline.read_layers(path).items()]
    return FLOAT.sub(rounded, "\n".join(lines) + "\n").replace(str(Path.cwd()), ".")


def texts() -> dict[str, Callable[[], str]]:
    """Return the functions that make the texts, by name."""
    makers: dict[str, Callable[[], str]] = {}

    def add(name: str, *arguments: str, widths: tuple[int, ...] = (80,)) -> None:
        for width in widths:
            suffix = f"-{width}" if len(widths) > 1 else ""
            makers[name + suffix] = partial(command, *arguments, columns=width)

    for name in COMMANDS:
        add(f"help-{name}", name, "--help")
    add("help", "--help")
    for name, run in NAMES.items():
        path = f"runs/{run}"
        add(f"show-{name}", "show", path, widths=WIDTHS)
        add(f"show-{name}-json", "show", path, "--json")
        add(f"tail-{name}", "tail", path, "--json")
        makers[f"export-{name}"] = partial(export, run, "csv")
        makers[f"read-{name}"] = partial(read_all, name)
    add("checkpoints", "checkpoints", f"runs/{RICH}", widths=WIDTHS)
    add("checkpoints-ranks-json", "checkpoints", f"runs/{RANKS}", "--json")
    makers["export-other-jsonl"] = partial(export, OTHER, "jsonl")
    add("label", "label", f"runs/{RICH}")
    add("label-json", "label", f"runs/{RICH}", "--json")
    add("runs", "runs", "runs", widths=WIDTHS)
    add("runs-json", "runs", "runs", "--json")
    for name, compared in {"two": (RICH, OTHER), "three": (RICH, OTHER, RESUMED), "killed": (KILLED, RESUMED)}.items():
        paths = [f"runs/{run}" for run in compared]
        add(f"compare-{name}", "compare", *paths, widths=WIDTHS)
        add(f"compare-{name}-json", "compare", *paths, "--json")
    add("plot", "plot", f"runs/{RICH}", f"runs/{OTHER}")
    add("plot-json", "plot", f"runs/{RICH}", f"runs/{OTHER}", "--json")
    for name in NAMES:
        makers[f"page-{name}"] = partial(page_data, name)
    makers["page-three"] = partial(page_data, "rich", "other", "resumed")
    return makers


if __name__ == "__main__":
    folder, only = Path(sys.argv[1]).resolve(), sys.argv[2:]
    with runs_folder():
        for name, make in texts().items():
            if not only or name in only:
                (folder / f"{name}.txt").write_text(make())
