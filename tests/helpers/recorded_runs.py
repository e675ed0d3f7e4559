"""The runs behind tests/golden_reading: small trainings that between them write every kind of file and most events.

``python tests/helpers/recorded_runs.py DIRECTORY`` writes new ones. What is read from them is compared with texts, and
numbers differ between processors, so the runs in tests/golden_reading/records are written once and kept.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_on_ranks
from torch import nn

import hookline
from hookline import SimpleTrainer, Trainer, TrainingHook

EVERY_STEP = {"every": 1}


class KillAt(TrainingHook):
    """End the process at a step, as a machine that fails does."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class FailAt(TrainingHook):
    """Raise at some steps; `on_error` decides what follows."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, step: int) -> None:
        if step in self.steps:
            raise ValueError(f"no <b>luck</b> at step {step}")


class LogTables(TrainingHook):
    """Log numbers with unusual names and values, a table and an image."""

    def on_step_end(self, step: int, trainer: Any) -> None:
        trainer.log("odd/<i>name</i>", float("nan") if step == 4 else step / 7)
        if step == 6:
            trainer.log_table("odd/table", ["text", "number"], [["<script>", 1.5], ["naïve", None]])
            trainer.log_image("odd/image", torch.linspace(0, 1, 48).reshape(3, 4, 4))


def make(folder: str | Path, seed: int = 1, share: slice = slice(None), **options: Any) -> Trainer:
    """Return a trainer of a small classifier, with 8 batches and a validation after each epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(8, 8, 4, generator=generator)
    targets = inputs[..., :3].argmax(-1)
    batches = [(batch[share], target[share]) for batch, target in zip(inputs, targets, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.5))
    options = {
        "loss_fn": nn.CrossEntropyLoss(), "seed": seed, "console": False, "max_epochs": 2, "validate_every": "1 epochs",
        "output_dir": str(folder), "warn_above": None, **options,
    }  # fmt: skip
    if options.pop("ddp", False):
        model = nn.parallel.DistributedDataParallel(model)
    return SimpleTrainer(model, batches, optimizer, "cpu", val_loaders=batches[:2], **options)


def train_rich(folder: Path) -> None:
    """Train with histograms, media, labels, several monitors, and a hook that fails."""
    trainer = make(folder, name="rich <b>run</b>", tags=["first", "sweep"], notes="Two\nlines.", max_grad_norm=1.0)
    trainer.add_hook("monitor", "first_layer", modules="0", metrics=["mean", "std", "histogram", "zeros"], **EVERY_STEP)
    trainer.add_hook("monitor", "last_layer", modules="2", metrics=["mean", "histogram", "dead_units"], every=2)
    trainer.add_hook("activation_stats", modules="*", every=4)
    trainer.add_hook("gradient_monitor", log_histogram=True, log_update_ratio=True, percentiles=[50], every=2)
    trainer.add_hook("lr_monitor")
    trainer.add_hook("checkpoint", every=5, save_top_k=2)
    trainer.add_hook("confusion_matrix", classes=["a", "b", "<c>"])
    trainer.add_hook("sample_predictions")
    trainer.add_hook("loss_spike")
    trainer.add_hook(LogTables(), "log_tables")
    trainer.add_hook(FailAt(3, 9), "unlucky", on_error="warn")
    trainer.train()


def train_other(folder: Path) -> None:
    """Train as `train_rich` with another seed and learning rate, until a hook stops the run."""
    trainer = make(folder, seed=2, lr=0.05, name="other", tags=["sweep"])
    trainer.add_hook("activation_stats", modules="*", every=4)
    trainer.add_hook("gradient_monitor", every=2)
    trainer.add_hook("early_stopping", monitor="val/loss", patience=1, min_delta=10.0)
    trainer.train()


def train_diverging(folder: Path) -> None:
    """Train with a learning rate that makes the loss NaN."""
    trainer = make(folder, lr=1e30, name="diverging", loss_fn=lambda output, target: (output**3).mean())
    trainer.add_hook("gradient_monitor", every=1)
    trainer.train()


def train_failing(folder: Path) -> None:
    """Train until a hook ends the run."""
    trainer = make(folder)
    trainer.add_hook(FailAt(5), "unlucky", on_error="raise")
    try:
        trainer.train()
    except ValueError:
        return
    raise AssertionError("the run did not fail")


def train_killed(folder: Path, at: int, resume: str | None = None) -> None:
    """Train in a process of its own, which is killed at a step; 0 lets it end."""
    if os.fork() == 0:
        trainer = make(folder)
        trainer.add_hook("activation_stats", modules="*", every=2)
        trainer.add_hook("gradient_monitor", log_histogram=True, every=2)
        trainer.add_hook("checkpoint", every=4)
        trainer.add_hook(KillAt(at), "kill_at")
        trainer.fit(resume=resume)
        os._exit(0)
    os.wait()


def train_on_ranks(rank: int, folder: str) -> None:
    """Train one rank of two, each with half of every batch."""
    trainer = make(folder, share=slice(rank, None, 2), ddp=True, max_epochs=1, name="two ranks")
    trainer.add_hook("activation_stats", modules="*", every=4)
    trainer.add_hook("gradient_monitor", every=2)
    trainer.add_hook("checkpoint", every=4)
    trainer.train()


def write_all(folder: Path) -> None:
    """Write all runs, each under a directory name that is also its id."""
    jobs = {
        "rich": lambda: train_rich(folder),
        "other": lambda: train_other(folder),
        "diverging": lambda: train_diverging(folder),
        "failed": lambda: train_failing(folder),
        "killed": lambda: train_killed(folder, 7),
        "resumed": lambda: (train_killed(folder, 11), train_killed(folder, 0, resume=str(newest(folder)))),
        "ranks": lambda: run_on_ranks(train_on_ranks, 2, str(folder)),
    }
    names = {}
    for job in jobs.values():
        job()
        names[newest(folder).name] = f"20260102-03040{len(names)}-aaaaaaa{'abcdefgh'[len(names)]}"
        if len(names) == 5:  # the killed run: its last line is torn
            with (newest(folder) / "metrics.jsonl").open("a") as file:
                file.write('{"step": 8, "ti')
    for old, new in names.items():
        rename(folder / old, new)


def newest(folder: Path) -> Path:
    """Return the run that began last."""
    return max((path for path in folder.iterdir() if (path / "run.json").exists()), key=started)


def started(path: Path) -> str:
    """Return when a run began, as text that sorts."""
    return str(json.loads((path / "run.json").read_text())["started"])


def rename(run: Path, name: str) -> None:
    """Give a run another id everywhere, remove what is about this machine, and what is large and not read."""
    shutil.rmtree(run / "sinks", ignore_errors=True)
    (run / "report.html").unlink(missing_ok=True)
    for path in run.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml") and "checkpoints" not in path.parts:
            text = path.read_text().replace(run.name, name).replace(str(run.parent), "/data/runs")
            text = text.replace(str(Path(hookline.__file__).parents[2]), "/code")
            path.write_text(re.sub(r'"(host|hostname|platform)": "[^"]*"', r'"\1": "a \1"', text))
    run.rename(run.with_name(name))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]).resolve())
