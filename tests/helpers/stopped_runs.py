"""Runs that are stopped and resumed, for tests that compare them with uninterrupted ones."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from hookline import SimpleTrainer, TrainingHook, read_metrics


class SaveAndStop(TrainingHook):
    """Saves at a step, and ends the run there or some steps later."""

    def __init__(self, at: int, stop_at: int | None = None) -> None:
        self.at, self.stop_at = at, stop_at or at

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.at:
            trainer.save()
        if step == self.stop_at:
            trainer.request_stop("tested")


def run_in_parts(make_trainer: Callable[[], SimpleTrainer], stops: Iterable[int]) -> SimpleTrainer:
    """Stop at each of the steps and resume in a new trainer each time; return the last one."""
    run_dir = None
    for at in [*stops, -1]:
        trainer = make_trainer()
        if at > 0:
            trainer.add_hook(SaveAndStop(at))
        torch.rand(3), np.random.rand(3)  # another process begins with other streams
        trainer.fit(resume=run_dir)
        run_dir = trainer.run_dir
    return trainer


def curve_of(trainer: SimpleTrainer) -> list[dict[str, str]]:
    """Return everything that the run recorded of each step, as hex floats."""
    assert trainer.run_dir is not None
    return [
        {name: float(value).hex() for name, value in line.items() if name not in ("time", "resumed")}
        for line in read_metrics(trainer.run_dir)
        if line["step"] > 0
    ]


def bits_of(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return every bit of each tensor."""
    return [tensor.numpy().tobytes().hex() for tensor in tensors]
