"""Tensors of every kind are measured as the whole, dense tensors they stand for, also over ranks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hookline
from hookline import HooklineError
from hookline.stats import STATISTICS, summarize
from hookline.stats.distributed import LocalTensors
from hookline.stats.histograms import histograms

L2 = STATISTICS.index("l2")


def scattered() -> Tensor:
    """Make a sparse matrix with many rows of zeros and one entry that appears twice."""
    indices = torch.tensor([[7, 2, 7, 11]])
    return torch.sparse_coo_tensor(indices, torch.randn(4, 5), (20, 5), check_invariants=True)


def test_plain_tensors_are_used_as_they_are() -> None:
    """Nothing is copied, and the rows are `summarize`'s."""
    tensors = [torch.randn(30), torch.randn(4, 5)]
    local = LocalTensors(tensors)
    assert all(held is tensor for held, tensor in zip(local.dense, tensors, strict=True))
    assert torch.equal(local.summarize(), summarize(tensors))
    assert torch.equal(local.histograms(local.summarize()).counts, histograms(tensors).counts)


def test_sparse_tensors_count_their_zeros(assert_rows: Callable[..., None]) -> None:
    """A sparse tensor, not coalesced, beside a dense one has the row and the histogram of the dense one."""
    torch.manual_seed(0)
    sparse, other = scattered(), torch.randn(7)
    whole = [sparse.to_dense(), other]
    local = LocalTensors([sparse, other])
    rows = local.summarize()
    assert_rows(rows, whole)
    torch.testing.assert_close(local.norms(), summarize(whole)[:, L2])
    found, wanted = local.histograms(rows), histograms(whole)
    assert torch.equal(found.counts, wanted.counts) and torch.equal(found.tops, wanted.tops)


def test_complex_tensors_have_the_norm_of_their_parts() -> None:
    """A complex parameter's gradient is measured by its real and imaginary parts."""
    tensor = torch.randn(6, dtype=torch.complex64)
    assert LocalTensors([tensor]).norms().item() == pytest.approx(torch.linalg.vector_norm(tensor).item(), rel=1e-6)


def test_other_values_for_the_same_tensors() -> None:
    """`with_dense` measures other values and leaves the first ones alone."""
    local = LocalTensors([torch.ones(4), torch.ones(9)])
    assert local.with_dense([2 * torch.ones(4), torch.zeros(9)]).norms().tolist() == [4.0, 0.0]
    assert local.norms().tolist() == [2.0, 3.0]


def test_no_tensors() -> None:
    """An empty list is valid."""
    local = LocalTensors([])
    assert local.summarize().shape[0] == local.norms().shape[0] == 0
    assert local.histograms(local.summarize()).counts.shape[0] == 0


def test_a_tensor_without_statistics_is_named() -> None:
    """A layout that is not handled is refused with the name."""
    local = LocalTensors([torch.ones(2), torch.ones(3).to_mkldnn()], ["embed", "head"])
    for measure in (local.summarize, local.norms):
        with pytest.raises(HooklineError, match=r"no statistics of head: it has the layout torch\._mkldnn"):
            measure()


def test_results_are_on_the_device_of_the_first_tensor() -> None:
    """Tensors on two devices are measured separately and returned together; one device here holds no values."""
    local = LocalTensors([torch.ones(2, device="meta"), torch.ones(3), torch.ones(4, device="meta")])
    rows, norms = local.summarize(), local.norms()
    assert rows.is_meta and rows.shape == (3, len(STATISTICS)) and norms.is_meta and norms.shape == (3,)


def test_which_tensors_are_plain() -> None:
    """Sparse and complex ones are not."""
    assert LocalTensors([torch.ones(2), torch.nn.Parameter(torch.ones(2))]).plain and LocalTensors([]).plain
    assert not LocalTensors([torch.ones(2), scattered()]).plain
    assert not LocalTensors([torch.ones(2, dtype=torch.complex64)]).plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_several_devices(assert_rows: Callable[..., None]) -> None:
    """Rows come back in the order of the tensors, on the device of the first."""
    tensors = [torch.randn(10, device="cuda"), torch.randn(20), torch.randn(30, device="cuda"), torch.randn(5)]
    local = LocalTensors(tensors)
    rows = local.summarize()
    assert rows.device.type == "cuda"
    assert_rows(rows, tensors)
    counts = local.histograms(rows).counts
    assert counts.sum(dim=1).tolist() == [10, 20, 30, 5]
    torch.testing.assert_close(local.norms(), rows[:, L2])


# ---- two ranks -------------------------------------------------------------------------------------------------------

# One interpreter imports everything and then becomes two ranks: importing takes longer than all that they do.
SETUP = """
import os, sys, torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hookline import get_trainer
from hookline import HooklineError
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.stats import summarize
from hookline.stats.distributed import LocalTensors
from hookline.stats.histograms import histograms

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
local = LocalTensors(tensors)
rows = local.summarize()
torch.testing.assert_close(rows, summarize(wholes), rtol=1e-6, atol=1e-8, equal_nan=True)
assert calls == [dist.ReduceOp.SUM, dist.ReduceOp.MAX], calls
counted, wanted = local.histograms(rows), histograms(wholes)
assert torch.equal(counted.counts, wanted.counts) and torch.equal(counted.tops, wanted.tops)
assert calls[2:] == [dist.ReduceOp.SUM]
torch.testing.assert_close(local.norms(), rows[:, 6], rtol=1e-6, atol=0, equal_nan=True)

for shape in ((2, 1), (1, 2)):  # copies along one dimension, shards along the other
    both = [Replicate(), Shard(0)]
    local = LocalTensors([distribute_tensor(odd, init_device_mesh("cpu", shape), both), odd])
    torch.testing.assert_close(local.summarize(), summarize([odd, odd]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(local.norms(), summarize([odd, odd])[:, 6])

partial = DTensor.from_local(odd, mesh, [Partial()])
try:
    LocalTensors([partial], ["encoder.weight"])
except HooklineError as error:
    assert "no statistics of encoder.weight" in str(error) and "redistribute" in str(error)
else:
    raise AssertionError("a partial tensor was measured")
"""
END = """
dist.barrier()
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_ranks(tmp_path: Path) -> None:
    """Rows take one sum and one maximum, histograms one more sum."""
    source = str(Path(hookline.__file__).parents[1])
    command = [sys.executable, "-c", SETUP + MEASURE + END, str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
