"""What ranks send each other for the record and the agreement, counted: it does not grow with the number of ranks."""

from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import make_batches, make_trainer
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 100


class Collectives(TorchDispatchMode):
    """Counts the collectives of ours, by kind, and their bytes; training's own have float32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith("c10d.allreduce"):
            (tensor,) = args[0]
            if tensor.dtype in (torch.int64, torch.float64):
                kind = f"{str(function).split('.')[1]} {str(tensor.dtype).split('.')[1]}"
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if tensor.dtype == torch.int64:
                    self.largest = max(self.largest, tensor.nbytes)
        return function(*args, **(kwargs or {}))


def count(rank: int, kind: str, world_size: int) -> dict[str, Any]:
    batches = make_batches(rank, world_size, 4) * (STEPS // 4)
    trainer = make_trainer(kind, rank, world_size, None, batches=batches, max_steps=STEPS, max_epochs=9)
    seen, at = Collectives(), {}

    @trainer.on("step_end")
    def note(step: int) -> None:
        at[step] = dict(seen.counts)

    with seen:
        trainer.train()
    (within, later), exchanged = (at[3], at[48]), at[55]
    return {
        "a step": {key: (value - within.get(key, 0)) / 45 for key, value in later.items() if value != within.get(key)},
        "an exchange": {
            key: value - later[key] if key in later else value for key, value in exchanged.items() if "float64" in key
        },
        "bytes": seen.largest,
    }


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4)])
def test_a_step_costs_one_small_collective_and_an_exchange_one_sum(kind: str, world_size: int) -> None:
    for result in run_on_ranks(count, world_size, kind, world_size):
        assert result.value["a step"] == {"allreduce_ int64": 1}
        assert sum(result.value["an exchange"].values()) <= 2  # one sum, and one maximum if there is something for it
        assert result.value["bytes"] <= 128
