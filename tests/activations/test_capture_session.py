"""Capturing in a block: the cache, threads, and what is left on the model afterwards."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_model
from safetensors.torch import load_file
from torch import Tensor, nn

from hookline import HooklineError, HookManager

INPUT = torch.ones(2, 4)


def identities() -> nn.Sequential:
    """Three modules that return their input."""
    return nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())


def number(value: int) -> Tensor:
    """An input that can be distinguished from others."""
    return torch.full((1, 2), float(value))


def in_threads(work: Callable[[int], Any], count: int = 4) -> None:
    """Run a function in several threads and raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def capture(model: nn.Module, modules: Any = "?", **options: Any) -> Any:
    """One block with one forward pass."""
    with HookManager().capturing(model, modules, **options) as cache:
        cache.run(INPUT)
    return cache


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_names_and_globs() -> None:
    """A name returns the last output, a glob a dict; an unknown name is an error with the nearest."""
    model = make_model(4, 4, 2)
    with HookManager().capturing(model, "[02]") as cache:
        model(INPUT * 2)
        output = model(INPUT)
    assert torch.equal(cache["2"], output) and list(cache["*"]) == ["0", "2"]
    assert len(cache) == 4 and "1" not in cache and "0" in cache
    with pytest.raises(HooklineError, match="nothing was captured from '1'"):
        cache["1"]


def test_inputs_if_only_these_are_captured() -> None:
    """They are returned instead of the output."""
    model = make_model(4, 4, 2)
    with HookManager().capturing(model, "0", what="input") as cache:
        model(INPUT)
    assert torch.equal(cache["0"][0], INPUT)


def test_early_stop_ends_each_pass_after_the_last_selected_module() -> None:
    """Other modules do not run, and a second pass is as complete as the first."""
    model, ran = make_model(4, 4, 2), []
    model[2].register_forward_hook(lambda *_: ran.append(1))
    with HookManager().capturing(model, "[01]", early_stop=True) as cache:
        assert cache.run(INPUT) is None and cache.run(INPUT) is None
    assert ran == [] and [state.name for state in cache.states] == ["0", "1", "0", "1"]
    assert all(not module._forward_hooks for module in model[:2])


def test_early_stop_raises_what_the_capture_raised() -> None:
    """The failure is not lost when the same module is the last one, and the next pass stops again."""

    def fail_once(output: torch.Tensor) -> torch.Tensor:
        calls.append(output)
        if len(calls) == 1:
            raise ValueError("not reducible")
        return output.sum()

    calls: list[torch.Tensor] = []
    with HookManager().capturing(make_model(4, 4, 2), "1", early_stop=True, reduce=fail_once) as cache:
        with pytest.raises(ValueError, match="not reducible"):
            cache.run(INPUT)
        assert cache.run(INPUT) is None
    assert len(cache) == 1


def test_saved_to_a_file(tmp_path: Path) -> None:
    """Every tensor is under its module, call, part and index."""
    model = make_model(4, 4, 2)
    with HookManager().capturing(model, "0", what="both") as cache:
        output = model[0](INPUT)
    saved = load_file(cache.save(tmp_path / "states.safetensors"))
    assert set(saved) == {"0/1/inputs/0", "0/1/outputs/0"} and torch.equal(saved["0/1/outputs/0"], output)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("003-05")
def test_each_cache_has_the_states_of_its_own_thread() -> None:
    """Every block overlaps with those of the other threads."""
    model, manager, together = identities(), HookManager(), threading.Barrier(4, timeout=300)

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
    """Threads that do not capture are part of an open block."""
    model, manager = identities(), HookManager()
    with manager.capturing(model, "2") as cache:
        in_threads(lambda value: model(number(value)))
    assert sorted(state.outputs[0, 0].item() for state in cache.states) == [0, 1, 2, 3]


def test_a_nested_block_is_captured_by_both() -> None:
    """In one thread all blocks have its states."""
    model, manager = identities(), HookManager()
    with manager.capturing(model, "0") as outer:
        model(number(1))
        with manager.capturing(model, "0") as inner:
            model(number(2))
        with manager.capturing(model, "1"):
            model(number(3))
    assert (len(outer), len(inner)) == (3, 1)


