"""The engine places, runs backward, scales and steps; here on the CPU."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from hookline.errors import TrainingError
from hookline.trainer.engine import Engine, find_device


def model_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """One weight of one."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_devices() -> None:
    """A name, a device, or nothing, which means the best there is."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")
    assert find_device(None).type == best
    with pytest.raises(TrainingError, match="'gpu' is not a device"):
        find_device("gpu")


def test_a_batch_is_moved_as_a_whole() -> None:
    """Tensors in any nest go to the device, other things stay, and types are kept."""
    Pair = namedtuple("Pair", "x y")
    engine = Engine(torch.device("meta"))
    tensor = torch.ones(2)
    batch: Any = {"a": tensor, "b": [tensor, "text"], "c": (tensor, 3), "d": Pair(tensor, None)}
    moved = engine.place(batch)
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["c"][0].is_meta and moved["d"].x.is_meta
    assert (moved["b"][1], moved["c"][1], moved["d"].y) == ("text", 3, None)
    assert isinstance(moved["d"], Pair) and isinstance(moved["b"], list)
    assert not tensor.is_meta


def test_a_model_is_moved_only_if_it_must_be() -> None:
    """A model that is in place already is not touched; another one goes where it trains."""
    model = torch.nn.Linear(2, 2)
    assert Engine(torch.device("cpu")).prepare(model) is model
    assert next(Engine(torch.device("meta")).prepare(model).parameters()).is_meta


def test_full_precision_has_no_scaler() -> None:
    """Backward and step are the plain ones."""
    model, optimizer = model_and_optimizer()
    engine = Engine(torch.device("cpu"))
    assert engine.scaler is None
    engine.backward(model(torch.ones(1, 1)).sum())
    engine.unscale([optimizer])
    assert engine.step(optimizer, None)
    engine.end_step()
    assert model.weight.item() == 0.0


def test_bf16_runs_the_forward_in_bf16() -> None:
    """Autocast is on inside the block only."""
    model, _ = model_and_optimizer()
    engine = Engine(torch.device("cpu"), "bf16")
    with engine.autocast():
        assert model(torch.ones(1, 1)).dtype is torch.bfloat16
    assert model(torch.ones(1, 1)).dtype is torch.float32
    assert engine.scaler is None


def test_fp16_scales_unscales_and_says_when_it_skipped() -> None:
    """A finite gradient is stepped with its true value; a non-finite one is skipped and lowers the scale."""
    model, optimizer = model_and_optimizer()
    engine = Engine(torch.device("cpu"), "fp16")
    assert engine.scaler is not None
    engine.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad is not None and model.weight.grad.item() > 1000
    engine.unscale([optimizer])
    assert model.weight.grad.item() == 1.0
    assert engine.step(optimizer, None)
    engine.end_step()
    scale = engine.scaler.get_scale()
    model.weight.grad = torch.full((1, 1), float("inf"))
    engine.unscale([optimizer])
    assert not engine.step(optimizer, None)
    engine.end_step()
    assert engine.scaler.get_scale() < scale
    assert model.weight.item() == 0.0


@pytest.mark.req("004-32")
def test_a_custom_step() -> None:
    """A custom optimizer step takes the place of the optimizer's; with a GradScaler, which owns it, that is refused."""
    _, optimizer = model_and_optimizer()
    stepped: list[Any] = []
    assert Engine(torch.device("cpu")).step(optimizer, stepped.append)
    assert stepped == [optimizer]
    with pytest.raises(TrainingError, match="optimizer_step cannot be combined with precision='fp16'"):
        Engine(torch.device("cpu"), "fp16").step(optimizer, stepped.append)
