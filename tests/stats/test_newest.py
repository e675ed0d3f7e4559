"""What was read a moment ago is not read again, and what has changed since is."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.stats import newest
from hookline.stats.newest import Known, recall, recall_norms, remember, remember_norms, summarize_once
from hookline.stats.statistics import summarize


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors were read each time; what earlier tests read is forgotten."""
    remember(Known([]), torch.empty(0, 10))
    counted: list[int] = []

    def count(tensors: list[Tensor], names: object = None) -> Tensor:
        counted.append(len(tensors))
        return summarize(tensors, names)  # type: ignore[arg-type]

    monkeypatch.setattr(newest, "summarize", count)
    yield counted


def test_the_same_tensors_are_read_once(reads: list[int]) -> None:
    """For the second who asks, for one who asks for some of them, and in another order."""
    tensors = [torch.randn(5), torch.randn(4, 6), torch.randn(7)]
    first = summarize_once(tensors)
    assert torch.equal(first, summarize(tensors))
    assert torch.equal(summarize_once(tensors), first)
    assert torch.equal(summarize_once([tensors[2], tensors[0]]), first[[2, 0]])
    assert reads == [3]


def test_a_tensor_that_stands_there_twice_is_read_once(reads: list[int]) -> None:
    """A module that only passes on what another gave has the same output: both get its row."""
    a, b = torch.randn(5), torch.randn(6)
    assert torch.equal(summarize_once([a, b, a, b, a]), summarize([a, b, a, b, a]))
    assert reads == [2]


def test_what_was_written_to_is_read_again(reads: list[int]) -> None:
    """One write in place, and the rows are new; the same numbers in another tensor are another tensor."""
    tensor = torch.randn(5)
    before = summarize_once([tensor])
    tensor.add_(1)
    assert torch.equal(summarize_once([tensor]), summarize([tensor]))
    assert not torch.equal(summarize_once([tensor]), before)
    summarize_once([tensor.clone()])
    assert reads == [1, 1, 1]


def test_a_new_tensor_at_an_old_address_is_read(reads: list[int]) -> None:
    """Nothing is kept alive, so ids come back; they are not taken for the tensors that had them."""
    for value in range(50):
        assert summarize_once([torch.full((3,), float(value))])[0, 1].item() == value
    assert len(reads) == 50


def test_inference_tensors_are_always_read(reads: list[int]) -> None:
    """They have no version: that one was written to could not be seen."""
    with torch.inference_mode():
        tensor = torch.randn(5)
        summarize_once([tensor, tensor])
        tensor.add_(1)
        assert torch.equal(summarize_once([tensor]), summarize([tensor]))
    assert reads == [1, 1]
    assert recall([tensor]) is None


def test_a_problem_is_told_by_its_own_name() -> None:
    """The names stay with their tensors where some stand twice."""
    fine, complex_one = torch.randn(3), torch.randn(3, dtype=torch.complex64)
    with pytest.raises(HooklineError, match="no statistics of third"):
        summarize_once([fine, fine, complex_one], ["first", "second", "third"])


def test_tensors_are_known_again_until_somebody_writes() -> None:
    """The very same ones, in their order; not others with the same numbers, and not one that was written to."""
    tensors = [torch.randn(5), torch.randn(6)]
    known = Known(tensors)
    assert known.are(tensors) and not known.are(tensors[::-1]) and not known.are([one.clone() for one in tensors])
    tensors[1].zero_()
    assert not known.are(tensors)
    with torch.inference_mode():
        assert not Known(one := [torch.randn(5)]).are(one)


def test_norms_are_known_by_what_was_read_last() -> None:
    """Of norms alone and of all statistics, whichever came later; a write that no version counts lies between."""
    tensors = [torch.ones(4)]
    remember_norms(Known(tensors), torch.tensor([2.0]))
    assert recall_norms(tensors) is not None and recall(tensors) is None
    tensors[0].data.mul_(5)
    remember(Known(tensors), summarize(tensors))
    found = recall_norms(tensors)
    assert found is not None and found.tolist() == [10.0]
    tensors[0].mul_(2)
    assert recall_norms(tensors) is None
