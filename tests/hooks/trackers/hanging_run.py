"""A run with a tracker whose client hangs; the arguments are how it ends, and the directory of its record."""

import atexit
import signal
import sys
import threading
import time
from typing import Any

import leaves_work
import torch

from hookline import Tracker, get_trainer

how, directory = sys.argv[1:]


class Hanging(Tracker):
    """A tracker that never comes further than its beginning."""

    package = "leaves_work"

    def open(self, run: Any) -> None:
        """Hang."""
        leaves_work.connect()


atexit.register(print, "my exit handler", flush=True)
model = torch.nn.Linear(4, 1)
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
trainer = get_trainer(
    "simple", model, batches, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", max_epochs=1,
    loss_fn=torch.nn.functional.mse_loss, console=False, output_dir=directory, hooks=[Hanging(timeout=0.1)],
)  # fmt: skip
if how != "exit":
    trainer.on("step_end", at=2, name="signal")(lambda: signal.raise_signal(signal.Signals[how]))


def work() -> None:
    """Do something of the user's after the main thread has ended."""
    time.sleep(2)
    print("my thread", flush=True)


threading.Thread(target=work).start()
trainer.train()
sys.exit(5)
