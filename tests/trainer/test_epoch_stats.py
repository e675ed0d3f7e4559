"""The losses of an epoch are added up where they are and read only when asked for."""

import math

import pytest
import torch

from hookline.trainer.epoch_stats import EpochStats


def test_the_mean_is_that_of_all_losses() -> None:
    """Folding now and then changes nothing about the mean."""
    stats = EpochStats()
    values = [float(value) for value in range(1000)]
    for index, value in enumerate(values):
        stats.recent.append(torch.tensor(value))
        if index % 300 == 0:
            stats.fold()
    assert stats.mean_loss() == pytest.approx(sum(values) / len(values))


def test_no_bit_tells_when_losses_were_folded() -> None:
    """On the host, the mean has the same bits whether losses were added to the sums often, once or at the end."""
    values = torch.rand(257, generator=torch.Generator().manual_seed(0)).unbind()
    means = []
    for often in (1, 10, 50, 1000):
        stats = EpochStats()
        for index, value in enumerate(values):
            stats.recent.append(value)
            if index % often == 0:
                stats.fold()
        means.append(stats.mean_loss())
    assert len(set(means)) == 1


def test_the_sums_resume_in_another_process() -> None:
    """Saved in the middle of an epoch and put back, mean and bad losses are those of the whole epoch."""
    stats, again = EpochStats(), EpochStats()
    stats.recent += [torch.tensor(0.1), torch.tensor(float("inf")), torch.tensor(0.3)]
    again.load_state_dict(stats.state_dict())
    for one in (stats, again):
        one.recent.append(torch.tensor(0.7))
    assert again.state_dict() == stats.state_dict()
    assert again.mean_loss() == stats.mean_loss() and again.take_non_finite() == 1


def test_nothing_yet_is_nan() -> None:
    """Before the first batch the mean is nan, not an error and not zero."""
    assert math.isnan(EpochStats().mean_loss())


def test_non_finite_losses_are_counted_once() -> None:
    """NaN and infinities are counted once."""
    stats = EpochStats()
    stats.recent.extend(map(torch.tensor, [1.0, math.nan, math.inf, -math.inf]))
    assert stats.take_non_finite() == 3
    assert stats.take_non_finite() == 0
    stats.recent.append(torch.tensor(math.nan))
    assert stats.take_non_finite() == 1


def test_small_losses_are_added_in_double_precision() -> None:
    """A long epoch of half-precision losses keeps its mean."""
    stats = EpochStats()
    stats.recent.extend([torch.tensor(0.1, dtype=torch.bfloat16)] * 5000)
    assert stats.mean_loss() == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)))


def test_numbers_of_any_kind_are_averaged() -> None:
    """Over those that came, folded or not."""
    means = EpochStats()
    for value in (torch.tensor(1.0), 2, torch.tensor([3]), True):
        means.add("train/acc", value)
        means.fold()
    means.add("train/a/loss", torch.tensor(0.5, dtype=torch.bfloat16))
    assert means.means() == {"train/epoch_acc": 1.75, "train/a/epoch_loss": 0.5}


def test_on_a_device_they_are_added_there() -> None:
    """A device without memory stands for one: to read it would be an error."""
    means = EpochStats()
    for _ in range(2):
        means.add("train/acc", torch.ones((), device="meta"))
    means.fold()
    with pytest.raises(RuntimeError):
        means.means()


def test_latest_values_after_a_step() -> None:
    """Older ones are left out."""
    means = EpochStats()
    means.set_latest(1, "a", torch.tensor(1.0))
    means.set_latest(2, "a", torch.tensor(2.0))
    means.set_latest(1, "b", 3)
    assert (means.latest(-1), means.latest(1), means.latest(2)) == ({"a": 2.0, "b": 3.0}, {"a": 2.0}, {})


def test_latest_values_survive_the_end_of_an_epoch() -> None:
    """Means start again; without a step, only values of this epoch are returned."""
    means = EpochStats()
    means.add("train/a/loss", 1.0)
    means.set_latest(7, "train/a/loss", 1.0)
    following = EpochStats()
    following.load_state_dict(means.next_epoch(7).state_dict())
    assert following.means() == following.latest() == {} and following.latest(6) == {"train/a/loss": 1.0}


def test_metrics_are_saved_with_the_losses() -> None:
    """One of an earlier version knows nothing of them."""
    stats, again = EpochStats(), EpochStats()
    stats.add("train/acc", 0.25)
    stats.set_latest(4, "train/acc", 0.25)
    again.load_state_dict(stats.state_dict())
    again.add("train/acc", 0.75)
    assert again.means() == {"train/epoch_acc": 0.5} and again.latest(3) == {"train/acc": 0.25}
    again.load_state_dict({"count": 0, "sum": 0.0, "bad": 0})
    assert again.means() == again.latest(-1) == {}
