"""Until something is compiled a compiler is only there, and what must be gone before a trace goes in time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.callback import callback_handler

from hookline import HookManager
from hookline.activations import first_compile
from hookline.activations.capture import Capture
from hookline.activations.compiled import as_plain_python
from hookline.activations.direct import PLACE, is_open
from hookline.activations.monitor import Monitor

INPUT = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has imported a compiler and not used it."""
    torch._dynamo.reset()
    monkeypatch.setattr(first_compile, "_begun", False)
    monkeypatch.setattr(convert_frame.input_codes, "seen", [])
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    yield
    torch._dynamo.reset()


def make_model() -> nn.Sequential:
    """Three modules."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def direct_calls(model: nn.Module) -> int:
    """How many modules are called directly."""
    return sum(module.__dict__.get(PLACE) is not None for module in model.modules())


def watched(model: nn.Module, hook: Any) -> HookManager:
    """A manager whose hook has heard one pass."""
    manager = HookManager()
    manager.watch(model)
    manager.register(hook, "it")
    model(INPUT)
    return manager


def test_the_direct_way_is_open_until_the_first_frame_is_traced() -> None:
    """Which sees a model that torch calls; from then on the way is closed."""
    model, seen = make_model(), []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(direct_calls(model))
        return graph.forward

    manager = watched(model, Capture("?"))
    assert is_open() and direct_calls(model) == 3
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    outputs = [compiled(INPUT) for _ in range(2)]
    assert seen == [0] and torch.equal(outputs[0], model(INPUT))
    assert [state.name for state in manager.get_captured_states("it")] == ["0", "1", "2"] * 4
    manager.tap.sync()
    assert not is_open() and direct_calls(model) == 0


def test_a_module_that_is_compiled_by_itself_gets_no_graphs_of_our_own_code() -> None:
    """Its first call still comes through the direct way, which calls the hook."""
    graphs, model = [], make_model()
    manager = watched(model, Monitor("?", ["mean"]))
    model[0] = torch.compile(model[0], backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(3):
        model(INPUT)
    code = "\n".join(graph.code for graph in graphs)
    assert 1 <= len(graphs) <= 2 and "linear" in code and "mean" not in code
    assert [row.fired for row in manager.fire_report().rows] == [4, 4, 4]


def test_what_was_compiled_before_anybody_asked_counts() -> None:
    """Nobody was told of it."""
    torch.compile(lambda x: x + 1, backend="eager")(INPUT)
    assert first_compile.has_begun() and not is_open()
    with as_plain_python():
        assert is_open()


def test_who_listens_is_called_once_and_listens_again_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo forgets its listeners when it is reset."""
    told: list[int] = []
    monkeypatch.setattr(first_compile, "_before", [lambda: told.append(1)])
    assert not first_compile.has_begun()
    torch._dynamo.reset()
    assert not first_compile.has_begun()
    for plus in (1, 2):
        torch.compile(lambda x, plus=plus: x + plus, backend="eager")(INPUT)
    assert told == [1] and first_compile.has_begun()
