"""The direct way through a module: what torch would do, and no trace of it afterwards."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hookline import HookManager
from hookline.activations import compiled, direct
from hookline.activations.capture import Capture

INPUT = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported Dynamo, or inside `capturing`."""
    monkeypatch.setattr(compiled, "is_used", lambda: False)
    monkeypatch.setattr(direct, "has_begun", lambda: False)


def make_model() -> nn.Sequential:
    """Three modules."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def captured(model: nn.Module, modules: Any = "?") -> HookManager:
    """A manager that captures."""
    manager = HookManager()
    manager.watch(model)
    manager.register(Capture(modules, what="both"), "it")
    return manager


def names(manager: HookManager) -> list[str]:
    """Of the modules that were heard."""
    return [state.name for state in manager.get_captured_states("it")]


def is_direct(module: nn.Module) -> bool:
    """Whether ours is called."""
    return module._compiled_call_impl is not None


@pytest.mark.req("003-38")
def test_outputs_gradients_and_states_are_those_of_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit."""
    results = []
    for is_open in (True, False):
        monkeypatch.setattr(direct, "is_open", lambda is_open=is_open: is_open)
        model = make_model()
        manager = captured(model)
        model(INPUT)
        assert is_direct(model[0]) is is_open
        output = model(INPUT)
        output.sum().backward()
        tensors = [tensor for state in manager.get_captured_states("it") for tensor in state.tensors()]
        results.append([output.detach(), *(p.grad for p in model.parameters()), *tensors])
    assert len(results[0]) == len(results[1]) > 8 and all(map(torch.equal, *results))


def test_the_torch_hook_is_there_for_everybody_to_see_and_to_clear() -> None:
    """Who clears the torch hooks of a module has cleared ours."""
    model = make_model()
    manager = captured(model)
    model(INPUT)
    manager.clear_captured_states()
    model[0]._forward_hooks.clear()
    model[1]._forward_hooks = type(model[1]._forward_hooks)()
    model(INPUT)
    assert len(model[2]._forward_hooks) == 1 and names(manager) == ["2"]


