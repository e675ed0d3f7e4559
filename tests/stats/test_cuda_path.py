"""The kernels give the reference's rows: in Triton's interpreter, if it is installed, and on a CUDA device."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookline.stats.columns import STATISTICS, STD
from hookline.stats.statistics import summarize

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and is for where there is no device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

INTERPRETED = """
import sys, torch
from hookline.stats import cuda_path
tensors = [cuda_path.readable(tensor) for tensor in torch.load(sys.argv[1])]
torch.save(cuda_path.launch(tensors, torch.device("cpu"), 0), sys.argv[2])
"""


@needs_interpreter
def test_the_kernels_in_the_interpreter(
    tmp_path: Path, awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """The kernels' own arithmetic, on the CPU, over all kinds of tensors."""
    tensors = [tensor.detach().reshape(-1)[:70_000] for tensor in awkward_tensors()]  # the interpreter is slow
    tensors += [torch.randn(70_000) + 1e4, 0.1 * torch.randn(70_000) + 1e6, torch.randn(8, 9).bfloat16().t()]
    torch.save(tensors, tmp_path / "tensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "tensors", "rows"], env=environment, cwd=tmp_path, check=True)
    rows = torch.load(tmp_path / "rows")
    assert_rows(rows, tensors, std_error=1e-4)
    assert rows[-2, STD].item() == pytest.approx(tensors[-2].double().std().item(), rel=1e-6)  # a mean of 1e7 stds


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(
    awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """All kinds of tensors in one call, and each alone."""
    tensors = [tensor.cuda() for tensor in awkward_tensors()]
    assert_rows(summarize(tensors), tensors)
    for tensor in tensors:
        assert_rows(summarize([tensor]), [tensor])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_on_cuda(
    dtype: torch.dtype, large_tensors: Callable[..., list[Tensor]], assert_rows: Callable[..., None]
) -> None:
    """Many chunks, a far mean, a NaN in one of them; views that start at any element."""
    tensors = large_tensors(dtype)
    assert_rows(summarize(tensors), tensors, std_error=1e-4)


@pytest.mark.gpu
@needs_cuda
def test_the_same_bits_every_time_on_cuda() -> None:
    """Ten launches give identical rows."""
    tensors = [torch.randn(3_000_000, device="cuda"), torch.randn(999, device="cuda").half()]
    first = summarize(tensors)
    assert all(torch.equal(summarize(tensors), first) for _ in range(10))


@pytest.mark.gpu
@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    """No host sync once the shapes have been seen, nor with new shapes."""
    summarize([torch.randn(1000, device="cuda")])
    other = [torch.randn(2000, device="cuda"), torch.randn(70, 30, device="cuda").t()[::2]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = summarize(other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.shape == (2, len(STATISTICS)) and rows.is_cuda


@needs_triton
@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(2, 6)[:, ::2], False),
        (torch.ones(1, 5).expand(4, 5), False),
        (torch.ones(4, 1, 5)[:, :, 1:], False),
    ],
)
def test_dense_tensors_are_read_where_they_are(tensor: Tensor, dense: bool) -> None:
    """A permuted tensor is not copied; one with gaps or repeats is."""
    from hookline.stats.cuda_path import is_dense

    assert is_dense(tensor) is dense
