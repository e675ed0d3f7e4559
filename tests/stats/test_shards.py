"""What ranks measure of their shards gives what the whole tensors have, and a monitored sharded run the same record."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookline

# One interpreter imports everything and then becomes two ranks: importing takes longer than all that they do.
SETUP = """
import os, sys, torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hookline import get_trainer
from hookline.errors import HooklineError
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.stats.histograms import histograms
from hookline.stats.pieces import Pieces
from hookline.stats.statistics import summarize

torch.set_num_threads(1)
other = os.fork()
rank = 0 if other else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
"""
MEASURE = """
torch.manual_seed(0)
odd, even, small, broken = torch.randn(5, 3), torch.randn(64, 10) + 3, torch.randn(1), torch.randn(8)
broken[6] = float("nan")
wholes = [odd, torch.randn(7), even, even.clone(), small, broken]
placements = [Shard(0), None, Shard(1), Replicate(), Shard(0), Shard(0)]
tensors = [whole if place is None else distribute_tensor(whole, mesh, [place])
           for whole, place in zip(wholes, placements)]
calls = []
reduce = dist.all_reduce
dist.all_reduce = lambda values, operation, group: (calls.append(operation), reduce(values, operation, group=group))
pieces = Pieces(tensors)
rows = pieces.summarize()
torch.testing.assert_close(rows, summarize(wholes), rtol=1e-6, atol=1e-8, equal_nan=True)
assert calls == [dist.ReduceOp.SUM, dist.ReduceOp.MAX], calls
counted, wanted = pieces.histograms(rows), histograms(wholes)
assert torch.equal(counted.counts, wanted.counts) and torch.equal(counted.tops, wanted.tops)
assert calls[2:] == [dist.ReduceOp.SUM]
torch.testing.assert_close(pieces.norms(), rows[:, 6], rtol=1e-6, atol=0, equal_nan=True)

for shape in ((2, 1), (1, 2)):  # copies along one dimension, shards along the other
    both = [Replicate(), Shard(0)]
    pieces = Pieces([distribute_tensor(odd, init_device_mesh("cpu", shape), both), odd])
    torch.testing.assert_close(pieces.summarize(), summarize([odd, odd]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(pieces.norms(), summarize([odd, odd])[:, 6])

partial = DTensor.from_local(odd, mesh, [Partial()])
try:
    Pieces([partial], ["encoder.weight"])
except HooklineError as error:
    assert "no statistics of encoder.weight" in str(error) and "redistribute" in str(error)
else:
    raise AssertionError("a partial tensor was measured")
"""
TRAIN = """
dist.all_reduce = reduce

def trained(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batches = [(torch.randn(16, 5), torch.randn(16, 3)) for _ in range(3)]
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"loss_fn": nn.functional.mse_loss, "record": False, "console": False, "max_grad_norm": 0.1}
    trainer = get_trainer("simple", model, batches, optimizer, "cpu", **options)
    monitor = GradientMonitor(1, log_histogram=True, percentiles=[10, 50], log_update_ratio=True)
    trainer.add_hook(monitor, on_error="raise")
    trainer.train()
    return trainer.record

alone, together = trained(False), trained(True)
assert len(together.layer_steps) == 6
for whole, sharded in zip(alone.layer_steps, together.layer_steps, strict=True):
    torch.testing.assert_close(sharded.values, whole.values, rtol=1e-4, atol=1e-6)
for whole, sharded in zip(alone.metrics, together.metrics, strict=True):
    for name in ("gradients/norm", "gradients/final_norm", "gradients/update_ratio"):
        assert abs(whole[name] / sharded[name] - 1) < 1e-4, (name, whole[name], sharded[name])
dist.barrier()
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_ranks(tmp_path: Path) -> None:
    """Rows take one sum and one maximum, histograms one more sum; FSDP training is recorded as on one rank."""
    source = str(Path(hookline.__file__).parents[1])
    command = [sys.executable, "-c", SETUP + MEASURE + TRAIN, str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
