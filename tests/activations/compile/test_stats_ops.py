"""Which outputs a graph computes statistics of; that it does is tested in test_compiled_stats."""

import gc
from typing import Any

import torch
from torch import nn

from hookline.activations.compile import stats_ops
from hookline.activations.compile.stats_ops import REFUSED, add_statistics, forget_key, new_key
from hookline.activations.hooked_modules import ForwardTorchHook, HookedModule
from hookline.core.dispatch import EventSlots


class Refusing:
    """An owner of rows that counts requests and refuses all of them."""

    graph_id = due_flag = torch.empty(0)
    requests = 0

    def admit(self, device: torch.device) -> str:
        self.requests += 1
        return REFUSED

    def is_whole_model(self) -> bool:
        return False

    def begin(self, due_flag: torch.Tensor) -> None: ...


def make_hook() -> ForwardTorchHook:
    """The torch hook of some module."""
    return HookedModule("it", nn.ReLU(), EventSlots()).torch_hook


def test_without_an_owner_nothing_is_computed() -> None:
    """The graph calls the hooks instead, also once the owner is closed."""
    owner = Refusing()
    key = new_key(owner)  # type: ignore[arg-type]
    assert not add_statistics(make_hook(), "in a test", torch.ones(2)) and not owner.requests
    assert not add_statistics(make_hook(), key, torch.ones(2)) and owner.requests == 1
    forget_key(key)
    assert not add_statistics(make_hook(), key, torch.ones(2)) and owner.requests == 1


def test_what_no_kernel_can_read_is_not_requested() -> None:
    """Integers, eight-bit floats and outputs without tensors."""
    owner = Refusing()
    key = new_key(owner)  # type: ignore[arg-type]
    outputs: list[Any] = [
        torch.ones(2).long(),
        torch.ones(2).to(torch.float8_e4m3fn),
        None,
        (torch.tensor([1]), "text"),
    ]
    for output in outputs:
        assert not add_statistics(make_hook(), key, output)
    assert not owner.requests


def test_keys_are_unique_and_keep_nothing_alive() -> None:
    """A graph that was made for a module that is gone must not serve another."""
    hook = make_hook()
    key = new_key(hook)
    assert stats_ops._targets[key] is hook and new_key(hook) != key
    forget_key(key)
    assert key not in stats_ops._targets
    key = new_key(hook)
    del hook
    gc.collect()
    assert key not in stats_ops._targets
