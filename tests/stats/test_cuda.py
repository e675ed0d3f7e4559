"""The kernels give the reference's rows and histograms, in Triton's interpreter and on a CUDA device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookline.stats import STATISTICS, summarize
from hookline.stats.histograms import histograms, percentiles, tops_of
from hookline.stats.layout import CHUNK_BYTES, Launch, layout_of

ABSMAX, STD = map(STATISTICS.index, ("absmax", "std"))

AssertRows = Callable[..., None]
Tensors = Callable[[], list[Tensor]]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")

SUMMARIZE = """
from hookline.stats import cuda
result = cuda.summarize(given)
"""
COUNT = """
from hookline.stats import cuda
result = cuda.count(*given)
"""


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_in_the_interpreter(
    interpret: Callable[..., Any], awkward_tensors: Tensors, assert_rows: AssertRows
) -> None:
    """The arithmetic of the kernels is right for all kinds of tensors."""
    tensors = [tensor.detach().reshape(-1)[:70_000] for tensor in awkward_tensors()]  # the interpreter is slow
    tensors += [torch.randn(70_000) + 1e4, 0.1 * torch.randn(70_000) + 1e6, torch.randn(8, 9).bfloat16().t()]
    rows = interpret(SUMMARIZE, tensors)
    assert_rows(rows, tensors, std_error=1e-4)
    assert rows[-2, STD].item() == pytest.approx(tensors[-2].double().std().item(), rel=1e-6)  # a mean of 1e7 stds


@pytest.mark.gpu
@needs_cuda
def test_every_awkward_tensor_on_cuda(awkward_tensors: Tensors, assert_rows: AssertRows) -> None:
    """All kinds of tensors in one call, and each alone."""
    tensors = [tensor.cuda() for tensor in awkward_tensors()]
    assert_rows(summarize(tensors), tensors)
    for tensor in tensors:
        assert_rows(summarize([tensor]), [tensor])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_on_cuda(
    dtype: torch.dtype, large_tensors: Callable[..., list[Tensor]], assert_rows: AssertRows
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
def test_statistics_wait_for_nothing() -> None:
    """The host does not sync, neither with known shapes nor with new ones."""
    summarize([torch.randn(1000, device="cuda")])
    other = [torch.randn(2000, device="cuda"), torch.randn(70, 30, device="cuda").t()[::2]]
    with no_host_sync():
        rows = summarize(other)
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
def test_dense_tensors_are_read_in_place(tensor: Tensor, dense: bool) -> None:
    """A permuted tensor is not copied; one with gaps or repeats is."""
    from hookline.stats.cuda import is_dense

    assert is_dense(tensor) is dense


# ---- histograms ------------------------------------------------------------------------------------------------------


def assert_counts_agree(found: Tensor, wanted: Tensor) -> None:
    """Check that bins agree, but for a few values at the edge of a bin, which may be in the next one."""
    assert torch.equal(found.sum(dim=1), wanted.sum(dim=1))
    moved = (found.cumsum(dim=1) - wanted.cumsum(dim=1)).abs().amax(dim=1)
    assert (moved <= 1 + wanted.sum(dim=1) // 100).all()


def rows_of_all_sizes() -> Tensor:
    """Make rows whose largest values are in every octave and at its edges, zero, and not finite."""
    sizes = torch.exp2(torch.arange(-150.0, 128, dtype=torch.float64))
    odd = torch.tensor([0.0, 1e-310, 1e300, torch.inf, torch.nan], dtype=torch.float64)
    rows = torch.zeros(3 * len(sizes) + len(odd), len(STATISTICS), dtype=torch.float64)
    rows[:, ABSMAX] = torch.cat([sizes, sizes * 1.3, torch.nextafter(sizes, torch.zeros(())), odd])
    return rows


def test_histograms_in_the_interpreter(interpret: Callable[..., Any], awkward_tensors: Tensors) -> None:
    """The arithmetic of the kernels is right for all kinds of tensors."""
    tensors = [tensor.detach().reshape(-1)[:6000] for tensor in awkward_tensors()]
    wanted = histograms(tensors)
    assert_counts_agree(interpret(COUNT, (tensors, wanted.tops)), wanted.counts)


@pytest.mark.gpu
@needs_cuda
def test_histograms_of_every_awkward_tensor_on_cuda(awkward_tensors: Tensors) -> None:
    """All kinds of tensors in one call count as on the CPU, and give the same percentiles within a bin."""
    tensors = awkward_tensors()
    found, wanted = histograms([tensor.cuda() for tensor in tensors]), histograms(tensors)
    assert_counts_agree(found.counts.cpu(), wanted.counts)
    assert torch.equal(tops_of(rows_of_all_sizes().cuda()).cpu(), tops_of(rows_of_all_sizes()))
    points = percentiles(found, [10, 50, 90]).cpu(), percentiles(wanted, [10, 50, 90])
    torch.testing.assert_close(*points, rtol=0.1, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
@needs_cuda
def test_histograms_wait_for_nothing() -> None:
    """Counting and reading percentiles make no host sync."""
    tensors = [torch.randn(100_000, device="cuda"), torch.randn(10, device="cuda").double()]
    percentiles(histograms(tensors), [50])
    with no_host_sync():
        assert percentiles(histograms(tensors), [10, 50, 90]).shape == (2, 3)


# ---- layouts and launches --------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 400_000), st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.bool])),
        min_size=1,
        max_size=8,
    )
)
def test_chunks_cover_every_tensor(shapes: list[tuple[int, torch.dtype]]) -> None:
    """Each tensor has as many chunks as it needs if it starts 15 bytes after a boundary, and no more."""
    layout = layout_of(CPU, 0, tuple(size for size, _ in shapes), tuple(dtype for _, dtype in shapes))
    for index, (size, dtype) in enumerate(shapes):
        chunks, nbytes = int(layout.chunk_counts[index]), size * dtype.itemsize
        assert (nbytes + 15 <= chunks * CHUNK_BYTES < nbytes + 15 + CHUNK_BYTES) if size else chunks == 0
        first = int(layout.first_chunks[index])
        assert layout.owners[first : first + chunks].tolist() == [index] * chunks
    assert layout.chunks == len(layout.owners) == int(layout.chunk_counts.sum())


def test_chunks_of_a_dtype_are_adjacent() -> None:
    """Tensors of one dtype are next to each other, whatever order they came in."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    layout = layout_of(CPU, 0, (100_000, 5, 7), dtypes)
    assert [(group.dtype, group.skipped, group.chunks) for group in layout.groups] == [
        (torch.bfloat16, 0, 1),
        (torch.float32, 1, 5),
    ]
    assert layout.owners.tolist() == [1, 0, 0, 0, 0, 2]


