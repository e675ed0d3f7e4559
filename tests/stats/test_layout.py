"""Tensors are cut into chunks so that every element is in exactly one, at any alignment."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.stats.layout import CHUNK_BYTES, kept_table, layout_of

DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.bool])
CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 400_000), DTYPES), min_size=1, max_size=8))
def test_chunks_cover_every_tensor(shapes: list[tuple[int, torch.dtype]]) -> None:
    """Each tensor has as many chunks as it needs if it starts 15 bytes after a boundary, and no more."""
    layout = layout_of(CPU, 0, tuple(size for size, _ in shapes), tuple(dtype for _, dtype in shapes))
    for index, (size, dtype) in enumerate(shapes):
        chunks, nbytes = int(layout.chunk_counts[index]), size * dtype.itemsize
        assert (nbytes + 15 <= chunks * CHUNK_BYTES < nbytes + 15 + CHUNK_BYTES) if size else chunks == 0
        first = int(layout.first_chunks[index])
        assert layout.owners[first : first + chunks].tolist() == [index] * chunks
    assert layout.chunks == len(layout.owners) == int(layout.chunk_counts.sum())


def test_a_dtype_is_one_stretch_of_chunks() -> None:
    """Tensors of one dtype stand together, whatever order they came in."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    layout = layout_of(CPU, 0, (100_000, 5, 7), dtypes)
    assert [(group.dtype, group.skipped, group.chunks) for group in layout.groups] == [
        (torch.bfloat16, 0, 1),
        (torch.float32, 1, 5),
    ]
    assert layout.owners.tolist() == [1, 0, 0, 0, 0, 2]


def test_repeated_shapes_share_their_tables() -> None:
    """The same shapes give the same layout object, another stream a new one."""
    first = layout_of(CPU, 0, (10, 20), (torch.float32, torch.float32))
    assert layout_of(CPU, 0, (10, 20), (torch.float32, torch.float32)) is first
    assert layout_of(CPU, 1, (10, 20), (torch.float32, torch.float32)) is not first


def test_a_table_of_the_same_numbers_is_kept() -> None:
    """As addresses mostly are from step to step; other numbers have their own."""
    first = kept_table(CPU, (2**40, 3))
    assert first.tolist() == [2**40, 3] and first.dtype is torch.int64
    assert kept_table(CPU, (2**40, 3)) is first and kept_table(CPU, (3, 2**40)).tolist() == [3, 2**40]
