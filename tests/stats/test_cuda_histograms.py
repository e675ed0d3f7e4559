"""The histogram kernel counts as the torch path does."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookline.stats.columns import ABSMAX, STATISTICS
from hookline.stats.histograms import Histograms, histograms, percentiles, tops_of

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and is for where there is no device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

INTERPRETED = """
import sys, torch
from hookline.stats import cuda_histograms
tensors, tops, rows = torch.load(sys.argv[1])
readable = [cuda_histograms.in_float32(tensor) for tensor in tensors]
counts = cuda_histograms.launch(readable, tops, 0)
fractions = torch.tensor([0, 0.1, 0.5, 0.9, 1], dtype=torch.float64)
found = counts, cuda_histograms.percentiles(counts, tops, fractions), cuda_histograms.tops_of(rows)
torch.save(found, sys.argv[2])
"""


def assert_counts_agree(found: Tensor, wanted: Tensor) -> None:
    """The same values in the same bins, but for a few at the edge of a bin, which may be in the next one."""
    assert torch.equal(found.sum(dim=1), wanted.sum(dim=1))
    moved = (found.cumsum(dim=1) - wanted.cumsum(dim=1)).abs().amax(dim=1)
    assert (moved <= 1 + wanted.sum(dim=1) // 100).all()


def rows_of_all_sizes() -> Tensor:
    """Rows of which only the largest value matters: of every octave and at its edges, nothing, and not finite."""
    sizes = torch.exp2(torch.arange(-150.0, 128, dtype=torch.float64))
    odd = torch.tensor([0.0, 1e-310, 1e300, torch.inf, torch.nan], dtype=torch.float64)
    rows = torch.zeros(3 * len(sizes) + len(odd), len(STATISTICS), dtype=torch.float64)
    rows[:, ABSMAX] = torch.cat([sizes, sizes * 1.3, torch.nextafter(sizes, torch.zeros(())), odd])
    return rows


@needs_interpreter
def test_the_kernel_in_the_interpreter(tmp_path: Path, awkward_tensors: Callable[[], list[Tensor]]) -> None:
    """The kernel's own arithmetic, on the CPU, over all kinds of tensors."""
    tensors = [tensor.detach().reshape(-1)[:6000] for tensor in awkward_tensors()]
    wanted = histograms(tensors)
    rows = rows_of_all_sizes()
    torch.save((tensors, wanted.tops, rows), tmp_path / "tensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "tensors", "counts"], env=environment, cwd=tmp_path, check=True)
    counts, points, tops = torch.load(tmp_path / "counts")
    assert torch.equal(tops, tops_of(rows))
    assert_counts_agree(counts, wanted.counts)
    expected = percentiles(Histograms(counts, wanted.tops), [0, 10, 50, 90, 100])
    torch.testing.assert_close(points, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(awkward_tensors: Callable[[], list[Tensor]]) -> None:
    """All kinds of tensors in one call count as on the CPU, and give the same percentiles within a bin."""
    tensors = awkward_tensors()
    found, wanted = histograms([tensor.cuda() for tensor in tensors]), histograms(tensors)
    assert_counts_agree(found.counts.cpu(), wanted.counts)
    assert torch.equal(tops_of(rows_of_all_sizes().cuda()).cpu(), tops_of(rows_of_all_sizes()))
    points = percentiles(found, [10, 50, 90]).cpu(), percentiles(wanted, [10, 50, 90])
    torch.testing.assert_close(*points, rtol=0.1, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    """Counting and reading percentiles make no host sync."""
    tensors = [torch.randn(100_000, device="cuda"), torch.randn(10, device="cuda").double()]
    percentiles(histograms(tensors), [50])
    torch.cuda.set_sync_debug_mode("error")
    try:
        found: Histograms = histograms(tensors)
        assert percentiles(found, [10, 50, 90]).shape == (2, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