def test_repeated_shapes_share_their_layout() -> None:
    """The same shapes give the same layout, another stream a new one."""
    first = layout_of(CPU, 0, (10, 20), (torch.float32, torch.float32))
    assert layout_of(CPU, 0, (10, 20), (torch.float32, torch.float32)) is first
    assert layout_of(CPU, 1, (10, 20), (torch.float32, torch.float32)) is not first


class Kernel:
    """Stands for a Triton function; the compiled kernel notes its calls, which the interpreter does not."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("first", grid, arguments, options))
            return Compiled(self.calls) if self.compiles else None

        return first


class Compiled:
    """Stands for what a first call returns."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.calls.append(("again", grid, arguments, stream))


def test_later_launches_use_the_compiled_kernel() -> None:
    """Arguments come in the kernel's order: the fixed ones, those of the call, the constants."""
    kernel = Kernel()
    launch = Launch(kernel, 5, "table", 7, num_warps=8, TILE=64, ALIGNED=True)
    for step in (1, 2, 3):
        launch(99, f"tensor {step}")
    assert kernel.calls == [
        ("first", (5,), ("table", 7, "tensor 1"), {"TILE": 64, "ALIGNED": True, "num_warps": 8}),
        ("again", (5, 1, 1), ("table", 7, "tensor 2", 64, True), 99),
        ("again", (5, 1, 1), ("table", 7, "tensor 3", 64, True), 99),
    ]


def test_in_the_interpreter_every_launch_is_a_first_one() -> None:
    """Nothing is compiled there."""
    kernel = Kernel(compiles=False)
    launch = Launch(kernel, 1)
    launch(0, "a")
    launch(0, "b")
    assert [(kind, arguments) for kind, _, arguments, _ in kernel.calls] == [("first", ("a",)), ("first", ("b",))]
