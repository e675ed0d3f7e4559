"""Test the kernels that centralize, in Triton's interpreter, if it is installed, and on a CUDA device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and is for where there is no device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MATRICES = [(7, 3), (5, 768), (4, 3, 2, 2), (1, 1), (3, 9000), (130, 20), (2, 4096), (9, 100)]
SHAPES = [*MATRICES, (5,), (), (9000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTERPRETED = """
import sys, torch
from hookline.gradients import centralize_cuda
from hookline.stats.tensor_meta import tensor_meta
tensors = torch.load(sys.argv[1])
before = [tensor._version for tensor in tensors]
norms = centralize_cuda.launch(tensors, tensor_meta(tensors), torch.device("cpu"))
torch.save((tensors, norms, [tensor._version > at for tensor, at in zip(tensors, before)]), sys.argv[2])
"""


def tensors(device: str = "cpu") -> list[Tensor]:
    """Make tensors of many shapes and dtypes; two do not begin at a multiple of 16 bytes."""
    stream = torch.Generator().manual_seed(0)
    made = [(torch.randn(shape, generator=stream) + 2).to(dtype) for shape in SHAPES for dtype in DTYPES]
    odd = torch.randn(1 + 6 * 64, generator=stream)[1:]
    return [tensor.to(device) for tensor in [*made, odd.view(6, 64), odd.clone()[3:]]]


def assert_centralized(before: list[Tensor], after: list[Tensor], norms: Tensor) -> None:
    """Check that each row lost its mean, up to rounding in its dtype, and that the norms are those of the result."""
    for old, new, norm in zip(before, after, norms.tolist(), strict=True):
        if old.dim() > 1:
            rows = old.double().flatten(1)
            wanted = (rows - rows.mean(1, keepdim=True)).view(old.shape)
            rough = 1e-5 if old.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(new.double(), wanted, rtol=rough, atol=rough)
        else:
            assert torch.equal(new, old)
        assert norm == pytest.approx(new.double().norm().item(), rel=1e-5, abs=1e-6)


@needs_interpreter
def test_the_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """The kernels' arithmetic is right for all kinds of tensors, and the versions of written tensors increase."""
    given = tensors()
    torch.save(given, tmp_path / "tensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "tensors", "found"], env=environment, cwd=tmp_path, check=True)
    after, norms, written = torch.load(tmp_path / "found")
    assert_centralized(given, after, norms)
    assert written == [tensor.dim() > 1 for tensor in given]


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_the_kernels_on_a_device(rig: Any, dtype: torch.dtype | None) -> None:
    """The same holds through the transform, also for all dtypes at once; nothing waits for the device."""
    given = [tensor for tensor in tensors("cuda") if dtype in (None, tensor.dtype)]
    params = {str(index): torch.nn.Parameter(torch.zeros_like(tensor)) for index, tensor in enumerate(given)}
    # The norm that is measured is the one that the kernels found, if all gradients have one dtype.
    chain = rig(params, "centralize", "measure")
    grads = {str(index): tensor for index, tensor in enumerate(given)}
    chain.step(grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = chain.step(grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    left = list(after.values())
    norms = torch.stack([tensor.double().norm() for tensor in left])
    assert_centralized(given, left, norms)
    assert chain.trainer.logged["gradients/measure/norm"].item() == pytest.approx(norms.norm().item(), rel=1e-5)
