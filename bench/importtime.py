"""Milliseconds that `import hookline` adds to `import torch`, over fresh interpreters in turn."""

import subprocess
import sys
from statistics import median
from time import perf_counter

from bench.interleave import standard_error_of_median
from bench.table import Table

TITLE = "Import time"
STATEMENTS = ("import torch", "import torch, hookline")
NOTES = [
    "Each import runs in a fresh interpreter, the two in turn; the whole process is timed.",
    "Added: median of the paired differences, with its standard error.",
]


def seconds_to_run(statement: str) -> float:
    """Wall-clock seconds of a new interpreter that runs one statement."""
    started = perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return perf_counter() - started


def measure(rounds: int, only: list[str]) -> Table:
    """Import both ways, in turn, `rounds` / 60 times each; `only` means nothing here."""
    del only
    times = max(5, rounds // 60)
    for statement in STATEMENTS:
        seconds_to_run(statement)  # the first run reads the files from disk and writes the bytecode
    pairs = [tuple(map(seconds_to_run, STATEMENTS)) for _ in range(times)]
    added = [(both - torch_alone) * 1e3 for torch_alone, both in pairs]
    table = Table(TITLE, ("statement", "median ms"), notes=[f"{times} interpreters each.", *NOTES])
    for statement, column in zip(STATEMENTS, zip(*pairs, strict=True), strict=True):
        table.rows.append((statement, f"{median(column) * 1e3:.0f}"))
    table.rows.append(("added by hookline", f"{median(added):.1f} ± {standard_error_of_median(added):.1f}"))
    return table
