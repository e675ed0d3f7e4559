"""Test how programs are numbered; the launches themselves are tested where there is a device."""

import torch

from hookline.stats.layout import CHUNK_BYTES, layout_of, number_programs


def test_programs_of_one_kind_are_adjacent() -> None:
    """Each tensor's programs follow each other, and a kind's begin where those of the kind before it end."""
    first, owners, groups = number_programs([2, 1, 0, 3], ["b", "a", "a", "b"])
    assert first == [1, 0, 1, 3]
    assert owners.tolist() == [1, 0, 0, 3, 3, 3]
    assert groups == {"a": (0, 1), "b": (1, 5)}


def test_a_dtype_without_elements_needs_no_launch() -> None:
    """A tensor of more than one chunk has several programs, an empty one none."""
    sizes = (0, CHUNK_BYTES // 4 + 1, 5)
    layout = layout_of(torch.device("cpu"), 0, sizes, (torch.float64, torch.float32, torch.float32))
    assert [(group.dtype, group.skipped, group.chunks) for group in layout.groups] == [(torch.float32, 0, 3)]
    assert layout.chunk_counts.tolist() == [0, 2, 1] and layout.owners.tolist() == [1, 1, 2]
