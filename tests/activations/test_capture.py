"""The capture hook keeps the inputs and outputs of modules as they were at the call."""

from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched_models import watch

from hookline import HooklineError, HookManager
from hookline.activations.capture import Capture
from hookline.core.schedule import Reading
from hookline.errors import ConfigError

INPUT = torch.arange(8.0).reshape(2, 4)


def make_model() -> nn.Sequential:
    """Two layers with an in-place activation between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def captured(model: nn.Module, hook: Capture, *calls: Any) -> HookManager:
    """A manager with a capture hook, after some calls."""
    manager = watch(model)
    manager.register(hook, "capture")
    for call in calls:
        model(call)
    return manager


def test_in_place_writes_do_not_change_a_state() -> None:
    """An in-place ReLU returns its input: the states have its values before and after."""
    model = make_model()
    first, relu, last = captured(model, Capture("?", what="both"), INPUT - 4).get_captured_states("capture")
    expected = nn.functional.linear(INPUT - 4, model[0].weight, model[0].bias)
    assert (expected < 0).any() and torch.equal(first.outputs, expected)
    assert torch.equal(relu.outputs, expected.relu()) and torch.equal(last.inputs[0], expected.relu())


def test_inputs_are_those_at_the_end_of_the_call() -> None:
    """If a module writes into its input, the state has the written values."""

    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0).sum()

    model = nn.Sequential(nn.Identity(), Spoils())
    _, spoilt = captured(model, Capture("?", what="both"), INPUT.clone()).get_captured_states("capture")
    assert spoilt.inputs[0].abs().sum() == 0


@pytest.mark.parametrize("what", ["input", "output", "both"])
def test_on_forward_and_bind_module_capture_the_same(what: str) -> None:
    """Hookline binds it to modules; whoever calls a hook by hand calls `on_forward`."""
    model = make_model()
    hook = Capture("?", what=what)
    manager = captured(model, hook, INPUT)
    named = {"inputs": lambda state: state.inputs, "kwargs": lambda state: {}, "output": lambda state: state.outputs}
    for state in hook.states:
        given = {name: read(state) for name, read in named.items() if name in signature(hook.on_forward).parameters}
        hook.on_forward(name=state.name, module=state.module(), step=0, phase="inference", **given)
    states = manager.get_captured_states("capture")
    assert [state.call for state in states] == [1, 1, 1, 2, 2, 2]
    for direct, named in zip(states[:3], states[3:], strict=True):
        assert (direct.name, direct.phase, direct.step) == (named.name, named.phase, named.step)
        for part in ("inputs", "kwargs", "outputs"):
            one, other = getattr(direct, part), getattr(named, part)
            assert type(one) is type(other)
            assert all(map(torch.equal, _tensors(one), _tensors(other)))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return list(value.values() if isinstance(value, dict) else value or ())


def test_structures_are_kept() -> None:
    """An ordered dict in a tuple, keywords, and values that are not tensors."""

    class Nested(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Any:
            return OrderedDict(a=x * scale), "text", None

    manager, module = HookManager(), Nested()
    manager.register_capture_hook(module, "nested")
    module(INPUT, scale=2.0)
    (state,) = manager.get_captured_states("nested")
    assert type(state.outputs[0]) is OrderedDict and state.outputs[1:] == ("text", None)
    assert torch.equal(state.outputs[0]["a"], INPUT * 2) and state.kwargs == {"scale": 2.0}


@pytest.mark.req("003-37")
def test_it_is_timed_like_any_hook() -> None:
    """Each of its calls is measured."""
    model, hook = make_model(), Capture()
    manager = captured(model, hook)
    for batch in range(1, 20):
        manager.begin_batch(Reading(batch, batch, 1))
        model(INPUT)
    (row,) = manager.costs()
    assert row["hook"] == "capture" and row["calls"] == 19 * len(model) and row["seconds"] > 0


@pytest.mark.req("003-38")
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_failure_is_the_hooks_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is handled by the hook's policy; the model and later captures work."""
    model, hook = make_model(), Capture("0")
    manager = captured(model, hook)
    with monkeypatch.context() as patch:
        patch.setattr("hookline.activations.capture.observer_view", lambda tensor: 1 / 0)
        assert model(INPUT).shape == (2, 2)
    assert manager.entry("capture").failures.total == 1 and "ZeroDivisionError" in caplog.text
    model(INPUT)
    assert len(hook.states) == 1 and not manager.entry("capture").failures.in_a_row


