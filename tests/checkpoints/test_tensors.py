"""Tensors get names, are stored once, and their dtypes come from a fixed table."""

import pytest
import torch

from hookline.checkpoints.tensors import TensorTable, dtype_named, tensor_from


def test_an_address_that_is_reused_ties_nothing() -> None:
    """A temporary tensor's memory may be reused by the next one; the two are still two."""
    table = TensorTable()
    for index in range(50):
        table.add(torch.full((8,), float(index)), (str(index),))
    assert len(table.tensors) == 50
    assert all(float(tensor[0]) == float(name) for name, tensor in table.tensors.items())


def test_bytes_are_stored_like_tensors() -> None:
    """Raw bytes get a name and keep their values."""
    table = TensorTable()
    assert table.add_bytes(b"\x01\xff", ("a", "b")) == "a.b"
    assert table.tensors["a.b"].tolist() == [1, 255]
    assert table.tensors[table.add_bytes(b"", ("e",))].shape == (0,)


def test_dtypes_by_name() -> None:
    """Only a dtype's name finds a dtype."""
    assert dtype_named("bfloat16") is torch.bfloat16
    for name in ("nn", "Tensor", "torch.float32", ""):
        with pytest.raises(ValueError, match="unknown dtype"):
            dtype_named(name)


def test_an_entry_restores_dtype_and_shape() -> None:
    """A tensor kept as bytes is seen as it was."""
    table = TensorTable()
    value = torch.tensor([[1 + 2j]], dtype=torch.complex128)
    entry = table.add(value, ("z",))
    assert table.tensors["z"].dtype == torch.uint8
    assert torch.equal(tensor_from(table.tensors["z"], entry), value)
