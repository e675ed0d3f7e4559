"""Attention weights: multiplied by the values they give the output of the attention."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from hookline.activations.attention import (
    ATTENTION_FUNCTIONS,
    multi_head_weights,
    scaled_dot_product_weights,
    softmax_weights,
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from a new generator, so that no test depends on another's draws."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def mask_of(kind: str, queries: int, keys: int) -> Any:
    """The kinds of mask that scaled_dot_product_attention takes."""
    sometimes = (draw(queries, keys) > -0.5) | torch.eye(queries, keys, dtype=torch.bool)
    return {"none": None, "bool": sometimes, "float": draw(queries, keys)}[kind]


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 5),
    keys=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 4]),
    mask=st.sampled_from(["none", "bool", "float", "causal"]),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    batch=st.sampled_from([(), (3,), (2, 2)]),
)
def test_weights_times_values_is_the_attention(
    queries: int, keys: int, groups: int, mask: str, scale: float | None, dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    """Whatever mask, scale, grouping of heads, dtype and number of dimensions: the weights explain the output."""
    heads = 4
    if mask == "bool":
        queries = min(queries, keys)  # so that every query sees something
    query, key = draw(*batch, heads, queries, 8, dtype=dtype), draw(*batch, heads // groups, keys, 8, dtype=dtype)
    value = draw(*batch, heads // groups, keys, 6, dtype=dtype)
    more: dict[str, Any] = {"scale": scale, "enable_gqa": groups > 1, "is_causal": mask == "causal"}
    if mask != "causal":
        more["attn_mask"] = mask_of(mask, queries, keys)
        if mask == "float":
            more["attn_mask"] = more["attn_mask"].to(dtype)
    weights = scaled_dot_product_weights(query, key, value, **more)
    assert weights.shape == (*batch, heads, queries, keys) and weights.dtype == dtype
    made = weights.double() @ value.double().repeat_interleave(groups, -3)
    loose = 0.03 if dtype is torch.bfloat16 else 1e-5
    expected = F.scaled_dot_product_attention(query, key, value, **more).double()
    torch.testing.assert_close(made, expected, atol=loose, rtol=loose)


def test_a_fully_masked_query_has_zero_weights() -> None:
    """Zeros, as from the fused kernels, not NaN; a NaN in the query stays NaN."""
    query = draw(1, 1, 2, 4)
    mask = torch.tensor([[False, False], [True, False]])
    assert scaled_dot_product_weights(query, query, query, mask).flatten().tolist() == [0, 0, 1, 0]
    query[0, 0, 1] = math.nan
    assert scaled_dot_product_weights(query, query, query, mask)[0, 0, 1, 0].isnan()


def test_a_causal_bias_is_a_mask() -> None:
    """Torch's lazy causal masks are aligned to the last key."""
    query, key = draw(1, 2, 2, 4), draw(1, 2, 5, 4)
    weights = scaled_dot_product_weights(query, key, key, causal_lower_right(2, 5))
    torch.testing.assert_close(
        weights @ key, F.scaled_dot_product_attention(query, key, key, attn_mask=causal_lower_right(2, 5))
    )
    assert (weights[..., 0, 4] == 0).all() and (weights[..., 1, 4] > 0).all()


def test_half_precision_is_widened_under_autocast_too() -> None:
    """Scores are not rounded to eight bits: weights are the true ones rounded to their dtype."""
    query, key = draw(1, 1, 4, 16, dtype=torch.bfloat16) * 6, draw(1, 1, 9, 16, dtype=torch.bfloat16)
    true = scaled_dot_product_weights(query.double(), key.double(), key.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = scaled_dot_product_weights(query, key, key)
    assert torch.equal(weights, true.bfloat16())


def multi_head(module: torch.nn.MultiheadAttention, *inputs: Tensor, **more: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments with which the module calls the function."""
    called: list[Any] = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        called.append((args, kwargs))
        return original(*args, **kwargs)

    original = F.multi_head_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "multi_head_attention_forward", remember)
        module(*inputs, **more)
    return called[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 6}], ids=str
)
def test_multi_head_weights_are_torchs_own(options: dict[str, Any], need_weights: bool) -> None:
    """One map per head, before dropout, with and without need_weights; nothing is drawn."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, **options)
    query, key = draw(3, 4, 8), draw(3, 5, options.get("kdim", 8))
    args, kwargs = multi_head(module, query, key, key, need_weights=need_weights)
    state = torch.get_rng_state()
    weights = multi_head_weights(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    expected = module.eval()(query, key, key, average_attn_weights=False)[1]
    assert torch.equal(weights, expected) and weights.shape[:3] == (3, 2, 4)


def test_which_softmax_is_attention() -> None:
    """One over the last of four dimensions; not the one over a vocabulary, nor one over channels."""
    scores = draw(2, 2, 3, 3)
    made = scores.softmax(-1)
    assert softmax_weights(made, (scores, -1), {}) is made
    assert softmax_weights(made, (), {"input": scores, "dim": 3}) is made
    assert softmax_weights(scores.softmax(1), (scores, 1), {}) is None
    assert softmax_weights(scores[0].softmax(-1), (scores[0], -1), {}) is None
    assert set(ATTENTION_FUNCTIONS) >= {F.scaled_dot_product_attention, F.softmax, torch.softmax, torch.Tensor.softmax}
