"""Trains a small model in forked children and kills them; run by test_kill.py, in a separate interpreter.

    python killed_run.py ROOT KILLS SEED [async_save]

Importing torch takes longer than the training, so one process imports it and forks a child per attempt. Half of the
children are killed by a signal without a handler after a random CPU time, which says how far a child is on a busy
machine, too. The others kill themselves at a random call of a save to the _fs.
With async_save, that call is made while training continues. The run that is never stopped always waits for its saves.
Prints JSON: what each attempt came to, and the fingerprint of the run that was never stopped and of the one that was.
"""

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline import GenericTrainer, ResumableSampler, _fs, read_metrics
from hookline.core.plugins import HOOKS

STEPS_PER_EPOCH, EPOCHS, SAVE_EVERY = 18, 2, 2
STEPS_AHEAD_S = 0.05  # some steps' time
CALLS_PER_SAVE = 60  # to the _fs, about: open, write, fsync and rename
CURVE = ("train/loss", "train/lr", "train/grad_norm", "train/epoch_loss", "val/loss")
# No text here, no network, a trace per attempt; trackers have their own tests, with kills, too.
LEFT_OUT = {"sample_text", "notify", "profiler", "identity", "mlflow", "tensorboard", "trackio", "wandb"}
NEEDED: dict[str, dict[str, Any]] = {
    "checkpoint": {"save_every_n_steps": SAVE_EVERY},
    "clip_norm": {"max_norm": 0.5},
    "clip_value": {"max_value": 0.5},
    "freeze": {"params": "3.bias"},
    "mask": {"params": "3.weight"},
    "scale": {"factor": 0.9},
    "early_stopping": {"monitor": "val/loss", "patience": 1000},
}


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws a random number for every sample."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(3) + random.random(), self.y[index]


def loaders() -> dict[str, Any]:
    """Make two loaders: one that shuffles by the run's random stream, and one that counts."""
    half = Augmented(2 * STEPS_PER_EPOCH)
    return {
        "drawn": DataLoader(half, batch_size=4, shuffle=True),
        "counted": DataLoader(half, batch_size=4, sampler=ResumableSampler(half, seed=3)),
    }


def all_hooks() -> list[tuple[str, dict[str, Any]]]:
    # Interventions have no state to lose.
    names = [
        name for name in HOOKS.names() if name not in LEFT_OUT and not getattr(HOOKS.find(name), "intervene", False)
    ]
    return [(name, NEEDED.get(name, {})) for name in names]


def train(root: Path, resume: Path | None, async_save: bool) -> Path:
    """Train from the start or from the newest checkpoint, with every built-in hook; return the run's directory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS_PER_EPOCH * EPOCHS)
    trainer = GenericTrainer(
        {
            "max_epochs": EPOCHS, "seed": 7, "console": False, "output_dir": str(root), "validate_every": 5,
            "async_save": async_save,
        },
        model, [optimizer], [scheduler], device="cpu", loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    for name, parameters in all_hooks():
        trainer.add_hook(name, **parameters)
    trainer.fit(loaders(), [(torch.ones(4, 3), torch.ones(4, 1))], resume=resume)
    (trainer.run_dir / "fingerprint.json").write_text(json.dumps(fingerprint(trainer)))
    return trainer.run_dir


def fingerprint(trainer: Any) -> dict[str, Any]:
    """Return the curve as hex floats, and a hash over every bit of parameters, buffers and optimizer state."""
    digest = hashlib.sha256()
    state = trainer.optimizers[0].state_dict()["state"]
    of_optimizer = (value for of_param in state.values() for value in of_param.values())
    for tensor in (*trainer.model.state_dict().values(), *of_optimizer):
        digest.update(tensor.numpy().tobytes())
    lines = read_metrics(trainer.run_dir)
    curve = [{key: float(line[key]).hex() for key in CURVE if key in line} for line in lines if line["step"]]
    return {"sha256": digest.hexdigest(), "curve": curve}


def die_at_call(number: int) -> None:
    """Kill this process at the n-th call from now that writes a part of a checkpoint to disk."""
    left = [number]

    def counted(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                time.sleep(STEPS_AHEAD_S)  # a save in the background is overtaken by training
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return call

    for name in ("open", "write", "fsync", "rename"):
        setattr(_fs.os, name, counted(getattr(os, name)))


class DiskCalls:
    """Stands in for the module `os` in the disk layer, so that its calls can be replaced without affecting the rest."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def attempt(root: Path, kill_after: float | None, kill_at_call: int | None, async_save: bool = False) -> str:
    """Start or resume the run in a child process, kill it if asked, and return how it ended."""
    left_before = half_written(root)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the console hook's lines
            _fs.os = DiskCalls()
            if kill_at_call is not None:
                die_at_call(kill_at_call)
            if kill_after is not None:
                signal.setitimer(signal.ITIMER_PROF, kill_after)  # its signal ends the process, like SIGKILL
            train(root, newest_run(root), async_save)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    where = "in a save" if half_written(root) - left_before else "elsewhere"
    killed = f"killed {where}"
    return {0: "done", -signal.SIGKILL: killed, -signal.SIGPROF: killed}.get(status, "failed")


def half_written(root: Path) -> set[Path]:
    """Return what an interrupted save has left on disk."""
    return set(root.glob("*/checkpoints/.tmp-*"))


def newest_run(root: Path) -> Path | None:
    """Return the run to resume; None if the child was killed before it wrote run.json."""
    runs = sorted(path.parent for path in root.glob("*/run.json"))
    return runs[-1] if runs else None


def main(root: Path, kills: int, seed: int, async_save: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    assert attempt(root / "whole", None, None) == "done"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    story: list[str] = []
    share = 4 / kills  # so that the run is not over before the last kill
    while sum("killed" in entry for entry in story) < kills:
        inside = len(story) % 2 == 1
        after = None if inside else chance.uniform(0.1, 0.1 + 0.4 * share) * seconds
        call = chance.randint(1, int(4 * CALLS_PER_SAVE * share)) if inside else None
        story.append(attempt(root / "parts", after, call, async_save))
        if "killed" not in story[-1]:
            break
    if "killed" in story[-1]:
        story.append(attempt(root / "parts", None, None, async_save))
    print(json.dumps({"story": story, "whole": result_of(root / "whole"), "parts": result_of(root / "parts")}))


def result_of(root: Path) -> Any:
    """Return the fingerprint that a finished run has written."""
    run = newest_run(root)
    return json.loads((run / "fingerprint.json").read_text()) if run is not None else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "async_save" in sys.argv[4:])
