"""Test that no update hook but the guards reads a number from the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HOOKS: list[dict[str, Any]] = [
    {"name": "clip_norm", "max_norm": 0.5},
    {"name": "clip_norm", "max_norm": 0.5, "norm_type": 1.0},
    {"name": "clip_value", "max_value": 0.01},
    {"name": "clip_adaptive"},
    {"name": "scale", "factor": 0.5, "params": "matrix"},
    {"name": "freeze", "params": "vector"},
    {"name": "mask", "masks": {"matrix": torch.tensor([[1, 0, 1]])}},
    {"name": "noise", "seed": 1},
    {"name": "centralize"},
    {"name": "normalize"},
    {"name": "normalize", "by": "parameter"},
    {"name": "sign"},
    {"name": "grokfast"},
    {"name": "spike_guard", "warmup": 1, "action": "clip"},
    {"name": "measure"},
    {"name": "link_norms"},
]
NAMED = {"ids": [f"{hook['name']}{place}" for place, hook in enumerate(HOOKS)]}
GUARDS = [{"name": "skip_nonfinite"}, {"name": "spike_guard", "warmup": 1}]


class SingleNumbers(TorchDispatchMode):
    """Count the operations that read one number on the host, or need one there."""

    waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


class WholeTensors(TorchFunctionMode):
    """Count the calls that copy whole tensors to the host, which on the CPU are not operations."""

    waits = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self.waits += args[0].dtype is not torch.uint8  # the states of random streams live on the host
        return function(*args, **(kwargs or {}))


def waits_of(rig: Any, params: Callable[..., Any], *entries: Any) -> int:
    """Return how often the host would wait in three steps."""
    chain = rig(params())
    for hook in entries:
        chain.registry.register(hook, event="update") if callable(hook) else chain.registry.load({"update": [hook]})
    with SingleNumbers() as numbers, WholeTensors() as tensors:
        for seed in range(3):
            chain.step({name: param.grad for name, param in params(seed=seed).items() if param.grad is not None})
    return numbers.waits + tensors.waits


WAYS: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.item, bool, float, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.nonzero,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_waiting_is_counted(rig: Any, params: Callable[..., Any], way: Callable[..., Any]) -> None:
    """Otherwise the tests below could not fail."""

    def waits(grads: Any) -> Any:
        way(grads["scalar"])
        return grads

    waits.check_finite = False
    assert waits_of(rig, params, waits) == 3


@pytest.mark.parametrize("hook", HOOKS, **NAMED)
def test_a_hook_never_waits(rig: Any, params: Callable[..., Any], hook: dict[str, Any]) -> None:
    """A hook waits neither alone nor after another one."""
    assert waits_of(rig, params, hook) == 0
    assert waits_of(rig, params, {"name": "clip_norm", "as": "first", "max_norm": 1.0}, hook) == 0


@pytest.mark.parametrize("hook", GUARDS, ids=["skip_nonfinite", "spike_guard"])
def test_a_guard_waits_once_a_step(rig: Any, params: Callable[..., Any], hook: dict[str, Any]) -> None:
    """This also shows that waits are counted."""
    assert waits_of(rig, params, hook) == (3 if hook["name"] == "skip_nonfinite" else 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hook", HOOKS, **NAMED)
def test_on_a_device_nothing_waits(rig: Any, params: Callable[..., Any], hook: dict[str, Any]) -> None:
    """torch raises if something waits, once everything is compiled."""
    cuda = {name: torch.nn.Parameter(param.detach().cuda()) for name, param in params().items()}
    grads = {name: param.grad.cuda() for name, param in params().items() if param.grad is not None}
    chain = rig(cuda, {"name": "clip_norm", "as": "first", "max_norm": 1.0}, hook)
    for _ in range(2):
        chain.step(grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chain.step(grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
