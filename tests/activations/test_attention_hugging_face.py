"""Attention maps of Hugging Face models: directly with torch's attention, switched to "eager" with others."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import HookManager

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, **SIZES}


def gpt2() -> Any:
    """Causal, with dropout."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=4, loss_type="ForCausalLM", **SIZES)
    )


def bert() -> Any:
    """Bidirectional."""
    return transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=16, **SMALL))


def llama() -> Any:
    """Grouped queries: four heads share two keys; the softmax is in float32."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL))


def batch() -> dict[str, Tensor]:
    """Three texts, one of them padded."""
    tokens = torch.randint(1, 32, (3, 8), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def same_bits(first: Any, second: Any) -> bool:
    """Loss and logits of two passes."""
    return torch.equal(first.loss, second.loss) and torch.equal(first.logits, second.logits)


@pytest.fixture
def opaque() -> Iterator[str]:
    """Register an attention that no TorchFunctionMode can see."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return sdpa_attention_forward(*args, **kwargs)

    attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    attentions.register("opaque", attend)
    masks.register("opaque", transformers.masking_utils.sdpa_mask)
    yield "opaque"
    del attentions._global_mapping["opaque"], masks._global_mapping["opaque"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_maps_are_the_models_own_attentions(make: Callable[[], Any], implementation: str) -> None:
    """Outputs are the same bits inside the block, and maps equal what `output_attentions` returns."""
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation(implementation)
    plain = model(**batch())
    with HookManager().attention_maps(model) as maps:
        seen = model(**batch())
    assert same_bits(plain, seen) and maps.switched == ()
    assert model.config._attn_implementation == implementation
    model.set_attn_implementation("eager")
    own = model(**batch(), output_attentions=True).attentions
    assert len(maps["*"]) == len(own) == 2
    for weights, expected in zip(maps["*"].values(), own, strict=True):
        assert weights.shape == (3, 4, 8, 8)
        real = batch()["attention_mask"].bool()[:, None, :, None]  # padding is not compared
        torch.testing.assert_close(weights * real, expected * real)


def test_a_foreign_attention_is_switched_to_eager_and_back(opaque: str) -> None:
    """Eager inside the block, with a close output; afterwards the same bits as before, also after an error."""
    torch.manual_seed(0)
    model = bert().eval()
    model.set_attn_implementation(opaque)
    wrapped = nn.ModuleDict({"inner": model})
    plain = model(**batch())
    with pytest.raises(KeyError), HookManager().attention_maps(wrapped) as maps:
        assert model.config._attn_implementation == "eager"
        torch.testing.assert_close(model(**batch()).logits, plain.logits)
        raise KeyError
    assert maps.switched == ("BertForMaskedLM: opaque → eager",)
    assert sorted(maps["*"]) == [f"inner.bert.encoder.layer.{index}.attention.self" for index in (0, 1)]
    assert model.config._attn_implementation == opaque and same_bits(model(**batch()), plain)


class Config:
    """A configuration as Hugging Face has it: setting the outer one's implementation sets those inside it."""

    def __init__(self, implementation: str, **inner: "Config") -> None:
        self.sub_configs, self.value = dict.fromkeys(inner), implementation
        self.__dict__.update(inner)

    @property
    def _attn_implementation(self) -> str:
        return self.value

    @_attn_implementation.setter
    def _attn_implementation(self, value: str) -> None:
        self.value = value
        for name in self.sub_configs:
            getattr(self, name)._attn_implementation = value


class Composed(nn.Module):
    """A model with a configuration and a switch for its attention."""

    def __init__(self, config: Config, **parts: nn.Module) -> None:
        super().__init__()
        self.config = config
        for name, part in parts.items():
            self.add_module(name, part)

    def set_attn_implementation(self, implementation: str) -> None:
        self.config._attn_implementation = implementation


def test_every_sub_config_is_restored() -> None:
    """Sub-models with torch's attention are not switched, unless the whole model is."""
    text, vision = Config("sdpa"), Config("flash_attention_2")
    whole = Config("flex_attention", text=text, vision=vision)
    model = Composed(whole, text=Composed(text), vision=Composed(vision))
    with HookManager().attention_maps(model) as maps:
        assert {whole.value, text.value, vision.value} == {"eager"}
    assert maps.switched == ("Composed: flex_attention → eager",)
    assert (whole.value, text.value, vision.value) == ("flex_attention", "sdpa", "flash_attention_2")
    whole.value = "sdpa"
    with HookManager().attention_maps(model):
        assert (whole.value, text.value, vision.value) == ("sdpa", "sdpa", "eager")
    assert (whole.value, text.value, vision.value) == ("sdpa", "sdpa", "flash_attention_2")


def test_other_models_are_left_alone() -> None:
    """A module that has no config, or not a Hugging Face one, is not switched."""
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(_attn_implementation="mine")
    with HookManager().attention_maps(nn.Sequential(model, nn.ReLU())) as maps:
        assert maps.switched == () and model.config._attn_implementation == "mine"
