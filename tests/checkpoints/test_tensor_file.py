"""What is written is a safetensors file like any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hookline.checkpoints.tensor_file import CODES, file_parts


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_is_read_back_by_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """Matrices, scalars and empty tensors, with names that JSON must escape."""
    tensors = {'a "quoted" ü': torch.arange(6).reshape(2, 3).to(dtype), "one": torch.ones((), dtype=dtype),
               "none": torch.zeros(0, 4, dtype=dtype), "turned": torch.arange(6).view(2, 3).t().to(dtype)}  # fmt: skip
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(file_parts(tensors)))
    found = load_file(path)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)


def test_mixed_widths_are_aligned(tmp_path: Path) -> None:
    """Odd numbers of bytes do not push a wide tensor off its boundary: the widest come first."""
    tensors = {"bytes": torch.ones(3, dtype=torch.uint8), "half": torch.ones(5, dtype=torch.bfloat16),
               "wide": torch.ones(2, dtype=torch.float64), "word": torch.ones(1, dtype=torch.int32)}  # fmt: skip
    parts = file_parts(tensors)
    assert len(parts[0]) % 8 == 0
    assert [len(part) for part in parts[1:]] == [16, 4, 10, 3]
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(parts))
    assert all(torch.equal(found, tensors[name]) for name, found in load_file(path).items())


def test_memory_is_not_copied() -> None:
    """The parts are the tensors' own memory: a later write shows in them."""
    tensor = torch.zeros(4)
    part = file_parts({"x": tensor})[1]
    tensor.fill_(1.0)
    assert bytes(part) == torch.ones(4).numpy().tobytes()
