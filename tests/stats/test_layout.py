"""Test how chunks are numbered; the launches themselves are tested where there is a device."""

import torch

from hookline.stats.layout import CHUNK_BYTES, layout_of


def test_chunks_of_one_dtype_are_adjacent() -> None:
    """Each tensor's chunks follow each other, and a dtype's begin where those of the dtype before it end."""
    chunk = CHUNK_BYTES // 4
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    layout = layout_of(torch.device("cpu"), 0, (chunk + 1, 5, 0, 2 * chunk + 1), dtypes)
    assert layout.first_chunks.tolist() == [1, 0, 1, 3] and layout.chunks == 6
    assert layout.owners.tolist() == [1, 0, 0, 3, 3, 3]
    placed = [(group.dtype, group.skipped, group.chunks) for group in layout.groups]
    assert placed == [(torch.bfloat16, 0, 1), (torch.float32, 1, 5)]


def test_a_dtype_without_elements_needs_no_launch() -> None:
    """A tensor of more than one chunk has several programs, an empty one none."""
    sizes = (0, CHUNK_BYTES // 4 + 1, 5)
    layout = layout_of(torch.device("cpu"), 0, sizes, (torch.float64, torch.float32, torch.float32))
    assert [(group.dtype, group.skipped, group.chunks) for group in layout.groups] == [(torch.float32, 0, 3)]
    assert layout.chunk_counts.tolist() == [0, 2, 1] and layout.owners.tolist() == [1, 1, 2]
