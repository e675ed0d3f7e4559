"""Reference statistics in float64, tensors with pitfalls, and a runner for Triton's interpreter."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.stats import STATISTICS

COUNT, ZEROS = map(STATISTICS.index, ("count", "zeros"))


def _reference(tensor: Tensor) -> list[float]:
    """Compute the row of one tensor with torch's own functions on float64."""
    wide = tensor.detach().cpu().double().reshape(-1)
    count = wide.numel()
    if not count:
        return [0, math.nan, math.nan, math.nan, math.nan, math.nan, 0, 0, 0, 0]
    counts = [(wide == 0).sum().item(), wide.isnan().sum().item(), wide.isinf().sum().item()]
    std = wide.std().item() if count > 1 else 0.0 * wide.item()
    extremes = [wide.min().item(), wide.max().item(), wide.abs().max().item()]
    return [count, wide.mean().item(), std, *extremes, torch.linalg.vector_norm(wide).item(), *counts]


def _assert_rows(rows: Tensor, tensors: list[Tensor], std_error: float = 1e-5) -> None:
    """Check every row: counts and extremes exactly, mean, std and norm up to rounding in float32."""
    assert rows.shape == (len(tensors), len(STATISTICS))
    for row, tensor in zip(rows.cpu().tolist(), tensors, strict=True):
        _assert_row(row, _reference(tensor), std_error)


def _assert_row(row: list[float], wanted: list[float], std_error: float) -> None:
    """Check one row against its reference; the scale of a tensor is its largest value."""
    scale = wanted[5] if math.isfinite(wanted[5]) else 0.0
    tolerance = {"mean": (1e-6, 1e-6 * scale), "std": (std_error, 2e-7 * scale), "l2": (1e-5, 0.0)}
    for name, value, right in zip(STATISTICS, row, wanted, strict=True):
        relative, absolute = tolerance.get(name, (0.0, 0.0))
        close = math.isclose(value, right, rel_tol=relative, abs_tol=absolute)
        assert close or (math.isnan(value) and math.isnan(right)), f"{name} is {value}, should be {right}"
    assert row[COUNT] >= row[ZEROS]


def _awkward_tensors() -> list[Tensor]:
    """Make tensors of every kind that has a pitfall."""
    generator = torch.Generator().manual_seed(0)
    randn = torch.randn(300_007, generator=generator)
    return [
        randn,
        randn.bfloat16()[3:],  # does not start at a 16-byte boundary
        randn.half(),
        randn.double() * 1e100,
        randn[:35].view(5, 7).t(),
        randn[:3000].view(30, 100)[:, ::2],
        randn[:400].expand(50, 400),
        torch.tensor(3.0),
        torch.tensor(2.5, requires_grad=True),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.bfloat16),
        torch.tensor([1.0, math.nan, 0.0]),
        torch.tensor([1.0, math.inf, 0.0]),
        torch.tensor([-math.inf, math.inf, 0.0]),
        torch.cat([randn[:150_000], torch.tensor([math.nan, math.inf, -math.inf])]),
        torch.arange(70_001) % 9,
        torch.arange(-500, 700, dtype=torch.int32),
        torch.arange(-100, 100, dtype=torch.int8),
        torch.arange(200, dtype=torch.uint8),
        randn > 0.3,
        randn.relu(),
        torch.full((100_000,), 1e30),
        torch.full((5,), 0.1),
        randn * 1e-25,
        torch.zeros(200_000),
        randn[:20].to(torch.float8_e4m3fn),
    ]


@pytest.fixture(scope="session")
def assert_rows() -> Callable[..., None]:
    """Return the function that compares rows with the reference: `assert_rows(rows, tensors, std_error=1e-5)`."""
    return _assert_rows


@pytest.fixture(scope="session")
def awkward_tensors() -> Callable[[], list[Tensor]]:
    """Return the function that makes the awkward tensors."""
    return _awkward_tensors


@pytest.fixture
def large_tensors() -> Callable[[torch.dtype], list[Tensor]]:
    """Return a function that makes tensors of many chunks on the GPU: a far mean, a NaN, views from any element."""

    def make(dtype: torch.dtype) -> list[Tensor]:
        base = torch.randn(5_000_000, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        broken = base.clone()
        broken[3_333_333] = math.nan
        far = base + 1e4 if dtype is torch.float32 else base * 3 + 7
        return [far.to(dtype), broken.to(dtype), *(base.to(dtype)[start:] for start in range(1, 9))]

    return make


@pytest.fixture
def interpret(tmp_path: Path) -> Callable[[str, object], Any]:
    """Return a function that runs code in Triton's interpreter: it gets `given` and must set `result`."""
    if find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("needs Triton, and is for machines without a device")

    def run(code: str, given: object) -> Any:
        torch.save(given, tmp_path / "given")
        script = f"import torch\ngiven = torch.load('given')\n{code}\ntorch.save(result, 'result')\n"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True)
        return torch.load(tmp_path / "result")

    return run
