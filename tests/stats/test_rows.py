"""Statistics of many tensors are right up to rounding, whatever the tensors are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from hookline import HooklineError
from hookline.stats import STATISTICS, summarize
from hookline.stats import rows as module
from hookline.stats.distributed import LocalTensors
from hookline.stats.rows import row_dtype, summarize_by_torch, wide_dtype

L2, MEAN, NANS, STD = map(STATISTICS.index, ("l2", "mean", "nans", "std"))

AssertRows = Callable[..., None]
Tensors = Callable[[], list[Tensor]]
SPECIAL = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e4, 6e4, 1e-25])
VALUES = st.one_of(SPECIAL, st.floats(-100, 100).map(lambda value: round(value, 6)))
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_every_awkward_tensor_in_one_call(awkward_tensors: Tensors, assert_rows: AssertRows) -> None:
    """All dtypes, shapes and strides together, NaN and infinities included, give the reference's rows."""
    tensors = awkward_tensors()
    assert_rows(summarize(tensors), tensors)


def test_every_awkward_tensor_alone(awkward_tensors: Tensors, assert_rows: AssertRows) -> None:
    """A tensor's row does not depend on the other tensors."""
    for tensor in awkward_tensors():
        assert_rows(summarize([tensor]), [tensor])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values_in_any_float_dtype(data: Any, assert_rows: AssertRows) -> None:
    """Random values with NaN and infinities, several tensors at once, match float64."""
    tensors = []
    for _ in range(data.draw(st.integers(1, 6))):
        values = data.draw(st.lists(VALUES, max_size=40))
        tensors.append(torch.tensor(values, dtype=data.draw(st.sampled_from(DTYPES))))
    assert_rows(summarize(tensors), tensors)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 300_000), mean=st.floats(-1e4, 1e4), dtype=st.sampled_from(DTYPES[:2]))
def test_any_size_and_mean(size: int, mean: float, dtype: torch.dtype, assert_rows: AssertRows) -> None:
    """Whatever the size and however far the mean is from zero, mean and std are right."""
    tensor = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size)) + mean
    assert_rows(summarize([tensor]), [tensor], std_error=1e-4)


@pytest.mark.parametrize("copies", [1, 8])
@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_mean_ten_thousand_stds_away_costs_no_digits(size: int, copies: int, assert_rows: AssertRows) -> None:
    """The spread around 1e4 is right to 1e-4, also in tensors that are measured together."""
    spread = torch.randn(size, generator=torch.Generator().manual_seed(1))
    tensors = [spread * (1 + index) + 1e4 * (1 + index) for index in range(copies)]
    assert_rows(summarize(tensors), tensors, std_error=1e-4)


def test_a_mean_that_drifts_through_the_tensor(assert_rows: AssertRows) -> None:
    """Blocks with different means are merged correctly."""
    tensor = torch.linspace(-1000, 3000, 500_000) + torch.randn(500_000, generator=torch.Generator().manual_seed(2))
    assert_rows(summarize([tensor]), [tensor])


def test_the_same_bits_every_time(awkward_tensors: Tensors) -> None:
    """Two calls give identical rows."""
    tensors = awkward_tensors()
    assert torch.equal(summarize(tensors).nan_to_num(), summarize(tensors).nan_to_num())


def test_fp16_sums_do_not_overflow() -> None:
    """A sum beyond the largest fp16 number is finite."""
    row = summarize([torch.full((100_000,), 60_000.0, dtype=torch.float16)])[0]
    assert row[MEAN].item() == pytest.approx(60_000, rel=1e-6) and row[STD] == 0


def test_counts_are_exact_beyond_float32() -> None:
    """More zeros than float32 can count one by one are counted to the last."""
    assert summarize([torch.zeros(2**24 + 1, dtype=torch.int8)])[0, STATISTICS.index("zeros")] == 2**24 + 1


def test_no_tensors_give_no_rows() -> None:
    """An empty list is valid."""
    assert summarize([]).shape == (0, len(STATISTICS))


def test_no_graph_is_kept() -> None:
    """Measuring what requires grad builds nothing."""
    assert not summarize([torch.ones(3, requires_grad=True) * 2]).requires_grad


def test_measuring_changes_nothing() -> None:
    """The tensor and its version stay as they were."""
    tensor = torch.randn(200_000)
    before, version = tensor.clone(), tensor._version
    summarize([tensor])
    assert torch.equal(tensor, before) and tensor._version == version


