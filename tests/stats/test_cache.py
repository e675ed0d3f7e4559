"""Tensors that were read last are not read again, unless they were written to since."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hookline import HooklineError
from hookline.stats import cache, summarize
from hookline.stats.cache import TensorVersions, cache_norms, cache_rows, cached_norms, cached_rows, summarize_cached


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return how many tensors were read each time, with an empty cache."""
    cache_rows(TensorVersions([]), torch.empty(0, 10))
    counted: list[int] = []

    def count(tensors: list[Tensor], names: object = None) -> Tensor:
        counted.append(len(tensors))
        return summarize(tensors, names)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "summarize", count)
    yield counted


def test_the_same_tensors_are_read_once(reads: list[int]) -> None:
    """A second call for all of them, or for some in another order, reads nothing."""
    tensors = [torch.randn(5), torch.randn(4, 6), torch.randn(7)]
    first = summarize_cached(tensors)
    assert torch.equal(first, summarize(tensors))
    assert torch.equal(summarize_cached(tensors), first)
    assert torch.equal(summarize_cached([tensors[2], tensors[0]]), first[[2, 0]])
    assert reads == [3]


def test_a_tensor_that_is_listed_twice_is_read_once(reads: list[int]) -> None:
    """A module that returns its input has the same output as the one before it: both get its row."""
    a, b = torch.randn(5), torch.randn(6)
    assert torch.equal(summarize_cached([a, b, a, b, a]), summarize([a, b])[[0, 1, 0, 1, 0]])
    assert reads == [2]


def test_a_tensor_that_was_written_to_is_read_again(reads: list[int]) -> None:
    """One write in place, and the rows are new; the same numbers in another tensor are another tensor."""
    tensor = torch.randn(5)
    before = summarize_cached([tensor])
    tensor.add_(1)
    assert torch.equal(summarize_cached([tensor]), summarize([tensor]))
    assert not torch.equal(summarize_cached([tensor]), before)
    summarize_cached([tensor.clone()])
    assert reads == [1, 1, 1]


def test_a_new_tensor_at_an_old_address_is_read(reads: list[int]) -> None:
    """Nothing is kept alive, so ids come back; a new tensor is not confused with an old one."""
    for value in range(50):
        assert summarize_cached([torch.full((3,), float(value))])[0, 1].item() == value
    assert len(reads) == 50


def test_inference_tensors_are_always_read(reads: list[int]) -> None:
    """They have no version, so writes to them could not be noticed."""
    with torch.inference_mode():
        tensor = torch.randn(5)
        summarize_cached([tensor, tensor])
        tensor.add_(1)
        assert torch.equal(summarize_cached([tensor]), summarize([tensor]))
    assert reads == [1, 1]
    assert cached_rows([tensor]) is None


def test_an_error_names_the_right_tensor() -> None:
    """Names stay with their tensors if some are listed twice."""
    fine, complex_one = torch.randn(3), torch.randn(3, dtype=torch.complex64)
    with pytest.raises(HooklineError, match="no statistics of third"):
        summarize_cached([fine, fine, complex_one], ["first", "second", "third"])


def test_a_snapshot_matches_until_a_tensor_is_written_to() -> None:
    """It matches the same tensors in the same order, not copies of them and not one that was written to."""
    tensors = [torch.randn(5), torch.randn(6)]
    snapshot = TensorVersions(tensors)
    assert (
        snapshot.matches(tensors)
        and not snapshot.matches(tensors[::-1])
        and not snapshot.matches([one.clone() for one in tensors])
    )
    tensors[1].zero_()
    assert not snapshot.matches(tensors)
    with torch.inference_mode():
        assert not TensorVersions(one := [torch.randn(5)]).matches(one)


def test_norms_come_from_what_was_cached_last() -> None:
    """Norms alone and all statistics replace each other; a write that raises no version happens in between."""
    tensors = [torch.ones(4)]
    cache_norms(TensorVersions(tensors), torch.tensor([2.0]))
    assert cached_norms(tensors) is not None and cached_rows(tensors) is None
    tensors[0].data.mul_(5)
    cache_rows(TensorVersions(tensors), summarize(tensors))
    found = cached_norms(tensors)
    assert found is not None and found.tolist() == [10.0]
    tensors[0].mul_(2)
    assert cached_norms(tensors) is None
