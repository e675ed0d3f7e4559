"""Capturing for one piece of code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hookline import HooklineError, HookManager

INPUT = torch.ones(2, 4)


def make_model() -> nn.Sequential:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_names_and_globs() -> None:
    """A name gives the last output, a glob a dict; a miss names the nearest."""
    model = make_model()
    with HookManager().capturing(model, "[02]") as cache:
        model(INPUT * 2)
        output = model(INPUT)
    assert torch.equal(cache["2"], output) and list(cache["*"]) == ["0", "2"]
    assert len(cache) == 4 and "1" not in cache and "0" in cache
    with pytest.raises(HooklineError, match="nothing was captured of '1'"):
        cache["1"]


def test_inputs_where_only_those_were_captured() -> None:
    """They stand in for the output."""
    model = make_model()
    with HookManager().capturing(model, "0", what="input") as cache:
        model(INPUT)
    assert torch.equal(cache["0"][0], INPUT)


def test_an_early_stop_leaves_after_the_last_wanted_module_each_time() -> None:
    """The rest does not run, and a second pass is as complete as the first."""
    model, ran = make_model(), []
    model[2].register_forward_hook(lambda *_: ran.append(1))
    with HookManager().capturing(model, "[01]", early_stop=True) as cache:
        assert cache.run(INPUT) is None and cache.run(INPUT) is None
    assert ran == [] and [state.name for state in cache.states] == ["0", "1", "0", "1"]
    assert all(not module._forward_hooks for module in model[:2])


def test_saved_to_a_file(tmp_path: Path) -> None:
    """Every tensor under its module, call, part and place."""
    model = make_model()
    with HookManager().capturing(model, "0", what="both") as cache:
        output = model[0](INPUT)
    saved = load_file(cache.save(tmp_path / "states.safetensors"))
    assert set(saved) == {"0/1/inputs/0", "0/1/outputs/0"} and torch.equal(saved["0/1/outputs/0"], output)
