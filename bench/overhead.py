"""Microseconds per training step above a bare PyTorch loop, for Hookline and the trainers people use."""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch

from bench import peers
from bench.interleave import Contender, close_all, interleave, on_one_core, standard_error_of_median
from bench.table import Table

TITLE = "Overhead per training step"
COLUMNS = ("contender", "stepped", "step µs", "above bare µs", "± s.e.", "mean µs")
NOTES = [
    "Model: MLP 32-64-10, batch 16, SGD, ready-made batches. Hooks are no-ops at four events a step.",
    "Above bare: the median over the rounds of (contender - bare) in the same round, with the standard error of that "
    "median.",
    "Mean: the mean of these differences without the 1 % at either end; it shows occasional costs.",
    "In a thread: a trainer that owns its loop runs in a thread and is stopped in its data iterator. This is noisier, "
    "so such rows are compared with a bare loop that runs the same way.",
    "Trainers that are stepped directly take their turns first, among themselves, so that what a large framework "
    "leaves in the caches is not counted as a cost of the next one.",
]
DIRECT, THREAD = "directly", "in a thread"
HOOK_COUNTS = (0, 10)


@dataclass(frozen=True)
class Entry:
    """One row to be: who, how stepped, how many hooks."""

    trainer: str
    stepped: str
    build: peers.Builder
    hooks: int | None = None

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return self.trainer if self.hooks is None else f"{self.trainer}, {self.hooks} hooks"

    @property
    def key(self) -> str:
        """A name no other row has."""
        return f"{self.name} {self.stepped}"


BASELINES = {
    DIRECT: Entry("bare", DIRECT, peers.bare_direct),
    THREAD: Entry("bare", THREAD, peers.bare_threaded),
}
TRAINERS: list[tuple[str, str, peers.Builder]] = [
    ("Hookline", DIRECT, peers.hookline_direct),
    ("Accelerate", DIRECT, peers.accelerate),
    ("Hookline", THREAD, peers.hookline_threaded),
    ("Ignite", THREAD, peers.ignite),
    ("Lightning", THREAD, peers.lightning),
    ("HF Trainer", THREAD, peers.hf_trainer),
]


def entries(only: list[str]) -> list[Entry]:
    """The rows of the table; `only` keeps the trainers whose name contains one of its words."""
    words = [word.lower() for word in only] or [""]
    wanted = [trainer for trainer in TRAINERS if any(word in trainer[0].lower() for word in words)]
    rows = [Entry(*trainer, hooks) for trainer in wanted for hooks in HOOK_COUNTS]
    return [*BASELINES.values(), *rows]


def build_all(rows: list[Entry]) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that could be built, and for the others why not."""
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for row in rows:
        try:
            contenders[row.key] = row.build(row.hooks or 0)
        except ModuleNotFoundError:
            missing[row.key] = "not installed"
        except Exception as failure:  # one contender that fails must not cost the others their row
            missing[row.key] = f"failed: {failure}"
    return contenders, missing


def without_extremes(values: list[float]) -> list[float]:
    """The values less the 1 % at either end, where the machine's own interruptions are."""
    cut = len(values) // 100
    return sorted(values)[cut : len(values) - cut]


def cells(row: Entry, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """One line of the table from the steps of a contender and of its baseline."""
    own, base = seconds[row.key], seconds[BASELINES[row.stepped].key]
    step = f"{median(own) * 1e6:.1f}"
    if row.hooks is None:
        return row.name, row.stepped, step, "", "", ""
    above = [(one - other) * 1e6 for one, other in zip(own, base, strict=True)]
    mean = fmean(without_extremes(above))
    error = standard_error_of_median(above)
    return row.name, row.stepped, step, f"{median(above):.1f}", f"{error:.1f}", f"{mean:.1f}"


@contextmanager
def scratch_directory() -> Iterator[None]:
    """Work in a directory that is thrown away, since trainers leave files where they run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        yield


def measure(rounds: int, only: list[str]) -> Table:
    """Run every contender side by side and tabulate them."""
    torch.set_num_threads(1)
    rows = entries(only)
    seconds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    with scratch_directory(), on_one_core():
        for stepped in BASELINES:
            contenders, failed = build_all([row for row in rows if row.stepped == stepped])
            missing |= failed
            try:
                seconds |= interleave(contenders, rounds)
            finally:
                close_all(contenders)
    lines = [cells(row, seconds) for row in rows if row.key in seconds]
    notes = [f"{rounds} rounds, one timed step each, on one core.", *NOTES]
    notes += [f"{key}: {why}" for key, why in missing.items()]
    return Table(TITLE, COLUMNS, lines, notes)
