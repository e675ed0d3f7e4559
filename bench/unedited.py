"""Microseconds per step that `hookline run` adds to a plain script, and seconds at its start and end.

Each contender is a process of its own that makes steps when it is told to, because what watches a script watches every
optimizer of its process.
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench.interleave import close_all, interleave, standard_error_of_median
from bench.overhead import scratch_directory
from bench.table import Table

TITLE = "hookline run, with unedited scripts"
COLUMNS = ("contender", "step µs", "above plain µs", "± s.e.", "goal")
NOTES = [
    "Model: MLP 32-64-10, batch 16, SGD, ready-made batches. Thread time of the last of three steps; the contenders "
    "take turns.",
    "Above plain: median over the rounds of (contender - plain) in the same round. Plain again: an A/A pair.",
    "No hooks: an empty config; the record has loss and learning rate. Default: gradient and activation statistics,"
    " every 25 steps.",
    "Start and end: seconds of a whole script with three steps, above plain Python; median of the pairs.",
]
SCRIPT = """
import sys
from time import thread_time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
inputs, targets = torch.randn(16, 32), torch.randint(10, (16,))
def step():
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
for line in sys.stdin:
    for _ in range(int(line)):
        step()
    began = thread_time()
    step()
    print(thread_time() - began, flush=True)
"""
RUN = (sys.executable, "-m", "hookline.cli", "run")
CONTENDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": ((sys.executable,), ""),
    "plain again": ((sys.executable,), ""),
    "run, no hooks": ((*RUN, "--hooks", "none.yaml"), "≤ 25"),
    "run, default hooks": (RUN, ""),
}
PAIRS = 5


class Process:
    """A contender in a process of its own."""

    def __init__(self, command: tuple[str, ...]) -> None:
        """Start the script."""
        self._process = subprocess.Popen(
            [*command, "script.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def turn(self, untimed: int) -> float:
        """Make `untimed` steps and then one more, whose seconds are returned."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{untimed}\n")
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the script, and wait for its record."""
        self._process.communicate()


def seconds_of(command: tuple[str, ...]) -> float:
    """Return how long a script with three steps takes."""
    began = time.perf_counter()
    subprocess.run([*command, "script.py"], input="2\n", capture_output=True, text=True, check=True)
    return time.perf_counter() - began


def measure(rounds: int, only: list[str]) -> Table:
    """Measure steps in turns, then whole scripts in pairs; `only` has no effect here."""
    del only
    table = Table(TITLE, COLUMNS, notes=[f"{rounds} rounds.", *NOTES])
    with scratch_directory():
        Path("script.py").write_text(SCRIPT)
        Path("none.yaml").write_text("hooks: {}\n")
        contenders = {name: Process(command) for name, (command, _) in CONTENDERS.items()}
        try:
            seconds = interleave(contenders, rounds)
        finally:
            close_all(contenders)
        pairs = [(seconds_of((sys.executable,)), seconds_of(RUN)) for _ in range(PAIRS)]
    for name, (_, goal) in CONTENDERS.items():
        own = seconds[name]
        above = [(mine - plain) * 1e6 for mine, plain in zip(own, seconds["plain"], strict=True)]
        difference = ("", "") if name == "plain" else (f"{median(above):.1f}", f"{standard_error_of_median(above):.1f}")
        table.rows.append((name, f"{median(own) * 1e6:.1f}", *difference, goal))
    added = [watched - plain for plain, watched in pairs]
    error = standard_error_of_median(added)
    table.rows.append(("start and end, seconds", "", f"{median(added):.2f}", f"{error:.2f}", "≤ 1.5"))
    return table
