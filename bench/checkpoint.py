"""Seconds to write a checkpoint of 124 million parameters with Adam's state, against safetensors' own writer.

Both write the same tensors and wait for the disk; ours also hashes every byte, and writes a manifest and a directory.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from safetensors.torch import save_file

from bench.table import Table
from hookline.checkpoints import read_checkpoint, write_checkpoint

TITLE = "Checkpoint of 124M parameters and Adam's state"
PARAMETERS, LAYERS = 124_000_000, 48
LIMIT = 1.15
NOTES = [
    "The two in turn, each into an empty directory after a sync; all bytes are waited for (fsync).",
    "Ours hashes the tensors in two threads while they are written: it needs a second core to hide that.",
]


def make_state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's tensors, and two more of each as Adam keeps them."""
    size = PARAMETERS // LAYERS
    model = {f"blocks.{index}.weight": torch.randn(size) for index in range(LAYERS)}
    moments = {f"{name}.{kind}": torch.randn(size) for name in model for kind in ("exp_avg", "exp_avg_sq")}
    return model, moments


def write_plainly(directory: Path, model: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
    """What one would do by hand: two files, and fsync."""
    for name, tensors in (("model", model), ("optimizer", moments)):
        path = directory / f"{name}.safetensors"
        save_file(tensors, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def seconds_of(write: Callable[[Path], object], root: Path) -> float:
    """One write into an empty directory."""
    directory = Path(tempfile.mkdtemp(dir=root))
    os.sync()
    started = perf_counter()
    write(directory)
    seconds = perf_counter() - started
    shutil.rmtree(directory)
    return seconds


def measure(rounds: int, only: list[str]) -> Table:
    """Both ways, in turn, `rounds` / 120 times; `only` means nothing here."""
    del only
    torch.set_num_threads(1)
    model, moments = make_state()
    state = {"model": model, "optimizers": moments}
    times: dict[str, list[float]] = {"safetensors save_file + fsync": [], "hookline write_checkpoint": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        root = Path(scratch)
        for _ in range(max(3, rounds // 120)):
            plain = seconds_of(lambda directory: write_plainly(directory, model, moments), root)
            ours = seconds_of(lambda directory: write_checkpoint(directory, "x", state, {"step": 1}), root)
            for row, seconds in zip(times.values(), (plain, ours), strict=True):
                row.append(seconds)
        path = write_checkpoint(root, "x", state, {"step": 1})
        started = perf_counter()
        read_checkpoint(path)
        reading = perf_counter() - started
    return make_table(times, reading)


def make_table(times: dict[str, list[float]], reading: float) -> Table:
    """Medians, and each against the first."""
    table = Table(TITLE, ("what", "median s", "least s", "against safetensors"), notes=list(NOTES))
    base = median(next(iter(times.values())))
    for name, row in times.items():
        table.rows.append((name, f"{median(row):.2f}", f"{min(row):.2f}", f"{median(row) / base:.2f} x"))
    table.rows.append(("hookline read_checkpoint (verified)", f"{reading:.2f}", f"{reading:.2f}", ""))
    table.notes.append(f"{len(next(iter(times.values())))} rounds; the limit is {LIMIT} x.")
    return table
