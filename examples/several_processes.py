"""Train on several processes with DDP: `torchrun --nproc-per-node=2 examples/several_processes.py`.

It also runs as one process. On GPUs, use the backend nccl and the device f"cuda:{os.environ['LOCAL_RANK']}".
"""

import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import ResumableSampler, SimpleTrainer, Trainer, TrainingHook


class BatchLoss(TrainingHook):
    """Log the loss of each rank's batch: Hookline records the mean over the ranks, so the hook needs no collective."""

    def on_step_end(self, loss: float, step: int, trainer: Trainer) -> None:
        trainer.log("loss_of_the_batch", loss)
        if step == 1:
            print(f"rank {trainer.ranks.rank} of {trainer.ranks.world_size}: loss {loss:.2f}")


def main() -> None:
    """Train; each process reads its share of the data, and all of them keep one record."""
    several = "RANK" in os.environ  # torchrun sets it.
    if several:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    if several:
        model = nn.parallel.DistributedDataParallel(model)
    trainer = SimpleTrainer(
        model,
        DataLoader(data, batch_size=16, sampler=ResumableSampler(data, seed=0)),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        "cpu",
        loss_fn=nn.functional.cross_entropy,
        max_epochs=2,
        seed=0,
        name="several-processes",
        resume="auto",  # After `torchrun --max-restarts`, the run continues from its newest checkpoint.
    )
    trainer.add_hook("checkpoint", every=20)
    trainer.add_hook("throughput")
    trainer.add_hook(BatchLoss())
    trainer.train()
    if several:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
