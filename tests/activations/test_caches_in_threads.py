"""Capturing from one model in several threads at once: each block has what its own thread ran, and stops only that."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import HookManager


def make_model() -> nn.Sequential:
    """Three modules that show which input they had."""
    return nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())


def number(value: int) -> Tensor:
    """An input that can be told from others."""
    return torch.full((1, 2), float(value))


def in_threads(work: Callable[[int], Any], count: int = 4) -> None:
    """Do something in several threads, and hand on what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


@pytest.mark.req("003-05")
def test_blocks_in_threads_have_what_their_own_thread_ran() -> None:
    """Every block overlaps with those of the other threads, and none has a state of theirs."""
    model, manager, together = make_model(), HookManager(), threading.Barrier(4, timeout=30)

    def work(own: int) -> None:
        for _ in range(20):
            with manager.capturing(model, "*") as cache:
                together.wait()
                model(number(own))
                together.wait()
                assert len(cache) == 3
            assert len(cache.states) == 3 and cache["2"][0, 0].item() == own

    in_threads(work)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pool_inside_a_block_is_captured() -> None:
    """Threads that capture nothing of their own work for whoever does."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "2") as cache:
        in_threads(lambda value: model(number(value)))
    assert sorted(state.outputs[0, 0].item() for state in cache.states) == [0, 1, 2, 3]


def test_a_block_inside_another_is_heard_by_both() -> None:
    """In one thread everything is its own."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "0") as outer:
        model(number(1))
        with manager.capturing(model, "0") as inner:
            model(number(2))
        with manager.capturing(model, "1"):
            model(number(3))
    assert (len(outer), len(inner)) == (3, 1)


def test_an_early_stop_stops_nobody_else() -> None:
    """Another thread that runs the model inside such a block gets its output."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "0", early_stop=True) as cache, ThreadPoolExecutor(1) as pool:
        assert pool.submit(model, number(5)).result(30).eq(5).all()
        assert cache.run(number(6)) is None
        assert pool.submit(model, number(7)).result(30).eq(7).all()


def test_a_model_that_is_called_past_the_cache_runs_to_its_end() -> None:
    """Only `cache.run` can leave it early, because it expects that."""
    model = make_model()
    with HookManager().capturing(model, "0", early_stop=True) as cache:
        assert model(number(1)).eq(1).all() and cache.run(number(2)) is None
    assert [state.outputs[0, 0].item() for state in cache.states] == [1, 2]