def test_copies_carry_no_graph_and_need_no_grad_mode() -> None:
    """In training, without gradients and in inference mode."""
    model = make_model()
    manager = captured(model, Capture("?", what="both"), INPUT)
    with torch.no_grad():
        model(INPUT)
    with torch.inference_mode():
        model(INPUT)
    states = manager.get_captured_states("capture")
    assert len(states) == 9 and not any(tensor.requires_grad for state in states for tensor in state.tensors())


def test_outputs_that_have_no_lazy_copy_are_cloned() -> None:
    """A sparse tensor keeps its values when the model writes into it later."""

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    module, manager = Sparse(), HookManager()
    manager.register_capture_hook(module, "it", capture_input=False)
    module(INPUT).mul_(0)
    assert torch.equal(manager.get_captured_states("it")[0].outputs.to_dense(), INPUT)


def test_a_hook_that_is_set_up_again_continues() -> None:
    """As between two runs: its states are removed, its call numbers continue."""
    model, hook = make_model(), Capture("0")
    manager = captured(model, hook, INPUT)
    manager.close()
    assert hook.states == []
    manager.reopen()
    model(INPUT)
    assert [state.call for state in manager.get_captured_states("capture")] == [2]


@pytest.mark.parametrize(
    ("options", "path"), [({"what": "outputs"}, "what"), ({"dtype": "float31"}, "dtype"), ({"reduce": "sum"}, "reduce")]
)
def test_invalid_options_are_rejected(options: dict[str, Any], path: str) -> None:
    """When the hook is made."""
    with pytest.raises(HooklineError, match=path):
        Capture(**options)


class WritesBetween(nn.Module):
    """Writes into the output of one module before another gets it."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(4, 4), nn.Identity(), write

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        self.write(between)
        return self.second(between)


@pytest.mark.parametrize("inference", [False, True])
def test_inputs_are_right_after_writes_without_a_version(inference: bool) -> None:
    """Writes through `.data`, and in inference mode, where tensors have no version."""
    model = WritesBetween((lambda t: t.mul_(10)) if inference else (lambda t: t.data.mul_(10)))
    with torch.inference_mode(inference):
        first, second = captured(model, Capture(["first", "second"], what="both"), INPUT).get_captured_states("capture")
        assert torch.equal(second.inputs[0], first.outputs * 10) and torch.equal(second.outputs, second.inputs[0])


def test_no_tensor_is_held_beyond_the_limit() -> None:
    """With a limit of 0 bytes nothing is kept."""
    module, manager = nn.Linear(4, 4), HookManager(memory_limit_mb=0)
    manager.register_capture_hook(module, "it")
    output = module(INPUT)
    assert len(manager.captures) == 0
    assert torch._C._storage_Use_Count(output.untyped_storage()._cdata) <= 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("limit", [None, 1.0])
def test_states_under_vmap_have_the_whole_batch(limit: float | None) -> None:
    """A tensor of the transform could not be read outside of it."""
    model, manager = nn.Linear(4, 2), HookManager(memory_limit_mb=limit)
    manager.register_capture_hook(model, "it")
    batch = torch.stack([INPUT, INPUT + 1, INPUT + 2])
    expected = torch.func.vmap(model)(batch)
    torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(batch)
    plain, with_grad = manager.get_captured_states("it")
    for state in (plain, with_grad):
        assert torch.allclose(state.outputs, expected) and torch.equal(state.inputs[0], batch)
        assert not state.outputs.requires_grad


class WithMean(nn.Module):
    """Returns its input and a single number."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.mean()