def test_it_works_inside_and_after_inference_mode(assert_rows: AssertRows) -> None:
    """Scratch memory that is first used in inference mode can be used outside."""
    for size in (300_000, 400_000):
        with torch.inference_mode():
            inside = torch.randn(size).bfloat16()
            assert_rows(summarize([inside]), [inside])
        outside = torch.randn(size).bfloat16()
        assert_rows(summarize([outside]), [outside])


@pytest.mark.parametrize("many", [1, 6])
def test_fake_tensors_have_fake_rows(many: int, assert_rows: AssertRows) -> None:
    """A monitored model may be traced without values; scratch memory must not become fake by that."""
    with FakeTensorMode():
        rows = summarize([torch.randn(9) for _ in range(many)])
    assert isinstance(rows, FakeTensor) and rows.shape == (many, len(STATISTICS))
    tensors = [torch.randn(9) for _ in range(many)]
    assert_rows(summarize(tensors), tensors)


@pytest.mark.parametrize("size", [50, 300_000])
def test_many_work_inside_and_after_inference_mode(size: int, assert_rows: AssertRows) -> None:
    """The same holds for tensors that are read together, with and without a graph."""
    for _ in range(2):
        with torch.inference_mode():
            inside = [torch.randn(size) for _ in range(5)]
            assert_rows(summarize(inside), inside)
        outside = [torch.randn(size, requires_grad=True).exp() for _ in range(5)]
        rows = summarize(outside)
        assert_rows(rows, outside)
        assert not rows.requires_grad


def test_several_threads_do_not_disturb_each_other(assert_rows: AssertRows) -> None:
    """Torch's own threads share a block, and the result is right."""
    torch.set_num_threads(2)
    try:
        tensor = torch.randn(700_000)
        assert_rows(summarize([tensor]), [tensor])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(2, dtype=torch.complex64), "view_as_real"),
        (torch.ones(2, device="meta"), "is on meta, but fine is on cpu"),
    ],
)
def test_tensors_without_statistics_are_refused_by_name(bad: Tensor, remedy: str) -> None:
    """The message names the tensor, says what is wrong and what would be right."""
    with pytest.raises(HooklineError, match="layer_3") as caught:
        summarize([torch.ones(2), bad], names=["fine", "layer_3"])
    assert remedy in str(caught.value)


def test_without_names_the_place_is_named() -> None:
    """A tensor without a name is called by its index."""
    with pytest.raises(HooklineError, match="tensor 1"):
        summarize([torch.ones(2), torch.ones(2, dtype=torch.complex64)])


def test_a_nan_shows_in_the_values_and_is_counted() -> None:
    """Every value is NaN, the counts are not."""
    row = dict(zip(STATISTICS, summarize([torch.tensor([math.nan, 0.0, 2.0])])[0].tolist(), strict=True))
    assert all(math.isnan(row[name]) for name in ("mean", "std", "min", "max", "absmax", "l2"))
    assert (row["count"], row["zeros"], row["nans"], row["infs"]) == (3, 1, 1, 0)
    assert STATISTICS.index("nans") == NANS


@pytest.mark.parametrize("size", [5, 40_000])
def test_values_that_are_not_in_their_memory(size: int, assert_rows: AssertRows) -> None:
    """A negated view and a subclass that wraps other tensors are measured like other tensors."""
    negated = torch.imag(torch.randn(size, dtype=torch.complex64).conj())
    assert negated.is_neg()
    assert_rows(summarize([negated, torch.ones(3)]), [negated.resolve_neg(), torch.ones(3)])
    inside = torch.randn(size) * 1e30  # whose squares overflow in float32
    for many in (1, 5, 20):
        assert_rows(summarize([TwoTensor(inside, inside)] * many), [inside] * many)


class Sharded(torch.Tensor):
    """A tensor that holds only a part of the values, as a DTensor does."""

    def to_local(self) -> torch.Tensor:
        """Return the part."""
        return self


def test_a_distributed_tensor_is_refused_with_the_remedy() -> None:
    """Its local values alone would pass for the whole."""
    with pytest.raises(HooklineError, match=r"weight: it is a DTensor; hookline\.stats\.distributed\.LocalTensors"):
        summarize([torch.ones(2).as_subclass(Sharded)], names=["weight"])


def test_the_first_bad_tensor_is_named() -> None:
    """Of several bad tensors the first is in the message."""
    with pytest.raises(HooklineError, match="no statistics of b"):
        summarize([torch.ones(1), torch.ones(1).cfloat(), torch.eye(2).to_sparse()], names=["a", "b", "c"])