HOOKS: list[Callable[[nn.Module, Callable[..., None]], Any]] = [
    lambda module, told: module.register_forward_hook(lambda *_: told()),
    lambda module, told: module.register_forward_pre_hook(lambda *_: told()),
    lambda module, told: module.register_full_backward_hook(lambda *_: told()),
    lambda module, told: module.register_full_backward_pre_hook(lambda *_: told()),
    lambda module, told: register_module_forward_hook(lambda ran, *_: told() if ran is module else None),
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("first", [True, False])
def test_torch_hooks_of_others_are_called(register: Callable[..., Any], first: bool) -> None:
    """Of every kind, whether they come before ours or after."""
    model, told = make_model(), []
    manager = captured(model) if not first else None
    if manager:
        model(INPUT)
        manager.clear_captured_states()
    handle = register(model[0], lambda: told.append(1))
    manager = manager or captured(model)
    model(INPUT.requires_grad_()).sum().backward()
    handle.remove()
    assert told == [1] and names(manager) == ["0", "1", "2"]


def test_what_an_earlier_torch_hook_returns_is_what_is_captured() -> None:
    """Ours comes after it, and its output goes on."""
    model = make_model()
    model[0].register_forward_hook(lambda module, inputs, output: output * 0 + 7)
    manager = captured(model)
    model(INPUT)
    state = manager.get_captured_states("it")[0]
    assert torch.equal(state.outputs, torch.full((2, 4), 7.0))


def test_another_forward_that_comes_later_is_called() -> None:
    """Some libraries replace it on the instance."""
    model = make_model()
    manager = captured(model)
    model(INPUT)
    manager.clear_captured_states()
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    model(INPUT)
    assert torch.equal(manager.get_captured_states("it")[0].outputs, INPUT + 1)


def test_copies_and_pickles_do_not_run_the_original() -> None:
    """A copy has parameters of its own, and only the torch hook."""
    model = make_model()
    manager = captured(model, "0")
    model(INPUT)
    for twin in (copy.deepcopy(model), copy.copy(model[0])):
        assert not is_direct(twin[0] if isinstance(twin, nn.Sequential) else twin)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not torch.equal(twin[0](INPUT), model[0](INPUT))
    manager.remove("it")
    assert torch.equal(pickle.loads(pickle.dumps(model))(INPUT), model(INPUT))


def test_modules_that_copy_themselves_in_their_own_way_take_the_long_way() -> None:
    """Their copies would run the original."""

    class Own(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__.copy()

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    manager = captured(model)
    model(INPUT)
    assert [is_direct(module) for module in model] == [False, False, True] and names(manager) == ["0", "1", "2"]


def test_compiled_calls_are_left_alone() -> None:
    """Of modules that somebody compiled before or compiles while ours is there."""
    model = make_model()
    model[0].compile(backend="eager")
    theirs = model[0]._compiled_call_impl
    with HookManager().capturing(model, "?"):
        model(INPUT)
        model[1].compile(backend="eager")
        assert model[0]._compiled_call_impl is theirs and direct.is_compiled(model[0])
        assert direct.is_compiled(model[1]) and is_direct(model[2]) and not direct.is_compiled(model[2])
    assert model[0]._compiled_call_impl is theirs and direct.is_compiled(model[1]) and not is_direct(model[2])


@pytest.mark.parametrize("take_away", ["remove", "disable"])
def test_nothing_is_left_on_the_module(take_away: str) -> None:
    """When the hook is removed or switched off."""
    model = make_model()
    manager = captured(model)
    model(INPUT)
    assert all(map(is_direct, model))
    getattr(manager, take_away)("it")
    assert not any(vars(module).get("_compiled_call_impl") or module._forward_hooks for module in model)


def test_it_closes_when_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the torch hooks keep their places among others."""
    model, order = make_model(), []
    manager = captured(model)
    model(INPUT)
    manager.clear_captured_states()
    model[0].register_forward_hook(lambda *_: order.append(len(manager.captures)))
    monkeypatch.setattr(direct, "has_begun", lambda: True)
    manager.tap.sync()
    model(INPUT)
    assert not any(map(is_direct, model)) and order == [1]


def test_a_module_is_not_kept_alive() -> None:
    """Not even until the garbage is collected."""
    module = nn.Linear(4, 4)
    manager = HookManager()
    manager.register_capture_hook(module, "it", capture_input=False)
    module(INPUT)
    assert is_direct(module)
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_set_aside_recomputed_and_scheduled_calls() -> None:
    """What the long way leaves out is left out here, too."""
    model = make_model()
    manager = captured(model, "0")
    model(INPUT)
    manager.clear_captured_states()
    with manager.silenced():
        model(INPUT)
    assert names(manager) == []
    output = checkpoint(model, INPUT.requires_grad_(), use_reentrant=False)
    output.sum().backward()  # type: ignore[union-attr]
    assert names(manager) == ["0"]
    (row,) = manager.fire_report().rows
    assert (row.calls, row.fired) == (4, 2)


def test_several_hooks_on_a_module_and_interventions_are_heard() -> None:
    """Only a capture that is alone there is called without the table of hooks; what an intervention returns goes on."""
    model = make_model()
    manager = HookManager(enable_intervention=True)
    manager.watch(model)
    manager.register(Capture("?"), "it")
    with manager.register(Double(), "double"):
        changed = model(INPUT)
    assert torch.equal(changed, model(INPUT) * 2)
    assert [state.call for state in manager.get_captured_states("it")] == [1, 1, 1, 2, 2, 2]
    assert {(row.hook, row.calls, row.fired) for row in manager.fire_report().rows} == {("it", 2, 2)}


class Double(Capture):
    """Not a capture, but a hook with its own method that changes the last output."""

    built_in, intervene = False, True

    def __init__(self) -> None:
        super().__init__("2")
        self.on_forward = self.doubled

    def shortcut(self, site: Any, tap: Any) -> None:
        """It has none."""

    def doubled(self, output: Tensor) -> Tensor:
        """Twice as much."""
        return output * 2


def test_a_model_that_skips_its_modules_unless_they_have_hooks() -> None:
    """An encoder layer takes a fused way in evaluation, and does not when it sees torch hooks."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad(), HookManager().capturing(layer, "linear?") as cache:
        layer(torch.ones(1, 3, 4))
    assert sorted(cache["*"]) == ["linear1", "linear2"]


def test_several_gpus_in_one_process_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `DataParallel` copies modules by their dictionaries; as one of many processes it is not used."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not direct.is_open()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert direct.is_open()


def test_tracing_goes_the_long_way() -> None:
    """Where torch names the scopes of modules."""
    model = make_model()
    captured(model)
    model(INPUT)
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(model, INPUT)
    assert torch.equal(traced(INPUT), model(INPUT))


def test_modules_that_are_copied_in_a_way_of_their_own_go_the_long_way() -> None:
    """A copy that takes over the whole dictionary would run the original."""

    class Own(nn.Linear):
        def __copy__(self) -> "Own":
            made = Own.__new__(Own)
            made.__dict__.update(self.__dict__, weight=None)
            return made

    class Reduced(nn.Linear):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Linear, (4, 4), dict(self.__dict__)

    model = nn.Sequential(Own(4, 4), Reduced(4, 4), nn.ReLU())
    manager = captured(model)
    model(INPUT)
    assert [is_direct(module) for module in model] == [False, False, True]
    assert names(manager) == ["0", "1", "2"]


def test_a_copy_of_a_parametrized_module_runs_its_own_weights() -> None:
    """Parametrizations have a way of their own to copy a module, with all that is in it."""
    model = make_model()
    manager = captured(model)
    model(INPUT)
    assert is_direct(model[0])
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    copied = copy.deepcopy(model)
    assert not is_direct(copied[0])
    for param in copied[0].parameters():
        nn.init.zeros_(param)
    assert not copied[0](INPUT).any()
    assert model[0](INPUT).any()
    manager.close()


def test_records_that_cannot_be_made_are_the_hooks_to_keep_or_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is reported by its policy, and the model goes on."""
    model, manager = make_model(), HookManager()
    manager.watch(model)
    manager.register(Capture("0"), "it")
    model(INPUT)
    monkeypatch.setattr(direct, "is_grad_enabled", lambda: 1 / 0)
    expected = model(INPUT)
    assert names(manager) == ["0", "0"] and not manager.entry("it").failures.total
    monkeypatch.setattr("hookline.activations.capture.copy_on_write", lambda tensor: 1 / 0)
    assert torch.equal(model(INPUT), expected)
    assert names(manager) == ["0", "0"] and manager.entry("it").failures.total == 1


def test_outputs_that_are_no_tensors_keep_their_structure() -> None:
    """They are kept by the hook itself."""
    manager, module = HookManager(), nn.MultiheadAttention(4, 2)
    manager.register_capture_hook(module, "it", capture_input=False)
    for _ in range(2):
        output, weights = module(INPUT, INPUT, INPUT)
    state = manager.get_captured_states("it")[1]
    assert is_direct(module) and state.call == 2
    assert all(map(torch.equal, state.outputs, (output, weights)))


@pytest.mark.req("003-05")
def test_threads_are_told_apart() -> None:
    """Each state has the name of the thread that ran the module, in its first call as in others."""
    model = make_model()
    manager = HookManager()
    manager.watch(model)
    manager.register(Capture("0"), "it")
    for name in ("one", "two"):
        thread = threading.Thread(target=lambda: [model(INPUT) for _ in range(2)], name=name)
        thread.start()
        thread.join()
    assert [state.thread for state in manager.get_captured_states("it")] == ["one", "one", "two", "two"]


def test_calls_are_counted_on_both_ways() -> None:
    """Whether somebody's torch hook sends them the long way or not; and under a hook that is gone."""
    model, manager = make_model(), HookManager()
    manager.watch(model)
    manager.register(Capture("0"), "first")
    model(INPUT)
    model(INPUT)
    handle = model[0].register_forward_hook(lambda *_: None)
    model(INPUT)
    handle.remove()
    model(INPUT)
    assert [state.call for state in manager.get_captured_states("first")] == [1, 2, 3, 4]
    manager.register(Capture("0", what="both"), "second")
    model(INPUT)
    manager.remove("first")
    model(INPUT)
    (row,) = manager.fire_report().rows
    assert (row.hook, row.calls, row.fired) == ("second", 6, 2)


@pytest.mark.req("003-06")
@pytest.mark.parametrize(("interval", "passes", "sweeps"), [(1, 4, 4), (3, 9, 3), (100, 99, 0), (100, 112, 1)])
def test_cleaning_up_after_so_many_calls(interval: int, passes: int, sweeps: int) -> None:
    """Of one module, to within a few of them."""
    module, swept = nn.Linear(4, 4), []
    manager = HookManager(cleanup_interval=interval)
    manager.tap._clean_up = lambda: swept.append(1)
    manager.register_capture_hook(module, "it", capture_input=False)
    for _ in range(passes):
        module(INPUT)
    assert len(swept) == sweeps


def test_each_set_of_due_hooks_has_its_own_way() -> None:
    """When a set of hooks is due again, its callable is back, and modules are called as it wants it."""
    model = make_model()
    manager = captured(model, "0")
    model(INPUT)
    before, call = manager.fire.on_forward, model[0]._compiled_call_impl
    manager.tables.reset()
    model(INPUT)
    assert model[0]._compiled_call_impl not in (None, call)
    manager.fire.on_forward = before  # type: ignore[method-assign]
    model(INPUT)
    assert model[0]._compiled_call_impl is call
    model(INPUT)
    assert [state.call for state in manager.get_captured_states("it")] == [1, 2, 3, 4]


def test_no_call_is_left_at_a_module_whose_hooks_are_gone() -> None:
    """A thread that still runs the module may ask for another call: it gets none, and what failed is not noted."""
    model = make_model()
    manager = captured(model)
    model(INPUT), model(INPUT)
    site = next(iter(manager.tap.sites))
    standing = vars(model[0])[direct.PLACE]
    vars(model[0])[direct.PLACE] = somebodys = direct.DirectCall(model[0].forward)
    site.be_called(direct.DirectCall(model[0].forward))
    assert vars(model[0])[direct.PLACE] is somebodys
    vars(model[0])[direct.PLACE] = standing
    manager.remove("it")
    site.be_called(direct.DirectCall(model[0].forward))
    assert direct.PLACE not in vars(model[0])


def test_threads_leave_no_call_behind() -> None:
    """Hooks come and go while threads run the model; afterwards nothing of ours is on it."""
    model, over = make_model(), threading.Event()

    def run() -> None:
        while not over.is_set():
            model(INPUT)

    threads = [threading.Thread(target=run) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        left = 0
        for _ in range(60):
            manager = captured(model)
            manager.register_monitoring_hook(model[0], "beside", metrics=["mean"])
            manager.remove("beside")
            manager.remove("it")
            left += sum(direct.PLACE in vars(module) for module in model)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert left == 0
