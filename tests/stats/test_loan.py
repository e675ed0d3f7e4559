"""Tensors on loan: known in the thread that lends, and only while it does."""

import threading

import pytest
import torch

from hookline.stats.collector import Collector
from hookline.stats.columns import STATISTICS
from hookline.stats.loan import lending, on_loan


def test_only_inside_the_block_which_nests() -> None:
    """Also when the block fails."""
    assert not on_loan()
    with pytest.raises(ValueError), lending():
        with lending():
            assert on_loan()
        assert on_loan()
        raise ValueError
    assert not on_loan()


def test_another_thread_lends_nothing() -> None:
    """Each thread has its own."""
    seen: list[bool] = []
    with lending():
        thread = threading.Thread(target=lambda: seen.append(on_loan()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_statistics_of_a_tensor_on_loan_are_of_what_was_shown() -> None:
    """Its owner may write into it afterwards without a version that would tell."""
    collector, tensor = Collector(), torch.ones(4)
    with lending():
        collector.add("on loan", tensor)
    tensor.data.fill_(7.0)
    keys, rows = collector.finish()
    assert keys == ["on loan"] and rows[0][STATISTICS.index("mean")] == 1.0