# ---- columns and precision -------------------------------------------------------------------------------------------


def test_column_constants_are_the_positions_of_their_names() -> None:
    """COUNT, MEAN and the others are indices into `STATISTICS`."""
    places = [getattr(module, name.upper()) for name in STATISTICS]
    assert places == list(range(len(STATISTICS)))


def test_rows_are_float64_where_the_device_has_it() -> None:
    """MPS has no float64; everything else does."""
    assert row_dtype(torch.device("cpu")) is torch.float64
    assert row_dtype(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_that_float32_holds_are_computed_in_it(dtype: torch.dtype) -> None:
    """Narrow dtypes need no float64."""
    assert wide_dtype(dtype) is torch.float32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_dtypes_that_float32_does_not_hold_are_computed_in_float64(dtype: torch.dtype) -> None:
    """Wide integers keep their last digit."""
    assert wide_dtype(dtype) is torch.float64


def moderate(tensor: Tensor) -> bool:
    """Return whether no value is so large or so small that its square leaves the range of float32."""
    sizes = tensor.detach().double().abs()
    return not bool(((sizes > 1e15) & sizes.isfinite() | (sizes < 1e-15) & (sizes > 0)).any())


def test_torch_operations_for_devices_without_kernels(awkward_tensors: Tensors, assert_rows: AssertRows) -> None:
    """All kinds of tensors whose squares float32 can hold give the reference's rows in one call."""
    tensors = [tensor for tensor in awkward_tensors() if moderate(tensor)]
    with torch.no_grad():
        assert_rows(summarize_by_torch(tensors), tensors)


# ---- norms alone -----------------------------------------------------------------------------------------------------


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, computed without its other statistics."""
    return LocalTensors(tensors).norms()


def test_norms_of_every_awkward_tensor(awkward_tensors: Tensors) -> None:
    """Norms equal those of all statistics for tensors that overflow, underflow, are empty, strided or not finite."""
    tensors = awkward_tensors()
    torch.testing.assert_close(norms(tensors), summarize(tensors)[:, L2], rtol=1e-5, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 5000),
    many=st.integers(1, 70),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_norms_of_many_tensors_of_one_shape(size: int, many: int, scale: float, dtype: torch.dtype) -> None:
    """Tensors of one shape are squared together, some at a time, and none gets the norm of another."""
    generator = torch.Generator().manual_seed(size)
    tensors = [(torch.randn(size, generator=generator) * scale * (1 + index)).to(dtype) for index in range(many)]
    wanted = torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in tensors])
    torch.testing.assert_close(norms(tensors), wanted, rtol=1e-5, atol=0)


def test_norms_of_millions_of_elements_lose_no_digits() -> None:
    """A large tensor is read in blocks."""
    tensor = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) + 2
    assert norms([tensor]).item() == pytest.approx(torch.linalg.vector_norm(tensor.double()).item(), rel=1e-6)


def test_norms_write_nothing() -> None:
    """The tensors are unchanged, and so is an earlier result, although freed memory is used again."""
    tensors = [torch.full((8,), float(value)) for value in range(5)]
    first = norms(tensors)
    kept = first.clone()
    norms([torch.randn(8) for _ in range(5)])
    assert torch.equal(first, kept)
    assert all(torch.equal(tensor, torch.full((8,), float(value))) for value, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    "dtypes",
    [
        ["float8_e4m3fn", "float8_e5m2"],
        ["int8", "bool", "float16"],
        ["bfloat16"],
        ["int64", "float32"],
        ["float64", "float16"],
    ],
)
def test_norms_of_every_dtype(dtypes: list[str]) -> None:
    """A norm is rounded neither to the dtype of its tensor nor to that of another."""
    tensors = [(torch.randn(999) * 5).to(getattr(torch, dtypes[place % len(dtypes)])) for place in range(9)]
    expected = [tensor.double().square().sum().sqrt().item() for tensor in tensors]
    assert norms(tensors).tolist() == pytest.approx(expected, rel=1e-6)


def test_norms_of_memory_with_gaps() -> None:
    """Added up one by one, a large value first, float32 would lose three digits more."""
    column = torch.full((32768, 2), 0.7)[:, 0]
    column[0] = 4000.0
    assert norms([column, torch.ones(3)])[0].item() == pytest.approx(column.double().norm().item(), rel=1e-7)
