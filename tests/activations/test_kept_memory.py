"""What captures keep alive: no more than they show, nothing that is still under way, and no model."""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import HookManager
from hookline.errors import ConfigError, HooklineError

BATCH = torch.arange(2 * 64 * 8.0).reshape(2, 64, 8)


def make_model() -> nn.Sequential:
    """Two modules, the second without parameters."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def test_a_manager_counts_a_slice_as_large_as_it_is() -> None:
    """Fifty last tokens fit where fifty whole outputs would not: the rest of each output is let go."""
    model, size = make_model(), 2 * 8 * 4
    manager = HookManager(memory_limit_mb=50 * size / 2**20)
    manager.register_capture_hook(model[1], "last", capture_input=False, reduce="last_token")
    outputs = [model(BATCH + number) for number in range(50)]
    states = manager.get_captured_states("last")
    assert len(states) == 50 and manager.captures.bytes == 50 * size
    assert all(torch.equal(state.outputs, output[:, -1]) for state, output in zip(states, outputs, strict=True))


@pytest.mark.parametrize("reduce", ["first", "last_token", lambda tensor: tensor[..., :2]])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("more", [{}, {"clone": True}, {"device": "cpu"}, {"dtype": "float32"}])
def test_a_slice_has_memory_of_its_own(
    reduce: str | Callable[[Tensor], Tensor], mode: Callable[[], Any], more: dict[str, Any]
) -> None:
    """However the model runs and whatever else is asked for."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "part", reduce=reduce, **more)
    with mode():
        model(BATCH)
    (state,) = manager.get_captured_states("part")
    for tensor in state.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes > 0


class Pretends(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class Event:
    """Something that one waits for."""

    waited = 0

    def synchronize(self) -> None:
        """Count."""
        self.waited += 1


def test_a_module_without_parameters_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device a copy comes from is told by the tensors: a ReLU has no parameters to ask."""
    event = Event()
    stream = type("Stream", (), {"record_event": lambda self: event})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    module, manager = nn.ReLU(), HookManager()
    manager.register_capture_hook(module, "relu", device="cpu")
    module(BATCH.as_subclass(Pretends))
    (state,) = manager.get_captured_states("relu")
    assert event.waited == 0
    assert torch.equal(state.outputs.as_subclass(Tensor), BATCH.relu()) and event.waited > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_is_true_before_the_device_has_caught_up() -> None:
    """Reading it waits for the copy, also of a module without parameters."""
    module, manager = nn.ReLU(), HookManager()
    manager.register_capture_hook(module, "relu", device="cpu", capture_input=False)
    batch = torch.ones(1000, 1000, device="cuda")
    torch.cuda._sleep(100_000_000)
    module(batch)
    (state,) = manager.get_captured_states("relu")
    assert state.outputs.eq(1).all()


def test_a_cache_keeps_no_model() -> None:
    """It outlives its block and the model; it can be read, but there is nothing left to run."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "*") as cache:
        expected = model(BATCH)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(cache["1"], expected)
    with pytest.raises(HooklineError, match="no longer exists"):
        cache.run(BATCH)


def test_a_state_beyond_the_budget_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be kept of such a module, which would look like a hook that never fired."""
    model, manager = make_model(), HookManager(memory_limit_mb=2**-9)
    manager.register_capture_hook(model[1], "all")
    with caplog.at_level(logging.WARNING, "hookline"):
        model(BATCH)
        model(BATCH)
    assert manager.get_captured_states("all") == [] and manager.captures.dropped == 2
    (record,) = caplog.records
    assert "'all' keeps nothing of 'all'" in record.message and "memory_limit_mb is 0.00195" in record.message


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("max_captured_states", -1),
        ("max_captured_states", 2.5),
        ("memory_limit_mb", -0.5),
        ("memory_limit_mb", "512"),
        ("max_age_seconds", -1),
    ],
)
def test_a_limit_that_means_nothing_is_refused(option: str, given: Any) -> None:
    """When the manager is made, not when it captures."""
    with pytest.raises(ConfigError, match=f"{option}: {given!r} is no limit"):
        HookManager(**{option: given})


@pytest.mark.parametrize("given", [None, 0, -1, 1.5, True, "4"])
def test_an_interval_is_a_number_of_calls(given: Any) -> None:
    """Other than a limit, which None takes away."""
    with pytest.raises(ConfigError, match=f"cleanup_interval: expected a whole number .* got {given!r}"):
        HookManager(cleanup_interval=given)


def test_options_of_a_capture_are_checked_when_it_is_registered() -> None:
    """A limit or a device that cannot be is no matter of the first forward pass."""
    model, manager = make_model(), HookManager()
    with pytest.raises(ConfigError, match="max_captured_states: -1 is no limit"):
        manager.register_capture_hook(model, "a", max_captured_states=-1)
    with pytest.raises(ConfigError, match="device: 'cudda' is no device"):
        manager.register_capture_hook(model, "a", device="cudda")


@pytest.mark.parametrize("make", [Tensor.to_sparse, lambda tensor: tensor.to(torch.complex128)])
def test_what_cannot_be_written_is_named(make: Callable[[Tensor], Tensor], tmp_path: Any) -> None:
    """With its module, its call and what to do about it."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make(x)

    model = nn.Sequential(Odd())
    with HookManager().capturing(model, "0") as cache:
        model(BATCH)
    with pytest.raises(HooklineError, match=r"cannot hold 0/1/outputs/0 .*reduce="):
        cache.save(tmp_path / "odd.safetensors")
