"""Key-value caches of Hugging Face models: objects with tensors in their attributes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import ForwardHook, HookManager
from hookline._tensors import map_tensors
from hookline.activations.interventions import Scale

transformers = pytest.importorskip("transformers")
IDS = torch.arange(2, 10).reshape(1, 8)


def gpt2() -> Any:
    """GPT-2 with two layers; it returns its key-value cache, in training too."""
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, loss_type="ForCausalLM")
    return transformers.GPT2LMHeadModel(config).eval()


def cache_of(keys: Tensor, values: Tensor) -> Any:
    """A cache with one layer."""
    cache = transformers.DynamicCache()
    cache.update(keys, values, 0)
    return cache


def test_a_captured_cache_does_not_grow() -> None:
    """Each state has as many keys as there were at its call, although the model appends to its own cache."""
    model = gpt2()
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    manager = HookManager()
    manager.watch(model)
    manager.register_capture_hook("", "root")
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)
    kept = [state.outputs.past_key_values for state in manager.get_captured_states("root")]
    assert [cache.get_seq_length() for cache in kept] == [8, 9, 10, 11]
    with torch.no_grad():
        continued = model(expected[:, 8:9], past_key_values=kept[0]).logits[:, -1]
        assert torch.allclose(continued, model(expected[:, :9]).logits[:, -1], atol=1e-5)


def test_a_budget_counts_keys_and_values() -> None:
    """Captured keys and values count towards the limit and hold no autograd graph."""
    model, manager = gpt2(), HookManager(memory_limit_mb=1)
    manager.register_capture_hook(model, "root", capture_input=False)
    output = model(IDS)
    (state,) = manager.get_captured_states("root")
    tensors = state.tensors()
    assert len(tensors) == 1 + 2 * 2 and not any(tensor.requires_grad for tensor in tensors)
    layers = output.past_key_values.layers
    assert manager.captures.bytes >= output.logits.nbytes + sum(one.keys.nbytes + one.values.nbytes for one in layers)


def test_an_observer_cannot_write_into_a_cache() -> None:
    """Its write changes a copy and is reported; the gradients are those without it."""

    class Spoils(ForwardHook):
        modules = "transformer"

        def on_forward(self, output: Any) -> None:
            output.past_key_values.layers[0].keys.zero_()

    def gradient(manager: HookManager) -> Tensor:
        model = gpt2()
        manager.watch(model)
        model(IDS, labels=IDS).loss.backward()
        return model.transformer.h[0].attn.c_attn.weight.grad

    manager = HookManager()
    manager.register(Spoils(), "spoils")
    assert torch.equal(gradient(HookManager()), gradient(manager))
    assert manager.entry("spoils").overruled == {"on_forward": 1}


def test_a_nested_cache_is_copied() -> None:
    """A cache inside a cache as well; the original is not changed."""
    keys, values = torch.ones(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    given = transformers.EncoderDecoderCache(cache_of(keys, values), transformers.DynamicCache())
    made = map_tensors(lambda tensor: tensor + 1, given)
    assert type(made) is type(given) and type(made.self_attention_cache) is transformers.DynamicCache
    assert made.self_attention_cache.layers[0].keys.eq(2).all() and made.get_seq_length() == 3
    assert given.self_attention_cache.layers[0].keys.eq(1).all()


def test_an_intervention_reaches_a_tensor_in_a_cache() -> None:
    """If a module returns only a cache, the first tensor of a copy of it is changed."""

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return cache_of(x, x)

    module, manager = Remembers(), HookManager(enable_intervention=True)
    manager.register(Scale(module, 3.0), "scale")
    layer = module(torch.ones(1, 1, 2, 2)).layers[0]
    assert layer.keys.eq(3).all()
