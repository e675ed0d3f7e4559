"""Measure the seconds to write a checkpoint of 124 million parameters with Adam's state, against safetensors' writer.

Both write the same tensors and wait for the disk; ours also hashes every byte, and writes a manifest and a directory.
Then, for a model of 30 million: how long training stands still for a checkpoint, with `async_save` and without.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from safetensors.torch import save_file

from bench.table import Table
from hookline import Trainer, get_trainer
from hookline.checkpoints.store import read_checkpoint, write_checkpoint

TITLE = "Checkpoint of 124M parameters and Adam's state"
PARAMETERS, LAYERS = 124_000_000, 48
LIMIT = 1.15
WIDTH, DEPTH = 1581, 12  # 30 million parameters
SAVES, STEPS_BETWEEN = 6, 4
NOTES = [
    "The two alternate; each writes into an empty directory after a sync, and waits until all bytes are on disk "
    "(fsync).",
    "Ours hashes the tensors in two threads while they are written, which only a second core can hide.",
    "In training: 30M parameters with Adam and a save every few steps; the first save of a run also allocates the "
    "memory to copy to.",
]


def make_state() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Make a model's tensors, and two more of each as Adam keeps them."""
    size = PARAMETERS // LAYERS
    model = {f"blocks.{index}.weight": torch.randn(size) for index in range(LAYERS)}
    moments = {f"{name}.{kind}": torch.randn(size) for name in model for kind in ("exp_avg", "exp_avg_sq")}
    return model, moments


def write_plainly(directory: Path, model: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
    """Do what one would do by hand: two files, and fsync."""
    for name, tensors in (("model", model), ("optimizer", moments)):
        path = directory / f"{name}.safetensors"
        save_file(tensors, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def seconds_of(write: Callable[[Path], object], root: Path) -> float:
    """Time one write into an empty directory."""
    directory = Path(tempfile.mkdtemp(dir=root))
    os.sync()
    started = perf_counter()
    write(directory)
    seconds = perf_counter() - started
    shutil.rmtree(directory)
    return seconds


def measure(rounds: int, only: list[str]) -> Table:
    """Time both ways in turn, `rounds` / 120 times; `only` has no effect here."""
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
        training = {**watch_training(root, async_save=False), **watch_training(root, async_save=True)}
    return make_table(times, reading, training)


def make_trainer(root: Path, async_save: bool) -> Trainer:
    """Make a trainer of 30 million parameters with Adam, with steps as short as such a model's can be."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batches = [(torch.randn(1, WIDTH), torch.randn(1, WIDTH))] * 10_000
    options = {"async_save": async_save, "output_dir": str(root), "console": False}
    return get_trainer("simple", model, batches, optimizer, "cpu", loss_fn=torch.nn.functional.mse_loss, **options)


def watch_training(root: Path, async_save: bool) -> dict[str, list[float]]:
    """Return the seconds that training waits for saves, and those of steps without a save and during one."""
    trainer, stopped = make_trainer(root, async_save), []
    save = trainer.save_requested

    def timed() -> None:
        started, requested = perf_counter(), trainer.pending_save == "request"
        save()
        if requested:
            stopped.append(perf_counter() - started)

    trainer.save_requested = timed  # type: ignore[method-assign]
    alone, beside = seconds_of_steps(trainer, trainer.stepper())
    if not async_save:
        return {"in training: it waits for a save": stopped, "in training: a step": alone}
    names = ("the first save with async_save", "a save with async_save", "a step beside it")
    return {f"in training: {name}": row for name, row in zip(names, (stopped[:1], stopped[1:], beside), strict=True)}


def seconds_of_steps(trainer: Trainer, steps: Iterator[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Save some times; return the seconds of the steps without a save, and of those while one was being written."""
    rows: tuple[list[float], list[float]] = ([], [])
    for _ in range(SAVES):
        for _ in range(STEPS_BETWEEN):
            rows[0].append(seconds_of_step(steps))
        trainer.save()
        next(steps)
        while trainer.saving:
            rows[1].append(seconds_of_step(steps))
    steps.close()  # type: ignore[attr-defined]
    return rows


def seconds_of_step(steps: Iterator[torch.Tensor]) -> float:
    """Time one step."""
    started = perf_counter()
    next(steps)
    return perf_counter() - started


def make_table(times: dict[str, list[float]], reading: float, training: dict[str, list[float]]) -> Table:
    """Return the medians, and the ratio of each to the first."""
    table = Table(TITLE, ("what", "median s", "least s", "against safetensors"), notes=list(NOTES))
    base = median(next(iter(times.values())))
    for name, row in times.items():
        table.rows.append((name, f"{median(row):.2f}", f"{min(row):.2f}", f"{median(row) / base:.2f} x"))
    table.rows.append(("hookline read_checkpoint (verified)", f"{reading:.2f}", f"{reading:.2f}", ""))
    for name, row in training.items():
        table.rows.append((name, f"{median(row):.2f}", f"{min(row):.2f}", ""))
    table.notes.append(f"{len(next(iter(times.values())))} rounds; the limit is {LIMIT} x.")
    return table
