"""Blocks that capture: what is kept for the next one, and what is not."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hookline import HookManager
from hookline.activations import block as blocks

INPUT = torch.ones(2, 4)


class Other(nn.ReLU):
    """What a module may become: parametrizations change the class."""


def make_model() -> nn.Sequential:
    """Three modules."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def capture(model: nn.Module, modules: Any = "?", **options: Any) -> Any:
    """One block with one forward pass."""
    with HookManager().capturing(model, modules, **options) as cache:
        cache.run(INPUT)
    return cache


def kept(model: nn.Module) -> list[blocks.Block]:
    """What is kept for a model."""
    return list(blocks._kept.get(model, {}).values())


def test_the_next_block_finds_everything_prepared_and_begins_anew() -> None:
    """Calls are numbered from 1, and each cache has its own states."""
    model = make_model()
    first = capture(model)
    (block,) = kept(model)
    second = capture(model)
    assert kept(model) == [block]
    for cache in (first, second):
        assert [(state.name, state.call) for state in cache.states] == [("0", 1), ("1", 1), ("2", 1)]
    assert first.states[0] is first.states[0] and first.states[0] is not second.states[0]


def test_between_blocks_nothing_is_on_the_model_and_no_tensor_is_kept() -> None:
    """What was captured goes with the cache."""
    model = make_model()
    cache = capture(model, what="both")
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "_compiled_call_impl" not in vars(module)
    held = [weakref.ref(tensor) for state in cache.states for tensor in state.tensors()]
    del cache
    gc.collect()
    assert len(held) == 6 and not any(ref() is not None for ref in held)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(nn.Linear(2, 2)),
        lambda model: model.__setitem__(1, nn.Tanh()),
        lambda model: model.add_module("extra", nn.Identity()),
        lambda model: model[0].add_module("inner", nn.Identity()),
        lambda model: setattr(model[1], "__class__", Other),
    ],
)
def test_a_model_that_has_changed_is_looked_at_anew(change: Any) -> None:
    """Modules that came, went or became others."""
    model = make_model()
    capture(model)
    (block,) = kept(model)
    change(model)
    assert not block.fits(model)
    cache = capture(model, "*")
    assert set(cache["*"]) >= {name for name, _ in model.named_children()}


def test_children_that_changed_their_names() -> None:
    """The same modules in another order are found under their new names."""
    model = make_model()
    capture(model, "0")
    model._modules["0"], model._modules["2"] = model._modules["2"], model._modules["0"]
    with HookManager().capturing(model, "0") as cache:
        model[2](INPUT)
        model[0](INPUT)
    assert cache["0"].shape == (2, 2)


