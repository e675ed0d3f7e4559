"""Milliseconds that `import hookline` adds to `import torch`, in fresh interpreters."""

import subprocess
import sys
from statistics import median

from bench.interleave import standard_error_of_median
from bench.table import Table

TITLE = "Import time"
NOTES = [
    "Each interpreter imports torch first, then hookline; the clock is read between the two and after them.",
    "Modules of hookline are imported when one of their names is first used; the last row uses the two trainers, "
    "HookManager and TrainingHook.",
    "The median over the interpreters, with its standard error.",
]
GOAL = "≤ 40"
IMPORT = """
from time import perf_counter
began = perf_counter()
import torch
between = perf_counter()
import hookline
behind = perf_counter()
from hookline import GenericTrainer, HookManager, SimpleTrainer, TrainingHook
print(between - began, behind - between, perf_counter() - between)
"""
ROWS = (("torch", ""), ("hookline, behind torch", GOAL), ("hookline and what a user takes from it", ""))


def seconds_to_import() -> list[float]:
    """Return the seconds that a new interpreter needs for torch, hookline, and hookline with its main names."""
    done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


def measure(rounds: int, only: list[str]) -> Table:
    """Measure in `rounds` / 60 interpreters; `only` has no effect here."""
    del only
    times = max(5, rounds // 60)
    seconds_to_import()  # the first one reads the files from disk and writes the bytecode
    columns = zip(*(seconds_to_import() for _ in range(times)), strict=True)
    table = Table(TITLE, ("import", "median ms", "± s.e.", "goal"), notes=[f"{times} interpreters.", *NOTES])
    for (name, goal), seconds in zip(ROWS, columns, strict=True):
        milliseconds = [one * 1e3 for one in seconds]
        error = standard_error_of_median(milliseconds)
        table.rows.append((name, f"{median(milliseconds):.1f}", f"{error:.1f}", goal))
    return table
