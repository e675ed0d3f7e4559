"""Train with every tracker, and be killed at step 6, after the checkpoint of step 4."""

import os
import sys

from tracked_runs import make_trainer

from hookline import MLflowTracker, TensorBoardTracker, WandbTracker

if __name__ == "__main__":
    wandb = WandbTracker(mode="offline", system_metrics=False)
    trainer = make_trainer(TensorBoardTracker(), wandb, MLflowTracker(sys.argv[1]))
    trainer.add_hook("checkpoint", save_every_n_steps=4)
    trainer.on("step_end", at=6, name="kill")(lambda: os._exit(9))
    trainer.train()