def test_blocks_inside_each_other_and_in_threads_have_their_own() -> None:
    """Of the same kind on the same model."""
    model = make_model()
    capture(model)
    with HookManager().capturing(model, "?") as outer:
        model(INPUT)
        with HookManager().capturing(model, "?") as inner:
            model(INPUT)
    assert (len(outer), len(inner)) == (6, 3) and len(kept(model)) == 1
    caches: list[Any] = []
    threads = [threading.Thread(target=lambda: caches.append(capture(model, "0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(cache) >= 1 for cache in caches) and len(caches) == 8
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_that_overlap_in_threads_leave_the_compiler_as_it_was() -> None:
    """Whichever of them ends last."""
    import torch._dynamo.eval_frame as dynamo

    model, before, begun, ended = make_model(), dynamo._stance.stance, threading.Event(), threading.Event()

    def overlap() -> None:
        with HookManager().capturing(model, "0"):
            begun.set()
            ended.wait(10)

    other = threading.Thread(target=overlap)
    with HookManager().capturing(model, "0"):
        other.start()
        assert begun.wait(10) and dynamo._stance.stance == "force_eager"
    assert dynamo._stance.stance == "force_eager"
    ended.set()
    other.join()
    assert dynamo._stance.stance == before


def test_what_cannot_be_told_apart_is_not_kept() -> None:
    """A predicate may say something else the next time."""
    model = make_model()
    capture(model, lambda name, module: name == "0")
    capture(model, model[0])
    capture(model, "0", reduce=lambda tensor: tensor[:1])
    assert kept(model) == [] and not any(module._forward_hooks for module in model)


def test_different_options_are_different_blocks_and_there_is_a_limit() -> None:
    """Of how many are kept."""
    model = make_model()
    for layer in range(20):
        assert capture(model, "0", layer_idx=layer).states[0].layer_idx == layer
        assert len(kept(model)) <= blocks.KINDS_KEPT
    assert capture(model, "0", dtype=torch.float64)["0"].dtype == torch.float64
    assert capture(model, "0")["0"].dtype == torch.float32


def test_a_block_whose_hook_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one starts without its failures."""
    model = make_model()
    with monkeypatch.context() as patch:
        patch.setattr("hookline.activations.capture.copy_on_write", lambda tensor: 1 / 0)
        assert len(capture(model)) < 3
    assert kept(model) == [] and not any(module._forward_hooks for module in model)
    assert len(capture(model)) == 3


def test_an_early_stop_is_prepared_as_well() -> None:
    """Half a pass does not make the next one shorter."""
    model = make_model()
    with HookManager().capturing(model, "[01]", early_stop=True) as cache:
        model[0](INPUT)
    for _ in range(2):
        cache = capture(model, "[01]", early_stop=True)
        assert [state.name for state in cache.states] == ["0", "1"]


def test_it_goes_with_the_model() -> None:
    """And keeps no module alive."""
    model = make_model()
    capture(model)
    gone = weakref.ref(model[0])
    gc.collect()
    before = len(blocks._kept)
    del model
    gc.collect()
    assert gone() is None and len(blocks._kept) == before - 1


def test_a_copy_of_the_model_tells_the_block_nothing_once_it_is_over() -> None:
    """A copy made inside has torch hooks of its own: what it runs later is not captured, nor held."""
    model = make_model()
    with HookManager().capturing(model, "?"):
        model(INPUT)
        twin = copy.deepcopy(model)
    twin(INPUT)
    (block,) = kept(model)
    assert block.hook.states == []
    with HookManager().capturing(model, "?") as cache:
        pass
    assert len(cache) == 0


def test_a_copy_that_finds_a_compiler_puts_no_torch_hooks_back() -> None:
    """It looks for one whenever it runs; between two blocks the model stays as it was."""
    model = make_model()
    capture(model)
    (block,) = kept(model)
    block._manager.tap.sync()
    assert not any(module._forward_hooks for module in model)
    assert len(capture(model)) == 3


def test_a_call_that_ends_after_the_block_is_not_captured() -> None:
    """Neither there nor in the next block."""

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leave: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for leave in self.leave:
                leave(None, None, None)
            return x + 1

    model = nn.Sequential(leaves := Leaves(), nn.ReLU())
    capture(model)
    block = HookManager().capturing(model, "?")
    cache = block.__enter__()
    leaves.leave.append(block.__exit__)
    model(INPUT)
    leaves.leave.clear()
    with HookManager().capturing(model, "?") as later:
        pass
    assert len(cache) == 0 and len(later) == 0


def test_models_that_compare_equal_are_told_apart() -> None:
    """What is kept for one is not used for the other."""

    class Equal(nn.Sequential):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    first, second = Equal(nn.ReLU()), Equal(nn.ReLU())
    assert len(capture(first)) == 1 and len(capture(second)) == 1
    assert not first[0]._forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_models_are_looked_at_as_others_are() -> None:
    """Their modules run inside of torch, so none is heard, and nothing fails."""
    traced: Any = torch.jit.trace(make_model(), INPUT)
    with HookManager().capturing(traced, "?") as cache:
        traced(INPUT)
    assert len(cache) == 0
