"""Memory that is kept can be written to in every mode, and is each thread's own."""

from threading import Thread

import torch

from hookline.stats.scratch import TOGETHER, scratch


def test_it_is_kept_and_grows() -> None:
    """The same memory for the same wish, more for a larger one, and another dtype has its own."""
    first = scratch.blocks(torch.float64)
    assert first.shape[1] >= TOGETHER and scratch.blocks(torch.float64, 5) is first
    larger = scratch.blocks(torch.float64, first.shape[1] + 1)
    assert larger.shape == (2, first.shape[1] + 1) and scratch.blocks(torch.float64) is larger
    assert scratch.blocks(torch.float32).dtype is torch.float32


def test_what_inference_mode_asked_for_can_be_written_to_outside() -> None:
    """It is no inference tensor."""
    with torch.inference_mode():
        asked = scratch.blocks(torch.float64, scratch.blocks(torch.float64).shape[1] + 1)
    asked.zero_()
    assert not asked.is_inference()


def test_no_thread_gets_another_ones() -> None:
    """Or they would write over each other's numbers."""
    others: list[int] = []
    thread = Thread(target=lambda: others.extend((scratch.blocks(torch.float32).data_ptr(), id(scratch.mask))))
    mine = [scratch.blocks(torch.float32).data_ptr(), id(scratch.mask)]
    thread.start()
    thread.join()
    assert not set(mine) & set(others)