def test_early_stop_does_not_stop_other_threads() -> None:
    """Another thread that runs the model during such a block gets its output."""
    model, manager = identities(), HookManager()
    with manager.capturing(model, "0", early_stop=True) as cache, ThreadPoolExecutor(1) as pool:
        assert pool.submit(model, number(5)).result(30).eq(5).all()
        assert cache.run(number(6)) is None
        assert pool.submit(model, number(7)).result(30).eq(7).all()


def test_only_cache_run_stops_early() -> None:
    """A direct call of the model runs to its end."""
    model = identities()
    with HookManager().capturing(model, "0", early_stop=True) as cache:
        assert model(number(1)).eq(1).all() and cache.run(number(2)) is None
    assert [state.outputs[0, 0].item() for state in cache.states] == [1, 2]


# ---- blocks one after the other --------------------------------------------------------------------------------------


def test_between_blocks_nothing_is_on_the_model_and_no_tensor_is_kept() -> None:
    """Tensors are released with the cache."""
    model = make_model(4, 4, 2)
    cache = capture(model, what="both")
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    held = [weakref.ref(tensor) for state in cache.states for tensor in state.tensors()]
    del cache
    gc.collect()
    assert len(held) == 6 and not any(ref() is not None for ref in held)


def test_nested_and_concurrent_blocks_do_not_share_their_states() -> None:
    """With the same options on the same model."""
    model = make_model(4, 4, 2)
    capture(model)
    with HookManager().capturing(model, "?") as outer:
        model(INPUT)
        with HookManager().capturing(model, "?") as inner:
            model(INPUT)
    assert (len(outer), len(inner)) == (6, 3)
    caches: list[Any] = []
    threads = [threading.Thread(target=lambda: caches.append(capture(model, "0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(cache) >= 1 for cache in caches) and len(caches) == 8
    assert not any(module._forward_hooks for module in model.modules())


def test_overlapping_blocks_restore_the_compiler() -> None:
    """Whichever block ends last."""
    import torch._dynamo.eval_frame as dynamo

    model, before, begun, ended = make_model(4, 4, 2), dynamo._stance.stance, threading.Event(), threading.Event()

    def overlap() -> None:
        with HookManager().capturing(model, "0"):
            begun.set()
            ended.wait()

    other = threading.Thread(target=overlap)
    with HookManager().capturing(model, "0"):
        other.start()
        assert begun.wait() and dynamo._stance.stance == "force_eager"
    assert dynamo._stance.stance == "force_eager"
    ended.set()
    other.join()
    assert dynamo._stance.stance == before


def test_each_block_has_its_own_options_and_counts_calls_from_one() -> None:
    """Nothing of an earlier block of the same model is left."""
    model = make_model(4, 4, 2)
    for layer in range(3):
        (state,) = capture(model, "0", layer_idx=layer).states
        assert (state.layer_idx, state.call) == (layer, 1)
    assert capture(model, "0", dtype=torch.float64)["0"].dtype == torch.float64
    assert capture(model, "0")["0"].dtype == torch.float32


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_the_block_after_one_whose_hook_failed_captures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block starts without failures."""
    model = make_model(4, 4, 2)
    with monkeypatch.context() as patch:
        patch.setattr("hookline.activations.capture.observer_view", lambda tensor: 1 / 0)
        assert len(capture(model)) < 3
    assert not any(module._forward_hooks for module in model)
    assert len(capture(model)) == 3


def test_a_copy_of_the_model_is_not_captured_after_the_block() -> None:
    """A copy made inside the block has copies of the torch hooks, which do nothing afterwards."""
    model = make_model(4, 4, 2)
    with HookManager().capturing(model, "?") as cache:
        model(INPUT)
        twin = copy.deepcopy(model)
    twin(INPUT)
    assert len(cache) == 3
    with HookManager().capturing(model, "?") as cache:
        pass
    assert len(cache) == 0


def test_a_call_that_ends_after_the_block_is_not_captured() -> None:
    """Neither in this nor in the next block."""

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


def test_models_that_compare_equal_are_captured_separately() -> None:
    """The hooks of one are not on the other."""

    class Equal(nn.Sequential):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    first, second = Equal(nn.ReLU()), Equal(nn.ReLU())
    assert len(capture(first)) == 1 and len(capture(second)) == 1
    assert not first[0]._forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_models_capture_nothing() -> None:
    """Their modules run inside torch without hooks, and nothing fails."""
    traced: Any = torch.jit.trace(make_model(4, 4, 2), INPUT)
    with HookManager().capturing(traced, "?") as cache:
        traced(INPUT)
    assert len(cache) == 0
