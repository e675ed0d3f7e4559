"""A hook, a transform, a tracker and a metric that configs can name; pyproject.toml offers them to Hookline."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline import RunControl, Tracker, TrainingHook, UpdateHook


class WeightNorm(TrainingHook):
    """Logs the norm of all weights together.

    Args:
        metric: The name of the metric.
    """

    def __init__(self, metric: str = "train/weight_norm") -> None:
        self.metric = metric

    def on_step_end(self, trainer: RunControl, model: torch.nn.Module) -> None:
        trainer.log(self.metric, torch.nn.utils.get_total_norm(model.parameters()))


class UnitRMS(UpdateHook):
    """Divides each gradient by its root mean square.

    Args:
        scale: The root mean square of every gradient afterwards.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def on_update(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.scale * grad / (grad.square().mean().sqrt() + 1e-12) for name, grad in grads.items()}


class Lines(Tracker):
    """Writes every metric as a line with step, name and value into `lines.txt` in the run's directory."""

    def import_package(self) -> None:
        """Import nothing. If your tracker needs a package, set the class attribute `package` instead."""

    def open(self, run: Any) -> None:
        self.path = run.directory / "lines.txt"

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                metrics = {name: value for name, value in row.items() if name not in ("step", "epoch", "time")}
                file.writelines(f"{row['step']} {name} {value}\n" for name, value in metrics.items())

    def finish(self, run: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{run['outcome']}\n")


def confidence(output: Any, batch: Any, temperature: float = 1.0) -> Tensor:
    """The highest probability that a classifier gives to a class, on average."""
    logits = output["logits"] if isinstance(output, Mapping) else output
    return torch.softmax(logits / temperature, -1).amax(-1).mean()
