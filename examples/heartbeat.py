"""Show a watchdog that the run is alive, by a file that is written every second."""

import time
from pathlib import Path

import torch

from hookline import StepContext, TrainingHook, get_trainer


class Heartbeat(TrainingHook):
    """Write the step and the time to a file. Only `ctx.step` is read, so the loss is never fetched from the device."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_step_end(self, ctx: StepContext) -> None:
        Path(self.path).write_text(f"{ctx.step} {time.time():.0f}\n", encoding="utf-8")

    def on_train_end(self, reason: str) -> None:
        Path(self.path).unlink(missing_ok=True)
        print(f"heartbeat ended: {reason}")


def main() -> None:
    """Train with a heartbeat at the first step and every second, however fast the steps are."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(200)]
    trainer = get_trainer(
        "simple", model, batches, optimizer, "cpu", loss_fn=torch.nn.functional.mse_loss, record=False
    )
    trainer.add_hook(Heartbeat("heartbeat.txt"), every="1 s", at=1)
    trainer.train()


if __name__ == "__main__":
    main()
