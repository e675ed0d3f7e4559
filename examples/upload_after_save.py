"""Upload every checkpoint once it is durable. The bucket here is a directory; replace it by your client's calls."""

import shutil
import tempfile
from pathlib import Path

import torch

from hookline import TrainingHook, get_trainer


class UploadAfterSave(TrainingHook):
    """Copy each checkpoint. `on_checkpoint_save` fires when it is complete on disk, so the copy can be loaded."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    def on_checkpoint_save(self, step: int, checkpoint_path: str) -> None:
        target = Path(self.bucket) / Path(checkpoint_path).name
        shutil.copytree(checkpoint_path, target)
        print(f"step {step}: uploaded {target.name}, {sum(1 for _ in target.iterdir())} files")


def main() -> None:
    """Train two epochs, with a checkpoint after each."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(10)]
    with tempfile.TemporaryDirectory() as bucket:
        trainer = get_trainer(
            "simple", model, batches, optimizer, "cpu", loss_fn=torch.nn.functional.mse_loss, max_epochs=2
        )
        trainer.add_checkpointing(save_every_n_epochs=1)
        trainer.add_hook(UploadAfterSave(bucket))
        trainer.train()


if __name__ == "__main__":
    main()
