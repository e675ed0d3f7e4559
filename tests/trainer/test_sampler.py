"""The order of a counter-based sampler is a function of seed, epoch and place, and looks shuffled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hookline import ResumableSampler
from hookline.errors import TrainingError


def order_of(size: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the indices of an epoch."""
    sampler = ResumableSampler(range(size), seed=seed)
    sampler.epoch = epoch
    return torch.tensor(list(sampler))


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_every_index_comes_once(size: int, seed: int, epoch: int) -> None:
    """Whatever the size, the seed and the epoch, it is a permutation."""
    assert sorted(order_of(size, seed, epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("start", [0, 1, 37, 4095, 4096, 4097, 9999])
def test_it_starts_anywhere(start: int) -> None:
    """The rest of an epoch is what it would have been."""
    whole = list(ResumableSampler(range(10_000), seed=3))
    entered = ResumableSampler(range(10_000), seed=3)
    entered.start_at(start)
    assert list(entered) == whole[start:]
    assert list(entered) == order_of(10_000, 3, 1).tolist()


def test_epochs_and_seeds_differ() -> None:
    """Another epoch or another seed is another order; the same ones are the same."""
    orders = [tuple(order_of(100, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert orders[7] == tuple(order_of(100, 1, 2).tolist())


def test_it_looks_shuffled() -> None:
    """Every index is about equally often in every place, and neighbours are as far apart as chance has them."""
    size, epochs = 16, 2000
    counts = torch.zeros(size, size)
    for epoch in range(epochs):
        counts[torch.arange(size), order_of(size, 1, epoch)] += 1
    expected = epochs / size
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 6 * (2 * freedom) ** 0.5
    order = order_of(100_000, 1, 0).double()
    assert abs(float(torch.corrcoef(torch.stack([order[:-1], order[1:]]))[0, 1])) < 0.02
    assert abs(float(order.diff().abs().mean()) / 100_000 - 1 / 3) < 0.01


def test_it_draws_from_no_stream() -> None:
    """Iterating leaves torch's random state where it was."""
    before = torch.get_rng_state()
    list(ResumableSampler(range(500)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_huge_dataset_costs_nothing() -> None:
    """The first indices of a trillion come at once."""
    first = [index for index, _ in zip(ResumableSampler(range(10**12)), range(5), strict=False)]
    assert len(set(first)) == 5 and all(0 <= index < 10**12 for index in first)


def test_without_shuffling() -> None:
    """In order, and still entered anywhere."""
    sampler = ResumableSampler(range(5), shuffle=False)
    sampler.start_at(2)
    assert list(sampler) == [2, 3, 4]
    assert len(sampler) == 5


def test_its_state_is_the_next_epoch() -> None:
    """Put back, the same epoch comes again; with another dataset or seed it is refused."""
    sampler = ResumableSampler(range(50), seed=2)
    first = list(sampler)
    state = sampler.state_dict()
    second = list(sampler)
    sampler.load_state_dict(state)
    assert list(sampler) == second != first
    with pytest.raises(TrainingError, match="the size was 50 and is 51"):
        ResumableSampler(range(51), seed=2).load_state_dict(state)
    with pytest.raises(TrainingError, match="the seed was 2 and is 3"):
        ResumableSampler(range(50), seed=3).load_state_dict(state)
    with pytest.raises(TrainingError, match="the dataset is empty"):
        ResumableSampler([])


def test_in_a_loader() -> None:
    """It is a sampler like any other."""
    loader = DataLoader(range(10), batch_size=4, sampler=ResumableSampler(range(10), seed=1))  # type: ignore[arg-type]
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(10))
