"""Multiplying in one launch: in Triton's interpreter, if it is installed, and on a CUDA device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookline.gradients.norms import Norms
from hookline.gradients.transforms import Centralize, ClipNorm, Scale
from hookline.gradients.view import Gradients

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, and is for where there is no device"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(), (5,), (7, 3), (0, 4), (130, 40), (3, 9000), (16384,), (4, 3, 2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = [0.1, 3.3, 1e6]
INTERPRETED = """
import sys, torch
from hookline.gradients import cuda_multiply
from hookline.gradients.look import Look
found = []
for tensors, norm, limit in torch.load(sys.argv[1]):
    look = Look(tensors)
    assert cuda_multiply.can_multiply(look.kinds)
    factor = cuda_multiply.launch_clip(look, norm, limit, torch.device("cpu"))
    found.append((tensors, factor, [tensor._version for tensor in tensors]))
    more = [tensor.clone() for tensor in tensors]
    norms = cuda_multiply.launch_multiply(Look(more), limit, torch.device("cpu"))
    found[-1] += (more, norms, [tensor._version for tensor in more])
torch.save(found, sys.argv[2])
"""


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Many shapes; one begins where no vector of 16 bytes does."""
    stream = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=stream).to(dtype) for shape in SHAPES]
    return [*made, torch.randn(1001, generator=stream).to(dtype)[1:]]


def wanted(given: list[Tensor], norm: Tensor, limit: float) -> tuple[list[Tensor], Tensor]:
    """What torch's operations on a device make of them: in float32, and rounded after each."""
    inverse = (norm.float() + 1e-6).to(norm.dtype).float().reciprocal().to(norm.dtype).float()
    factor = (inverse * limit).to(norm.dtype).clamp(max=1.0)
    return [(tensor.float() * factor.float()).to(tensor.dtype) for tensor in given], factor


def cases() -> list[tuple[list[Tensor], Tensor, float]]:
    """Norms above and below each limit, and one that is no number."""
    numbers = [(17.3, limit) for limit in LIMITS] + [(0.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0)]
    return [(tensors(dtype), torch.tensor(norm, dtype=dtype), limit) for dtype in DTYPES for norm, limit in numbers]


@needs_interpreter
def test_the_kernel_in_the_interpreter(tmp_path: Path) -> None:
    """Every bit as torch has it; only bf16 is cut off there, not rounded. The writing shows in the versions."""
    torch.save(cases(), tmp_path / "given")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", INTERPRETED, "given", "found"], env=environment, cwd=tmp_path, check=True)
    for (given, norm, limit), found in zip(cases(), torch.load(tmp_path / "found"), strict=True):
        after, factor, versions, more, norms, more_versions = found
        expected, expected_factor = wanted(given, norm, limit)
        rough = 2**-5 if norm.dtype is torch.bfloat16 else 0.0
        for one, other in zip([factor, *after], [expected_factor, *expected], strict=True):
            torch.testing.assert_close(one, other, rtol=rough, atol=rough / 1000, equal_nan=True)
        for one, other, of_one in zip(more, after, norms, strict=True):
            product = (other.float() * limit).to(one.dtype)
            torch.testing.assert_close(one, product, rtol=rough, atol=rough, equal_nan=True)
            torch.testing.assert_close(of_one, one.float().norm(), rtol=1e-5, atol=1e-6, equal_nan=True)
        assert min(versions) > 0 < min(more_versions)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_on_a_device(dtype: torch.dtype, max_norm: float) -> None:
    """Through the link it is bit for bit clip_grad_norm_, and nothing waits for the device."""
    sets = [_params(dtype) for _ in range(2)]
    ClipNorm(max_norm).on_update(Gradients(_params(dtype), Norms()))
    clip = ClipNorm(max_norm)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip.on_update(Gradients(sets[0], Norms()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    norm = torch.nn.utils.clip_grad_norm_(list(sets[1].values()), max_norm)
    assert torch.equal(clip.clipped_norm, norm)
    for name, param in sets[0].items():
        assert param.grad is not None and torch.equal(param.grad, sets[1][name].grad)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_behind_a_link_that_found_the_norms(dtype: torch.dtype) -> None:
    """Every bit as torch's multiplication has it, and the norms are those of what is there then."""
    params, known = _params(dtype), Norms()
    params.pop("3")  # nothing is in it, so that no kernel takes it
    grads = Gradients(params, known)
    Centralize().on_update(grads)
    before = [tensor.clone() for tensor in grads.tensors()]
    assert known.were_found(grads.look())
    Scale(0.3).on_update(grads)
    torch._foreach_mul_(before, 0.3)
    assert all(torch.equal(one, other) for one, other in zip(grads.tensors(), before, strict=True))
    wanted = torch.stack([tensor.float().norm() for tensor in before])
    torch.testing.assert_close(grads.norms(), wanted, rtol=1e-4, atol=1e-6)


def _params(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    made = {str(index): torch.nn.Parameter(torch.zeros_like(one).cuda()) for index, one in enumerate(tensors(dtype))}
    for param, gradient in zip(made.values(), tensors(dtype), strict=True):
        param.grad = gradient.cuda()
    return made
