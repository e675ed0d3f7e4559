"""The run behind tests/golden: a small model on fixed data, with a hook of every kind.

``python tests/helpers/golden_run.py /tmp/golden`` writes the files into an empty directory. Those in tests/golden stand
for what users have on their disks: write them again only where a change of a format is intended. Leave out report.html,
and replace what run.json says about the machine (host, platform, pid).
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from hookline import (
    Trainer,
    TrainingHook,
    register_data,
    register_hook,
    register_model,
    trainer_from_config,
)

EVENTS = """
    on_train_start on_epoch_start on_train_batch_start on_forward on_before_backward on_after_backward
    on_gradients_ready on_update on_gradient_clip on_before_optimizer_step on_after_optimizer_step on_step_skipped
    on_train_batch_end on_step_end on_validation_start on_validation_batch_start on_validation_batch_end
    on_validation_end on_epoch_end on_checkpoint_save on_checkpoint_load on_exception on_train_end
"""

CONFIG: dict[str, Any] = {
    "model": {"name": "golden_model"},
    "data": {"name": "golden_data"},
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "trainer": {
        "max_epochs": 2,
        "accumulate": 2,
        "validate_every": "1 epochs",
        "seed": 7,
        "console": False,
        "max_grad_norm": 0.5,
    },
    "hooks": {
        "lifecycle": [
            {"name": "golden_trace", "as": "trace"},
            {"name": "checkpoint", "save_every_n_epochs": None, "save_every_n_steps": 3},
            {"name": "early_stopping", "monitor": "val/loss", "patience": 50},
            {"name": "lr_monitor"},
            {"name": "gradient_monitor", "every": 2},
            {"name": "ema", "decay": 0.9},
        ],
        "forward": [{"name": "activation_stats", "modules": "*", "every": 2}],
        "update": [{"name": "grokfast"}, {"name": "centralize", "before": "grokfast"}],
    },
}


class Trace(TrainingHook):
    """Records every event with its step, and draws random numbers so that its random streams are saved."""

    saves = ("count",)

    def __init__(self) -> None:
        self.count = 0
        self.events: list[str] = []

    def on_step_end(self, ctx: Any) -> None:
        self.count += 1
        torch.rand(2)
        self.events.append(f"on_step_end step={ctx.step} tokens={ctx.tokens_seen}")


def _tracer(event: str) -> Any:
    def method(self: Trace, step: int) -> None:
        self.events.append(f"{event} step={step}")

    return method


for _event in set(EVENTS.split()) - {"on_step_end", "on_update", "on_forward"}:
    setattr(Trace, _event, _tracer(_event))


class Data:
    """Fixed batches; the last window of an epoch is short."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(7)]
        self.train, self.validation = batches[:5], batches[5:]


def make_model() -> torch.nn.Module:
    """Two layers and dropout, which draws random numbers in training."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))


def make_trainer(config: dict[str, Any] = CONFIG) -> Trainer:
    """Build the trainer; run it in an empty current directory."""
    register_model("golden_model")(make_model)
    register_data("golden_data")(Data)
    register_hook("golden_trace")(Trace)
    trainer = trainer_from_config(config, device="cpu")
    trainer.loss_fn = torch.nn.functional.mse_loss
    return trainer


def explained(trainer: Trainer) -> str:
    """Return what `explain` prints for every event."""
    return "\n".join(trainer.hooks.explain(event) for event in EVENTS.split()) + "\n"


def trace_of(trainer: Trainer) -> str:
    """Return the events of the run, one per line."""
    return "\n".join(trainer.hooks.get("trace").events) + "\n"


def write(directory: Path) -> None:
    """Write the run's directory, its event trace and the explanations."""
    os.chdir(directory)
    torch.set_num_threads(1)
    trainer = make_trainer()
    explanation = explained(trainer)
    trainer.train()
    assert trainer.run_dir is not None
    trainer.run_dir.rename(directory / "run")
    (directory / "runs").rmdir()
    (directory / "explain.txt").write_text(explanation)
    (directory / "events.txt").write_text(trace_of(trainer))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