@pytest.mark.parametrize("reduce", ["batch_mean", "first", "last_token"])
def test_a_single_number_is_captured_as_it_is(reduce: str) -> None:
    """It has no batch to take a part of."""
    model = WithMean()
    with HookManager().capturing(model, "", reduce=reduce) as cache:
        model(torch.tensor([[1.0, 3.0]]))
    assert cache[""][1].item() == 2.0


# ---- with the graph --------------------------------------------------------------------------------------------------


def gradient_of_hidden(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and its gradient with respect to the output of the first module, by plain torch."""
    hidden = model[0](inputs)
    loss = model[1](hidden).square().sum()
    return loss, torch.autograd.grad(loss, hidden)[0]


@pytest.mark.parametrize("capture_input", [True, False])
def test_a_capture_that_is_not_detached_has_its_graph(capture_input: bool) -> None:
    """The gradient of a loss with respect to an activation is that of plain torch, bit for bit."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    expected_loss, expected = gradient_of_hidden(model, inputs)
    with HookManager(model) as manager:
        hook_id = manager.register_capture_hook("0", capture_input=capture_input, detach=False)
        loss = model(inputs).square().sum()
        (state,) = manager.get_captured_states(hook_id)
        (gradient,) = torch.autograd.grad(loss, state.outputs, retain_graph=True)
        state.outputs.retain_grad()
        loss.backward()
        assert torch.equal(gradient, expected) and torch.equal(state.outputs.grad, expected)
        assert torch.equal(loss, expected_loss) and (state.inputs is not None) == capture_input


def test_inputs_keep_their_graph_too() -> None:
    """An input that needs no gradient is captured as ever."""
    model, manager = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), HookManager()
    manager.register_capture_hook(model[0], "first", detach=False)
    manager.register_capture_hook(model[1], "second", detach=False)
    loss = model(given := torch.ones(1, 3)).sum()
    (first,), (second,) = map(manager.get_captured_states, ("first", "second"))
    assert second.inputs[0] is first.outputs and not first.inputs[0].requires_grad
    given.zero_()
    assert first.inputs[0].sum() == 3
    assert torch.equal(torch.autograd.grad(loss, second.inputs[0])[0][0], model[1].weight.detach().sum(0))


def test_captures_are_detached_by_default_and_without_grad() -> None:
    """`detach=False` keeps a graph where there is one."""
    model, manager = nn.Linear(3, 4), HookManager()
    manager.register_capture_hook(model, "default")
    manager.register_capture_hook(model, "with_graph", detach=False)
    model(torch.ones(1, 3))
    with torch.no_grad():
        model(torch.ones(1, 3))
    states = {name: manager.get_captured_states(name) for name in manager}
    has_graph = {name: [state.outputs.requires_grad for state in of] for name, of in states.items()}
    assert has_graph == {"default": [False, False], "with_graph": [True, False]}


def test_a_block_and_a_call_by_hand_keep_the_graph() -> None:
    """As a registered hook does."""
    model, manager = nn.Sequential(nn.Linear(3, 4)), HookManager()
    with manager.capturing(model, "0", detach=False) as cache:
        loss = model(torch.ones(1, 3)).sum()
    assert torch.equal(torch.autograd.grad(loss, cache["0"])[0], torch.ones(1, 4))
    hook_id = manager.register_capture_hook(model[0], detach=False)
    output = torch.ones(2, requires_grad=True)
    manager.on_forward("by_hand", output, module=model[0], inputs=(), kwargs={})
    assert manager.get_captured_states(hook_id)[0].outputs is output


@pytest.mark.parametrize("option", [{"dtype": "float16"}, {"device": "cpu"}, {"clone": True}, {"reduce": "first"}])
def test_what_keeps_its_graph_is_not_converted(option: dict[str, Any]) -> None:
    """The states can be converted when they are read."""
    with pytest.raises(ConfigError, match="detach: False keeps the tensors themselves; leave out dtype, device, clone"):
        Capture(detach=False, **option)
