"""Send a run to TensorBoard: metrics, histograms of the gradients, and a table and numbers of your own.

Afterwards, `tensorboard --logdir runs` shows it. For W&B, trackio or MLflow, only the tracker's name changes.
"""

import torch
from torch import nn

from hookline import SimpleTrainer, TensorBoardTracker, Trainer, TrainingHook


class Margin(TrainingHook):
    """Log how sure the classifier is, and a table of the samples that it is least sure of."""

    def on_validation_batch_end(self, output: torch.Tensor, batch: tuple[torch.Tensor, ...], trainer: Trainer) -> None:
        margins = (output[:, 0] - output[:, 1]).abs()
        trainer.log("margin/mean", margins.mean())  # A tensor: nothing waits for the device.
        hardest = margins.argsort()[:3]
        rows = [[int(index), float(margins[index]), int(batch[1][index])] for index in hardest]
        trainer.log_table("hardest", ["sample", "margin", "target"], rows)


def main() -> None:
    """Train with the tracker; print the files that it wrote."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    batches = [(inputs, (inputs.sum(1) > 0).long()) for inputs in torch.randn(60, 16, 8)]
    trainer = SimpleTrainer(
        model,
        batches[:50],
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        "cpu",
        loss_fn=nn.functional.cross_entropy,
        val_dataloader=[tuple(torch.cat(column) for column in zip(*batches[50:], strict=True))],
        max_epochs=2,
        name="tracked",
        hooks=[TensorBoardTracker(), Margin()],
    )
    trainer.add_hook("gradient_monitor", every=10, log_histogram=True)
    trainer.add_hook("lr_monitor")
    trainer.train()
    assert trainer.run_dir is not None  # It is None with record=False.
    files = (trainer.run_dir / "tensorboard").glob("events.out.*")
    print("TensorBoard:", ", ".join(file.name for file in files))


if __name__ == "__main__":
    main()
