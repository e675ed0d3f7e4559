"""The gradient monitor on FSDP2: what rank 0 records is true of the whole gradients."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_model, make_trainer
from commands import python
from torch import nn

from hookline import GradientMonitor

# Rows that two processes cannot share evenly, and a layer with one row, of which one process has nothing.
make_layers = partial(make_model, 6, 7, 1, 3, between=None)
EVERYTHING = {"log_histogram": True, "percentiles": [1, 50, 90], "log_update_ratio": True}


def trained(model: nn.Module, share: slice = slice(None)) -> Any:
    """Three steps of two micro-batches, with everything measured at each and a chain that changes the gradients."""
    stream = torch.Generator().manual_seed(3)
    batches = [(torch.randn(4, 6, generator=stream), torch.tensor([0, 1, 2, 1])) for _ in range(6)]
    batches = [(inputs[share], labels[share]) for inputs, labels in batches]
    links = ["centralize", {"name": "freeze", "params": "1.bias"}, {"name": "clip_norm", "max_norm": 0.1}]
    options = {"loss_fn": nn.functional.cross_entropy, "accumulate": 2, "hooks": {"update": links}}
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    trainer = make_trainer(model=model, data=batches, optimizer=optimizer, **options)
    trainer.add_hook(GradientMonitor(log_frequency=1, **EVERYTHING), on_error="raise")
    trainer.train()
    return trainer


def assert_same_record(whole: Any, cut: Any) -> None:
    """Every layer's row and bins, and what is true of all layers."""
    assert len(whole.record.layer_rows) == len(cut.record.layer_rows) == 6  # statistics and bins of three steps
    for wanted, recorded in zip(whole.record.layer_rows, cut.record.layer_rows, strict=True):
        assert (wanted.step, wanted.header) == (recorded.step, recorded.header)
        torch.testing.assert_close(recorded.values, wanted.values, rtol=1e-4, atol=1e-6, equal_nan=True)
    for wanted, recorded in zip(whole.record.metrics, cut.record.metrics, strict=True):
        theirs = {name: value for name, value in wanted.items() if name.startswith("gradients/")}
        assert theirs and {name: recorded[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, nan_ok=True)


def main(store: str, rank: int) -> None:
    """Each process trains on half of every batch; first the whole model on all of it."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    whole = trained(make_layers())
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh, cut = init_device_mesh("cpu", (2,)), make_layers()
    for layer in (*cut, cut):
        fully_shard(layer, mesh=mesh)
    sharded = trained(cut, slice(rank, None, 2))
    if rank == 0:
        assert_same_record(whole, sharded)
    dist.destroy_process_group()
    print(f"all the same on rank {rank}", flush=True)


def test_sharded_gradients_are_recorded_as_the_whole_ones(tmp_path: Path) -> None:
    """Norms before and after the chain, moments, percentiles, bins and update ratios."""
    done = python(__file__, tmp_path / "store", check=True)
    assert all(done.stdout.count(f"all the same on rank {rank}") == 1 for rank in range(2))


if __name__ == "__main__":
    # One interpreter imports everything and then becomes two, as importing takes longer than all that they do.
    child = os.fork()
    main(sys.argv[1], rank=0 if child else 1)
    if child and os.waitpid(child, 0)[1]:
        sys.exit("rank 1 failed")
